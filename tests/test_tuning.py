"""tune without a GPU: who is admitted, who wins, what the file says, and who reads it.

The op of these tests adds two tensors. Its routes are functions of this file; a clock says what a
test wants, so the quickest can be wrong and the noise can be chosen.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fake_bench
from tilewright import dispatch, tuned
from tilewright import gpu as gpus
from tilewright.bench.timing import Broken
from tilewright.cli import app
from tilewright.errors import InputError, UnsupportedError
from tilewright.explain import explain_call
from tilewright.ops.matmul.op import OP as MATMUL
from tilewright.spec import Args, Backend, Case, Choice, Cost, Op, Tuning, normal
from tilewright.tuned import file
from tilewright.tuned.file import Bucket, Device, Timed, Unusable
from tilewright.tuning import judge, measure, plan, run

H200 = gpus.pretend("h200")
WIDE, NARROW, TORCH = Choice("wide", (128, 4)), Choice("wide", (64, 8)), Choice("torch")
ORDER = (WIDE, NARROW, TORCH)
HERE = __name__


# --- an op, its routes and its model -------------------------------------------------------------


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def add_wrongly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a - b


def choices(gpu: gpus.Gpu, *args: Any) -> tuple[Choice, ...]:
    return ORDER


def expected(gpu: gpus.Gpu, choice: Choice, a: torch.Tensor, b: torch.Tensor) -> float:
    return a.numel() * (2.0 if choice == TORCH else 1.0)


def place(a: torch.Tensor, b: torch.Tensor) -> tuple[str, tuple[float, ...]]:
    return str(a.dtype).removeprefix("torch."), tuple(math.log2(n) for n in a.shape)


def part(rng: torch.Generator, a: torch.Tensor, b: torch.Tensor) -> tuple[Args, Callable[..., Any]]:
    return (a[:2], b[:2]), lambda result: result[:2]


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    return tuple(normal(dims["shape"], rng).to(dtype).to(device) for _ in range(2))


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    shape = dims["shape"]
    return tuple(torch.randint(-3, 4, shape, generator=rng).to(dtype) for _ in range(2))


OP = Op(
    name="adding",
    summary="a sum",
    schema="(Tensor input, Tensor other) -> Tensor",
    reference=add,
    outputs=lambda a, b: torch.empty_like(a),
    check=lambda *args: None,
    backends=(
        Backend("wide", "torch", f"{HERE}:add"),
        Backend("torch", "torch", f"{HERE}:add", dtypes=None),
    ),
    tolerance=lambda r, out, *args: tuple(4 * r.u_out * o.abs() + r.tiny for o in out),
    public=add,
    inputs=inputs,
    cost=lambda dims, dtype: Cost(float(math.prod(dims["shape"]))),
    tuning=Tuning(
        cases=(Case("small", {"shape": (8, 16)}), Case("large", {"shape": (64, 256)})),
        dtypes=(torch.float32, torch.bfloat16),
        choices=f"{HERE}:choices",
        expected=f"{HERE}:expected",
        place=f"{HERE}:place",
    ),
)
JOB = plan.Job(OP, OP.tuning.cases[0], torch.float32)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op is known while a test runs, and no table of anybody's is."""
    monkeypatch.setattr(plan, "registry", lambda: {"adding": OP, "plain": replace(OP, tuning=None)})
    monkeypatch.setattr(dispatch, "_names", {"wide": None, "torch": None})
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    tuned.reset()
    yield
    tuned.reset()


def tools(us: Mapping[Choice, float] | None = None, **lies: Callable[..., Any]) -> measure.Tools:
    """Times by choice, and for each backend named in `lies` another function in its place."""
    clock = fake_bench.Clock({str(choice): time for choice, time in (us or {}).items()})

    def prepare(op: Op, args: Args, choice: Choice) -> Callable[..., Any]:
        return (
            lies[choice.backend] if choice.backend in lies else measure.prepared(op, args, choice)
        )

    return measure.Tools(H200, clock, device="cpu", prepare=prepare)


def measured(
    us: Mapping[Choice, float], before: Bucket | None = None, **lies: Any
) -> measure.Found:
    return measure.measure(JOB, tools(us, **lies), before)


def table(us: Mapping[Choice, float], before: run.Tables | None = None) -> str:
    """The file of a run in which every bucket takes these times."""
    kept = before or {}
    found = run.run(plan.grid(OP), tools(us), kept, kept)
    return file.text(Device.of(H200), found.tables)


TIMES = {WIDE: 10.0, NARROW: 12.0, TORCH: 15.0}


# --- a wrong choice is never admitted ------------------------------------------------------------


def remembers() -> Callable[..., torch.Tensor]:
    """Right on the first inputs, and the same for all others."""
    kept: list[torch.Tensor] = []

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept.append(a + b)
        return kept[0].clone()

    return call


def writes_half() -> Callable[..., torch.Tensor]:
    """Right once; later it leaves half of the memory as it finds it."""
    memory: list[torch.Tensor] = []

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not memory:
            memory.append(a + b)
        memory[0][:4] = (a + b)[:4]
        return memory[0]

    return call


def raises(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no memory at 0x7f")


@pytest.mark.parametrize(
    ("lie", "when"),
    [
        (lambda: add_wrongly, "before timing"),
        (remembers, "after timing"),
        (writes_half, "before timing"),
        (lambda: raises, "before timing"),
        (lambda: lambda a, b: (a + b)[:4], "shape"),
        (lambda: lambda a, b: (a + b) * math.nan, "nan"),
    ],
)
def test_a_fast_but_wrong_choice_is_never_admitted(lie: Any, when: str) -> None:
    found = measured({WIDE: 0.1, NARROW: 0.1, TORCH: 50.0}, wide=lie())
    assert found.bucket.choice == TORCH
    assert set(found.bucket.times) == {TORCH}
    assert set(found.bucket.refused) == set(found.wrong) == {WIDE, NARROW}
    assert when in found.bucket.refused[WIDE]


class Phases(fake_bench.Clock):
    """Says whether timing is to come, going on or over."""

    phase = "before"

    def graph(self, calls: Any, rounds: int, check: Any) -> Any:
        self.phase = "while"
        found = super().graph(calls, rounds, check)
        self.phase = "after"
        return found


@pytest.mark.parametrize("phase", ["before", "while", "after"])
def test_one_that_is_wrong_in_one_phase_alone(phase: str) -> None:
    clock = Phases({str(WIDE): 0.1, str(NARROW): 0.1})
    with_lie = tools(wide=lambda a, b: a + b + (clock.phase == phase))
    found = measure.measure(JOB, replace(with_lie, clock=clock))
    assert found.bucket.choice == TORCH
    assert set(found.bucket.times) == {TORCH}
    assert f"wrong {phase} " in found.bucket.refused[WIDE]


def test_one_that_only_exact_inputs_betray() -> None:
    """A last bit that the tolerance lets pass."""
    job = replace(JOB, op=replace(OP, exact_inputs=exact_inputs))
    off = {"wide": lambda a, b: torch.nextafter(a + b, torch.tensor(math.inf))}
    assert measure.measure(JOB, tools(TIMES, **off)).bucket.choice == WIDE
    found = measure.measure(job, tools(TIMES, **off))
    assert "exact inputs" in found.bucket.refused[WIDE]
    assert measure.measure(job, tools(TIMES)).bucket.choice == WIDE


def test_exact_inputs_that_outgrow_their_dtype_are_left_out() -> None:
    def large(*given: Any) -> Args:
        return tuple(1000 * x + 1 for x in exact_inputs(*given))

    bf16 = replace(JOB, dtype=torch.bfloat16)
    assert judge.exact(replace(bf16, op=replace(OP, exact_inputs=large)), "cpu", 0) is None
    assert judge.exact(replace(bf16, op=replace(OP, exact_inputs=exact_inputs)), "cpu", 0)


def test_one_that_raises_while_it_is_timed() -> None:
    class Clock(fake_bench.Clock):
        def graph(self, calls: Any, rounds: int, check: Any) -> Any:
            if str(WIDE) in calls:
                raise Broken(str(WIDE), RuntimeError("an illegal address"))
            return super().graph(calls, rounds, check)

    found = measure.measure(JOB, replace(tools(), clock=Clock({})))
    assert "an illegal address" in found.bucket.refused[WIDE]
    assert set(found.bucket.times) == {NARROW, TORCH}


def test_one_that_cannot_serve_is_refused_and_not_called_wrong() -> None:
    def prepare(op: Op, args: Args, choice: Choice) -> Any:
        if choice == WIDE:
            raise UnsupportedError("adding: rows too short")
        return measure.prepared(op, args, choice)

    found = measure.measure(JOB, replace(tools(TIMES), prepare=prepare))
    assert "rows too short" in found.bucket.refused[WIDE]
    assert (found.bucket.choice, found.wrong) == (NARROW, ())


def test_nobody_is_right() -> None:
    found = run.run([JOB], tools(wide=add_wrongly, torch=add_wrongly), {}, {})
    assert found.failed
    assert found.measured[0][1].choice is None
    text = file.text(Device.of(H200), found.tables)
    assert file.read(text, Device.of(H200))["adding"].buckets[0].choice is None


def test_large_calls_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SMALL", 0)
    with_clock = tools(TIMES)
    assert measure.measure(JOB, with_clock).bucket.choice == WIDE
    assert {way for way, _ in with_clock.clock.order} == {"cold"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda a, b: torch.cat([(a - b)[:1], (a + b)[1:]]), "tolerance"),  # in the part
        (lambda a, b: torch.cat([(a + b)[:4], (a - b)[4:]]), "torch's own"),  # beside it
        (lambda a, b: torch.cat([(a + b)[:4], (a + b)[4:] * math.nan]), "torch's own"),
        (lambda a, b: (a + b)[:4], "other shapes"),
    ],
)
def test_a_call_too_large_for_float64(monkeypatch: pytest.MonkeyPatch, lie: Any, why: str) -> None:
    monkeypatch.setattr(judge, "LARGE", 1.0)
    op = replace(OP, tuning=replace(OP.tuning, part=f"{HERE}:part"))
    job = replace(JOB, op=op)
    found = measure.measure(job, tools({WIDE: 0.1, NARROW: 0.1}, wide=lie))
    assert why in found.bucket.refused[WIDE]
    assert found.bucket.choice == TORCH


def test_slices_and_expanded_dims_are_timed_as_they_lie() -> None:
    for make in (lambda x: x[:, 2:7], torch.t, lambda x: x[0].expand(4, 10)):
        t, other = make(torch.arange(60.0).view(6, 10)), make(torch.rand(6, 10))
        (copy,) = measure._copy((t,))
        assert torch.equal(copy, t)
        assert copy.stride() == t.stride()
        measure._refill((copy,), (other,))
        assert torch.equal(copy, other)
        assert not torch.equal(copy, t)


# --- who wins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "winner"),
    [
        ({WIDE: 10.0, NARROW: 10.0, TORCH: 10.0}, WIDE),
        ({WIDE: 10.1, NARROW: 10.0, TORCH: 10.0}, WIDE),  # inside the noise: the first in order
        ({WIDE: 10.3, NARROW: 10.15, TORCH: 10.0}, NARROW),
        ({WIDE: 10.3, NARROW: 10.3, TORCH: 10.0}, TORCH),
    ],
)
def test_ties_take_the_fixed_order(us: Mapping[Choice, float], winner: Choice) -> None:
    assert measured(us).bucket.choice == winner


def test_a_second_run_with_times_that_are_near_writes_the_same_bytes() -> None:
    first = table(TIMES)
    before = file.read(first, Device.of(H200))
    again = {WIDE: 10.4, NARROW: 11.6, TORCH: 15.6}
    assert table(again, before) == first
    assert table(again) != first


def test_times_that_are_far_change_it() -> None:
    before = file.read(table(TIMES), Device.of(H200))
    after = file.read(table({**TIMES, NARROW: 9.0}, before), Device.of(H200))["adding"]
    assert {bucket.choice for bucket in after.buckets} == {NARROW}
    assert after.buckets[0].times[NARROW].us == 9.0
    assert after.buckets[0].times[WIDE].us == 10.0


def test_the_incumbent_stays_unless_it_is_beaten_clearly() -> None:
    before = measured({WIDE: 10.5, NARROW: 10.2, TORCH: 15.0}).bucket
    assert before.choice == NARROW
    near = {WIDE: 10.1, NARROW: 10.2, TORCH: 15.0}  # wide would win a first run
    assert measured(near, before).bucket.choice == NARROW
    assert measured(near).bucket.choice == WIDE
    assert measured({**near, WIDE: 9.8}, before).bucket.choice == NARROW
    assert measured({**near, WIDE: 9.6}, before).bucket.choice == WIDE


SLOW_ONCE, LUCKY_ONCE = {WIDE: 9.9, NARROW: 12.4}, {WIDE: 9.0, NARROW: 10.2}
AS_BEFORE = {WIDE: 10.5, NARROW: 10.2}


@pytest.mark.parametrize(
    ("rounds", "winner"),
    [
        ([SLOW_ONCE, AS_BEFORE], NARROW),
        ([LUCKY_ONCE, AS_BEFORE], NARROW),
        ([SLOW_ONCE, SLOW_ONCE], WIDE),
        ([LUCKY_ONCE, LUCKY_ONCE], WIDE),
    ],
)
def test_the_incumbent_is_beaten_twice_or_not_at_all(rounds: Any, winner: Choice) -> None:
    before = measured({**AS_BEFORE, TORCH: 15.0}).bucket
    told = iter(rounds)

    class Clock(fake_bench.Clock):
        def graph(self, calls: Any, rounds: int, check: Any) -> Any:
            us = {**next(told), TORCH: 15.0}
            clock = fake_bench.Clock({str(choice): time for choice, time in us.items()})
            return clock.graph(calls, rounds, check)

    found = measure.measure(JOB, replace(tools(), clock=Clock({})), before).bucket
    assert found.choice == winner
    assert {c: found.times[c].us for c in (WIDE, NARROW)} == rounds[1]
    assert next(told, None) is None


def test_old_numbers_do_not_speak_against_the_winner() -> None:
    before = measured({WIDE: 11.0, NARROW: 10.2, TORCH: 15.0}).bucket
    found = measured({WIDE: 9.7, NARROW: 10.0, TORCH: 15.0}, before).bucket  # 10.2 would stay
    assert (found.choice, found.times[NARROW].us) == (NARROW, 10.0)


# --- a call finds its bucket ---------------------------------------------------------------------


def bucket(shape: tuple[int, ...], us: Mapping[Choice, float], winner: Choice) -> Bucket:
    kind, at = place(*[torch.empty(shape, device="meta")] * 2)
    args = [torch.empty(shape, device="meta")] * 2
    times = {c: Timed(t, expected(H200, c, *args)) for c, t in us.items()}
    return Bucket("x".join(map(str, shape)), "float32", kind, file.rounded(at), winner, times)


def installed(monkeypatch: pytest.MonkeyPatch, *buckets: Bucket) -> None:
    found = file.Table(H200.name, 0.02, {}, "", buckets)
    monkeypatch.setattr(tuned, "_tables", lambda name, device: {"adding": found})
    monkeypatch.setattr(tuned._tables, "cache_clear", lambda: None, raising=False)


def decided(*shape: int, only: tuple[Choice, ...] = ORDER, dtype: Any = None) -> Any:
    args = [torch.empty(shape, device="meta", dtype=dtype)] * 2
    return tuned.decide(H200, "adding", place(*args), {c: expected(H200, c, *args) for c in only})


def test_near_buckets_count_by_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(
        monkeypatch,
        bucket((8, 8), {WIDE: 1.0, TORCH: 2.0}, WIDE),
        bucket((32, 8), {WIDE: 9.0, TORCH: 3.0}, TORCH),
    )
    assert decided(9, 8).choice == WIDE
    assert decided(30, 8).choice == TORCH
    assert decided(8, 8).us == pytest.approx(1.0)  # at a bucket no other counts
    assert decided(32, 8).others == ((WIDE, pytest.approx(9.0)),)
    assert decided(16, 8).bucket.dims == "8x8"  # equally near: the first in the file
    assert decided(15, 8, dtype=torch.bfloat16) is None  # another kind
    found = decided(16, 8)
    # of wide 2.0 and 4.5, of torch 4.0 and 1.5: from half of the elements, and from twice as many
    wide, torchs = pytest.approx((2.0 * 4.5) ** 0.5), pytest.approx((4.0 * 1.5) ** 0.5)
    assert found.us == torchs
    assert found.others == ((WIDE, wide),)
    assert found.best == {"wide": (WIDE, wide), "torch": (TORCH, torchs)}
    assert found.against("torch") is None
    assert all(word in found.against("wide") for word in ("NVIDIA H200", "2.4 us", "not 3.0"))


def test_far_buckets_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [bucket((8, 8 + i), {TORCH: 1.0}, TORCH) for i in range(file.NEAR)]
    installed(monkeypatch, bucket((4096, 8), {TORCH: 1.0, WIDE: 1e-3}, WIDE), *near)
    assert decided(9, 9).choice == TORCH
    assert WIDE not in dict(decided(9, 9).others)


def test_one_that_a_near_bucket_refused_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(bucket((8, 8), {TORCH: 9.0}, TORCH), refused={WIDE: "wrong before timing"})
    installed(monkeypatch, wrong, bucket((32, 8), {WIDE: 1.0, NARROW: 2.0, TORCH: 9.0}, WIDE))
    assert decided(30, 8).choice == NARROW  # of which the other bucket says nothing
    assert WIDE not in dict(decided(30, 8).others)
    assert decided(32, 8).choice == WIDE  # where it was measured


def test_one_that_the_bucket_did_not_admit_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, bucket((8, 8), {NARROW: 5.0, TORCH: 9.0}, NARROW))
    assert decided(8, 8).choice == NARROW
    assert WIDE not in dict(decided(8, 8).others)
    assert decided(8, 8, only=(WIDE,)) is None  # the op's own rule speaks
    assert decided(8, 8, only=(WIDE, TORCH)).choice == TORCH


def test_at_its_bucket_a_call_takes_the_winner_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incumbent, though another was a little quicker. log2 of 3584 is rounded in the file."""
    installed(monkeypatch, bucket((8, 3584), {WIDE: 1.0, NARROW: 1.03}, NARROW))
    assert decided(8, 3584).choice == NARROW
    assert decided(8, 4000).choice == WIDE


def test_an_untuned_gpu_has_no_table() -> None:
    assert tuned.table(gpus.pretend("t4"), "adding") is None
    assert tuned.table(gpus.interpreter(), "adding") is None


def test_explain_tells_the_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    args = tuple([torch.empty(16, 8, device="meta")] * 2)
    assert explain_call(OP, args, gpu=H200).predicted_us is None
    assert "predicted" not in str(explain_call(OP, args, gpu=H200))
    installed(monkeypatch, bucket((8, 8), {WIDE: 6.0, TORCH: 7.5}, WIDE))
    found = explain_call(OP, args, gpu=H200)
    assert found.predicted_us == pytest.approx(12.0)
    line = "  predicted: 12.0 us by the table of NVIDIA H200 (bucket 8x8, float32): "
    assert f"{line}wide 12.0, torch 15.0" in str(found).splitlines()
    assert explain_call(OP, args, gpu=H200, backend="torch").predicted_us == pytest.approx(15.0)


def test_forcing_is_undone_after_an_exception() -> None:
    assert tuned.forced() is None
    with pytest.raises(ZeroDivisionError), tuned.forcing(WIDE):
        with tuned.forcing(NARROW):
            assert tuned.forced() == NARROW
        assert tuned.forced() == WIDE
        raise ZeroDivisionError
    assert tuned.forced() is None


def test_a_choice_is_prepared_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def prepare(op: Op, args: Args, backend: str) -> Any:
        seen.append((backend, tuned.forced()))
        return lambda a, b, backend: a + b

    monkeypatch.setattr(dispatch, "prepare", prepare)
    measure.measure(JOB, measure.Tools(H200, fake_bench.Clock({}), device="cpu"))
    assert seen == [(choice.backend, choice) for choice in ORDER]


# --- the file ------------------------------------------------------------------------------------


def spoiled(text: str, **facts: Any) -> str:
    """Another word in the file, with a proof that fits it."""
    found = {**json.loads(text), **facts}
    return json.dumps({**found, "proof": file.proof(found)})


@pytest.fixture()
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of tables, and the file of an H200 in it."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    tuned.reset()
    return tmp_path / "h200.json"


def test_a_file_is_read_once_and_used(tables: Path) -> None:
    tables.write_text(table(TIMES))
    found = tuned.table(H200, "adding")
    assert found is not None
    assert [b.dims for b in found.buckets] == ["8x16", "64x256"] * 2
    tables.unlink()
    assert tuned.table(H200, "adding") is found
    assert tuned.table(H200, "another") is None


BAD: Mapping[str, tuple[Callable[[str], str], str]] = {
    "cut in half": (lambda text: text[: len(text) // 2], "cut off"),
    "empty": (lambda text: "", "is empty"),
    "no JSON": (lambda text: "times: fast", "no whole JSON"),
    "nested": (lambda text: "[" * 100_000, "no whole JSON"),
    "a list": (lambda text: "[1, 2]", "no table"),
    "of another GPU": (
        lambda text: spoiled(text, device=Device.of(gpus.pretend("h100"))._asdict()),
        "another GPU, NVIDIA H100 80GB HBM3",
    ),
    "of a partition": (
        lambda text: spoiled(text, device={"name": "NVIDIA H200", "sm": 90, "sm_count": 16}),
        "16 SMs",
    ),
    "tampered": (lambda text: text.replace("10.0", "1.0"), "does not fit its proof"),
    "of a later format": (lambda text: spoiled(text, format=2), "format 2"),
    "without ops": (lambda text: spoiled(text, ops=None), "no table"),
    "a time of nothing": (
        lambda text: spoiled(text, ops=json.loads(text.replace("10.0", "0.0"))["ops"]),
        "no table",
    ),
    "a winner that was not measured": (
        lambda text: spoiled(
            text, ops=json.loads(text.replace('"wide:128x4", "t', '"x", "t'))["ops"]
        ),
        "no table",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_with_one_warning(tables: Path, name: str) -> None:
    spoil, says = BAD[name]
    tables.write_text(spoil(table(TIMES)))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            assert tuned.table(H200, "adding") is None
            assert tuned.table(replace(H200, pretend=False), "adding") is None
    (warning,) = heard
    assert all(word in str(warning.message) for word in (str(tables), says, "tilewright tune"))


def test_a_file_of_bytes_is_ignored_too(tables: Path) -> None:
    tables.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert tuned.table(H200, "adding") is None


def test_a_folder_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "nowhere"))
    tuned.reset()
    with pytest.warns(UserWarning, match="no folder"):
        assert tuned.table(H200, "adding") is None


def test_a_bucket_is_a_line_and_nothing_depends_on_the_day(tables: Path) -> None:
    text = table(TIMES)
    assert sum('"dims"' in line for line in text.splitlines()) == len(plan.grid(OP))
    assert text == table(TIMES)
    facts = json.loads(text)
    assert facts["device"] == {"name": "NVIDIA H200", "sm": 90, "sm_count": 132}
    assert set(facts["ops"]["adding"]["versions"]) == {"tilewright", "triton", "torch", "cuda"}
    read = file.read(text, Device.of(H200))
    assert file.text(Device.of(H200), read) == text
    two = {**read, "another": replace(read["adding"], buckets=())}
    assert file.read(file.text(Device.of(H200), two), Device.of(H200)) == two
    assert file.read(file.text(Device.of(H200), {}), Device.of(H200)) == {}
    with pytest.raises(Unusable):
        file.read(text, Device.of(gpus.pretend("t4")))


def test_choices_are_words() -> None:
    for choice in (*ORDER, Choice("cuda_v2", (1,))):
        assert Choice.of(str(choice)) == choice


def test_a_comment_is_no_other_source() -> None:
    """What was measured is code; a name, a number or a text of it is another one."""
    text = "def f(x):  # of a call\n    # so it is\n    return g(x, '# no comment')\n"
    for same in (text.replace("of a call", "of one"), text.replace("    # so it is\n", "\n")):
        assert run._without_comments(same) == run._without_comments(text)
    for other in (text.replace("g(", "h("), text.replace("# no", "#no"), text.replace("x", "y")):
        assert run._without_comments(other) != run._without_comments(text)
    deeper = text.replace("    return", "        return")
    assert run._without_comments(deeper) != run._without_comments(text)
    far = "a = '\f'\nx = 12  # of it\ny = 345678  # of it\n"  # a line for Python is one for us
    assert run._without_comments(far) == "a = '\f'\nx = 12\ny = 345678"


def test_the_source_is_of_all_kernels_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(**files: str) -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return run.source_of(MATMUL)

    monkeypatch.setattr(run.inspect, "getfile", lambda _: str(tmp_path / "routes.py"))
    kernels = ("a_impl__py", "a_kernels__py", "a_math__py", "launches__py")
    files = {**dict.fromkeys((*kernels, "notes__py"), "x = 1  # one"), "b__cu": "int x;  // one"}
    first = source(**files)
    assert source(**{**files, "notes__py": "x = 2"}) == first
    for name in kernels:
        assert source(**{**files, name: "x = 1  # two"}) == first, name
        assert source(**{**files, name: "x = 2"}) != first, name
    assert source(**{**files, "b__cu": "int x;  // two"}) != first
    text = files.pop("a_impl__py")
    assert source(**files, aa_impl__py=text) != first  # its name counts


def test_a_part_is_measured_beside_its_like_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = file.read(table(TIMES), Device.of(H200))
    jobs = plan.plan(["adding"], ["bf16"], "small")
    found = run.run(jobs, tools({**TIMES, TORCH: 1.0}), kept, kept).tables["adding"]
    winners = {(b.dims, b.dtype): b.choice for b in found.buckets}
    assert list(winners.values()).count(WIDE) == 3
    assert winners["8x16", "bfloat16"] == TORCH
    monkeypatch.setattr(run, "source_of", lambda op: "another")
    with pytest.raises(InputError, match="a part of adding is asked for.*not another"):
        run.run(jobs, tools(TIMES), kept, kept)
    # all of it may be of another code, to which neither its winners nor its numbers matter
    near = {WIDE: 10.4, NARROW: 10.1, TORCH: 10.1}
    fresh = run.run(plan.grid(OP), tools(near), {}, {}).tables["adding"]
    assert run.run(plan.grid(OP), tools(near), kept, kept).tables["adding"] == fresh
    assert {bucket.choice for bucket in fresh.buckets} == {NARROW}


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json"
    path.write_text("old")

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(run.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        run.write(path, H200, {})
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]
    assert path.read_text() == "old"


# --- the command ---------------------------------------------------------------------------------


def tw(*words: object) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, words)], catch_exceptions=False)


def assert_one_line(done: Any, *says: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in says), done.stderr


@pytest.fixture()
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if there were one, with these times and lies."""

    def use(us: Mapping[Choice, float] = TIMES, **lies: Any) -> None:
        monkeypatch.setattr(gpus, "detect", lambda index=0: H200)
        monkeypatch.setattr(run, "instruments", lambda gpu, seed: tools(us, **lies))

    return use


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rellu"], ("op is 'rellu'", "adding")),
        (["plain"], ("op is 'plain'", "adding")),
        (["adding", "--dtype", "fp9"], ("--dtype is 'fp9'", "bf16")),
        (["adding", "--case", "huge"], ("--case is 'huge'", "--dry-run")),
        (["adding", "--gpu", "h3000"], ("h3000", "h200")),
        (["adding"], ("torch sees none", "--dry-run")),
    ],
)
def test_bad_words(monkeypatch: pytest.MonkeyPatch, words: list[str], says: Any) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: None)
    assert_one_line(tw(*words), *says)


def test_another_gpu_than_the_one_here(on_a_gpu: Any, tmp_path: Path) -> None:
    on_a_gpu()
    assert_one_line(tw("--gpu", "h100", "--out", tmp_path / "x.json"), "h100", "NVIDIA H200")
    other = tmp_path / "other.json"
    other.write_text(spoiled(table(TIMES), device=Device.of(gpus.pretend("t4"))._asdict()))
    kept = other.read_text()
    assert_one_line(tw("--out", other), "--out", "Tesla T4", "Name another file")
    assert other.read_text() == kept
    assert_one_line(tw("--out", "/proc/nowhere/x.json"), "--out", "cannot be written")


def test_a_dry_run_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: None)
    out = tmp_path / "x.json"
    done = tw("adding", "--dry-run", "--gpu", "t4", "--out", out, "--json", "-")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["gpu"] == "Tesla T4"
    assert len(found["buckets"]) == len(plan.grid(OP))
    assert found["buckets"][0]["choices"] == [str(choice) for choice in ORDER]
    assert not out.exists()
    shown = tw("--dry-run", "--dtype", "bf16")
    assert (shown.exit_code, shown.stdout.count("wide:128x4")) == (0, 2)


def test_a_run_writes_the_table_and_tells_who_won(on_a_gpu: Any, tmp_path: Path) -> None:
    on_a_gpu()
    out, told = tmp_path / "new" / "h200.json", tmp_path / "told.json"
    done = tw("adding", "--gpu", "h200", "--out", out, "--json", told)
    assert done.exit_code == 0, done.output
    assert "4 buckets, won by wide 4; 0 choices refused" in done.stdout
    assert "1.20x" in done.stdout  # over the next
    assert "1.50x" in done.stdout  # over torch
    assert json.loads(told.read_text())["buckets"][0]["choice"] == "wide:128x4"
    first = out.read_text()
    assert file.read(first, Device.of(H200))["adding"].buckets[0].choice == WIDE
    on_a_gpu({WIDE: 10.1, NARROW: 11.9, TORCH: 15.1})
    assert tw("adding", "--out", out).exit_code == 0
    assert out.read_text() == first


def test_a_wrong_choice_fails_the_command_and_is_written_down(
    on_a_gpu: Any, tmp_path: Path
) -> None:
    on_a_gpu({WIDE: 0.1, NARROW: 0.1}, wide=add_wrongly)
    out = tmp_path / "h200.json"
    done = tw("adding", "--out", out, "--json", "-")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["buckets"][0]["choice"] == "torch"
    assert "wide:128x4 wrong before timing" in done.stderr
    (bucket, *_) = file.read(out.read_text(), Device.of(H200))["adding"].buckets
    assert (set(bucket.times), set(bucket.refused)) == ({TORCH}, {WIDE, NARROW})


def test_an_interrupted_run_leaves_the_old_file(on_a_gpu: Any, tmp_path: Path) -> None:
    def interrupt(a: Any, b: Any) -> Any:
        raise KeyboardInterrupt

    out = tmp_path / "h200.json"
    out.write_text(table(TIMES))
    kept = out.read_text()
    on_a_gpu(torch=interrupt)
    done = tw("adding", "--out", out)
    assert done.exit_code == 130
    assert "is as it was" in done.stderr
    assert out.read_text() == kept
    assert list(tmp_path.iterdir()) == [out]


def test_a_cut_table_is_mended(on_a_gpu: Any, tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    out.write_text(table(TIMES)[:300])
    on_a_gpu()
    assert tw("adding", "--out", out).exit_code == 0
    assert out.read_text() == table(TIMES)
