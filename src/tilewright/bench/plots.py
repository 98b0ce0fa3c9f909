"""The pictures of a record: one drawing code for SVG and PNG.

Colours have names. A drawing uses a name's value in the light theme, and `svg` turns every such
value into the CSS variable `--tw-NAME`: one SVG serves light and dark pages. Nothing here touches
pyplot, whose figures are global; matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import textwrap
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar
from xml.sax.saxutils import escape

from tilewright.bench.record import Roof, Row, Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

BASELINES = ("eager", "compile", "vendor")  # what a speed-up must have been held against
LEVEL = 0.02  # two times closer than this are the same
NO_NUMBER = "\N{EN DASH}"
WIDTH = 5.2  # inches; every picture has it, so that they can be stacked in columns

# --- colours and markers -------------------------------------------------------------------------

# name: (light, dark). The light values differ from one another, because `svg` finds names by them.
THEME: Mapping[str, tuple[str, str]] = {
    "page": ("#f5f6f8", "#0c0f14"),
    "paper": ("#ffffff", "#151a21"),
    "ink": ("#1c2127", "#e8ecf1"),
    "muted": ("#59636e", "#9ba6b2"),
    "line": ("#d8dde3", "#323a45"),
    "loss": ("#b3261e", "#ff8f80"),
    "warn": ("#855700", "#e3b341"),
    # ours: blues
    "triton": ("#0b4fc4", "#6ea8ff"),
    "cuda": ("#0d8ecf", "#4cc4f5"),
    "cuda_v1": ("#6b5fd6", "#a99fff"),
    "cuda_v2": ("#0a7ea4", "#5bd3e8"),
    "gluon": ("#3f37c9", "#8f8aff"),
    "cute": ("#17847a", "#4fd1c1"),
    "ours": ("#2b6cb0", "#7fb2ea"),
    # rivals: muted, told apart by lightness and marker too
    "eager": ("#858b94", "#8b95a1"),
    "compile": ("#b07d1a", "#d3a64d"),
    "vendor": ("#a0568c", "#d48cc0"),
    "liger": ("#6b8a3a", "#a3c46f"),
    "quack": ("#b8613f", "#e0926f"),
    "flash_attention_4": ("#5d7a8c", "#93b4c7"),
    "gemlite": ("#94704f", "#c9a37f"),
    "other0": ("#4d7c6f", "#7fb5a6"),
    "other1": ("#8d6f5a", "#c2a38c"),
    "other2": ("#7a6a99", "#b3a3d4"),
    # the heatmap: losses orange, wins blue, one value per step of STEPS
    "heat0": ("#ee8158", "#a3411f"),
    "heat1": ("#f5a583", "#833822"),
    "heat2": ("#f9c8b1", "#643023"),
    "heat3": ("#fce4d9", "#482a23"),
    "heat4": ("#eceef1", "#2b3139"),
    "heat5": ("#dceaf7", "#1c3146"),
    "heat6": ("#b9d5ee", "#1d4265"),
    "heat7": ("#8cbbe3", "#1f5382"),
    "heat8": ("#5f9fd7", "#22649f"),
}
STEPS = (0.44, 0.67, 0.87, 1 - LEVEL, 1 + LEVEL, 1.15, 1.5, 2.25)  # a step's heat begins above

MARKERS = {
    **{"triton": "o", "cuda": "s", "cuda_v1": "D", "cuda_v2": "^", "gluon": "p", "cute": "h"},
    **{"eager": "v", "compile": "X", "vendor": "P", "liger": "<", "quack": ">"},
    **{"flash_attention_4": "8", "gemlite": "H"},
}


def colour(contender: str, ours: bool) -> str:
    """The name of a contender's colour: fixed, whoever else is in the picture."""
    if contender in MARKERS:
        return contender
    return "ours" if ours else f"other{zlib.crc32(contender.encode()) % 3}"


def marker(contender: str, ours: bool) -> str:
    return MARKERS.get(contender, "*" if ours else "d")


def light(name: str) -> str:
    return THEME[name][0]


def css(names: Iterable[str], dark: bool) -> str:
    """The variables of one theme."""
    return "".join(f"--tw-{name}:{THEME[name][dark]};" for name in names)


# --- who is fastest ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """The contenders of one case, by name."""

    rows: Mapping[str, Row]

    @property
    def entered(self) -> bool:
        """Whether anything of ours takes part: a yardstick is a case without."""
        return any(row.ours for row in self.rows.values())

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))

    @property
    def best(self) -> Row | None:
        """The fastest of ours."""
        return _fastest(row for row in self.rows.values() if row.ours)

    @property
    def best_rival(self) -> Row | None:
        return _fastest(row for row in self.rows.values() if not row.ours)

    @property
    def barred(self) -> str:
        """Why no speed-up may be shown, or nothing. A weak field makes a fast winner."""
        if self.best is None:
            return "none of ours has a number"
        for name in BASELINES:
            row = self.rows.get(name)
            if row is None:
                return f"{name} was not measured"
            if row.state == "refused":
                return f"{name} was refused: {row.reason or 'no reason given'}"
            if not has_number(row) and not row.reason and not row.flags:
                return f"{name} has no number, and nothing says why"
        if self.best_rival is None:
            return "no rival has a number"
        return ""

    def speedup(self, rival: str) -> float | None:
        """The rival's time over the best of ours; None where it may not be shown."""
        row, best = self.rows.get(rival), self.best
        if self.barred or row is None or best is None or not has_number(row):
            return None
        return time_of(row) / time_of(best)

    @property
    def outcome(self) -> str:
        """ "faster", "level" or "slower" than the fastest rival; "" where nobody may say."""
        best, rival = self.best, self.best_rival
        if self.barred or best is None or rival is None:
            return ""
        return verdict(time_of(rival) / time_of(best))


def contests(rows: Iterable[Row]) -> list[Contest]:
    """Rows by case, in the order in which cases appear."""
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row.case_key][row.contender] = row
    return [Contest(by_name) for by_name in found.values()]


def verdict(speedup: float) -> str:
    if speedup > 1 + LEVEL:
        return "faster"
    return "slower" if speedup < 1 - LEVEL else "level"


def has_number(row: Row) -> bool:
    return row.state == "ok" and bool(row.us)


def time_of(row: Row) -> float:
    assert row.us is not None
    return row.us


def device_stats(row: Row) -> Stats | None:
    """The statistics behind `us`."""
    return {"graph": row.graph, "cold": row.cold}.get(row.method)


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(filter(has_number, rows), key=time_of, default=None)


# --- words ---------------------------------------------------------------------------------------

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def size(count: float) -> str:
    """Bytes as people say them: 512 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def micros(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:#.3g}".rstrip(".")


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def where(row: Row) -> str:
    return f"{row.op} {row.case} {SHORT.get(row.dtype, row.dtype)} {row.phase}"


def _tip(row: Row) -> str:
    roof = f", {percent(row.of_roof)} of its roof" if row.of_roof else ""
    flags = f"; flagged: {'; '.join(row.flags)}" if row.flags else ""
    rate = f", {row.gbps:,.0f} GB/s" if row.gbps else ""
    return f"{where(row)}, {row.contender}: {micros(time_of(row))} µs{rate}{roof}{flags}"


# --- a picture -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A drawing, what it is called, and what it shows in words."""

    name: str  # letters, digits and dashes
    title: str
    alt: str
    digest: str  # of the data that it draws
    figure: Figure
    tips: Mapping[str, str] = field(default_factory=dict)  # gid of an artist: words on hover


def figure_digest(rows: Iterable[Row], roofs: Iterable[Roof] = ()) -> str:
    """The sha256 of what a picture of `rows` and `roofs` draws: of no sample and no host time."""
    facts: list[Any] = []
    for row in rows:
        stats = device_stats(row)
        band = (stats.p20, stats.p80) if stats else ()
        numbers = (row.bytes, row.flops, row.us, row.roof_us, row.gbps, row.tflops, row.error)
        facts.append([*row.key, row.ours, row.state, bool(row.flags)])
        # as many digits as a record keeps: one that was read back draws the same
        facts.append([None if n is None else f"{n:.7g}" for n in (*numbers, *band)])
    facts.append([[roof.name, roof.unit, f"{roof.value:.7g}"] for roof in roofs])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def pictures(rows: Sequence[Row], roofs: Sequence[Roof]) -> dict[str, list[Picture]]:
    """Every picture of a record by kind; a kind that has nothing to draw is left out."""
    found = {
        "Speed-ups": speedups(rows),
        "Roofs and tolerances": [*bandwidth(rows, roofs), *roofline(rows, roofs), *errors(rows)],
        "Latency": latency(rows),
    }
    return {kind: drawn for kind, drawn in found.items() if drawn}


def _style() -> AbstractContextManager[None]:
    """matplotlib's settings while a picture is made or saved."""
    import matplotlib

    ink, muted, line, paper = map(light, ("ink", "muted", "line", "paper"))
    settings: Any = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, wider than what a page will use
        "font.size": 8.5,
        "text.color": ink,
        "text.parse_math": False,  # an op's name is no formula
        "axes.edgecolor": muted,
        "axes.labelcolor": muted,
        "axes.facecolor": paper,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": line,
        "grid.linewidth": 0.6,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.bottom": False,  # the grid shows where a label belongs
        "ytick.left": False,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "figure.facecolor": paper,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "hatch.color": line,
        "hatch.linewidth": 0.8,
        "svg.fonttype": "none",
        "svg.hashsalt": "tilewright",
    }
    return matplotlib.rc_context(settings)


def _figure(title: str, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    figure.suptitle(textwrap.fill(title, 52), x=0.015, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def _slug(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def _grouped(
    items: Iterable[T], key: Callable[[T], tuple[str, ...]]
) -> dict[tuple[str, ...], list[T]]:
    found: dict[tuple[str, ...], list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _contenders(rows: Iterable[Row]) -> list[tuple[str, bool]]:
    """(name, ours), ours first, then those that everybody knows."""
    names = {(row.contender, row.ours) for row in rows}
    known = list(MARKERS)
    rank = {name: position for position, name in enumerate(known)}
    return sorted(names, key=lambda c: (not c[1], rank.get(c[0], len(known)), c[0]))


DASHED: Any = (0, (4, 2))
MARK = {"markersize": 4.5, "markeredgewidth": 0.9}


def _hollow() -> dict[str, Any]:
    return {"markerfacecolor": light("paper")}


def _hollow_entry(meaning: str) -> tuple[str, dict[str, Any]]:
    look = {**MARK, "color": light("muted"), "marker": "o", "linestyle": "none"}
    return f"hollow: {meaning}", {**look, **_hollow()}


def _roof_entry(label: str) -> tuple[str, dict[str, Any]]:
    return label, {"color": light("ink"), "linestyle": DASHED, "linewidth": 1}


class _Dots:
    """Draws single measurements, each with words that a page shows on hover."""

    def __init__(self) -> None:
        self.tips: dict[str, str] = {}

    def draw(self, axes: Axes, x: float, y: float, row: Row, words: str = "", **style: Any) -> None:
        gid = f"tip-{len(self.tips)}"
        self.tips[gid] = words or _tip(row)
        name = light(colour(row.contender, row.ours))
        look = {**MARK, "color": name, "marker": marker(row.contender, row.ours)}
        edge = {"markeredgecolor": name, "linestyle": "none"}
        (dot,) = axes.plot([x], [y], **{**look, **edge, **style}, gid=gid)
        dot.set(in_layout=False, clip_on=False)


def _legend(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Below everything, in as many columns as the labels allow."""
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[Line2D([], [], label=label, **style) for label, style in entries],
        loc="outside lower center",
        ncols=_fitting([len(label) for label, _ in entries]),
        columnspacing=1.4,
        handletextpad=0.5,
    )


def _fitting(letters: Sequence[int]) -> int:
    """How many columns of labels fit side by side, filled from top to bottom."""
    for columns in range(len(letters), 1, -1):
        deep, more = divmod(len(letters), columns)  # as matplotlib fills them
        ends = [(deep + 1) * min(c, more) + deep * max(0, c - more) for c in range(columns + 1)]
        widest = [max(letters[start:end]) for start, end in pairwise(ends)]
        if sum(0.58 + 0.075 * most for most in widest) < WIDTH:  # inches, with its handle
            return columns
    return 1


def _entry(contender: tuple[str, bool], **style: Any) -> tuple[str, dict[str, Any]]:
    name, ours = contender
    look = {**MARK, "color": light(colour(name, ours)), "marker": marker(name, ours)}
    return name, {**look, "linewidth": 1.4, **style}


def _size_axis(axes: Axes, sizes: Iterable[float], most: int) -> None:
    """A logarithmic axis of bytes with at most `most` labels, at powers of two."""
    low, high = min(sizes), max(sizes)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, math.ceil((last - first) / (most - 1)))
    ticks = [2.0**power for power in range(first, last + step, step)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.5, high * 1.5)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: decades if there are enough, or else closer ones."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 3:
            break
    return ticks


def _log_axis(axes: Axes, values: Iterable[float], which: str) -> None:
    low, high = min(values) / 1.3, max(values) * 1.3
    ticks = _log_ticks(low, high)
    axis = axes.yaxis if which == "y" else axes.xaxis
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis.set_ticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axis.set_ticks([], minor=True)


# --- latency against size ------------------------------------------------------------------------


def latency(rows: Sequence[Row]) -> list[Picture]:
    """One picture per op, phase and dtype: device time against bytes moved, and the roof."""
    timed = [row for row in rows if has_number(row) and row.bytes]
    by_panel = _grouped(timed, lambda row: (row.op, row.phase, row.dtype))
    return [_latency(panel) for panel in by_panel.values()]


def _latency(rows: Sequence[Row]) -> Picture:
    first = rows[0]
    title = f"{first.op} {first.phase}, {first.dtype}: device time"
    dots, roofs = _Dots(), _roof_by_size(rows)
    with _style():
        figure = _figure(title, 4.1)
        axes, ratio = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
        _size_axis(axes, [row.bytes for row in rows], most=6)
        _log_axis(axes, [v for row in rows for v in _band(row)] + list(roofs.values()), "y")
        axes.set_ylabel("µs")
        slowest = max((time_of(row) / row.roof_us for row in rows if row.roof_us), default=2.0)
        ratio.set(xlabel="bytes moved", ylabel="µs / roof", ylim=(0.9, max(1.6, min(slowest, 3))))
        if roofs:
            axes.plot(list(roofs), list(roofs.values()), color=light("ink"), ls=DASHED, lw=1)
            ratio.axhline(1, color=light("ink"), ls=DASHED, lw=1)
        for name, ours in reversed(_contenders(rows)):  # ours on top
            its = [row for row in rows if row.contender == name and row.ours == ours]
            look = {"color": light(colour(name, ours)), "linewidth": 1.6 if ours else 1.0}
            _line(axes, its, lambda row: 1.0, look)
            _line(ratio, [row for row in its if row.roof_us], lambda row: row.roof_us or 1.0, look)
            for row in its:
                dots.draw(axes, row.bytes, time_of(row), row, **(_hollow() if row.flags else {}))
        entries = [_entry(contender) for contender in _contenders(rows)]
        if roofs:
            entries.append(_roof_entry("roof"))
        if any(row.flags for row in rows):
            entries.append(_hollow_entry("flagged"))
        _legend(figure, entries)
    name = _slug("latency", first.op, first.phase, first.dtype)
    return Picture(name, title, _latency_words(rows), figure_digest(rows), figure, dots.tips)


def _latency_words(rows: Sequence[Row]) -> str:
    first = rows[0]
    words = f"{first.op} {first.phase} in {first.dtype} at {count(len(contests(rows)), 'case')}: "
    largest = max(row.bytes for row in rows)
    there = Contest({row.contender: row for row in rows if row.bytes == largest})
    best, rival = there.best, there.best_rival
    if best is None:
        return f"{words}nothing of ours at {size(largest)}."
    roof = f"reaches {percent(best.of_roof)} of the roof" if best.of_roof else "takes"
    words += f"{best.contender} {roof} at {size(largest)}"
    words += f" ({micros(time_of(best))} µs)" if best.of_roof else f" {micros(time_of(best))} µs"
    if rival:
        words += f"; the fastest rival, {rival.contender}, takes {micros(time_of(rival))} µs"
    return f"{words}."


def _band(row: Row) -> tuple[float, ...]:
    stats = device_stats(row)
    return (
        (time_of(row), *(v for v in (stats.p20, stats.p80) if v > 0)) if stats else (time_of(row),)
    )


def _line(
    axes: Axes, rows: Sequence[Row], over: Callable[[Row], float], look: Mapping[str, Any]
) -> None:
    """Times over something, through the median of each size; from the lowest p20 to the top p80."""
    by_size: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.bytes):
        by_size[row.bytes].append(row)
    middle = [median(time_of(row) / over(row) for row in its) for its in by_size.values()]
    low = [min(v / over(row) for row in its for v in _band(row)) for its in by_size.values()]
    high = [max(v / over(row) for row in its for v in _band(row)) for its in by_size.values()]
    axes.fill_between(list(by_size), low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.plot(list(by_size), middle, **look)


def _roof_by_size(rows: Iterable[Row]) -> dict[int, float]:
    found: dict[int, float] = {}
    for row in rows:
        if row.roof_us:
            found[row.bytes] = min(row.roof_us, found.get(row.bytes, math.inf))
    return dict(sorted(found.items()))


# --- against the roofs ---------------------------------------------------------------------------


def bandwidth(rows: Sequence[Row], roofs: Sequence[Roof], of: str = "") -> list[Picture]:
    """Achieved GB/s of every kernel of ours that memory limits, against bytes; a panel per op."""
    ours = [row for row in rows if has_number(row) and row.ours and row.gbps and row.bytes]
    drawn = [row for row in ours if row.bound != "compute"]
    lines = [roof for roof in roofs if roof.unit == "GB/s"]
    if not drawn:
        return []
    title = f"Memory bandwidth reached{of}, every kernel of ours"
    by_op = _grouped(drawn, lambda row: (row.op,))
    columns = min(len(by_op), 2 if len(by_op) <= 4 else 3)
    lanes = math.ceil(len(by_op) / columns)
    dots = _Dots()
    with _style():
        figure = _figure(title, 1.0 + 1.75 * lanes)
        grid = figure.subplots(lanes, columns, squeeze=False, sharex=True, sharey=True)
        panels = list(grid.flat)
        for axes, ((op,), its) in zip(panels, by_op.items(), strict=False):
            axes.set_title(op)
            for roof in lines:
                axes.axhline(roof.value, color=light("muted"), linewidth=0.7)
            floor = _roof_by_size(its)
            reach = [moved / us / 1e3 for moved, us in floor.items()]
            axes.plot(list(floor), reach, color=light("ink"), ls=DASHED, lw=0.9)
            for row in its:
                hollow = _hollow() if row.phase == "backward" else {}
                dots.draw(axes, row.bytes, row.gbps or 0, row, **hollow)
        for axes in panels[len(by_op) :]:
            axes.set_axis_off()
        _size_axis(panels[0], [row.bytes for row in drawn], most=5 if columns < 3 else 4)
        top = max([row.gbps or 0 for row in drawn] + [roof.value for roof in lines])
        panels[0].set_ylim(0, 1.08 * top)
        panels[0].yaxis.set_major_formatter("{x:,.0f}")
        for position in range(len(by_op)):
            if position % columns == 0:
                panels[position].set_ylabel("GB/s")
            if position + columns >= len(by_op):  # the lowest of its column
                panels[position].tick_params(labelbottom=True)
                panels[position].set_xlabel("bytes moved")
        entries = [_entry(c, linestyle="none") for c in _contenders(drawn)]
        if any(row.phase == "backward" for row in drawn):
            entries.append(_hollow_entry("backward"))
        entries.append(_roof_entry("roof at that size"))
        if lines:
            entries.append((_reach(lines), {"color": light("muted"), "linewidth": 0.8}))
        _legend(figure, entries)
    best = max(drawn, key=lambda row: row.gbps or 0)
    words = f"{count(len(drawn), 'measurement')} of {count(len(by_op), 'op')}: the most is "
    words += f"{best.gbps:,.0f} GB/s, by {best.op} {best.contender} at {size(best.bytes)}"
    if lines:
        fastest = max(lines, key=lambda roof: roof.value)
        share = percent((best.gbps or 0) / fastest.value)
        words += f", {share} of the fastest measured roof ({fastest.name}, "
        words += f"{fastest.value:,.0f} GB/s)"
    digest = figure_digest(drawn, lines)
    return [Picture("bandwidth", title, f"{words}.", digest, figure, dots.tips)]


def _reach(lines: Sequence[Roof]) -> str:
    low, high = min(r.value for r in lines), max(r.value for r in lines)
    span = f"{low:,.0f}" if len(lines) == 1 else f"{low:,.0f} to {high:,.0f}"
    return f"measured: {span} GB/s"


def roofline(rows: Sequence[Row], roofs: Sequence[Roof]) -> list[Picture]:
    """The classic one, for rows that compute: TFLOP/s against flops per byte.

    A row without flops has no place on either logarithmic axis; the picture says how many.
    """
    ours = [row for row in rows if has_number(row) and row.ours]
    drawn = [row for row in ours if row.tflops and row.flops and row.bytes]
    if not drawn:
        return []
    slopes = [roof for roof in roofs if roof.unit == "GB/s"]
    flats = [roof for roof in roofs if roof.unit == "TFLOP/s"]
    title = "Roofline, every kernel of ours that computes"
    left_out = len(ours) - len(drawn)
    note = f"; {count(left_out, 'row')} without flops not drawn" if left_out else ""
    dots = _Dots()
    with _style():
        figure = _figure(title, 4.2)
        axes = figure.add_subplot()
        axes.set(xlabel=f"flops per byte moved{note}", ylabel="TFLOP/s")
        labels = _roof_lines(axes, drawn, slopes, flats)
        for row in drawn:
            hollow = _hollow() if row.phase == "backward" else {}
            dots.draw(axes, row.flops / row.bytes, row.tflops or 0, row, **hollow)
        _name_ops(axes, drawn, labels)
        entries = [_entry(c, linestyle="none") for c in _contenders(drawn)]
        if any(row.phase == "backward" for row in drawn):
            entries.append(_hollow_entry("backward"))
        if slopes:
            fastest = max(slopes, key=lambda roof: roof.value)
            label = f"slope: {fastest.value:,.0f} GB/s"
            entries.append((label, {"color": light("ink"), "linewidth": 1.1}))
        _legend(figure, entries)
    best = max(drawn, key=lambda row: row.tflops or 0)
    words = f"{count(len(drawn), 'measurement')}: the most is {best.tflops:,.3g} TFLOP/s, by "
    words += f"{best.op} {best.contender} at {best.flops / best.bytes:,.1f} flops per byte"
    words += f" ({percent(best.of_roof)} of its roof)" if best.of_roof else ""
    digest = figure_digest(drawn, [*slopes, *flats])
    return [Picture("roofline", title, f"{words}{note}.", digest, figure, dots.tips)]


Box = tuple[float, float, float]  # left, right and height of a label, in parts of the axes


def _roof_lines(
    axes: Axes, rows: Sequence[Row], slopes: Sequence[Roof], flats: Sequence[Roof]
) -> list[Box]:
    """The fastest memory as a slope, each arithmetic unit as a line from there on; their labels."""
    xs, ys = [row.flops / row.bytes for row in rows], [row.tflops or 0 for row in rows]
    memory = max((roof.value for roof in slopes), default=0.0)
    ridges = [flat.value * 1e3 / memory for flat in flats] if memory else []
    # room at the right for the labels of the lines, which begin at their ridges
    _log_axis(axes, [*xs, *(10 * ridge for ridge in ridges)], "x")
    _log_axis(axes, [*ys, *(1.4 * flat.value for flat in flats)], "y")
    left, right = axes.get_xlim()
    if memory:
        knee = max(ridges, default=right)
        reach = [x * memory / 1e3 for x in (left, knee)]
        axes.plot([left, knee], reach, color=light("ink"), linewidth=1.1)
    labels = []
    for alike in _alike(flats):
        value = max(flat.value for flat in alike)
        for flat in alike:
            start = flat.value * 1e3 / memory if memory else left
            axes.plot([start, right], [flat.value] * 2, color=light("ink"), linewidth=1.1)
        text = (
            f"{alike[0].name}{''.join(f', {r.name.split()[-1]}' for r in alike[1:])}: {value:,.0f}"
        )
        axes.text(start * 1.5, value * 1.06, text, va="bottom", fontsize=7.5)
        x, y = _place(axes, start * 1.5, value)
        labels.append((x, x + LETTER * len(text), y + 0.02))
    return labels


def _alike(roofs: Iterable[Roof]) -> list[list[Roof]]:
    """Roofs so close together that they must share a label."""
    groups: list[list[Roof]] = []
    for roof in sorted(roofs, key=lambda roof: roof.value):
        if groups and roof.value < 1.25 * groups[-1][0].value:
            groups[-1].append(roof)
        else:
            groups.append([roof])
    return groups


LETTER = 0.016  # of the width of the axes, in a small font


def _place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of two logarithmic axes in parts of them."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return math.log(x / left) / math.log(right / left), math.log(y / bottom) / math.log(
        top / bottom
    )


def _name_ops(axes: Axes, rows: Sequence[Row], taken: list[Box]) -> None:
    """One label at each op's highest dot, moved on until it covers no other.

    It ends there: to the left of a dot the roof runs lower, and nothing can lie above it.
    """
    for (op,), its in sorted(_grouped(rows, lambda row: (row.op,)).items()):
        high = max(its, key=lambda row: row.tflops or 0)
        right, y = _place(axes, high.flops / high.bytes, high.tflops or 0)
        step = 0.05 if y < 0.7 else -0.05
        y += 0.035 if y < 0.7 else -0.06
        width = LETTER * len(op)
        right = max(right, width)
        while any(a < right and right - width < b and abs(y - c) < 0.05 for a, b, c in taken):
            y += step
        taken.append((right - width, right, y))
        label = axes.text(right, y, op, ha="right", transform=axes.transAxes)
        label.set(fontsize=7.5, in_layout=False)


# --- speed-ups -----------------------------------------------------------------------------------


def speedups(rows: Sequence[Row]) -> list[Picture]:
    """One heatmap per op and phase: a rival's time over the best of ours, case by case."""
    ready = [contest for contest in contests(rows) if contest.best]
    grouped = _grouped(ready, lambda contest: (contest.first.op, contest.first.phase))
    return [
        heatmap(its, f"{op} {phase}: rival's time / best of ours", _slug("speedup", op, phase))
        for (op, phase), its in grouped.items()
        if any(not row.ours for contest in its for row in contest.rows.values())
    ]


def heatmap(
    its: Sequence[Contest], title: str, name: str, label: Callable[[Row], str] | None = None
) -> Picture:
    """Below 1 is a loss, in orange; a rival without a number is hatched."""
    from matplotlib.patches import Rectangle

    label = label or (lambda row: f"{row.case}  {SHORT.get(row.dtype, row.dtype)}")
    rows = [row for contest in its for row in contest.rows.values()]
    rivals = [contender for contender, ours in _contenders(rows) if not ours]
    tips: dict[str, str] = {}
    flagged = False
    with _style():
        figure = _figure(title, 1.2 + 0.235 * len(its))
        axes, strip = figure.subplots(2, 1, height_ratios=[0.235 * len(its), 0.13])
        for line, contest in enumerate(its):
            for column, rival in enumerate(rivals):
                ratio = contest.speedup(rival)
                heat = "paper" if ratio is None else f"heat{sum(ratio > s for s in STEPS)}"
                gid = f"tip-{len(tips)}"
                tips[gid] = _cell_words(contest, rival)
                cell = Rectangle((column, line), 1, 1, gid=gid, linewidth=1)
                cell.set(facecolor=light(heat), edgecolor=light("paper"), in_layout=False)
                if ratio is None:
                    cell.set(hatch="////", edgecolor=light("line"))
                axes.add_patch(cell)
                doubtful = ratio is not None and _doubtful(contest, rival)
                flagged = flagged or doubtful
                text = NO_NUMBER if ratio is None else f"{ratio:.2f}{'*' if doubtful else ''}"
                drawn = axes.text(column + 0.5, line + 0.5, text, ha="center", va="center_baseline")
                weight = "bold" if ratio is not None and ratio < 1 - LEVEL else "normal"
                drawn.set(fontsize=8, in_layout=False, fontweight=weight)
        axes.set(xlim=(0, len(rivals)), ylim=(len(its), 0))
        axes.set_xticks([i + 0.5 for i in range(len(rivals))], rivals)
        axes.set_yticks([i + 0.5 for i in range(len(its))], [label(c.first) for c in its])
        axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
        axes.tick_params(axis="both", labelcolor=light("ink"))
        axes.grid(False)
        axes.spines[:].set_visible(False)
        _key(strip, "; * flagged" if flagged else "")
    return Picture(name, title, _heat_words(its, rivals), figure_digest(rows), figure, tips)


def _doubtful(contest: Contest, rival: str) -> bool:
    best = contest.best
    return bool(contest.rows[rival].flags or (best and best.flags))


def _cell_words(contest: Contest, rival: str) -> str:
    row, best = contest.rows.get(rival), contest.best
    place = f"{where(contest.first)}, {rival}"
    if contest.barred:
        return f"{place}: no speed-up, {contest.barred}"
    if row is None or best is None:
        return f"{place}: not measured"
    if not has_number(row):
        return f"{place}: no number, {'; '.join((row.reason, *row.flags)).strip('; ')}"
    flags = [f"{r.contender} flagged: {'; '.join(r.flags)}" for r in (row, best) if r.flags]
    words = f"{place} {micros(time_of(row))} µs, {best.contender} {micros(time_of(best))} µs"
    return "; ".join([words, *flags])


def _heat_words(its: Sequence[Contest], rivals: Sequence[str]) -> str:
    found = [(r, c, rival) for c in its for rival in rivals if (r := c.speedup(rival)) is not None]
    words = f"Best of ours against {', '.join(rivals)} at {count(len(its), 'case')}: "
    if not found:
        return f"{words}no speed-up may be shown."
    low, high = min(found, key=lambda f: f[0]), max(found, key=lambda f: f[0])
    outcomes = [contest.outcome for contest in its]
    words += f"from {low[0]:.2f} ({low[1].first.case}, {low[2]}) "
    words += f"to {high[0]:.2f} ({high[1].first.case}, {high[2]}). Against the fastest rival "
    parts = [f"{kind} at {outcomes.count(kind)}" for kind in ("faster", "level", "slower")]
    missing = outcomes.count("")
    return f"{words}{', '.join(parts)}{f', not judged at {missing}' if missing else ''}."


def _key(axes: Axes, note: str) -> None:
    """What the colours mean: a strip under the heatmap."""
    from matplotlib.patches import Rectangle

    for step in range(len(STEPS) + 1):
        cell = Rectangle((step, 0), 1, 1, facecolor=light(f"heat{step}"), linewidth=0)
        axes.add_patch(cell)
    axes.set(xlim=(0, len(STEPS) + 1), ylim=(0, 1), yticks=[])
    axes.set_xticks(range(1, len(STEPS) + 1), [f"{step:g}" for step in STEPS])
    axes.set_xlabel(f"below 1 ours is slower; hatched: no number{note}")
    axes.grid(False)
    axes.spines[:].set_visible(False)


# --- errors --------------------------------------------------------------------------------------

FARTHEST = 2.0  # an error beyond this is drawn at the edge, with its value


def errors(rows: Sequence[Row]) -> list[Picture]:
    """Error over its tolerance, a line per op and contender; refused rows are here too."""
    known = [row for row in rows if row.error is not None]
    if not known:
        return []
    title = "Error against float64, as a part of the tolerance"
    grouped = _grouped(known, lambda row: (row.op, row.contender))
    dots = _Dots()
    with _style():
        figure = _figure(title, 1.0 + 0.185 * len(grouped))
        axes = figure.add_subplot()
        axes.axvline(1, color=light("loss"), linewidth=1.2)
        for line, its in enumerate(grouped.values()):
            worst = max(its, key=_error)
            usual = colour(worst.contender, worst.ours)
            name = "loss" if _error(worst) > 1 else usual
            others = [min(_error(row), FARTHEST) for row in its if row is not worst]
            axes.plot(others, [line] * len(others), "|", color=light(usual), markersize=5)
            reach = min(_error(worst), FARTHEST)
            look = {"color": light(name), "markeredgecolor": light(name), "markersize": 5.5}
            dots.draw(axes, reach, line, worst, words=_error_words(worst), **look)
            if name == "loss":
                text = axes.text(reach + 0.04, line, f"{_error(worst):.3g}", va="center")
                text.set_color(light("loss"))
                text.set(fontsize=7.5, in_layout=False)
        top = min(FARTHEST, max(1.0, *map(_error, known)))
        axes.set(xlim=(-0.02, top * 1.12), ylim=(len(grouped) - 0.5, -0.5))
        axes.set_yticks(range(len(grouped)), [" ".join(key) for key in grouped])
        axes.tick_params(axis="y", length=0, labelcolor=light("ink"))
        axes.set_xlabel("error / tolerance; the mark is the worst case, 1 the limit")
    worst = max(known, key=_error)
    above = [sum(_error(row) > 1 for row in known if row.ours is ours) for ours in (True, False)]
    words = f"{count(len(known), 'result')}: the worst error is {worst.error:.2f} of its "
    words += f"tolerance, {worst.op} {worst.phase} {worst.contender}; above the limit of 1: "
    words += f"{above[0] or 'none'} of ours, {above[1] or 'none'} of the rivals."
    return [Picture("error", title, words, figure_digest(known), figure, dots.tips)]


def _error(row: Row) -> float:
    return row.error or 0.0


def _error_words(row: Row) -> str:
    return f"{where(row)}, {row.contender}: {row.error:.3g} of its tolerance"


# --- files ---------------------------------------------------------------------------------------


def svg(picture: Picture, ident: str, standalone: bool = False) -> str:
    """The picture as SVG: for a page that defines the colours, or on its own with both themes.

    `ident` begins every id, so that several pictures can share a page.
    """
    buffer = io.StringIO()
    with _style():
        picture.figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    body = _named_colours(_compact(_own_ids(body, ident, picture.tips)))
    body, sheet = _shared_styles(body, ident)
    width, height = (round(72 * inches) for inches in picture.figure.get_size_inches())
    space = ""
    if standalone:
        used = sorted(set(re.findall(r"--tw-(\w+)", body + sheet)))
        dark = f"@media (prefers-color-scheme:dark){{svg{{{css(used, True)}}}}}"
        own = f"svg{{font-family:system-ui,sans-serif;{css(used, False)}}}{dark}"
        sheet = f"{own}svg *{{stroke-linejoin:round}}{sheet}"
        size_in_pixels = f'width="{width / 0.75:.0f}" height="{height / 0.75:.0f}"'
        space = f' xmlns="http://www.w3.org/2000/svg" {size_in_pixels}'
    return (
        f'<svg{space} viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="{ident}-title {ident}-desc">'
        f'<title id="{ident}-title">{escape(picture.title)}</title>'
        f'<desc id="{ident}-desc">{escape(picture.alt)}</desc>'
        f"<metadata>data sha256:{picture.digest}</metadata><style>{sheet}</style>{body}</svg>\n"
    )


def embedded_digest(svg_text: str) -> str | None:
    """The digest that `svg` wrote: two SVGs with the same one draw the same data."""
    found = re.search(r"<metadata>data sha256:([0-9a-f]{64})</metadata>", svg_text)
    return found[1] if found else None


def pixels(picture: Picture, dpi: int = 120) -> Any:
    """The picture as an array [height, width, 4], in the light theme."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with _style():
        picture.figure.set_dpi(dpi)
        canvas = FigureCanvasAgg(picture.figure)
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba()).copy()


def _own_ids(body: str, ident: str, tips: Mapping[str, str]) -> str:
    """Words for hover where an artist has some, no id that nothing points at, short ones else."""
    for gid, words in tips.items():
        body = body.replace(f'<g id="{gid}">', f"<g><title>{escape(words)}</title>")
    used = dict.fromkeys(re.findall(r"(?:url\(|href=\")#([\w.-]+)", body))
    names = {old: f"{ident}-{number}" for number, old in enumerate(used)}

    def defined(match: re.Match[str]) -> str:
        return f' id="{names[match[1]]}"' if match[1] in names else ""

    body = re.sub(r' id="([^"]*)"', defined, body)
    body = re.sub(r"url\(#([\w.-]+)\)", lambda m: f"url(#{names[m[1]]})", body)
    return re.sub(r'(?:xlink:)?href="#([\w.-]+)"', lambda m: f'href="#{names[m[1]]}"', body)


def _compact(body: str) -> str:
    """Two thirds of what matplotlib writes is white space, digits and fonts."""

    def tag(match: re.Match[str]) -> str:
        text = re.sub(r"\s+", " ", match[0])
        text = re.sub(r"-?\d+\.\d{2,}", lambda m: _shorter(float(m[0])), text)
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
        text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
        text = re.sub(r"([:;]) ", r"\1", text).replace(' "', '"')
        return re.sub(r"(?<=[\d\"]) ?([MLCz]) ?(?=[-\d\"])", r"\1", text)

    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<[a-zA-Z][^>]*>", tag, body)
    body = re.sub(r">\s+<", "><", body)
    body = re.sub(r"<defs></defs>", "", body)
    alone = re.compile(r"<g>(<(?:path|use)\b[^>]*/>|<text\b[^>]*>[^<]*</text>)</g>")
    while (shorter := alone.sub(r"\1", body)) != body:
        body = shorter
    return body.strip()


def _shorter(number: float) -> str:
    """A tenth of a point for a place, a hundredth for a width."""
    return f"{number:.{1 if abs(number) >= 10 else 2}f}".rstrip("0").rstrip(".")


def _shared_styles(body: str, ident: str) -> tuple[str, str]:
    """The body with a class for every style that is used again, and the sheet of the classes."""
    uses = Counter(re.findall(r' style="([^"]*)"', body))
    again = [style for style, times in uses.items() if times > 2]
    classes = {style: f"{ident}-s{number}" for number, style in enumerate(again)}

    def shared(match: re.Match[str]) -> str:
        name = classes.get(match[1])
        return f' class="{name}"' if name else match[0]

    sheet = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return re.sub(r' style="([^"]*)"', shared, body), sheet


def _named_colours(body: str) -> str:
    """Every colour of the theme by its name, inside tags only."""
    names = {value: name for name, (value, _) in THEME.items()}

    def named(match: re.Match[str]) -> str:
        name = names.get(match[0])
        return f"var(--tw-{name})" if name else match[0]

    body = re.sub(r"<[a-zA-Z][^>]*>", lambda m: re.sub(r"#[0-9a-f]{6}\b", named, m[0]), body)
    return re.sub(r' fill="(var\([^"]*)"', r' style="fill:\1"', body)
