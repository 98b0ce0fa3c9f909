"""What a run shows on a terminal: one small table per case, head to head, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tilewright.bench.contest import (
    NO_NUMBER,
    Contest,
    contests,
    has_number,
    micros,
    size,
    verdict,
)
from tilewright.bench.record import Row, Stats

# 80 columns; the samples' spread and the CPU's time are in the record and on the page
HEADS = ("", "µs", "host µs", "GB/s", "TFLOP/s", "roof", "peak", "error", "of tol", "ours is")
COLOURS = {"faster": "green", "slower": "red", "level": ""}


def case_tables(rows: Iterable[Row]) -> Group:
    """Every case with all its contenders, then what there is to know about them."""
    shown: list[Any] = []
    for contest in contests(rows):
        shown += [_title(contest), _table(contest), *_remarks(contest), ""]
    return Group(*shown)


def _title(contest: Contest) -> Text:
    row = next((r for r in contest.rows.values() if r.us), contest.first)
    words = f"{row.op} {row.phase}, {row.case}, {row.dtype}: moves {size(row.bytes)}"
    if row.roof_us:
        each = row.method == "sustained"  # a roof for each row, at its own clock
        words += f"; bound by {row.bound}; roof "
        words += row.roof if each else f"{micros(row.roof_us)} µs ({row.roof})"
    return Text(words, style="bold")


def _table(contest: Contest) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for head in HEADS:
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for row in contest.rows.values():
        if row.state == "ok":
            table.add_row(*_cells(row, contest))
    return table


def _cells(row: Row, contest: Contest) -> Iterator[str]:
    """Latency, rates, their part of the measured roof and of the datasheet's peak, and errors."""
    yield f"[bold]{row.contender}[/]" if row.ours else row.contender
    yield micros(row.us) if row.us else NO_NUMBER
    yield _median(row.host)
    yield f"{row.gbps:,.0f}" if row.gbps is not None else NO_NUMBER
    yield _rate(row.tflops)
    yield f"{row.of_roof:.1%}" if row.of_roof is not None else NO_NUMBER
    yield f"{row.of_peak:.1%}" if row.of_peak is not None else NO_NUMBER
    yield f"{row.largest_error:.1e}" if row.largest_error is not None else NO_NUMBER
    yield f"{row.error:.2f}" if row.error is not None else NO_NUMBER
    yield "" if row.ours else _speedup(row, contest)


def _rate(tflops: float | None) -> str:
    return NO_NUMBER if not tflops else f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2f}"


def _median(found: Stats | None) -> str:
    return micros(found.median) if found else NO_NUMBER


def _speedup(row: Row, contest: Contest) -> str:
    ratio = contest.speedup(row.contender)
    if ratio is None:
        return NO_NUMBER
    return _coloured(ratio)


def _coloured(ratio: float) -> str:
    colour = COLOURS[verdict(ratio)]
    return f"[{colour}]{ratio:.2f}x[/]" if colour else f"{ratio:.2f}x"


def _remarks(contest: Contest) -> Iterator[Text]:
    if contest.entered and contest.barred:
        yield Text(f"  no speed-up is shown: {contest.barred}", style="yellow")
    for row in contest.rows.values():
        if row.state != "ok":
            style = "red" if row.state == "refused" else "dim"
            yield Text(f"  {row.contender} {row.state}: {row.reason}", style=style)
        for flag in row.flags:
            yield Text(f"  {row.contender}: {flag}", style="yellow")


def summary(rows: Sequence[Row]) -> str:
    """One line that says how ours fared, losses included."""
    entered = [c for c in contests(rows) if c.entered]
    outcomes = Counter(c.outcome for c in entered)
    states = Counter(row.state for row in rows)
    flagged = sum(bool(row.flags) for row in rows if row.state == "ok")
    words = [f"{len(rows)} rows, {states['refused']} refused, {flagged} flagged"]
    if entered:
        words.append(
            f"of {len(entered)} cases ours is faster than every rival in {outcomes['faster']}, "
            f"level in {outcomes['level']}, slower in {outcomes['slower']}, "
            f"not judged in {outcomes['']}"
        )
    return "; ".join(words)


def head_to_head(rows: Iterable[Row], first: str, second: str) -> Table:
    """One backend of ours against another, for every case that has both."""
    table = Table("case", first, second, f"{first} is", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    ratios = []
    for pair in versus(rows, first, second):
        a, b, ratio = pair["first"], pair["second"], pair["ratio"]
        ratios.append(ratio)
        cells = (micros(a.us), micros(b.us), _coloured(ratio))
        where = f"{a.op} {a.phase}, {a.case}, {a.dtype}"
        table.add_row(escape(where), f"{cells[0]} µs", f"{cells[1]} µs", cells[2])
    if ratios:
        table.add_row("geometric mean", "", "", f"{geometric_mean(ratios):.2f}x", style="bold")
    else:
        table.add_row(f"no case has both {first} and {second}", "", "", "")
    return table


def versus(rows: Iterable[Row], first: str, second: str) -> list[dict[str, Any]]:
    """Pairs of rows, and the second's time over the first's. "cuda" stands for cuda_v2 and so on
    where an op numbers its versions: the fastest of them."""
    found = []
    for contest in contests(rows):
        a, b = _best_of(contest, first), _best_of(contest, second)
        if a is not None and b is not None and a.us and b.us:
            found.append({"first": a, "second": b, "ratio": b.us / a.us})
    return found


def _best_of(contest: Contest, name: str) -> Row | None:
    ours = [row for row in contest.rows.values() if row.ours and has_number(row)]
    named = [r for r in ours if r.contender == name or r.contender.startswith(f"{name}_")]
    return min(named, key=lambda row: row.us or 0.0, default=None)
