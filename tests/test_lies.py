"""Planted lies: every way to look faster than one is must be refused or flagged. No GPU needed."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_bench
from fake_bench import H200, bench, ours, stream_us, subject
from tilewright.bench import measure as measuring
from tilewright.bench import rivals, timing
from tilewright.bench.guard import Floor, Timed, is_suspect, judge
from tilewright.bench.measure import measure
from tilewright.bench.record import Row
from tilewright.bench.subject import Contender, Subject, Wish, of_op
from tilewright.ops import registry
from tilewright.spec import Case, Cost, Traffic

REFERENCE = registry()["softmax"].reference


def in_doubles(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Right on any CPU: where torch has no vectors, it sums a long row element after element."""
    return REFERENCE(x.double(), dim, torch.float64).to(dtype or x.dtype)


def with_ours(of: Subject, contender: Contender) -> Subject:
    return replace(of, contenders=(contender, *of.contenders))


def run(contender: Contender, us: float | None = None, **settings: Any) -> dict[str, Row]:
    """Softmax with this contender; by default it takes a little longer than the roof."""
    of = with_ours(subject(), contender)
    time = stream_us(of.traffic) * 1.05 if us is None else us
    rows = measure(of, bench(of, {contender.name: time}, **settings))
    return {row.contender: row for row in rows}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A shape that is too large for a graph, where that begins at what a CPU copies at once."""
    monkeypatch.setattr(measuring, "SMALL", 2**20)
    return 512, 512


def assert_no_number(row: Row, *says: str) -> None:
    assert row.state == "refused"
    assert (row.us, row.gbps, row.tflops, row.of_roof, row.samples) == (None, None, None, None, ())
    assert (row.cold, row.graph, row.host, row.cpu) == (None, None, None, None)
    for word in says:
        assert word in row.reason


# --- the truth passes ----------------------------------------------------------------------------


def test_an_honest_kernel_gets_its_number() -> None:
    rows = run(ours(REFERENCE))
    row = rows["triton"]
    assert (row.state, row.flags, row.ran, row.kernels) == ("ok", (), "triton", ("_k",))
    assert row.us == pytest.approx(stream_us(subject().traffic) * 1.05, rel=0.01)
    assert row.of_roof == pytest.approx(1 / 1.05, rel=0.01)
    assert row.error is not None
    assert row.error <= 1
    assert row.largest_error is not None
    assert 0 < row.largest_error < 1e-6  # of float32 probabilities
    assert row.gbps is not None and H200.bandwidth is not None
    assert row.of_peak == pytest.approx(row.gbps * 1e9 / H200.bandwidth)
    assert not is_suspect(row)
    assert list(rows) == ["triton", "eager", "vendor"]


def test_every_contender_and_roof_is_timed_in_one_run() -> None:
    of = with_ours(subject(), ours(REFERENCE))
    with_clock = bench(of, {})
    measure(of, with_clock)
    for way in ("cold", "graph"):
        names = [name for w, name in with_clock.clock.order if w == way]
        roofs = ["roof: empty launch", "roof: stream", "roof: slow stream"]
        once = ["triton", "eager", "vendor", *roofs]
        assert names == once * 2


# --- lies about the result -----------------------------------------------------------------------


def test_a_kernel_that_skips_work() -> None:
    """Half of the rows are never written; whatever lay in memory stays there."""

    def half(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        out[: len(x) // 2] = REFERENCE(x[: len(x) // 2], dim, dtype)
        return out

    assert_no_number(run(ours(half))["triton"], "wrong before timing", "nan")


@pytest.mark.parametrize("wide", [False, True])
def test_a_kernel_that_writes_nothing_and_finds_a_right_result_in_memory(
    wide: bool, large: tuple[int, int]
) -> None:
    """torch.empty gives back a block of equal size; it must not hold what somebody else left.
    Also where the result is wider than the input."""
    dtype = torch.float64 if wide else torch.float32
    blocks: dict[int, torch.Tensor] = {}  # an allocator that knows one block of each size

    def empty(shape: Any) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return blocks.setdefault(size, torch.zeros(size, dtype=torch.uint8)).view(dtype).view(shape)

    def honest(x: torch.Tensor, dim: int, _: Any) -> torch.Tensor:
        return empty(x.shape).copy_(REFERENCE(x.double(), dim, None))

    def lazy(x: torch.Tensor, dim: int, _: Any) -> torch.Tensor:
        return empty(x.shape)

    both = (ours(honest), ours(lazy, name="cuda"))
    of = replace(subject(shape=large), contenders=both)
    slow = dict.fromkeys(("triton", "cuda"), 2 * stream_us(of.traffic))
    rows = {row.contender: row for row in measure(of, bench(of, slow))}
    assert rows["triton"].state == "ok"
    assert_no_number(rows["cuda"], "wrong before timing", "nan")


@pytest.mark.parametrize("key", ["address", "shape"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_kernel_that_returns_a_cached_result(key: str, copied: bool) -> None:
    cache: dict[Any, torch.Tensor] = {}

    def remembered(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        name = x.data_ptr() if key == "address" else x.shape
        if name not in cache:
            cache[name] = REFERENCE(x, dim, dtype)
        return cache[name].clone() if copied else cache[name]

    row = run(ours(remembered))["triton"]
    assert_no_number(row, "wrong after timing" if copied else "wrong before timing")


def test_inputs_are_not_soiled() -> None:
    """A result may be one of the arguments; what is the matter then is told, and nobody else is
    hurt."""
    rows = run(ours(lambda x, dim, dtype: x))
    assert_no_number(rows["triton"], "wrong before timing", "tolerance")
    assert rows["eager"].state == rows["vendor"].state == "ok"


def test_a_kernel_that_is_right_only_until_it_is_timed() -> None:
    calls = []

    def tired(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        calls.append(1)
        right = REFERENCE(x, dim, dtype)
        return right if len(calls) == 1 else torch.zeros_like(right)

    assert_no_number(run(ours(tired))["triton"], "timing")


def test_a_kernel_wrong_by_twice_its_tolerance() -> None:
    truth = subject().truth(subject().make(0))[0]

    def off(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        return (truth_of(x) + 2 * bound).float()

    bound = truth.bound.max()

    def truth_of(x: torch.Tensor) -> torch.Tensor:
        return REFERENCE(x.double(), dim=-1, dtype=torch.float64)

    row = run(ours(off))["triton"]
    assert_no_number(row, "wrong before timing", "the tolerance")
    assert row.error is not None
    assert row.error >= 2


def test_a_backward_wrong_by_twice_its_tolerance() -> None:
    of = subject("rms_norm", phase="backward")
    honest = next(c for c in of.contenders if c.name == "eager")

    def bind(args: Any) -> Any:
        call, truths = honest.bind(args), of.truth(args)
        return lambda: tuple(
            (g.double() + 2 * t.bound).float() for g, t in zip(call(), truths, strict=True)
        )

    lying = Contender("triton", True, bind, ("_k",))
    rows = measure(with_ours(of, lying), bench(of, {"triton": 1e4}))
    assert_no_number(rows[0], "wrong before timing")
    assert rows[1].state == "ok"


def test_results_of_another_shape_or_number() -> None:
    flat = run(ours(lambda x, dim, dtype: REFERENCE(x, dim, dtype).flatten()))["triton"]
    assert_no_number(flat, "shape (32768,), not (64, 512)")
    two = run(ours(lambda x, dim, dtype: (REFERENCE(x, dim, dtype),) * 2))["triton"]
    assert_no_number(two, "2 results where there should be 1")


def test_a_kernel_that_raises_is_told_and_the_others_go_on() -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("by zero")

    rows = run(ours(broken))
    assert_no_number(rows["triton"], "ZeroDivisionError", "by zero")
    assert rows["eager"].state == "ok"


def test_a_kernel_that_skips_work_in_the_graph() -> None:
    """Right on the first set of tensors, lazy on every other: a graph walks over many."""
    seen: list[int] = []

    def bind(args: Any) -> Any:
        if not seen:
            seen.append(args[0].data_ptr())
        right = args[0].data_ptr() == seen[0]
        return lambda: REFERENCE(*args) if right else torch.zeros_like(args[0])

    row = run(Contender("triton", True, bind, ("_k",)))["triton"]
    assert_no_number(row, "wrong while timing")


def test_the_graph_has_tensors_of_its_own_for_every_call() -> None:
    seen: list[set[int]] = []

    def bind(args: Any) -> Any:
        seen.append({a.data_ptr() for a in args if isinstance(a, torch.Tensor)})
        return lambda: REFERENCE(*args)

    run(Contender("triton", True, bind, ("_k",)))
    assert len({min(one) for one in seen}) >= 16


def test_every_result_is_soiled_before_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    soil = measuring._soil

    def soiling(results: Any, args: Any) -> None:
        soil(results, args)
        assert results.isnan().all()
        order.append("soil")

    def bind(args: Any) -> Any:
        order.append("bind")
        return lambda: (order.append("call"), REFERENCE(*args))[1]

    monkeypatch.setattr(measuring, "_soil", soiling)
    of = replace(subject(), contenders=(Contender("triton", True, bind, ("_k",)),))
    measure(of, bench(of, {}))
    assert order[:5] == ["bind", "call", "soil", "call", "soil"]
    assert order[-5:] == order[:5]


def test_who_raises_while_being_timed_is_dropped_and_the_others_go_on() -> None:
    calls: list[int] = []

    def tired(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("too hot")
        return REFERENCE(x, dim, dtype)

    class Breaking(fake_bench.Clock):
        def _samples(self, way: str, named: Any, rounds: int) -> Any:
            for name, call in named.items():
                if name == "liger":
                    try:
                        call()
                    except RuntimeError as e:
                        raise timing.Broken(name, e) from e
            return super()._samples(way, named, rounds)

    hot = Contender("liger", False, lambda args: lambda: tired(*args))
    of = replace(subject(), contenders=(*subject().contenders, hot))
    made = replace(bench(of, {}), clock=Breaking(bench(of, {}).clock.us))
    rows = {row.contender: row for row in measure(of, made)}
    assert rows["liger"].state == "refused"
    assert "too hot" in rows["liger"].reason
    assert rows["eager"].state == "ok"
    assert rows["eager"].us


def test_warmup_and_seed_are_what_was_asked_for() -> None:
    calls: list[float] = []

    def counting(x: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        calls.append(float(x[0, 0]))
        return REFERENCE(x, dim, dtype)

    def first_values(warmup: int, seed: int) -> list[float]:
        calls.clear()
        run(ours(counting), warmup=warmup, seed=seed)
        return list(calls)

    few, many = first_values(2, 0), first_values(9, 0)
    assert len(many) - len(few) == 7
    assert few[0] == many[0] != first_values(2, 5)[0]


# --- outputs that a user does not get ------------------------------------------------------------

TWO_OUTPUTS = registry()["add_rms_norm"]  # the norm, and the sum that it is the norm of


def only_the_norm(*args: Any) -> torch.Tensor:
    norm: torch.Tensor = TWO_OUTPUTS.reference(*args)[0]
    return norm


def of_the_norm_alone(phase: str, *rivals: str) -> Subject:
    """As if its function kept the sum to itself."""
    op = replace(TWO_OUTPUTS, returned=1, baselines={"vendor": only_the_norm})
    case, wish = Case("a case", {"shape": (64, 512)}), Wish((), rivals or ("eager", "vendor"))
    return of_op(op, case, torch.float32, phase, "cpu", H200, wish)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_outputs_that_a_user_does_not_get_are_not_compared(phase: str) -> None:
    of = of_the_norm_alone(phase)
    rows = measure(of, bench(of, {"eager": 1e4, "vendor": 1e4}))
    assert [(row.state, row.reason) for row in rows] == [("ok", "")] * 2
    whole = of_op(TWO_OUTPUTS, Case("", of.dims), torch.float32, phase, "cpu", H200, Wish((), ()))
    one = 64 * 512 * 4
    ours_moves = one if phase == "forward" else 0  # it writes the sum, and reads no gradient of it
    assert of.traffic.total == whole.traffic.total - one + ours_moves
    assert of.least.total == whole.least.total - one  # nobody must move it
    count = len(TWO_OUTPUTS.arguments)
    assert len(of.make(0)) == (count if phase == "forward" else count + 1)


def test_a_kernel_that_returns_more_than_was_asked_for() -> None:
    of = with_ours(of_the_norm_alone("forward"), ours(TWO_OUTPUTS.reference))
    row = measure(of, bench(of, {"triton": 1e4}))[0]
    assert_no_number(row, "2 results where there should be 1")


def test_a_wrong_result_among_those_that_a_user_gets() -> None:
    of = with_ours(of_the_norm_alone("forward"), ours(lambda *args: 1.01 * only_the_norm(*args)))
    row = measure(of, bench(of, {"triton": 1e4}))[0]
    assert_no_number(row, "wrong before timing", "the tolerance")


def test_a_backward_that_knows_a_gradient_of_what_nobody_used() -> None:
    of = of_the_norm_alone("backward")

    def bind(both: Any) -> Any:
        args, grad = both[:-1], both[-1]
        leaves = [a.detach().requires_grad_() for a in args[:3]]
        with torch.enable_grad():
            outputs = TWO_OUTPUTS.reference(*leaves, *args[3:])
        return lambda: torch.autograd.grad(outputs, leaves, (grad, grad), retain_graph=True)

    rows = measure(with_ours(of, Contender("triton", True, bind, ("_k",))), bench(of, {}))
    assert_no_number(rows[0], "wrong before timing", "the tolerance")
    assert rows[1].state == "ok"


def test_a_compiler_is_not_made_to_compute_what_nobody_gets() -> None:
    op = replace(TWO_OUTPUTS, returned=1)
    args = of_the_norm_alone("forward").make(0)
    for name in ("eager", "compile"):
        call = rivals.of(op)[name].call
        function = call.function if isinstance(call, rivals.Compiled) else call
        assert len(function(*args)) == 1


def test_a_graph_is_let_go_before_the_truth_is_made_again() -> None:
    """What contenders saved for their backwards, and float64's own, need not fit together."""
    of = of_the_norm_alone("backward")
    honest = of.contenders[0]
    alive: list[weakref.ref[Any]] = []
    at_truth: list[int] = []

    def bind(args: Any) -> Any:
        call = honest.bind(args)
        alive.append(weakref.ref(call))
        return call

    def truth(args: Any) -> Any:
        gc.collect()
        at_truth.append(sum(one() is not None for one in alive))
        return of.truth(args)

    made = replace(of, contenders=(replace(honest, bind=bind),), truth=truth)
    measure(made, bench(made, {}))
    assert (at_truth[0], at_truth[-1]) == (0, 0)


# --- lies about what ran -------------------------------------------------------------------------


def test_a_backend_that_falls_back_silently() -> None:
    """Right results, from somebody else's kernel."""
    seen = ("at::native::softmax_kernel",)
    row = run(ours(REFERENCE, launches=("_softmax_rows",)), launched=seen)["triton"]
    assert_no_number(row, "fell back silently", "_softmax_rows", "at::native::softmax_kernel")
    assert row.kernels == seen
    assert row.ran == "not triton"


def test_a_backend_that_hands_over_a_part_of_its_work() -> None:
    seen = ("_softmax_rows", "at::native::softmax_kernel")
    row = run(ours(REFERENCE, launches=("_softmax_rows",)), launched=seen)["triton"]
    assert (row.state, row.ran) == ("ok", "triton")
    assert row.flags == ("launches what it does not declare: at::native::softmax_kernel",)


def test_a_backend_that_launches_nothing() -> None:
    row = run(ours(REFERENCE), launched=())["triton"]
    assert_no_number(row, "fell back silently", "launched nothing")


def test_what_could_not_be_seen_is_said() -> None:
    row = run(ours(REFERENCE), launched=lambda bind: None)["triton"]
    assert row.state == "ok"
    assert row.ran == ""
    assert any("could not be read" in flag for flag in row.flags)


# --- lies about the time -------------------------------------------------------------------------


def test_a_time_out_of_l2_is_flagged() -> None:
    """Faster than the roof allows, slower than the datasheet, at a size that L2 holds."""
    of = subject("relu", (256, 4096))
    made = with_ours(of, ours(registry()["relu"].reference))
    row = measure(made, bench(made, {"triton": stream_us(of.traffic) / 1.10}))[0]
    assert row.state == "ok"
    assert "1.10x of its roof: L2-resident" in row.flags[-1]
    assert is_suspect(row)


def test_a_time_above_the_datasheet_is_refused() -> None:
    of = subject("relu", (512, 4096))
    lying = ours(registry()["relu"].reference)
    peak_us = of.traffic.total / 4.8e12 * 1e6
    made = with_ours(of, lying)
    row = measure(made, bench(made, {"triton": peak_us * 0.99}))[0]
    assert_no_number(row, "above physics", "GB/s", "4,800")
    assert is_suspect(row)


def test_a_noisy_row_is_flagged() -> None:
    of = with_ours(subject(), ours(REFERENCE))
    slow = stream_us(of.traffic) * 2
    row = measure(of, bench(of, {"triton": slow}, second={"triton": slow * 1.05}))[0]
    assert any(flag.startswith("noisy: two passes differ by") for flag in row.flags)
    steady = measure(of, bench(of, {"triton": slow}, second={"triton": slow * 1.02}))[0]
    assert steady.flags == ()


@pytest.mark.parametrize(
    ("in_a_graph", "kept"), [(True, (None, 0)), (False, (4, 4))], ids=["a pass", "most"]
)
def test_half_a_measurement_is_flagged(in_a_graph: bool, kept: Any, large: tuple[int, int]) -> None:
    """The host was late for a whole pass, or for most samples of both."""
    of = with_ours(subject(shape=(64, 512) if in_a_graph else large), ours(in_doubles))

    class Late(fake_bench.Clock):
        def _samples(self, way: str, named: Any, rounds: int) -> Any:
            found = super()._samples(way, named, rounds)
            return {n: t[: kept[self.passes[way] - 1]] for n, t in found.items()}

    made = replace(bench(of, {}), clock=Late(bench(of, {}).clock.us))
    row = measure(of, made)[0]
    assert any(flag.startswith("noisy: only") for flag in row.flags)


def test_a_roof_that_did_less_is_scaled() -> None:
    of = subject("relu", (256, 4096))

    class Rounded(fake_bench.Roofs):
        def beside(self, *facts: Any) -> Any:
            return [replace(r, scale=2.0) for r in super().beside(*facts)]

    row = measure(of, replace(bench(of, {}), roofs=Rounded()))[0]
    plain = measure(of, bench(of, {}))[0]
    assert row.roof_us == pytest.approx(2 * (plain.roof_us or 0))


def test_ours_is_not_excused_by_what_a_rival_may_save() -> None:
    of = subject("relu", (512, 4096), phase="backward")
    honest = next(c for c in of.contenders if c.name == "eager")
    lying = Contender("triton", True, honest.bind, ("_k",))
    fast = of.traffic.total / 4.8e12 * 1e6 * 0.99
    rows = measure(with_ours(of, lying), bench(of, {"triton": fast, "eager": fast}))
    by_name = {row.contender: row for row in rows}
    assert_no_number(by_name["triton"], "above physics")
    assert by_name["eager"].state == "ok"


MANY, FEW = Traffic(2**28, 2**28), Traffic(2**20, 2**20)  # 512 MiB, 2 MiB
ROOM = Floor(launch=1.0, stream=130.0, compute=0.0, bytes_alone=128.0)


def timed(us: float, traffic: Traffic = MANY, cost: float = 0.0, **facts: Any) -> Timed:
    return Timed(us, traffic, facts.pop("least", traffic), Cost(cost, "bf16"), **facts)


@pytest.mark.parametrize(
    ("call", "floor", "says"),
    [
        (timed(120), ROOM, "wrong byte count, or work skipped"),
        (timed(20.0, Traffic(2**24, 2**24)), Floor(1.0, 21.0), "L2-resident"),
        (timed(0.5, Traffic(64, 64)), Floor(1.0, 1.0), "faster than a kernel that does nothing"),
        (timed(120, kernels=0), ROOM, "it launches nothing"),
        (timed(90, FEW, cost=5e10), Floor(1.0, 10.0, 100.0), "more flops declared than done"),
    ],
)
def test_the_likely_reason(call: Timed, floor: Floor, says: str) -> None:
    found = judge(call, floor, H200)
    assert not found.refused
    assert len(found.flags) == 1
    assert says in found.flags[0]


def test_three_percent_is_still_noise() -> None:
    assert judge(timed(130 / 1.029), ROOM, H200).flags == ()
    assert judge(timed(130 / 1.031), ROOM, H200).flags


def test_flops_above_the_datasheet_are_refused() -> None:
    found = judge(timed(100, FEW, cost=1e12), Floor(1.0, 10.0, 120.0), H200)
    assert "TFLOP/s" in found.refused
    assert "989" in found.refused


def test_no_time_is_no_time() -> None:
    for us in (0.0, -1.0, float("nan")):
        assert judge(timed(us), ROOM, H200).refused


def test_a_rival_that_saved_less_keeps_its_time_and_loses_the_rate() -> None:
    """Its backward reads a mask where ours reads the output: our count is not its count."""
    least = Traffic(2**27, 2**28)
    found = judge(timed(105, least=least), ROOM, H200)
    assert (found.refused, found.gbps, found.of_roof) == ("", None, None)
    assert "fewer bytes" in found.flags[0]
    assert "refused" not in found.flags[0]
    below = judge(timed(92, least=least), ROOM, H200)  # the least takes 97.5 µs
    assert "x of its roof: wrong byte count" in below.flags[0]
    assert judge(timed(60, least=least), ROOM, H200).refused  # less than anybody must move


@pytest.mark.parametrize(
    ("floor", "bound"),
    [
        (Floor(3.0, 4.0, 1.0, 2.0), "launch"),
        (Floor(3.0, 14.0, 1.0, 12.0), "bandwidth"),
        (Floor(3.0, 14.0, 20.0, 12.0), "compute"),
    ],
)
def test_what_bounds_a_case(floor: Floor, bound: str) -> None:
    assert floor.bound == bound
    assert floor.us == max(floor.launch, floor.stream, floor.compute)


# --- power ---------------------------------------------------------------------------------------


def arithmetic(shape: tuple[int, int]) -> Subject:
    return replace(with_ours(subject(shape=shape), ours(in_doubles)), cost=Cost(1e12, "bf16"))


def test_a_case_bound_by_arithmetic_is_timed_hot_and_without_the_roofs(
    large: tuple[int, int],
) -> None:
    """Beside a roof that draws less power it would run at a clock that no program sees."""
    of = arithmetic(large)
    made = replace(bench(of, {}, iters=20), roofs=fake_bench.Roofs(compute_us=1100.0))
    hot = {"triton": 1500.0, "eager": 3000.0, "vendor": 3000.0}
    beside = {**hot, "triton": 1300.0, "roof: mma bf16": 1200.0, "roof: stream": 40.0}

    class Hot(fake_bench.Clock):
        def cold(self, calls: Any, rounds: int) -> Any:
            alone = not any(name.startswith("roof") for name in calls)
            self.us = hot if alone else beside
            asked.append((alone, rounds))
            found = self._samples("cold", calls, rounds)
            if alone:  # cool at first: those samples do not count
                found = {n: [t[0] / 2] * COOL + t[COOL:] for n, t in found.items()}
            return found

    asked: list[tuple[bool, int]] = []
    COOL = 16  # rounds of three contenders at 1.1 ms: fifty milliseconds
    row = measure(of, replace(made, clock=Hot({})))[0]
    assert asked == [(False, 10), (True, 2 * COOL)] * 2
    assert (row.method, row.us) == ("sustained", pytest.approx(1500.0, rel=0.001))
    assert row.sustained is not None and row.cold is not None
    assert (row.sustained.n, row.cold.median) == (2 * COOL, pytest.approx(1300.0, rel=0.001))
    assert row.of_roof == pytest.approx(1200 / 1300, rel=0.002)  # at equal clocks
    assert row.roof_us == pytest.approx(1500 * 1200 / 1300, rel=0.002)
    assert (row.bound, row.flags, len(row.samples)) == ("compute", (), 2 * COOL)


def test_a_sustained_time_above_the_roof_is_flagged(large: tuple[int, int]) -> None:
    """Its roof may be slower under load, not faster than it was measured."""
    of = arithmetic(large)
    made = bench(of, {"triton": 1300.0, "roof: mma bf16": 1200.0})

    class Lying(fake_bench.Clock):
        def cold(self, calls: Any, rounds: int) -> Any:
            found = self._samples("cold", calls, rounds)
            alone = not any(name.startswith("roof") for name in calls)
            return {n: [1050.0] * rounds for n in found} if alone else found

    roofs = fake_bench.Roofs(compute_us=1100.0)
    row = measure(of, replace(made, clock=Lying(made.clock.us), roofs=roofs))[0]
    assert row.us == 1050.0
    assert "1.14x of its roof" in row.flags[-1]
    assert is_suspect(row)


@pytest.mark.parametrize("in_a_graph", [True, False])
def test_others_are_not(in_a_graph: bool, large: tuple[int, int]) -> None:
    """Small ones, which a graph times, and those that memory limits."""
    of = arithmetic((64, 512) if in_a_graph else large)
    us = dict.fromkeys(("triton", "eager", "vendor"), 1500.0)
    roofs = fake_bench.Roofs(compute_us=1100.0 if in_a_graph else 0.1)
    made = replace(bench(of, us), roofs=roofs)
    row = measure(of, made)[0]
    assert (row.state, row.sustained) == ("ok", None)
    assert (row.graph is not None) == in_a_graph


# --- rivals --------------------------------------------------------------------------------------


def test_a_rival_may_round_more_often_and_says_so() -> None:
    of = subject()

    def rough(*args: Any) -> torch.Tensor:
        truth = of.truth(args)[0]
        return (truth.wanted + 3 * truth.bound).float()

    def foreign(*args: Any) -> torch.Tensor:
        truth = of.truth(args)[0]
        return (truth.wanted + 20 * truth.bound).float()

    def rival(name: str, call: Any) -> Contender:
        return Contender(name, False, lambda args: lambda: call(*args))

    made = replace(of, contenders=(rival("liger", rough), rival("quack", foreign)))
    rows = {row.contender: row for row in measure(made, bench(made, {}))}
    assert rows["quack"].state == "refused"
    assert rows["liger"].state == "ok"
    assert any("less accurate" in flag for flag in rows["liger"].flags)


def test_who_is_missing_is_listed_with_the_reason() -> None:
    of = subject()
    absent = Contender("liger", False, lambda args: fake_bench.H200, missing="not installed")
    made = replace(of, contenders=(*of.contenders, absent))
    row = {r.contender: r for r in measure(made, bench(made, {}))}["liger"]
    assert (row.state, row.reason, row.us, row.error) == (
        "unavailable",
        "not installed",
        None,
        None,
    )
