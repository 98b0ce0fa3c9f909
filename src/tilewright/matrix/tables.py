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
    """One line per kernel; per SM the most registers that any of its launch choices takes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = (
        f"compile matrix: {record['binaries']} binaries ({', '.join(record['compilers'])})\n"
        f"{record['compiled']} compiled now, {record['known']} known by hash, "
        f"{len(record['violations'])} violations\n"
        "per SM: registers of a thread, the most of any choice; 2! if two binaries break a limit"
    )
    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("op, backend", no_wrap=True)
    shown.add_column("kernel", no_wrap=True)
    for sm in record["sms"]:
        shown.add_column(str(sm), no_wrap=True, justify="right")
    before = ""
    for row in sorted(record["kernels"], key=lambda r: (r["op"], r["backend"], r["kernel"])):
        cells = []
        for sm in record["sms"]:
            facts = row["by_sm"].get(str(sm), {"violations": 0, "registers": "-"})
            bad = facts["violations"]
            cells.append(f"[red]{bad}![/]" if bad else str(facts["registers"]))
        name = f"{row['op']} {row['backend']}"
        shown.add_row("" if name == before else name, row["kernel"], *cells)
        before = name
    return Group(Text(title), shown)
