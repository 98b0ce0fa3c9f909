"""Two records of one GPU, held against each other: what became slower, and how sure that is.

Per row that is in both, the ratio of the median device times, B over A, with an interval that
covers the true ratio in 95 of 100 comparisons. On the log scale

    ln ratio ± 1.96 · sqrt(m_A² + m_B² + 2 · (r² + p²/2))

    m  sampling: the standard error of a record's median. Neighbouring samples are alike, so it is
       the spread of the medians of a bootstrap that draws blocks of them, pass by pass; where the
       clock ticks so coarsely that samples are equal, a tick's rounding error is added
    p  drift from pass to pass: 1.4826 · median |ln(pass 2 / pass 1)| / √2 over the rows of both
       records. For a row whose own passes disagree by more, p² is the mean of the pool's and of
       its own, which two numbers tell too badly to stand alone
    r  drift from run to run. A run cannot see it: taken to be p, and at least half a percent

A run is the mean of two passes, hence p²/2, and a ratio has two runs, hence 2. The passes' medians
carry sampling noise too, which is then counted twice: the interval errs on the wide side.

Of a hundred intervals, five miss by chance. A verdict that something changed must therefore also
hold in an interval for 1 - 0.05/rows instead of 0.95 (Bonferroni). Then about one comparison of
unchanged code in forty calls any row slower, however many rows there are and however noisy they
are; on a quiet machine fail_over makes it fewer. That ends where runs drift more than passes show,
or a few rows several times more than the rest: measure such a suspect again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.bench.contest import device_stats, where
from tilewright.bench.record import Record, Row
from tilewright.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

FAIL_OVER = 0.03  # a change that matters, as a part
Z = NormalDist().inv_cdf(0.975)  # 1.96 standard errors on either side
LEAST_DRIFT = 0.005  # of one run: clocks, temperature, where the allocator put the tensors
FEWEST = 6  # of fewer samples, not even the whole range is a 95 % interval of the median
RESAMPLES = 200
TIED = 0.05  # part of the samples that must equal the median to see the clock's tick
P80 = 0.8416  # standard errors from a normal's median to its 80th percentile
NORMAL = 1.4826  # from a median of absolute values to a normal's standard deviation

VERDICTS = {  # worst first; with what it looks like
    "refused": "bold red",
    "slower": "red",
    "noisy": "yellow",
    "same": "dim",
    "faster": "green",
}
VERSIONS = ("torch", "triton", "driver", "cuda")  # what baselines are made of, and run on


@dataclass(frozen=True)
class Pair:
    """One measurement of both runs."""

    a: Row
    b: Row
    verdict: str  # of VERDICTS; "" if the two cannot be compared
    remark: str = ""
    a_us: float | None = None
    b_us: float | None = None
    ratio: float | None = None  # b_us / a_us; above 1 is slower
    low: float = 0.0  # ends of the interval of the ratio
    high: float = math.inf

    @property
    def ours(self) -> bool:
        return self.a.ours or self.b.ours


@dataclass
class Comparison:
    """What `pair` found."""

    a: Record
    b: Record
    fail_over: float
    pass_drift: float  # p, of all rows
    run_drift: float  # r, of all rows
    pairs: list[Pair] = field(default_factory=list)  # worst first
    skipped: list[Pair] = field(default_factory=list)  # in both, and not comparable
    only_a: list[Row] = field(default_factory=list)
    only_b: list[Row] = field(default_factory=list)
    shift: float | None = None  # median ratio of the baselines, whose code is not ours
    baselines: int = 0  # how many those are
    notes: list[str] = field(default_factory=list)


def pair(a: Record, b: Record, fail_over: float = FAIL_OVER) -> Comparison:
    """Every row of `a` beside the same row of `b`.

    A pair is "slower" if the ratio is above 1 + fail_over and surely above 1, "faster" if that
    holds of its inverse. Else it is "same", or "noisy" if the interval reaches further than
    fail_over, so that such a change could not have been told from none. A row that had a time in
    `a` and is "refused" in `b`, or one of ours that is gone there, is worse than any time.
    """
    if not (math.isfinite(fail_over) and fail_over >= 0):
        raise InputError(
            f"compare: fail_over is {fail_over}; it must be a part of the time, such as 0.03."
        )
    if a.gpu != b.gpu:
        raise InputError(
            f"compare: {a.path} was measured on {a.gpu} and {b.path} on {b.gpu}; both must be of "
            "one GPU. Measure again on one of them."
        )
    # a case that was measured again, in a run that was resumed, counts as it was last
    rows_a, rows_b = ({row.key: row for row in record.rows} for record in (a, b))
    drift = _pass_drift([*rows_a.values(), *rows_b.values()])
    found = Comparison(a, b, fail_over, drift, max(drift, LEAST_DRIFT))
    found.only_a = [row for key, row in rows_a.items() if key not in rows_b]
    found.only_b = [row for key, row in rows_b.items() if key not in rows_a]
    keys = [key for key in rows_a if key in rows_b]
    sure = NormalDist().inv_cdf(1 - 0.025 / max(len(keys), 1))
    both = [_pair(rows_a[key], rows_b[key], found, sure) for key in keys]
    cases_b = {row.case_key for row in rows_b.values()}
    both += [
        Pair(row, replace(row, state="unavailable"), "refused", "gone from a case that B measured")
        for row in found.only_a
        if row.ours and row.state == "ok" and row.case_key in cases_b
    ]
    found.pairs = sorted((p for p in both if p.verdict), key=_badness)
    found.skipped = [p for p in both if not p.verdict]
    ratios = [p.ratio for p in found.pairs if p.ratio is not None and not p.ours]
    found.baselines = len(ratios)
    found.shift = float(np.median(ratios)) if ratios else None
    found.notes = list(_notes(found))
    return found


def regressions(comparison: Comparison, only_ours: bool = True) -> list[Pair]:
    """What fails a run: slower or refused; a baseline's only if asked for."""
    bad = [p for p in comparison.pairs if p.verdict in ("slower", "refused")]
    return [p for p in bad if p.ours or not only_ours]


def _pair(a: Row, b: Row, of: Comparison, sure: float) -> Pair:
    """The verdict on one row; a change must be `sure` standard errors from none."""
    if a.state == "ok" and (b.state == "refused" or (b.ours and b.state == "unavailable")):
        return Pair(a, b, "refused", b.reason)
    for name, row in (("A", a), ("B", b)):
        if row.state != "ok":
            return Pair(a, b, "", f"{row.state} in {name}{row.reason and ': '}{row.reason}")
    if a.method != b.method:
        return Pair(a, b, "", f"timed by {a.method or '?'} in A, by {b.method or '?'} in B")
    (a_us, a_error), (b_us, b_error) = _median(a), _median(b)
    if a_us is None or b_us is None:
        return Pair(a, b, "", f"no time in {'A' if a_us is None else 'B'}")

    own = (_disagreement(a) ** 2 + _disagreement(b) ** 2) / 4  # a pass is half of a difference
    by_pass = max(of.pass_drift, math.sqrt((of.pass_drift**2 + own) / 2))
    by_run = max(by_pass, of.run_drift)
    error = math.sqrt(a_error**2 + b_error**2 + 2 * (by_run**2 + by_pass**2 / 2))
    ratio, reach = b_us / a_us, Z * error
    factor = float(np.exp(reach))  # infinite where the error is, which math.exp would not say
    low, high = ratio / factor, ratio * factor
    matters = abs(math.log(ratio)) > math.log1p(of.fail_over)
    verdict, remark = "same", ""
    if matters and abs(math.log(ratio)) > sure * error:
        verdict = "slower" if ratio > 1 else "faster"
    elif math.isinf(error):
        verdict, remark = "noisy", "too few samples to know the noise"
    elif reach > math.log1p(of.fail_over):
        verdict, remark = "noisy", f"cannot tell {of.fail_over:.1%} from no change"
    elif matters:
        verdict, remark = "noisy", "of so many rows, one may be so far off by chance"
    return Pair(a, b, verdict, remark, a_us, b_us, ratio, low, high)


def _badness(p: Pair) -> tuple[Any, ...]:
    return list(VERDICTS).index(p.verdict), -(p.ratio or 0.0), p.a.key


# The noise of one row


def _median(row: Row) -> tuple[float | None, float]:
    """A row's device time, and the standard error of its logarithm."""
    stats = device_stats(row)
    passes = len(stats.passes) if stats and stats.passes else 2
    split = np.array_split(np.array(row.samples, dtype=float), passes)
    split = [times for times in map(_usable, split) if times.size]
    times = np.concatenate(split) if split else np.empty(0)
    us = float(np.median(times)) if times.size else row.us
    if us is None or not (math.isfinite(us) and us > 0):
        return None, math.inf
    if times.size >= FEWEST:
        return us, math.hypot(_resampled(split), _tick(times, us))
    if stats and stats.n >= FEWEST and 0 < stats.p20 <= stats.p80:
        # an older record without samples; two neighbours are taken to tell as much as one
        deviation = math.log(stats.p80 / stats.p20) / (2 * P80)
        return us, math.sqrt(math.pi / 2) * deviation / math.sqrt(stats.n / 2)
    return us, math.inf


def _resampled(passes: list[Any]) -> float:
    """Spread of ln median over resamples of each pass in blocks; the same for the same samples."""
    random = np.random.default_rng(0)
    drawn = []
    for times in passes:
        block = math.isqrt(times.size)
        starts = random.integers(times.size, size=(RESAMPLES, -(-times.size // block), 1))
        at = ((starts + np.arange(block)) % times.size).reshape(RESAMPLES, -1)
        drawn.append(times[at[:, : times.size]])
    return float(np.log(np.median(np.concatenate(drawn, axis=1), axis=1)).std())


def _tick(times: Any, median: float) -> float:
    """Rounding error of a clock whose ticks show as samples equal to their median."""
    below, above = times[times < median], times[times > median]
    if np.mean(times == median) < TIED or not below.size or not above.size:
        return 0.0
    step = min(median - below.max(), above.min() - median)
    return float(step / median / math.sqrt(12))


def _pass_drift(rows: Iterable[Row]) -> float:
    apart = [_disagreement(row) for row in rows if row.state == "ok" and _passes(row)]
    return float(NORMAL * np.median(apart) / math.sqrt(2)) if apart else 0.0


def _disagreement(row: Row) -> float:
    """|ln| of the ratio of the two passes' medians."""
    passes = _passes(row)
    return math.log(max(passes) / min(passes)) if passes else 0.0


def _passes(row: Row) -> tuple[float, ...]:
    stats = device_stats(row)
    passes = tuple(_usable(np.array(stats.passes, dtype=float))) if stats else ()
    return passes if len(passes) > 1 else ()


def _usable(times: Any) -> Any:
    return times[np.isfinite(times) & (times > 0)]


# What to know beside the ratios


def _notes(of: Comparison) -> Iterable[str]:
    for name, record in (("A", of.a), ("B", of.b)):
        if not record.rows:
            yield f"{name} has no rows"
        elif record.end is None or not record.end.get("complete", True):
            yield f"{name} was cut short: it may lack rows"
        twice = sum(n > 1 for n in Counter(row.key for row in record.rows).values())
        if twice:
            yield f"{name} has {_rows(twice)} more than once; the last of each counts"
    if of.a.rows and of.b.rows and not of.pairs:
        yield "no row could be compared"
    for name in VERSIONS:
        was, now = _version(of.a, name), _version(of.b, name)
        if was != now:
            yield f"{name} is {was} in A, {now} in B"
    yield from _changed(of.a.run.get("settings") or {}, of.b.run.get("settings") or {})
    for remark in dict.fromkeys(p.remark for p in of.skipped):
        rows = [p.b for p in of.skipped if p.remark == remark]
        yield f"{_rows(len(rows))} not compared, {remark}: {_named(rows)}"
    if of.shift is not None and abs(math.log(of.shift)) > Z * math.sqrt(2) * of.run_drift:
        yield "the baselines moved further than the drift in the intervals: measure A and B anew"


def _version(record: Record, name: str) -> Any:
    for part in ("environment", "machine"):
        held = record.run.get(part) or {}
        if name in held:
            return held[name]
    return None


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[str]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield f"setting {name} is {a.get(name)} in A, {b.get(name)} in B"


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _named(rows: Sequence[Row], most: int = 4) -> str:
    names = [f"{r.op} {r.case} {r.dtype} {r.phase} {r.contender}" for r in rows[:most]]
    return ", ".join(names) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def shift_in_words(comparison: Comparison) -> str:
    """How far the code that is not ours moved; it is shown and never subtracted."""
    if comparison.shift is None:
        return "no baseline rows: whether the machine moved is not known"
    names = [n for n in VERSIONS if _version(comparison.a, n) != _version(comparison.b, n)]
    mover = f"the machine, or {' or '.join(names)}," if names else "the machine"
    return (
        f"{mover} moved by {comparison.shift - 1:+.1%} "
        f"(the baselines' median, over {_rows(comparison.baselines)}; not subtracted)"
    )


# For people and for scripts


def table(comparison: Comparison) -> Table:
    """One line per pair, worst first; what could not be compared below."""
    from rich.markup import escape
    from rich.table import Table

    counts = Counter(p.verdict for p in comparison.pairs)
    told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) or "nothing compared"
    title = (
        f"{comparison.a.path} (A) and {comparison.b.path} (B) on {comparison.a.gpu}\n"
        f"{told}\n"
        f"slower, faster: by more than {comparison.fail_over:.1%}; 95 %: where B/A lies; "
        "rivals in parentheses"
    )
    shown = Table(
        title=escape(title),
        title_justify="left",
        caption=escape("\n".join(_below(comparison))),
        caption_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    shown.add_column("case", overflow="fold")
    shown.add_column("contender", no_wrap=True)
    for head in ("A us", "B us", "B/A", "95 %"):
        shown.add_column(head, no_wrap=True, justify="right")
    shown.add_column("", no_wrap=True)
    for p in comparison.pairs:
        row, look = p.b, VERDICTS[p.verdict]
        numbers = ["", "", "", ""]
        if p.a_us is not None and p.b_us is not None and p.ratio is not None:
            interval = f"{p.low:.3f}-{p.high:.3f}" if math.isfinite(p.high) else "not known"
            numbers = [f"{p.a_us:.4g}", f"{p.b_us:.4g}", f"{p.ratio:.3f}", interval]
        shown.add_row(
            escape(where(row)),
            escape(row.contender if p.ours else f"({row.contender})"),
            *numbers,
            f"[{look}]{p.verdict}[/]",
        )
    return shown


def _below(of: Comparison) -> Iterable[str]:
    yield shift_in_words(of)
    yield from of.notes
    for name, rows in (("A", of.only_a), ("B", of.only_b)):
        if rows:
            yield f"{_rows(len(rows))} only in {name}: {_named(rows)}"
    for told in dict.fromkeys((p.verdict, p.remark) for p in of.pairs if p.remark):
        rows = [p.b for p in of.pairs if (p.verdict, p.remark) == told]
        yield f"{told[0]}, {told[1]}: {_named(rows)}"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The same facts as plain JSON, without infinities."""
    found = comparison
    return {
        "a": str(found.a.path),
        "b": str(found.b.path),
        "gpu": found.a.gpu,
        "fail_over": found.fail_over,
        "pass_drift": found.pass_drift,
        "run_drift": found.run_drift,
        "shift": found.shift,
        "baselines": found.baselines,
        "notes": found.notes,
        "verdicts": dict(Counter(p.verdict for p in found.pairs)),
        "regressions": len(regressions(found)),
        "pairs": [_facts(p) for p in found.pairs],
        "skipped": [{**_name(p.b), "ours": p.ours, "remark": p.remark} for p in found.skipped],
        "only_a": [{**_name(row), "state": row.state} for row in found.only_a],
        "only_b": [{**_name(row), "state": row.state} for row in found.only_b],
    }


def _facts(p: Pair) -> dict[str, Any]:
    known = p.ratio is not None and math.isfinite(p.high)
    return {
        **_name(p.b),
        "ours": p.ours,
        "verdict": p.verdict,
        "remark": p.remark,
        "a_us": p.a_us,
        "b_us": p.b_us,
        "ratio": p.ratio,
        "low": p.low if known else None,
        "high": p.high if known else None,
        "flags": sorted({*p.a.flags, *p.b.flags}),
    }


def _name(row: Row) -> dict[str, Any]:
    return {
        "op": row.op,
        "case": row.case,
        "dims": dict(row.dims),
        "dtype": row.dtype,
        "phase": row.phase,
        "contender": row.contender,
    }
