"""Two records compared: it finds a planted slowdown, and stays silent where nothing changed."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tilewright.bench.compare import (
    Comparison,
    Pair,
    as_dict,
    pair,
    regressions,
    shift_in_words,
    table,
)
from tilewright.bench.record import Record, Row, Stats, Writer, read
from tilewright.errors import InputError

OURS, BASELINES, SAMPLES = 12, 8, 200  # rows, rows, samples per row
SLOW, SLOW_BASELINE = "case-03", "case-15"  # where a change is planted
RUNS = range(20)


def times(
    rng: np.random.Generator,
    us: float,
    count: int = SAMPLES,
    *,
    noise: float = 0.015,
    run_drift: float = 0.005,
    pass_drift: float = 0.003,
    alike: float = 0.3,
) -> np.ndarray:
    """Samples of two passes: each neighbour like the last, now and then one far out."""
    half = count // 2
    log = np.empty((2, half))
    for one in log:
        shocks = rng.normal(size=half) * math.sqrt(1 - alike**2)
        one[0] = rng.normal()
        for i in range(1, half):
            one[i] = alike * one[i - 1] + shocks[i]
    log = noise * log + rng.normal(scale=run_drift) + rng.normal(scale=pass_drift, size=(2, 1))
    far_out = rng.random(log.shape) < 0.02
    return us * np.exp(log).ravel() * np.where(far_out.ravel(), rng.uniform(1.1, 1.3, count), 1)


def row_of(name: str, samples: Any, ours: bool = True, method: str = "graph", **facts: Any) -> Row:
    values = np.asarray(samples, dtype=float)
    p20, median, p80 = (float(v) for v in np.percentile(values, (20, 50, 80)))
    passes = tuple(float(np.median(half)) for half in np.array_split(values, 2))
    stats = Stats(median, p20, p80, len(values), passes)
    facts = {"us": median, "samples": tuple(values.tolist()), method: stats, **facts}
    return Row(
        "softmax", name, {"shape": [8, 1024]}, "bfloat16", "forward",
        "triton" if ours else "eager", ours, facts.pop("state", "ok"), method=method, **facts,
    )  # fmt: skip


def record(rows: list[Row], name: str = "a.jsonl", **run: Any) -> Record:
    environment = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "driver": "580.1"}
    environment |= run.pop("environment", {})
    facts = {"schema": 1, "environment": environment, "settings": {"samples": 200}, **run}
    return Record(Path(name), facts, rows=rows, end={"complete": True})


def a_run(seed: int, factors: Mapping[str, float] | None = None, **model: Any) -> Record:
    """One run of the same code; `factors` are what was planted."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(OURS + BASELINES):
        name = f"case-{i:02d}"
        us = 2.0 * 1.35**i * (factors or {}).get(name, 1.0)
        samples = times(rng, us, **{"noise": rng.uniform(0.01, 0.02), **model})
        rows.append(row_of(name, samples, ours=i < OURS))
    return record(rows, f"{seed}.jsonl")


def two_runs(seed: int, factors: Mapping[str, float] | None = None, **model: Any) -> Comparison:
    return pair(a_run(2 * seed, **model), a_run(2 * seed + 1, factors, **model))


def one(comparison: Comparison, name: str = "x") -> Pair:
    return next(p for p in [*comparison.pairs, *comparison.skipped] if p.b.case == name)


def text(comparison: Comparison) -> str:
    console = Console(width=200, no_color=True, record=True, file=io.StringIO())
    console.print(table(comparison))
    return console.export_text()


@pytest.fixture(scope="module")
def unchanged() -> list[Comparison]:
    return [two_runs(seed) for seed in RUNS]


# The bars: what it finds, and when it stays silent


def test_a_slowdown_of_five_percent_is_found():
    found = [two_runs(seed, {SLOW: 1.05}) for seed in RUNS]
    hits = [c for c in found if SLOW in {p.b.case for p in regressions(c)}]
    assert len(hits) >= 19


def test_unchanged_code_gives_no_alarm(unchanged: list[Comparison]):
    alarms = [c for c in unchanged if regressions(c, only_ours=False)]
    assert len(alarms) <= 1


def test_the_interval_covers_the_truth(unchanged: list[Comparison]):
    inside = [p.low <= 1 <= p.high for c in unchanged for p in c.pairs]
    assert 0.92 <= sum(inside) / len(inside) <= 0.99


def test_a_noisy_machine_gives_no_alarm_either():
    """Drift of one percent: of 20 intervals for 95 %, one leaves out the truth in most runs."""
    found = [two_runs(seed, pass_drift=0.01, run_drift=0.01) for seed in RUNS[:10]]
    assert sum(bool(regressions(c, only_ours=False)) for c in found) <= 1
    assert any(p.verdict == "noisy" for c in found for p in c.pairs)


def test_a_speedup_is_never_slower_and_a_baseline_never_fails():
    found = [two_runs(seed, {SLOW: 1 / 1.05, SLOW_BASELINE: 1.05}) for seed in RUNS]
    assert sum(one(c, SLOW).verdict == "faster" for c in found) >= 19
    assert not any(one(c, SLOW).verdict == "slower" for c in found)
    assert sum(one(c, SLOW_BASELINE).verdict == "slower" for c in found) >= 19
    assert not any(p.b.case == SLOW_BASELINE for c in found for p in regressions(c))
    assert sum(bool(regressions(c)) for c in found) <= 1
    assert sum(bool(regressions(c, only_ours=False)) for c in found) >= 19


def test_the_machine_moving_is_told_and_not_subtracted():
    everywhere = {row.case: 1.06 for row in a_run(0).rows}
    moved = two_runs(0, everywhere)
    assert moved.shift == pytest.approx(1.06, abs=0.01)
    assert f"the machine moved by {moved.shift - 1:+.1%}" in shift_in_words(moved)
    assert any("moved further than the drift" in note for note in moved.notes)
    assert len(regressions(moved)) > OURS / 2


# One row: where the interval comes from


def quiet(us: float, seed: int = 0, count: int = SAMPLES) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return times(rng, us, count, run_drift=0, pass_drift=0)


def compared(a: Row, b: Row, **options: Any) -> Pair:
    return one(pair(record([a]), record([b]), **options), a.case)


def test_identical_records():
    a = a_run(3)
    found = pair(a, a)
    assert {p.verdict for p in found.pairs} <= {"same", "noisy"}  # one file is no quiet machine
    assert all(p.ratio == 1 and p.low < 1 < p.high for p in found.pairs)
    assert found.shift == 1
    assert not found.notes
    assert not regressions(found, only_ours=False)


def test_the_same_records_give_the_same_facts_alone_or_in_company():
    a, b = a_run(0), a_run(1, {SLOW: 1.05})
    assert as_dict(pair(a, b)) == as_dict(pair(a, b))
    a.rows.reverse()
    assert as_dict(pair(a, b)) == as_dict(pair(a_run(0), b))


def test_a_row_whose_passes_disagree_has_a_wider_interval():
    torn = row_of("x", quiet(10.0) * np.repeat([1.0, 1.06], SAMPLES // 2))
    whole = row_of("x", quiet(10.0))
    others = a_run(0).rows
    calm = one(pair(record([*others, whole]), record([*others, whole])))
    found = one(pair(record([*others, torn]), record([*others, torn])))
    assert math.log(found.high / found.low) > 2 * math.log(calm.high / calm.low)
    assert found.verdict == "noisy"
    assert "cannot tell 3.0% from no change" in found.remark


def test_samples_that_resemble_their_neighbours_widen_the_interval():
    def width(alike: float) -> float:
        rng = np.random.default_rng(0)
        rows = [
            row_of("x", times(rng, 10.0, 2000, noise=0.2, pass_drift=0, alike=alike))
            for _ in range(2)
        ]
        found = compared(*(dataclasses.replace(row, graph=None) for row in rows))
        return math.log(found.high / found.low)

    assert width(0.9) > 2 * width(0.0)


def test_a_coarse_clock_is_not_taken_for_a_precise_one():
    """All but a few samples fall on one tick; the time may lie anywhere in it."""
    ticks = np.array([1.5, 2.5] + [2.0] * 98 + [1.5, 2.5] + [2.0] * 98)
    coarse = compared(row_of("x", ticks), row_of("x", ticks))
    constant = compared(row_of("x", [2.0] * 200), row_of("x", [2.0] * 200))
    assert constant.verdict == "same"
    assert coarse.verdict == "noisy"


def test_an_older_record_without_samples_falls_back_to_its_percentiles():
    whole = [row_of("x", quiet(10.0, 1)), row_of("x", quiet(11.0, 2))]
    bare = [dataclasses.replace(row, samples=()) for row in whole]
    with_samples, without = compared(*whole), compared(*bare)
    assert without.verdict == "slower"
    assert without.ratio == pytest.approx(with_samples.ratio)
    assert without.low == pytest.approx(with_samples.low, rel=0.005)


def test_no_samples_and_no_percentiles_is_noisy_however_large_the_change():
    a = dataclasses.replace(row_of("x", quiet(10.0)), samples=(), graph=None)
    found = compared(a, dataclasses.replace(a, us=2 * a.us))
    assert (found.verdict, found.ratio) == ("noisy", 2.0)
    assert found.remark == "too few samples to know the noise"
    few = compared(row_of("x", [1.0, 1.0, 1.0]), row_of("x", [2.0, 2.0, 2.0]))
    assert few.verdict == "noisy"


@pytest.mark.parametrize("us", [None, 0.0, float("nan")])
def test_a_row_without_a_time_is_not_compared(us: float | None):
    a = row_of("x", quiet(10.0))
    found = pair(record([a]), record([dataclasses.replace(a, us=us, samples=(), graph=None)]))
    assert not found.pairs
    assert found.skipped[0].remark == "no time in B"
    assert "no row could be compared" in found.notes


def test_samples_of_zero_or_none_are_left_out():
    times_ = tuple(quiet(10.0).tolist())
    a = row_of("x", times_)
    holes: Any = (0.0, None, *times_[2:])  # a record keeps what is not finite as null
    found = compared(a, dataclasses.replace(a, samples=holes))
    assert found.verdict == "same"
    zeros = dataclasses.replace(a, samples=(0.0,) * 200)
    assert compared(a, zeros).verdict == "same"  # by `us` and the percentiles


def test_fail_over_decides_what_matters():
    a, b = row_of("x", quiet(10.0, 1)), row_of("x", quiet(10.7, 2))
    assert compared(a, b).verdict == "slower"
    assert compared(a, b, fail_over=0.1).verdict == "same"
    assert compared(b, a).verdict == "faster"
    with pytest.raises(InputError, match="fail_over is -0.1"):
        pair(record([a]), record([b]), fail_over=-0.1)


# Rows and records that do not fit together


def test_a_row_that_is_refused_is_a_regression_whatever_its_time():
    a = row_of("x", quiet(10.0))
    wrong = row_of("x", quiet(5.0), state="refused", reason="wrong result", method="cold")
    found = pair(record([a]), record([wrong]))
    assert [p.verdict for p in regressions(found)] == ["refused"]
    assert "refused, wrong result: softmax x bfloat16 forward triton" in text(found)
    back = pair(record([wrong]), record([a]))  # mended: nothing to compare with
    assert not back.pairs
    assert back.skipped[0].remark == "refused in A: wrong result"
    baseline = [dataclasses.replace(row, ours=False) for row in (a, wrong)]
    refused = pair(record(baseline[:1]), record(baseline[1:]))
    assert not regressions(refused)
    assert regressions(refused, only_ours=False)


def test_a_row_that_is_unavailable_is_named():
    a = row_of("x", quiet(10.0))
    gone = dataclasses.replace(a, state="unavailable", reason="needs SM 90", samples=(), us=None)
    found = pair(record([a]), record([gone]))
    assert [p.remark for p in regressions(found)] == ["needs SM 90"]
    rivals = [dataclasses.replace(row, ours=False) for row in (a, gone)]
    found = pair(record(rivals[:1]), record(rivals[1:]))
    assert not regressions(found, only_ours=False)
    assert any("unavailable in B: needs SM 90" in note for note in found.notes)


def test_a_row_of_ours_that_is_gone_from_its_case_is_a_regression():
    a, rival = row_of("x", quiet(10.0)), dataclasses.replace(
        row_of("x", quiet(12.0)), contender="eager", ours=False
    )  # fmt: skip
    assert regressions(pair(record([a, rival]), record([rival])))
    assert not regressions(pair(record([a, rival]), record([row_of("y", quiet(9.0))])))


def test_rows_of_one_record_only_are_listed():
    rows = [row_of(name, quiet(10.0)) for name in ("x", "y", "z")]
    found = pair(record(rows[:2]), record(rows[1:]))
    assert [r.case for r in found.only_a] == ["x"]
    assert [r.case for r in found.only_b] == ["z"]
    assert [p.b.case for p in found.pairs] == ["y"]
    assert "1 row only in A: softmax x bfloat16 forward triton" in text(found)
    assert not regressions(found)


def test_the_last_of_a_row_measured_twice_counts():
    old, new = row_of("x", quiet(20.0)), row_of("x", quiet(10.0))
    found = pair(record([new]), record([old, new]))
    assert found.pairs[0].ratio == 1
    assert "B has 1 row more than once; the last of each counts" in found.notes


def test_different_gpus_are_refused_in_one_line():
    a, b = record([], "old.jsonl"), record([], "new.jsonl", environment={"gpu": "NVIDIA L4"})
    with pytest.raises(InputError) as told:
        pair(a, b)
    message = str(told.value)
    assert "\n" not in message
    for part in ("old.jsonl", "NVIDIA H200", "new.jsonl", "NVIDIA L4"):
        assert part in message


def test_other_versions_settings_and_methods_are_notes():
    a = [row_of("x", quiet(10.0)), row_of("y", quiet(10.0), ours=False)]
    b = [row_of("x", quiet(20.0), method="cold"), a[1]]
    newer = {"torch": "2.12", "triton": "3.9", "driver": "590.2"}
    found = pair(record(a), record(b, environment=newer, settings={"samples": 50}))
    assert [p.b.case for p in found.pairs] == ["y"]
    assert not regressions(found)
    assert found.notes == [
        "torch is 2.11 in A, 2.12 in B",
        "triton is 3.6 in A, 3.9 in B",
        "driver is 580.1 in A, 590.2 in B",
        "setting samples is 200 in A, 50 in B",
        "1 row not compared, timed by graph in A, by cold in B: softmax x bfloat16 forward triton",
    ]
    assert shift_in_words(found).startswith("the machine, or torch or triton or driver, moved")


def test_empty_records():
    found = pair(record([]), record([]))
    assert not found.pairs
    assert found.shift is None
    assert found.notes == ["A has no rows", "B has no rows"]
    assert "nothing compared" in text(found)
    assert json.dumps(as_dict(found), allow_nan=False)


def test_a_run_that_was_cut_short_says_so():
    a, b = a_run(0), a_run(1)
    b.end = None
    assert "B was cut short: it may lack rows" in pair(a, b).notes


def test_through_a_file_and_a_file_that_is_cut_off(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    a = a_run(0)
    writer = Writer(path)
    writer.write("run", a.run)
    writer.rows(a.rows)
    writer.write("end", {"complete": True})
    found = pair(read(path), a)
    assert {p.verdict for p in found.pairs} == {"same"}
    assert not found.notes
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError, match="is cut off"):
        read(path)


# What is shown


def test_the_table_reads_without_colour_and_worst_first():
    a, b = a_run(0), a_run(1, {SLOW: 1.2, "case-05": 0.8, SLOW_BASELINE: 1.3})
    b.rows[7] = dataclasses.replace(b.rows[7], state="refused", reason="above [the] datasheet")
    found = pair(a, b)
    shown = text(found)
    verdicts = [p.verdict for p in found.pairs]
    assert verdicts[:3] == ["refused", "slower", "slower"]
    assert verdicts[-1] == "faster"
    assert "1 refused, 2 slower, 16 same, 1 faster" in shown
    assert "above [the] datasheet" in shown
    assert "(eager)" in shown
    assert "the machine moved by" in shown
    lines = [line.split()[1] for line in shown.splitlines() if line.startswith("softmax")]
    assert lines == [p.b.case for p in found.pairs]


def test_the_json_has_every_row_and_no_infinity():
    a, b = a_run(0), a_run(1, {SLOW: 1.2})
    b.rows[0] = dataclasses.replace(b.rows[0], samples=(), graph=None)
    facts = json.loads(json.dumps(as_dict(pair(a, b)), allow_nan=False))
    assert facts["regressions"] == 1
    assert len(facts["pairs"]) == OURS + BASELINES
    worst, noisy = facts["pairs"][0], facts["pairs"][1]
    assert worst["verdict"] == "slower"
    assert worst["case"] == SLOW
    assert worst["low"] < worst["ratio"] < worst["high"]
    assert noisy["verdict"] == "noisy"
    assert noisy["low"] is None
