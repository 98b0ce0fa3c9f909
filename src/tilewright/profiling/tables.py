"""What a profiler saw as a record and as a table, beside what the declaration predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilewright.profiling import advice
from tilewright.profiling.kernel import Kernel, Timing, per_call, ratio, short_name, times_per_call

if TYPE_CHECKING:
    from rich.table import Table


def kernel_rows(
    kernels: Sequence[Kernel], read: int, written: int, calls: int | None = None
) -> list[dict[str, Any]]:
    """Every kernel as a plain dict, with its advice.

    The prediction is about the whole call. It says something about one kernel only where the call
    launches just that one; otherwise a last row, named "one call", holds the sums. Where the number
    of calls is not known, the rarest kernel is taken to run once in each.
    """
    calls = calls or min((k.launches for k in kernels), default=1)
    alone = len(kernels) == 1
    rows = []
    for kernel in kernels:
        over_read, over_written = None, None
        if alone:
            over_read, over_written = _over(kernels, read, written, calls)
        rows.append(
            {
                **asdict(kernel),
                "read_over_predicted": over_read,
                "written_over_predicted": over_written,
                "advice": advice.of_kernel(kernel, over_read, over_written),
            }
        )
    return rows if alone else [*rows, _whole_call(kernels, read, written, calls)]


def _whole_call(kernels: Sequence[Kernel], read: int, written: int, calls: int) -> dict[str, Any]:
    over_read, over_written = _over(kernels, read, written, calls)
    launches = sum(times_per_call(k, calls) for k in kernels)
    return {
        "name": "one call",
        "launches": launches,
        "duration_us": per_call(kernels, "duration_us", calls),
        "dram_read": per_call(kernels, "dram_read", calls),
        "dram_written": per_call(kernels, "dram_written", calls),
        "read_over_predicted": over_read,
        "written_over_predicted": over_written,
        "advice": advice.of_call(launches, over_read, over_written),
    }


def _over(
    kernels: Sequence[Kernel], read: int, written: int, calls: int
) -> tuple[float | None, float | None]:
    return (
        ratio(per_call(kernels, "dram_read", calls), read),
        ratio(per_call(kernels, "dram_written", calls), written),
    )


def table(
    kernels: Sequence[Kernel],
    predicted_read: int,
    predicted_written: int,
    predicted_flops: float | None = None,
    calls: int | None = None,
) -> Table:
    """A paragraph per kernel, the longest first; predicted bytes beside the measured ones."""
    rows = kernel_rows(kernels, predicted_read, predicted_written, calls)
    rows.sort(key=lambda r: (r["name"] == "one call", -(r["duration_us"] or 0) * r["launches"]))
    shown = _empty("", "measured", "predicted", "ratio")
    for row in rows:
        whole = row["read_over_predicted"] is not None or row["written_over_predicted"] is not None
        for cells in _paragraph(row, predicted_read, predicted_written, predicted_flops, whole):
            shown.add_row(*cells)
        shown.add_row()
    return shown


def _paragraph(
    row: dict[str, Any], read: int, written: int, flops: float | None, whole: bool
) -> list[tuple[str, ...]]:
    """The lines of one kernel; what the tool did not measure is left out."""
    us = row["duration_us"]
    name = _plain(short_name(row["name"]))
    lines: list[tuple[str, ...]] = [("kernel", f"[bold]{name}[/], {row['launches']} launches")]
    if us is not None:
        lines.append(("duration", f"{us:.1f} us"))
    if row.get("sm_pct") is not None or row.get("memory_pct") is not None:
        parts = ("SM", "sm_pct"), ("memory", "memory_pct"), ("DRAM", "dram_pct")
        busy = [f"{what} {_pct(row.get(key))}" for what, key in parts]
        lines.append(("busy", ", ".join(busy)))
    if row.get("tensor_pct") is not None:
        lines.append(("tensor pipe", _pct(row["tensor_pct"])))
    if row.get("occupancy_pct") is not None:
        allowed, registers = row["theoretical_occupancy_pct"], row["registers"]
        of = f" of {_pct(allowed)} allowed" if allowed is not None else ""
        by = f", {registers} registers" if registers is not None else ""
        lines.append(("occupancy", f"{_pct(row['occupancy_pct'])}{of}{by}"))
    if row.get("l2_hit_pct") is not None:
        lines.append(("L2 hits", _pct(row["l2_hit_pct"])))
    for what, key, predicted in (("read", "dram_read", read), ("written", "dram_written", written)):
        if row[key] is not None:
            over = row[f"{what}_over_predicted"]
            beside = (f"{predicted:,} B", f"{over:.2f}x") if over is not None else ()
            lines.append((f"DRAM {what}", f"{row[key]:,.0f} B", *beside))
    if whole and flops and us:
        lines.append(("arithmetic", f"{flops / us / 1e6:,.2f} TFLOP/s", f"{flops:,.0f} flop"))
    if row.get("stalls"):
        waits = ", ".join(f"{reason} {warps:.1f}" for reason, warps in row["stalls"].items())
        lines.append(("waiting", waits))
    return [*lines, ("advice", f"[bold]{_plain(row['advice'])}[/]")]


def timing_rows(timings: Sequence[Timing], calls: int) -> list[dict[str, Any]]:
    """Every kernel as a plain dict, the longest first."""
    ordered = sorted(timings, key=lambda t: -t.total_us)
    return [
        {
            "name": t.name,
            "launches": t.launches,
            "mean_us": t.mean_us,
            "us_per_call": t.total_us / calls,
        }
        for t in ordered
    ]


def timing_table(timings: Sequence[Timing], calls: int, read: int, written: int) -> Table:
    """A line per kernel; below it what the whole call's time makes of the predicted bytes."""
    shown = _empty("kernel", "launches", "us each", "us per call")
    for row in timing_rows(timings, calls):
        cells = f"{row['launches']}", f"{row['mean_us']:.2f}", f"{row['us_per_call']:.2f}"
        shown.add_row(_plain(short_name(row["name"])), *cells)
    us = sum(t.total_us for t in timings) / calls
    if us:
        speed = (read + written) / us / 1e3
        shown.caption = (
            f"one call: {us:.1f} us of kernels; the {read + written:,} bytes it must move, at "
            f"{speed:,.0f} GB/s"
        )
        shown.caption_justify = "left"
    return shown


def _empty(*heads: str) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        # the first columns hold words, the last ones numbers
        shown.add_column(head, justify="left" if i < len(heads) - 2 else "right", overflow="fold")
    return shown


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _pct(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} %"
