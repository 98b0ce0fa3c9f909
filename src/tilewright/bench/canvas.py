"""The canvas: what every picture of a record is drawn on and with, whatever it shows.

Colours and markers, the style, marks with words on hover, legends, axes. The pictures themselves
are in `plots`; `svg` makes files of them. A colour has a name, and a drawing uses its value in the
light theme. Nothing here touches pyplot, whose figures are global; matplotlib is imported when the
first picture is drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from tilewright.bench.contest import LEVEL, device_stats, micros, percent, size, time_of, where
from tilewright.bench.record import Roof, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "sdpa-flash": ("#7d5ba6", "#b79ae0"),
    "sdpa-cudnn": ("#3f8f6b", "#74c79f"),
    "liger": ("#6b8a3a", "#a3c46f"),
    "quack": ("#b8613f", "#e0926f"),
    "fa4": ("#5d7a8c", "#93b4c7"),
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

MARKERS: Mapping[str, Any] = {
    **{"triton": "o", "cuda": "s", "cuda_v1": "D", "cuda_v2": "^", "gluon": "p", "cute": "h"},
    **{"eager": "v", "compile": "X", "vendor": "P"},
    **{"sdpa-flash": (4, 1, 0), "sdpa-cudnn": (6, 1, 0)},  # stars of so many points
    **{"liger": "<", "quack": ">"},
    **{"fa4": "8", "gemlite": "H"},
}


def colour(contender: str, ours: bool) -> str:
    """The name of a contender's colour: fixed, whoever else is in the picture."""
    if contender in MARKERS:
        return contender
    return "ours" if ours else f"other{zlib.crc32(contender.encode()) % 3}"


def marker(contender: str, ours: bool) -> Any:
    return MARKERS.get(contender, "*" if ours else "d")


def light(name: str) -> str:
    return THEME[name][0]


def css(names: Iterable[str], dark: bool) -> str:
    """The variables of one theme."""
    return "".join(f"--tw-{name}:{THEME[name][dark]};" for name in names)


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


def style() -> AbstractContextManager[None]:
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


def figure(title: str, height: float) -> Figure:
    """One as wide as all others, with its title."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    figure.suptitle(textwrap.fill(title, 52), x=0.015, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def slug(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def contenders(rows: Iterable[Row]) -> list[tuple[str, bool]]:
    """(name, ours), ours first, then those that everybody knows."""
    names = {(row.contender, row.ours) for row in rows}
    known = list(MARKERS)
    rank = {name: position for position, name in enumerate(known)}
    return sorted(names, key=lambda c: (not c[1], rank.get(c[0], len(known)), c[0]))


# --- marks and legends ---------------------------------------------------------------------------

DASHED: Any = (0, (4, 2))
MARK = {"markersize": 4.5, "markeredgewidth": 0.9}
HOLLOW = {"markerfacecolor": light("paper")}


class Dots:
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


def _tip(row: Row) -> str:
    roof = f", {percent(row.of_roof)} of its roof" if row.of_roof else ""
    flags = f"; flagged: {'; '.join(row.flags)}" if row.flags else ""
    rate = f", {row.gbps:,.0f} GB/s" if row.gbps else ""
    return f"{where(row)}, {row.contender}: {micros(time_of(row))} µs{rate}{roof}{flags}"


def line(
    axes: Axes, rows: Sequence[Row], over: Callable[[Row], float], look: Mapping[str, Any]
) -> None:
    """Times over something, through the median of each size; from the lowest p20 to the top p80."""
    by_size: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.bytes):
        by_size[row.bytes].append(row)
    middle = [median(time_of(row) / over(row) for row in its) for its in by_size.values()]
    low = [min(v / over(row) for row in its for v in band(row)) for its in by_size.values()]
    high = [max(v / over(row) for row in its for v in band(row)) for its in by_size.values()]
    axes.fill_between(list(by_size), low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.plot(list(by_size), middle, **look)


def band(row: Row) -> tuple[float, ...]:
    stats = device_stats(row)
    return (
        (time_of(row), *(v for v in (stats.p20, stats.p80) if v > 0)) if stats else (time_of(row),)
    )


def legend(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
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


def entry(contender: tuple[str, bool], **style: Any) -> tuple[str, dict[str, Any]]:
    name, ours = contender
    look = {**MARK, "color": light(colour(name, ours)), "marker": marker(name, ours)}
    return name, {**look, "linewidth": 1.4, **style}


def hollow_entry(meaning: str) -> tuple[str, dict[str, Any]]:
    look = {**MARK, "color": light("muted"), "marker": "o", "linestyle": "none"}
    return f"hollow: {meaning}", {**look, **HOLLOW}


def roof_entry(label: str) -> tuple[str, dict[str, Any]]:
    return label, {"color": light("ink"), "linestyle": DASHED, "linewidth": 1}


def heat_key(axes: Axes, words: str) -> None:
    """What the colours mean: a strip under the heatmap."""
    from matplotlib.patches import Rectangle

    for step in range(len(STEPS) + 1):
        cell = Rectangle((step, 0), 1, 1, facecolor=light(f"heat{step}"), linewidth=0)
        axes.add_patch(cell)
    axes.set(xlim=(0, len(STEPS) + 1), ylim=(0, 1), yticks=[])
    axes.set_xticks(range(1, len(STEPS) + 1), [f"{step:g}" for step in STEPS])
    axes.set_xlabel(words, loc="right")  # longer than the strip, and there is room on the left
    axes.grid(False)
    axes.spines[:].set_visible(False)


# --- axes ----------------------------------------------------------------------------------------


def size_axis(axes: Axes, sizes: Iterable[float], most: int) -> None:
    """A logarithmic axis of bytes with at most `most` labels, at powers of two."""
    low, high = min(sizes), max(sizes)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, math.ceil((last - first) / (most - 1)))
    ticks = [2.0**power for power in range(first, last + step, step)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.5, high * 1.5)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: decades if there are enough, or else closer ones."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 3:
            break
    return ticks


def log_axis(axes: Axes, values: Iterable[float], which: str) -> None:
    low, high = min(values) / 1.3, max(values) * 1.3
    ticks = log_ticks(low, high)
    axis = axes.yaxis if which == "y" else axes.xaxis
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis.set_ticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of two logarithmic axes in parts of them."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return math.log(x / left) / math.log(right / left), math.log(y / bottom) / math.log(
        top / bottom
    )
