"""python -m tilewright.readme: the tables of README.md, made from declarations and records.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. What it says comes from the
registry or from a file under results/, never from a hand; a record that is missing makes a table
that says so. `--check` changes nothing and exits 1 if the file and the tables differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tilewright.matrix import Ledger
from tilewright.ops import registry
from tilewright.spec import Backend

NOT_MEASURED = "not measured yet"
REGION = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def ops(root: Path) -> str:
    """Every op and its backends, from the declarations."""
    rows = []
    for op in registry().values():
        name = f"`{op.name}`"
        if op.public_name != op.name:
            name += f" (through `{op.public_name}`)"
        backward = op.autograd.op.backends if op.autograd else ()
        kernels = [b for b in op.backends if b.technology != "torch"]
        dtypes = dict.fromkeys(
            str(d).removeprefix("torch.") for b in kernels for d in b.dtypes or ("any float",)
        )
        sms = sorted({b.min_sm for b in kernels})
        rows.append(
            (name, op.summary, _names(op.backends), _names(backward), ", ".join(dtypes),
             ", ".join(map(str, sms)))
        )  # fmt: skip
    heads = ("op", "what", "forward", "backward", "dtypes of the kernels", "minimum SM")
    return _table(heads, rows)


def host_cost(root: Path) -> str:
    """CPU time per call beside torch's, from results/h200/host.json."""
    record = _record(root, "h200/host.json")
    if record is None:
        return NOT_MEASURED
    found: dict[tuple[str, str], dict[bool, Any]] = defaultdict(dict)
    for row in record["rows"]:
        found[row["op"], row["contender"]][row["grad"]] = row
    rows = []
    for (op, contender), by_grad in found.items():
        cells = [f"`{op}`", contender]
        for grad in (False, True):
            facts = by_grad.get(grad)
            cells.append(f"{facts['median_us']:.1f}" if facts else "")
            cells.append(f"{facts['over_torch']:.2f}" if facts else "")
        rows.append(cells)
    heads = ("op", "contender", "no grad, µs", "over torch", "with grad, µs", "over torch")
    case = record["case"]
    what = f"{case['rows']} x {case['columns']}, {case['dtype']}; medians"
    return f"{_table(heads, rows)}\n\n{what}; {_environment(record)}."


def verified(root: Path) -> str:
    """What `tilewright verify` ran on a GPU, from results/h200/verify.json."""
    record = _record(root, "h200/verify.json")
    if record is None:
        return NOT_MEASURED
    by_kernel: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in record["checks"]:
        by_kernel[row["op"], row["backend"]].append(row)
    rows = []
    for (op, backend), checks in sorted(by_kernel.items()):
        run = {phase: sum(c["run"] for c in checks if c["phase"] == phase) for phase in PHASES}
        failed = sum(c["failed"] for c in checks)
        worst = max(c["worst_error_over_tolerance"] for c in checks)
        counts = (f"{run[phase]:,}" for phase in PHASES)
        rows.append((f"`{op}`", backend, *counts, f"{failed:,}", f"{worst:.2f}"))
    heads = ("op", "backend", "forward cases", "backward cases", "other checks", "failures",
             "worst error / tolerance")  # fmt: skip
    kind = "full" if record["full"] else "quick"
    return f"{_table(heads, rows)}\n\nA {kind} run; {_environment(record)}."


PHASES = ("forward", "backward", "")


def compiled(root: Path) -> str:
    """The compile ledger, from results/compile/*.jsonl."""
    by_compiler: dict[str, list[Any]] = defaultdict(list)
    for built in Ledger(root / "results" / "compile").known.values():
        by_compiler[built.compiler].append(built)
    if not by_compiler:
        return NOT_MEASURED
    rows = []
    for compiler, binaries in sorted(by_compiler.items()):
        sms = ", ".join(map(str, sorted({b.sm for b in binaries})))
        violations = sum(bool(b.violation) for b in binaries)
        rows.append((compiler, sms, f"{len(binaries):,}", f"{violations:,}"))
    return _table(("compiler", "SMs", "binaries", "violations"), rows)


REGIONS: dict[str, Callable[[Path], str]] = {
    "ops": ops,
    "host-cost": host_cost,
    "verified": verified,
    "compiled": compiled,
}


def render(text: str, root: Path) -> str:
    """`text` with every region made anew; a region that nobody makes is a mistake."""

    def region(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}{REGIONS[name](root)}\n{end}"

    return REGION.sub(region, text)


def _names(backends: Sequence[Backend]) -> str:
    return ", ".join(b.name for b in backends)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _record(root: Path, name: str) -> Any:
    path = root / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _environment(record: Any) -> str:
    facts = record["environment"]
    parts = [facts["gpu"] or "CPU"]
    parts += [f"{name} {facts[name]}" for name in ("torch", "triton") if facts.get(name)]
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tables of README.md anew.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the repository")
    options = parser.parse_args()
    path = options.root / "README.md"
    if not path.exists():
        sys.exit(f"readme: no {path}; run it in the root of the repository")
    before = path.read_text(encoding="utf-8")
    after = render(before, options.root)
    if options.check:
        if before != after:
            sys.exit(f"{path} differs from its records; run python -m tilewright.readme")
        return
    path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
