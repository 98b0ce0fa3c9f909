"""The compile matrix as a table and as a record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tilewright.matrix.build import Built


def differs(now: Built, before: Built) -> bool:
    """The same hash must give the same facts: else the ledger lies, or the compiler does."""
    facts = ("registers", "spills", "shared", "violation")
    return any(getattr(now, f) != getattr(before, f) for f in facts)


def summarise(results: Sequence[Built], drifted: Sequence[Built]) -> dict[str, Any]:
    groups: dict[tuple[str, str, str], list[Built]] = defaultdict(list)
    for b in results:
        groups[b.op, b.backend, b.kernel.partition("<")[0]].append(b)
    violations = [f"{_line(b)}: {b.violation}" for b in results if b.violation]
    violations += [f"{_line(b)}: the ledger holds other facts under its hash" for b in drifted]
    return {
        "binaries": len(results),
        "sms": sorted({b.sm for b in results}),
        "compilers": sorted({b.compiler for b in results}),
        "kernels": [
            {
                "op": op, "backend": backend, "kernel": kernel,
                "by_sm": {str(sm): _facts([b for b in rows if b.sm == sm])
                          for sm in sorted({b.sm for b in rows})},
            }
            for (op, backend, kernel), rows in groups.items()
        ],
        "violations": violations,
        "broken": [asdict(b) for b in results if b.violation],
    }  # fmt: skip


def _facts(rows: Sequence[Built]) -> dict[str, int]:
    return {
        "choices": len(rows),
        "registers": max(b.registers for b in rows),
        "shared": max(b.shared for b in rows),
        "spills": max(b.spills for b in rows),
        "violations": sum(bool(b.violation) for b in rows),
    }


def _line(b: Built) -> str:
    return f"{b.op} {b.backend} {b.kernel} {b.dtype} SM {b.sm} ({b.case}; {b.choice})"


def table(record: dict[str, Any]) -> Any:
    """One line per kernel; per SM the choices compiled and the most registers any of them takes."""
    from rich import box
    from rich.table import Table

    title = (
        f"compile matrix: {record['binaries']} binaries, {record['compiled']} compiled now, "
        f"{record['known']} known by hash, {len(record['violations'])} violations "
        f"({', '.join(record['compilers'])})\n"
        "per SM: launch choices compiled / most registers of any"
    )
    heads = [f"SM{sm}" for sm in record["sms"]]
    shown = Table(
        "op backend",
        "kernel",
        *heads,
        title=title,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for row in record["kernels"]:
        cells = []
        for sm in record["sms"]:
            facts = row["by_sm"].get(str(sm))
            if facts is None:
                cells.append("-")
                continue
            text = f"{facts['choices']}/{facts['registers']}"
            bad = facts["violations"]
            cells.append(f"[red]{bad} of {facts['choices']}[/]" if bad else text)
        shown.add_row(f"{row['op']} {row['backend']}", row["kernel"], *cells)
    return shown
