"""A record for people: one HTML page that asks nobody for anything, CSV, PNG, README pictures.

A number that may not be believed is not shown. A refused row has its reason and nothing else, in
the page and in the CSV, even where it was measured. A speed-up needs the whole field: eager,
compile and vendor present with a number, or unavailable with a reason.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.bench import plots
from tilewright.bench.canvas import THEME, Picture, css, figure_digest
from tilewright.bench.contest import (
    LEVEL,
    NO_NUMBER,
    Contest,
    contests,
    device_stats,
    grouped,
    micros,
    percent,
    size,
    time_of,
    verdict,
    where,
)
from tilewright.bench.record import WAYS, Record, Roof, Row, Stats
from tilewright.bench.svg import pixels, svg

__all__ = ["csv_text", "figure_digest", "page", "readme_pictures", "write_png"]

README_CASES = 30  # what fits on a screen


# --- the page ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what it says, what it sorts by, what it says on hover, how it looks."""

    text: str
    sort: float | int | None = None  # where the text would sort wrongly
    tip: str = ""
    look: str = ""
    span: int = 1  # columns


@dataclass(frozen=True)
class Drawn:
    """One picture in the page."""

    svg: Any  # safe markup: every text in it is escaped where it is made
    alt: str


@dataclass(frozen=True)
class Run:
    """What the page says of one record."""

    name: str
    gpu: str
    facts: list[tuple[str, str]]  # what everybody asks for
    more_facts: list[tuple[str, str]]
    cut_short: bool
    roofs: list[Roof]
    counts: list[tuple[int, str, str]]  # number, words, look
    losses: list[list[Cell]]
    unjudged: list[tuple[str, str]]  # case, why
    refused: list[tuple[str, str]]  # contender of a case, why
    pictures: dict[str, list[Drawn]]


def page(records: Sequence[Record]) -> str:
    """The whole report as one HTML file, whatever the records hold."""
    import jinja2

    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    runs = [_run(number, record) for number, record in enumerate(records)]
    several = len(records) > 1
    rows = [
        ([Cell(record.path.name)] if several else []) + cells
        for record in records
        for cells in _table(record.rows)
    ]
    return environment.from_string(template).render(
        runs=runs,
        heads=([("run", False, "the record's file")] if several else []) + HEADS,
        rows=rows,
        light=css(THEME, dark=False),
        dark=css(THEME, dark=True),
        level=percent(LEVEL),
        dash=NO_NUMBER,
    )


def _run(number: int, record: Record) -> Run:
    entered = [contest for contest in contests(record.rows) if contest.entered]
    main, more = _facts(record)
    return Run(
        name=record.path.name,
        gpu=record.gpu,
        facts=main,
        more_facts=more,
        cut_short=record.cut_short,
        roofs=record.roofs,
        counts=_counts(record.rows, entered),
        losses=[_loss(contest) for contest in entered if contest.outcome == "slower"],
        unjudged=[(where(c.first), c.barred) for c in entered if c.barred],
        refused=[
            (f"{where(row)}, {row.contender}", _remarks(row))
            for row in record.rows
            if row.state == "refused"
        ],
        pictures=_drawn(number, record),
    )


def _drawn(number: int, record: Record) -> dict[str, list[Drawn]]:
    from markupsafe import Markup

    found: dict[str, list[Drawn]] = {}
    serial = 0
    for kind, pictures in plots.pictures(record.rows, record.roofs).items():
        for picture in pictures:
            text = Markup(svg(picture, f"r{number}p{serial}"))  # noqa: S704  escaped there
            found.setdefault(kind, []).append(Drawn(text, picture.alt))
            serial += 1
    return found


def _counts(rows: Sequence[Row], contests: Sequence[Contest]) -> list[tuple[int, str, str]]:
    outcomes = Counter(contest.outcome for contest in contests)
    states = Counter(row.state for row in rows)
    flagged = sum(bool(row.flags) for row in rows if row.state == "ok")
    noisy = sum(any(flag.startswith("noisy") for flag in row.flags) for row in rows)
    return [
        (outcomes["faster"], "cases where ours is fastest", "win"),
        (outcomes["level"], f"within {percent(LEVEL)} of the fastest rival", ""),
        (outcomes["slower"], "slower than a rival", "loss" if outcomes["slower"] else ""),
        (outcomes[""], "cases not judged", ""),
        (len(rows), "rows measured or tried", ""),
        (states["refused"], "refused", "loss" if states["refused"] else ""),
        (flagged, "flagged", "warn" if flagged else ""),
        (noisy, "of these noisy: two passes disagree", "warn" if noisy else ""),
        (states["unavailable"], "unavailable", ""),
    ]


def _loss(contest: Contest) -> list[Cell]:
    best, rival = contest.best, contest.best_rival
    assert best is not None
    assert rival is not None
    slower = time_of(best) / time_of(rival)
    return [
        Cell(where(best)),
        Cell(f"{best.contender} {micros(time_of(best))} µs"),
        Cell(f"{rival.contender} {micros(time_of(rival))} µs"),
        Cell(f"{slower:.2f} times as long", look="loss"),
        Cell("; ".join((*best.flags, *rival.flags))),
    ]


# --- facts about a run ---------------------------------------------------------------------------

# what everybody asks for, in this order: a fact whose name holds the word is shown first
ASKED = (
    "gpu",
    "driver",
    "mhz",
    "limited",
    "torch",
    "triton",
    "tilewright",
    "source",
    "seed",
    "iter",
)
LABELS = {
    **{"gpu": "GPU", "sm": "SM", "source": "source digest", "cuda_core": "cuda.core"},
    **{"sm_mhz": "SM clock, MHz", "sm_max_mhz": "highest SM clock, MHz", "iters": "iterations"},
    **{"memory_mhz": "memory clock, MHz", "power_w": "power, W", "limited_by": "clocks limited by"},
    **{"power_limit_w": "power limit, W", "temperature_c": "temperature, °C"},
}


def _facts(record: Record) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(asked for, the rest); what the machine said at the end stands beside what it said first."""
    found = {"started": str(record.run["started"])} if "started" in record.run else {}
    for block in ("environment", "settings", "machine"):
        found |= dict(_flat(record.run.get(block) or {}))
    for name, value in _flat((record.end or {}).get("machine") or {}):
        before = found.get(name)
        if before is None:
            found[f"{name} at the end"] = value
        elif before != value:
            found[name] = f"{before}, at the end {value}"
    if record.end and "seconds" in record.end:
        found["seconds"] = str(record.end["seconds"])

    def rank(name: str) -> int:
        return next((place for place, word in enumerate(ASKED) if word in name), len(ASKED))

    ranked = sorted(found, key=rank)  # sorting keeps the order of equals
    facts = [(LABELS.get(n, n.replace("_", " ")), found[n], rank(n)) for n in ranked]
    main = [(name, value) for name, value, place in facts if place < len(ASKED)]
    return main, [(name, value) for name, value, place in facts if place == len(ASKED)]


def _flat(block: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name} ")
        elif isinstance(value, (list, tuple)):
            yield f"{before}{name}", ", ".join(map(str, value)) or "nothing"
        elif value is not None:
            yield f"{before}{name}", f"{value:g}" if isinstance(value, float) else str(value)


# --- the table of rows ---------------------------------------------------------------------------

# (head, sorts as a number, what it means)
HEADS: list[tuple[str, bool, str]] = [
    ("op", False, "the op, or the yardstick"),
    ("case", False, "the case's name in the declaration, or the shape that was asked for"),
    ("dtype", False, "of the first tensor"),
    ("phase", False, "forward or backward"),
    ("contender", False, "whose kernels ran; ours are bold"),
    ("state", False, "refused and unavailable rows have a reason instead of numbers"),
    ("µs", True, "median device time of one call"),
    ("p20 to p80", True, "where the middle three fifths of the samples lie, in µs"),
    ("speed-up", True, "the fastest rival's time over this one's, for ours"),
    ("% of roof", True, "the least possible time over the measured one"),
    ("% of peak", True, "bytes or flops over the datasheet's peak, whichever part is larger"),
    ("bound", False, "what limits a perfect kernel here"),
    ("GB/s", True, "bytes moved over device time"),
    ("TFLOP/s", True, "declared arithmetic over device time"),
    ("moved", True, "each input read once, each output written once"),
    ("cold µs", True, "one call between two CUDA events, L2 flushed"),
    ("graph µs", True, "one call of a CUDA graph of many"),
    ("sustained µs", True, "as cold, under load: where arithmetic is the bound"),
    ("host µs", True, "wall time of one call in a queue of calls"),
    ("cpu µs", True, "until the call returns"),
    ("largest error", True, "the largest absolute error against float64"),
    ("error", True, "worst error over its tolerance; 1 is the limit"),
    ("kernels", True, "how many kernels one call launches"),
    ("remarks", False, "flags and reasons, in words"),
]


def _table(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    by_case = {contest.first.case_key: contest for contest in contests(rows)}
    for row in rows:
        names = _names(row)
        if row.state == "ok":
            yield [*names, *_numbers(row, by_case[row.case_key]), Cell(_remarks(row))]
        else:  # its reason stands where the numbers would
            span = len(HEADS) - len(names)
            yield [*names, Cell(_remarks(row), look="muted", span=span)]


def _names(row: Row) -> list[Cell]:
    dims = json.dumps(row.dims, sort_keys=True, default=str)
    state = "flagged" if row.state == "ok" and row.flags else row.state
    look = {"refused": "loss", "flagged": "warn", "unavailable": "muted"}.get(state, "")
    return [
        Cell(row.op),
        Cell(row.case, tip=dims),
        Cell(row.dtype),
        Cell(row.phase),
        Cell(row.contender, look="ours" if row.ours else ""),
        Cell(state, look=look),
    ]


def _numbers(row: Row, contest: Contest) -> list[Cell]:
    stats = device_stats(row)
    band = f"{micros(stats.p20)} to {micros(stats.p80)}" if stats else ""
    return [
        Cell(micros(row.us), row.us, tip=row.method) if row.us else Cell(""),
        Cell(band, stats.p20 if stats else None),
        _speedup(row, contest),
        Cell(f"{100 * row.of_roof:.1f}" if row.of_roof else "", tip=row.roof),
        Cell(f"{100 * row.of_peak:.1f}" if row.of_peak else ""),
        Cell(row.bound),
        Cell(f"{row.gbps:,.0f}" if row.gbps else ""),
        Cell(f"{row.tflops:,.3g}" if row.tflops else ""),
        Cell(size(row.bytes) if row.bytes else "", row.bytes or None),
        *(_median(getattr(row, way)) for way in WAYS),
        Cell("" if row.largest_error is None else f"{row.largest_error:.1e}", row.largest_error),
        Cell("" if row.error is None else f"{row.error:.2f}"),
        Cell(str(len(row.kernels) or ""), tip="; ".join(row.kernels)[:120]),
    ]


def _median(stats: Stats | None) -> Cell:
    return Cell(micros(stats.median), stats.median) if stats else Cell("")


def _speedup(row: Row, contest: Contest) -> Cell:
    if not row.ours or not row.us:
        return Cell("")
    rival = contest.best_rival
    if contest.barred or rival is None:
        return Cell(NO_NUMBER, tip=f"no speed-up: {contest.barred}", look="muted")
    ratio = time_of(rival) / row.us
    outcome = verdict(ratio)
    look = {"slower": "loss", "faster": "win"}.get(outcome, "")
    return Cell(f"{ratio:.2f} {outcome}", ratio, tip=f"against {rival.contender}", look=look)


def _remarks(row: Row) -> str:
    if row.state != "ok":
        return row.reason or "no reason given"
    return "; ".join(row.flags)


# --- CSV -----------------------------------------------------------------------------------------

WORDS = ("op", "case", "dtype", "phase", "contender", "ours", "state", "reason")
COUNTS = ("bytes_read", "bytes_written", "flops", "unit")
MEASURED = (
    *("method", "us", "gbps", "tflops", "roof_us", "roof", "of_roof", "of_peak", "bound"),
    *("error", "largest_error"),
)
COLUMNS = (
    *("record", "gpu"),
    *(*WORDS, "dims", "flags", "ran", "kernels", *COUNTS, *MEASURED),
    *(f"{way}_us" for way in WAYS),
)


def csv_text(records: Sequence[Record]) -> str:
    """One line per row with a line of heads: the flat fields, and the median of each way to time.

    Lists are joined by "; ", `dims` is JSON, what is missing is empty. A row that is not "ok" has
    no measured field.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for of, row in ((record, row) for record in records for row in record.rows):
        facts: dict[str, Any] = {"record": of.path.name, "gpu": of.gpu}
        facts |= {name: getattr(row, name) for name in (*WORDS, *COUNTS)}
        facts["dims"] = json.dumps(row.dims, sort_keys=True, default=str)
        facts |= {"flags": "; ".join(row.flags), "ran": row.ran, "kernels": "; ".join(row.kernels)}
        if row.state == "ok":
            facts |= {name: getattr(row, name) for name in MEASURED}
            stats: dict[str, Stats | None] = {way: getattr(row, way) for way in WAYS}
            facts |= {f"{way}_us": its.median for way, its in stats.items() if its}
        writer.writerow(facts)
    return buffer.getvalue()


# --- pictures in files ---------------------------------------------------------------------------


def write_png(records: Sequence[Record], path: Path | str) -> None:
    """One PNG with every picture of every record, in columns and in the light theme."""
    import numpy
    from matplotlib.image import imsave

    images = [
        pixels(picture)
        for record in records
        for pictures in plots.pictures(record.rows, record.roofs).values()
        for picture in pictures
    ]
    if not images:
        images = [numpy.full((60, 720, 4), 255, numpy.uint8)]  # nothing to draw is a blank sheet
    columns: list[list[Any]] = [[] for _ in range(min(3, len(images)))]
    for image in images:  # each under the shortest column
        min(columns, key=lambda column: sum(len(i) for i in column)).append(image)
    stacked = [numpy.concatenate(column) for column in columns]
    height = max(len(column) for column in stacked)
    sheet = numpy.full((height, sum(c.shape[1] for c in stacked), 4), 255, numpy.uint8)
    left = 0
    for column in stacked:
        sheet[: len(column), left : left + column.shape[1]] = column
        left += column.shape[1]
    imsave(str(path), sheet)


def readme_pictures(record: Record) -> dict[str, str]:
    """File name -> SVG with both themes, for the README: the speed-ups and the bandwidth.

    The speed-ups are of the forward in the dtype that most cases have. Where these are too many,
    each op keeps cases evenly spaced by size, its smallest and its largest among them; the title
    says how many of how many. Picking by result is thereby impossible.
    """
    found: list[Picture] = []
    gpu = record.gpu.removeprefix("NVIDIA ")
    chosen, of = _representative(contests(record.rows))
    if chosen:
        first = chosen[0].first
        part = "" if len(chosen) == of else f"; {len(chosen)} of {of} cases, spaced by size"
        title = f"{gpu}, {first.phase} {first.dtype}: rival's time / ours{part}"
        found.append(plots.heatmap(chosen, title, "speedup", lambda row: f"{row.op}  {row.case}"))
    found += plots.bandwidth(record.rows, record.roofs, f" on {gpu}")
    return {
        f"{picture.name}.svg": svg(picture, f"tw-{picture.name}", standalone=True)
        for picture in found
    }


def _representative(contests: Iterable[Contest]) -> tuple[list[Contest], int]:
    """(chosen, how many there were)."""
    ready = [c for c in contests if c.best and c.best_rival and c.first.phase == "forward"]
    dtypes = Counter(contest.first.dtype for contest in ready)
    if not dtypes:
        return [], 0
    usual = max(dtypes, key=lambda name: (dtypes[name], name == "bfloat16"))
    there = [contest for contest in ready if contest.first.dtype == usual]
    by_op = grouped(there, lambda contest: (contest.first.op,))
    each = max(2, README_CASES // len(by_op)) if len(there) > README_CASES else len(there)
    return [c for its in by_op.values() for c in _spread(its, each)], len(there)


def _spread(contests: list[Contest], count: int) -> list[Contest]:
    """`count` of them, evenly spaced by size."""
    ordered = sorted(contests, key=lambda contest: contest.first.bytes)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
