"""Results counted: what the table shows and the record keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tilewright.verify.record import Result


def summarise(results: Sequence[Result], device: str) -> dict[str, Any]:
    """Counts per op, backend, check and phase; the worst error per dtype; every failure."""
    counts: dict[tuple[str, str, str, str], list[Result]] = defaultdict(list)
    numerics: dict[tuple[str, str, str, str], list[Result]] = defaultdict(list)
    for r in results:
        counts[r.op, r.backend, r.check, r.phase].append(r)
        if r.dtype and r.phase:
            numerics[r.op, r.backend, r.dtype, r.phase].append(r)
    return {
        "checks": [
            {
                "op": op, "backend": backend, "check": check, "phase": phase, "run": len(rows),
                "failed": sum(not r.passed for r in rows),
                "worst_error_over_tolerance": max(r.ratio for r in rows),
            }
            for (op, backend, check, phase), rows in counts.items()
        ],
        "numerics": [
            {
                "op": op, "backend": backend, "dtype": dtype, "phase": phase, "run": len(rows),
                "worst_error": max(r.error for r in rows),
                "worst_error_over_tolerance": max(r.ratio for r in rows),
            }
            for (op, backend, dtype, phase), rows in sorted(numerics.items())
        ],
        "features": [
            {
                "op": r.op, "backend": r.backend, "levels": r.case, "phase": r.phase,
                "passed": r.passed,
            }
            for r in results
            if r.check == "features"
        ],
        "failures": [
            {
                "line": r.line,
                "repro": r.repro(device),
                **r.as_dict(),
            }
            for r in results
            if not r.passed
        ],
    }  # fmt: skip


# The checks with a column of their own; "other" is the rest: in place, empty, nan, ...
SHOWN = ("cases", "random", "exact", "layouts")


def table(report: dict[str, Any], title: str) -> Any:
    """One line per op and backend: checks run, worst error, verdict."""
    from rich import box
    from rich.table import Table

    by_kernel: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in report["checks"]:
        by_kernel[row["op"], row["backend"]].append(row)
    heads = (*SHOWN, "other", "error/tol", "")
    shown = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in ("op", "backend", *heads):
        shown.add_column(head, no_wrap=True)
    for (op, backend), rows in by_kernel.items():
        cells = []
        for name in (*SHOWN, "other"):
            mine = [r for r in rows if name == (r["check"] if r["check"] in SHOWN else "other")]
            run, failed = sum(r["run"] for r in mine), sum(r["failed"] for r in mine)
            cells.append(f"[red]{failed} of {run}[/]" if failed else str(run or ""))
        worst = max(r["worst_error_over_tolerance"] for r in rows)
        verdict = "[red]failed[/]" if any(r["failed"] for r in rows) else "[green]ok[/]"
        shown.add_row(op, backend, *cells, f"{worst:.2f}", verdict)
    return shown
