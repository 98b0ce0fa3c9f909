"""The pictures of a record: one drawing code for SVG and PNG.

Each takes rows and roofs and answers with pictures, none where there is nothing to draw. What they
are drawn with is the `canvas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tilewright.bench import canvas
from tilewright.bench.canvas import DASHED, HOLLOW, Picture, figure_digest, light
from tilewright.bench.contest import (
    LEVEL,
    NO_NUMBER,
    SHORT,
    Contest,
    contests,
    count,
    grouped,
    has_number,
    micros,
    percent,
    size,
    time_of,
    where,
)
from tilewright.bench.record import Roof, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pictures(rows: Sequence[Row], roofs: Sequence[Roof]) -> dict[str, list[Picture]]:
    """Every picture of a record by kind; a kind that has nothing to draw is left out."""
    found = {
        "Speed-ups": speedups(rows),
        "Roofs and tolerances": [*bandwidth(rows, roofs), *roofline(rows, roofs), *errors(rows)],
        "Latency": latency(rows),
    }
    return {kind: drawn for kind, drawn in found.items() if drawn}


# --- latency against size ------------------------------------------------------------------------


def latency(rows: Sequence[Row]) -> list[Picture]:
    """One picture per op, phase and dtype: device time against bytes moved, and the roof."""
    timed = [row for row in rows if has_number(row) and row.bytes]
    by_panel = grouped(timed, lambda row: (row.op, row.phase, row.dtype))
    return [_latency(panel) for panel in by_panel.values()]


def _latency(rows: Sequence[Row]) -> Picture:
    first = rows[0]
    title = f"{first.op} {first.phase}, {first.dtype}: device time"
    dots, roofs = canvas.Dots(), _roof_by_size(rows)
    with canvas.style():
        figure = canvas.figure(title, 4.1)
        axes, ratio = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
        canvas.size_axis(axes, [row.bytes for row in rows], most=6)
        times = [time for row in rows for time in canvas.band(row)]
        canvas.log_axis(axes, [*times, *roofs.values()], "y")
        axes.set_ylabel("µs")
        slowest = max((1 / row.of_roof for row in rows if row.of_roof), default=2.0)
        ratio.set(xlabel="bytes moved", ylabel="µs / roof", ylim=(0.9, max(1.6, min(slowest, 3))))
        if roofs:
            axes.plot(list(roofs), list(roofs.values()), color=light("ink"), ls=DASHED, lw=1)
            ratio.axhline(1, color=light("ink"), ls=DASHED, lw=1)
        for name, ours in reversed(canvas.contenders(rows)):  # ours on top
            its = [row for row in rows if row.contender == name and row.ours == ours]
            look = {"color": light(canvas.colour(name, ours)), "linewidth": 1.6 if ours else 1.0}
            canvas.line(axes, its, lambda row: 1.0, look)
            roofed = [row for row in its if row.of_roof]
            canvas.line(ratio, roofed, lambda row: row.roof_us or 1.0, look)
            for row in its:
                dots.draw(axes, row.bytes, time_of(row), row, **(HOLLOW if row.flags else {}))
        entries = [canvas.entry(contender) for contender in canvas.contenders(rows)]
        if roofs:
            entries.append(canvas.roof_entry("roof"))
        if any(row.flags for row in rows):
            entries.append(canvas.hollow_entry("flagged"))
        canvas.legend(figure, entries)
    name = canvas.slug("latency", first.op, first.phase, first.dtype)
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
    by_op = grouped(drawn, lambda row: (row.op,))
    columns = min(len(by_op), 2 if len(by_op) <= 4 else 3)
    lanes = math.ceil(len(by_op) / columns)
    dots = canvas.Dots()
    with canvas.style():
        figure = canvas.figure(title, 1.0 + 1.75 * lanes)
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
                hollow = HOLLOW if row.phase == "backward" else {}
                dots.draw(axes, row.bytes, row.gbps or 0, row, **hollow)
        for axes in panels[len(by_op) :]:
            axes.set_axis_off()
        canvas.size_axis(panels[0], [row.bytes for row in drawn], most=5 if columns < 3 else 4)
        top = max([row.gbps or 0 for row in drawn] + [roof.value for roof in lines])
        panels[0].set_ylim(0, 1.08 * top)
        panels[0].yaxis.set_major_formatter("{x:,.0f}")
        for position in range(len(by_op)):
            if position % columns == 0:
                panels[position].set_ylabel("GB/s")
            if position + columns >= len(by_op):  # the lowest of its column
                panels[position].tick_params(labelbottom=True)
                panels[position].set_xlabel("bytes moved")
        entries = [canvas.entry(c, linestyle="none") for c in canvas.contenders(drawn)]
        if any(row.phase == "backward" for row in drawn):
            entries.append(canvas.hollow_entry("backward"))
        entries.append(canvas.roof_entry("roof at that size"))
        if lines:
            entries.append((_reach(lines), {"color": light("muted"), "linewidth": 0.8}))
        canvas.legend(figure, entries)
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
    dots = canvas.Dots()
    with canvas.style():
        figure = canvas.figure(title, 4.2)
        axes = figure.add_subplot()
        axes.set(xlabel=f"flops per byte moved{note}", ylabel="TFLOP/s")
        labels = _roof_lines(axes, drawn, slopes, flats)
        for row in drawn:
            hollow = HOLLOW if row.phase == "backward" else {}
            dots.draw(axes, row.flops / row.bytes, row.tflops or 0, row, **hollow)
        _name_ops(axes, drawn, labels)
        entries = [canvas.entry(c, linestyle="none") for c in canvas.contenders(drawn)]
        if any(row.phase == "backward" for row in drawn):
            entries.append(canvas.hollow_entry("backward"))
        if slopes:
            fastest = max(slopes, key=lambda roof: roof.value)
            label = f"slope: {fastest.value:,.0f} GB/s"
            entries.append((label, {"color": light("ink"), "linewidth": 1.1}))
        canvas.legend(figure, entries)
    best = max(drawn, key=lambda row: row.tflops or 0)
    words = f"{count(len(drawn), 'measurement')}: the most is {best.tflops:,.3g} TFLOP/s, by "
    words += f"{best.op} {best.contender} at {best.flops / best.bytes:,.1f} flops per byte"
    words += f" ({percent(best.of_roof)} of its roof)" if best.of_roof else ""
    digest = figure_digest(drawn, [*slopes, *flats])
    return [Picture("roofline", title, f"{words}{note}.", digest, figure, dots.tips)]


LETTER = 0.016  # of the width of the axes, in a small font
Box = tuple[float, float, float]  # left, right and height of a label, in parts of the axes


def _roof_lines(
    axes: Axes, rows: Sequence[Row], slopes: Sequence[Roof], flats: Sequence[Roof]
) -> list[Box]:
    """The fastest memory as a slope, each arithmetic unit as a line from there on; their labels."""
    xs, ys = [row.flops / row.bytes for row in rows], [row.tflops or 0 for row in rows]
    memory = max((roof.value for roof in slopes), default=0.0)
    ridges = [flat.value * 1e3 / memory for flat in flats] if memory else []
    # room at the right for the labels of the lines, which begin at their ridges
    canvas.log_axis(axes, [*xs, *(10 * ridge for ridge in ridges)], "x")
    canvas.log_axis(axes, [*ys, *(1.4 * flat.value for flat in flats)], "y")
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
        x, y = canvas.place(axes, start * 1.5, value)
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


def _name_ops(axes: Axes, rows: Sequence[Row], taken: list[Box]) -> None:
    """One label at each op's highest dot, moved on until it covers no other.

    It ends there: to the left of a dot the roof runs lower, and nothing can lie above it.
    """
    for (op,), its in sorted(grouped(rows, lambda row: (row.op,)).items()):
        high = max(its, key=lambda row: row.tflops or 0)
        right, y = canvas.place(axes, high.flops / high.bytes, high.tflops or 0)
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
    """One heatmap per op and phase: a rival's time over ours, case by case."""
    ready = [contest for contest in contests(rows) if contest.best]
    by_op = grouped(ready, lambda contest: (contest.first.op, contest.first.phase))
    slug = canvas.slug
    return [
        heatmap(its, f"{op} {phase}: rival's time / ours", slug("speedup", op, phase))
        for (op, phase), its in by_op.items()
        if any(not row.ours for contest in its for row in contest.rows.values())
    ]


def heatmap(
    its: Sequence[Contest], title: str, name: str, label: Callable[[Row], str] | None = None
) -> Picture:
    """Below 1 is a loss, in orange; a rival without a number is hatched."""
    from matplotlib.patches import Rectangle

    label = label or (lambda row: f"{row.case}  {SHORT.get(row.dtype, row.dtype)}")
    rows = [row for contest in its for row in contest.rows.values()]
    rivals = [contender for contender, ours in canvas.contenders(rows) if not ours]
    tips: dict[str, str] = {}
    flagged = False
    with canvas.style():
        figure = canvas.figure(title, 1.2 + 0.235 * len(its))
        axes, strip = figure.subplots(2, 1, height_ratios=[0.235 * len(its), 0.13])
        for line, contest in enumerate(its):
            for column, rival in enumerate(rivals):
                ratio = contest.speedup(rival)
                heat = "paper" if ratio is None else f"heat{sum(ratio > s for s in canvas.STEPS)}"
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
        note = "; * flagged" if flagged else ""
        canvas.heat_key(strip, f"below 1 ours is slower; hatched: no number{note}")
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
    words = f"Ours against {', '.join(rivals)} at {count(len(its), 'case')}: "
    if not found:
        return f"{words}no speed-up may be shown."
    low, high = min(found, key=lambda f: f[0]), max(found, key=lambda f: f[0])
    outcomes = [contest.outcome for contest in its]
    words += f"from {low[0]:.2f} ({low[1].first.case}, {low[2]}) "
    words += f"to {high[0]:.2f} ({high[1].first.case}, {high[2]}). Against the fastest rival "
    parts = [f"{kind} at {outcomes.count(kind)}" for kind in ("faster", "level", "slower")]
    missing = outcomes.count("")
    return f"{words}{', '.join(parts)}{f', not judged at {missing}' if missing else ''}."


# --- errors --------------------------------------------------------------------------------------

FARTHEST = 2.0  # an error beyond this is drawn at the edge, with its value


def errors(rows: Sequence[Row]) -> list[Picture]:
    """Error over its tolerance, a line per op and contender; refused rows are here too."""
    known = [row for row in rows if row.error is not None]
    if not known:
        return []
    title = "Error against float64, as a part of the tolerance"
    lines = grouped(known, lambda row: (row.op, row.contender))
    dots = canvas.Dots()
    with canvas.style():
        figure = canvas.figure(title, 1.0 + 0.185 * len(lines))
        axes = figure.add_subplot()
        axes.axvline(1, color=light("loss"), linewidth=1.2)
        for line, its in enumerate(lines.values()):
            worst = max(its, key=_error)
            usual = canvas.colour(worst.contender, worst.ours)
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
        axes.set(xlim=(-0.02, top * 1.12), ylim=(len(lines) - 0.5, -0.5))
        axes.set_yticks(range(len(lines)), [" ".join(key) for key in lines])
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
