"""Measure how long the pieces of verify and compile take, and write them for budgets to draw by.

    python scripts/measure_costs.py verify --device cpu        # or cuda
    python scripts/measure_costs.py compile

Every kind of work is measured: all declared cases, and of seeds as many as say how long one takes.
The file keeps what it holds of other tables and ops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from tilewright.lab.draw import rank

FILE = Path(__file__).parents[1] / "src" / "tilewright" / "lab" / "seconds.json"
SEEDS = {"cpu": 40, "cuda": 100}
BINARIES = 3  # of each backend and SM
APART = 1.5  # a piece further from the mean than this factor has a number of its own
LEAST = 0.15  # seconds below which it has not

Row = tuple[str, str, float]  # kind, part, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the seconds that budgets are drawn by.")
    parser.add_argument("what", choices=("verify", "compile"))
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--missing", action="store_true", help="only what has no number yet")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    if options.what == "verify":
        os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
        table, rows = f"verify on {options.device}", verified(options)
    else:
        table, rows = "compile", compiled(options)
    kinds = summed(rows)
    known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    known.setdefault(table, {}).update(kinds)
    known[table] = dict(sorted(known[table].items()))
    lines = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(kind)}: {json.dumps(of)}" for kind, of in kinds.items())
        + "\n }"
        for name, kinds in sorted(known.items())
    ]
    options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{table}: {len(kinds)} kinds of work, written to {options.out}")


def verified(options: Any) -> Iterator[Row]:
    """Run every declared case and some seeds, and yield how long each step took."""
    from tilewright.verify import runner

    steps = runner.plan(options.ops, device=options.device, cases=SEEDS[options.device])
    if options.missing:
        known = runner.pieces(steps)
        steps = [step for step, piece in zip(steps, known, strict=True) if not piece.measured]
    if options.device == "cuda":  # what is cut off by the clock is of all kinds
        steps.sort(key=lambda step: rank("", runner.name_of(step)))
    began = time.monotonic()
    ended = runner.run(steps, count=options.workers, apart=True)
    for number, results in enumerate(ended, 1):
        _, kind, part = runner.costs_of(results.step)
        print(f"{number} of {len(steps)}: {kind}, {part} {results.seconds:.2f}", file=sys.stderr)
        yield kind, part, results.seconds
        if time.monotonic() - began > options.max_seconds:
            ended.close()


def compiled(options: Any) -> Iterator[Row]:
    """Compile a few binaries of each backend for each SM, and yield how long each took."""
    from tilewright import matrix

    wanted = sorted(matrix.reachable(options.ops), key=lambda w: rank("", w.key))
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for one in wanted:
        kind = f"{one.op} {one.backend}"
        seen[kind, one.sm] += 1
        if seen[kind, one.sm] <= BINARIES:
            began = time.perf_counter()
            matrix.build(one)
            seconds = time.perf_counter() - began
            print(f"{kind}, SM {one.sm} {seconds:.2f}", file=sys.stderr)
            yield kind, str(one.sm), seconds


def summed(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the mean of each kind, and the parts that are far from it."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, part, seconds in rows:
        found[kind][part].append(seconds)
    kinds = {}
    for kind, parts in found.items():
        middle = mean(s for some in parts.values() for s in some)
        means = {part: mean(some) for part, some in parts.items()}
        apart = {
            part: round(value, 3)
            for part, value in sorted(means.items())
            if not middle / APART <= max(value, LEAST) <= middle * APART
            and abs(value - middle) > LEAST
        }
        kinds[kind] = {"": round(middle, 4), **apart}
    return kinds


if __name__ == "__main__":
    main()
