"""`tilewright verify` on every op, and the parts it is made of: bounds, layouts, seeds."""

from __future__ import annotations

import ast
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import apart
from tilewright import dispatch, gpu, tuned
from tilewright.dims import meta_inputs
from tilewright.ops import registry
from tilewright.spec import FLOATS, Choice, Op, Rounding
from tilewright.verify import (
    CHECKS,
    Context,
    Result,
    compare,
    features,
    layouts,
    offsets,
    plan,
    repeat_checks,
)
from tilewright.verify.checks import _relaid
from tilewright.verify.compare import Verdict, like_torch, rounds_like, same_bits, within
from tilewright.verify.context import edge_cases
from tilewright.verify.layout_checks import BASE, layouts_of
from tilewright.verify.runner import backends_on, name_of
from tilewright.verify.summary import summarise

OPS = list(registry())
H200 = gpu.pretend("h200")
REPOSITORY = Path(__file__).parents[1]


def verify(*words: str, folder: Path) -> tuple[int | None, dict[str, Any]]:
    report = folder / "report.json"
    rest = ["--device", "cpu", "--workers", "1", "--json", str(report)]
    done = apart.run(["verify", *words, *rest])
    assert report.exists(), done.stderr[-2000:]
    return done.returncode, json.loads(report.read_text())


# --- the real thing ------------------------------------------------------------------------------

# `make test` runs `tilewright verify` itself, on every op. Here one op shows that it counts right.
BACKENDS = [(op, backend) for op in OPS for backend in backends_on(op, "cpu")]


@pytest.mark.drawn(seconds=6, family="slow")
def test_a_full_run_gives_every_result_that_is_declared(tmp_path: Path) -> None:
    code, report = verify("relu", "--full", "--cases", "20", folder=tmp_path)
    assert (code, [f["line"] for f in report["failures"]]) == (0, [])
    assert (report["complete"], report["full"], report["draw"]) == (True, True, None)
    assert report["environment"]["interpreter"] is True
    run: Counter[str] = Counter()
    for row in report["checks"]:
        assert (row["op"], row["backend"], row["failed"]) == ("relu", "triton", 0)
        assert row["worst_error_over_tolerance"] <= 1
        run[row["check"]] += row["run"]
    relu = registry()["relu"]
    context = Context(relu, "triton", "cpu", True, 20, 0)
    laid = len(layouts_of(relu))
    assert run == {
        "cases": 2 * 3 * len(edge_cases(context)),  # phases, dtypes
        "random": 2 * 20,
        "exact": 10,
        "layouts": 3 * (2 * laid + len(layouts.SAME_VALUES)),  # and the gradient's
        "in place": 3 * (laid - 1),
        "empty": 2 * 7,
        "nan": 3 * 6,
        "repeat": 3 * 2,
        "errors": len(relu.errors),
        "offsets": 1,
    }
    seen = {row["dtype"] for row in report["numerics"] if row["phase"] == "backward"}
    assert seen == {"float32", "float16", "bfloat16"}


@pytest.mark.drawn(seconds=4, family="slow")
def test_every_launch_is_run(tmp_path: Path) -> None:
    words = ("matmul", "--backend", "skinny", "--only", "launches", "--full")
    code, report = verify(*words, folder=tmp_path)
    assert (code, report["failures"]) == (0, [])
    matmul = registry()["matmul"]
    context = Context(matmul, "skinny", "cpu", True, 0, 0)
    wanted = sum(
        sum(choice.backend == "skinny" for choice in _choices(matmul, case.dims, dtype))
        for case, dtype in itertools.product(edge_cases(context), (torch.float16, torch.float32))
        if serves(context, case.dims, dtype)
    )
    assert [row["run"] for row in report["checks"]] == [wanted]


def _choices(op: Op, dims: Any, dtype: torch.dtype) -> Any:
    assert op.tuning is not None
    return dispatch.load(op.tuning.choices)(H200, *meta_inputs(op, dims, dtype))


def serves(context: Context, dims: Any, dtype: torch.dtype) -> bool:
    """Whether the backend takes it: asked for a GPU, for nothing is interpreted in this process."""
    args = meta_inputs(context.op, dims, dtype)
    backend = context.op.backend(context.backend)
    return dispatch.refusal(backend, context.op, args, args[0], H200, pretending=True) is None


def test_a_backend_that_refuses_every_draw_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(registry()["rms_norm"], "torch", "cpu", False, 2, 0)
    assert all(result.passed for result in CHECKS["random"](context))
    monkeypatch.setattr(Context, "serves", lambda *_: False)
    results = list(CHECKS["random"](context))
    assert [result.passed for result in results] == [False, False]
    assert all("draws is served" in result.message for result in results)
    assert not list(CHECKS["exact"](context))


def test_every_public_function_declares_its_mistakes() -> None:
    declared = {op.public_name for op in registry().values() if op.errors}
    assert declared == {op.public_name for op in registry().values()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_holds_every_part_of_every_check_once(device: str) -> None:
    steps = plan(device=device, full=True, cases=120)
    planned = Counter((c.op.name, c.backend, check) for check, c in steps)
    assert len({name_of(step) for step in steps}) == len(steps)
    on_gpu, kinds = device == "cuda", len(FLOATS)
    for op, backend in [(op, b) for op in OPS for b in backends_on(op, device)]:
        declared = registry()[op]
        cases = len({c.name for c in edge_cases(Context(declared, backend, device, True, 0, 0))})
        laid, covered = len(layouts_of(declared)), features.calls(op, device, backend)
        wanted = {
            "cases": kinds * cases,
            "launches": 2 * cases if declared.tuning else 0,
            "bits": int(declared.bit_inputs is not None),
            "layouts": kinds * laid * len(declared.variants),
            "in place": kinds * (laid - 1) * len(declared.variants) if declared.in_place else 0,
            "empty": 7,
            "nan": 6 * kinds,
            "repeat": 3 * kinds + len(covered[::8]) if on_gpu else 2 * kinds,
            "streams": kinds * on_gpu,
            "capture": kinds * on_gpu,
            "errors": int(backend == backends_on(op, device)[0]),
            "offsets": len(declared.variants),
            "large": int(on_gpu),
        }
        for check, count in wanted.items():
            assert planned[op, backend, check] == count, (op, backend, check)
        has_exact = declared.exact_inputs is not None and declared.sample is not None
        seeds = {"random": 120, "exact": 60 * has_exact, "features": min(120, len(covered))}
        for check, count in seeds.items():
            mine = [c for name, c in steps if (c.op.name, c.backend, name) == (op, backend, check)]
            assert [s for c in mine for s in range(c.seed, c.seed + c.cases)] == list(range(count))
        assert set(CHECKS) == {*wanted, *seeds}
    if on_gpu:
        there = {(op, backend) for op, backend, _ in planned}
        assert there > {("softmax", "cuda_v1"), ("softmax", "cuda_v2"), ("rms_norm", "cuda")}
        assert not any(backend == "torch" for _, backend in there)


def test_only_a_full_run_takes_what_wants_the_memory_of_a_large_gpu() -> None:
    assert "large" not in {check for check, _ in plan(device="cuda")}


def test_what_a_cpu_runs_is_small() -> None:
    """A case that is meant for the many SMs of a GPU takes the interpreter minutes."""
    for op in OPS:
        for case in edge_cases(Context(registry()[op], "triton", "cpu", True, 1, 0)):
            rows = math.prod(case.dims["shape"][:-1])
            assert rows <= 5_000 and math.prod(case.dims["shape"]) <= 400_000, (op, case.name)


@pytest.mark.drawn(seconds=3, family="slow")
def test_a_case_alone(tmp_path: Path) -> None:
    """One that a quick run leaves out as well: what failed in a full run is run again so."""
    code, report = verify("rms_norm", "--case", "wide-odd", folder=tmp_path)
    assert report["full"] is True
    assert (code, sum(row["run"] for row in report["checks"])) == (0, 2 * len(FLOATS))
    launch = Result("matmul", "launches", "skinny", "few-rows-deep skinny:64x6", "", "", False)
    assert "--only launches --backend skinny --case few-rows-deep" in launch.repro("cpu")
    laid = Result("rope", "layouts", "triton", "expanded, gradient", "float16", "backward", False)
    assert "--only layouts --backend triton --case expanded" in laid.repro("cpu")
    named = Result("relu", "cases", "triton", "one-dim", "float32", "forward", False, seed=3)
    assert "--only cases --backend triton --case one-dim --seed 3" in named.repro("cpu")
    steps = plan(["relu"], case="one-dim", seed=3)
    assert {(check, c.case, c.seed) for check, c in steps} == {("cases", "one-dim", 3)}
    assert len(steps) == len(FLOATS)


@pytest.mark.parametrize("check", ["cases", "layouts", "in place", "nan"])
def test_a_part_runs_alone(check: str) -> None:
    """What the parts of a check give is what the check gives."""
    context = Context(registry()["relu"], "torch", "cpu", False, 0, 0)
    parts = [c for name, c in plan(["relu"], only=[check]) if c.case]
    assert {c.dtype for c in parts} == {"bfloat16", "float16", "float32"}
    apart_ = [
        result
        for c in parts
        for result in CHECKS[check](replace(context, case=c.case, dtype=c.dtype))
    ]
    whole = list(CHECKS[check](context))
    key = attrgetter("case", "dtype", "phase")
    assert sorted(apart_, key=key) == sorted(whole, key=key)


@pytest.mark.parametrize("when", ["always", "later"])
def test_one_launch_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    op, wrong = registry()["matmul"], Choice("skinny", (64, 4))
    runs: Counter[Choice | None] = Counter()

    def prepare(op: Op, args: Any, backend: str) -> Any:
        runs[tuned.forced()] += 1
        is_wrong = tuned.forced() == wrong and (when == "always" or runs[wrong] % 2 == 0)
        return lambda a, b, *_: (a.double() @ b.double() + is_wrong).to(a.dtype)

    monkeypatch.setattr(Context, "serves", lambda *_: True)
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: SimpleNamespace(gpu=H200))
    monkeypatch.setattr(dispatch, "prepare", prepare)
    results = list(
        CHECKS["launches"](Context(op, "skinny", "cpu", False, 0, 0, "few-rows-deep", "float16"))
    )
    found = {result.case: result.message for result in results}
    assert set(found) == {
        f"few-rows-deep skinny:{launch}" for launch in ("64x6", "64x4", "64x3", "128x4")
    }
    failed = [result.case for result in results if not result.passed]
    assert failed == [f"few-rows-deep {wrong}"]
    assert ("bits differ" in found[failed[0]]) == (when == "later")


def test_the_plan_covers_every_seed_once() -> None:
    steps = plan(["relu"], only=["random"], cases=120, seed=7)
    seeds = [s for _, c in steps for s in range(c.seed, c.seed + c.cases)]
    assert seeds == list(range(7, 127))


# --- bounds --------------------------------------------------------------------------------------

ONE = torch.tensor([1.0, 2.0], dtype=torch.float64)
BOUND = torch.tensor([1e-3, 1e-3], dtype=torch.float64)


def judge(got: Any, wanted: Any = ONE, bound: Any = BOUND, truncates: bool = False) -> Verdict:
    got = torch.as_tensor(got, dtype=torch.float32)
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    return within(got, wanted, bound, "it", truncates=truncates)


def test_an_error_counts_in_tolerances() -> None:
    assert judge([1.0, 2.0]).ratio == 0
    half = judge([1.0, 2.0005])
    assert half.passed
    assert half.ratio == pytest.approx(0.5, rel=1e-3)
    assert half.error == pytest.approx(5e-4, rel=1e-3)
    twice = judge([0.998, 2.0])
    assert not twice.passed
    assert twice.ratio == pytest.approx(2, rel=1e-3)


def test_the_worst_element_decides() -> None:
    bound = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    assert not judge([1.0, 2.1], bound=bound).passed
    assert judge([1.1, 2.0], bound=bound).passed


def test_a_zero_bound_allows_nothing() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert judge([1.0, 2.0], bound=zero).passed
    assert judge([1.0, 2.0000002], bound=zero).ratio == math.inf


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, math.inf], [1.0, math.nan]),
        ([math.nan, 1.0], [1.0, math.nan]),
        ([1.0, 2.0], [1.0, math.inf]),
        ([1.0, -math.inf], [1.0, math.inf]),
        ([1.0, 2.0], [1.0, 1e300]),  # float32 overflows there
        ([1.0, -math.inf], [1.0, 1e300]),
    ],
)
def test_nan_and_infinity_stand_where_float64_has_them(got: Any, wanted: Any) -> None:
    assert not judge(got, wanted).passed


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_in_their_place_pass(odd: float) -> None:
    assert judge([1.0, odd], [1.0, odd]).passed
    assert not judge([1.1, odd], [1.0, odd]).passed


def test_overflow_gives_infinity_or_where_it_is_truncated_the_largest_number() -> None:
    """Triton's interpreter truncates to bfloat16, which stops one step short of infinity."""
    largest = torch.finfo(torch.float32).max
    assert judge([1.0, math.inf], [1.0, 1e300]).passed
    assert not judge([1.0, largest], [1.0, 1e300]).passed
    assert judge([1.0, largest], [1.0, 1e300], truncates=True).passed
    assert not judge([1.0, 2.0], [1.0, 1e300], truncates=True).passed


def test_a_result_of_another_shape_fails() -> None:
    assert "shape" in judge([1.0]).message


def test_verdicts_keep_the_worst() -> None:
    fine, bad, said = Verdict(0.5), Verdict(1.5), Verdict(message="no")
    assert fine.worst(bad) == bad.worst(fine) == bad
    assert fine.worst(said) == said.worst(bad) == said
    for first, second in ((fine, Verdict(math.nan)), (Verdict(math.nan), fine)):
        assert not first.worst(second).passed
    assert fine.passed
    assert not bad.passed
    assert not said.passed


def test_twice_torchs_own_error_is_the_limit() -> None:
    wanted = torch.tensor([1.0, 4.0], dtype=torch.float64)
    torchs = torch.tensor([1.0, 4.01], dtype=torch.float16)
    theirs = float((torchs.double() - wanted).abs().max())
    near = (wanted + 1.5 * theirs).to(torch.float32)
    far = (wanted + 2.5 * theirs).to(torch.float32)
    assert like_torch(near, wanted, torchs, 2.0**-11).passed
    assert not like_torch(far, wanted, torchs, 2.0**-11).passed


def test_another_rounding_on_the_way_shows() -> None:
    """Rounded to float16 before the weight, or not: about a third of the results differ."""
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 64, generator=rng), torch.randn(64, generator=rng)
    rounded, unrounded = (x.half().float() * w).half(), (x * w).half()
    assert rounds_like(rounded, rounded.clone(), "it").passed
    assert not rounds_like(unrounded, rounded, "it").passed
    few = rounded.clone()
    few[0, :3] = unrounded[0, :3] * 1.001
    assert rounds_like(few, rounded, "it").passed


def test_one_rounding_is_no_error_where_torch_was_lucky() -> None:
    wanted = torch.tensor([1.0], dtype=torch.float64)
    got = torch.tensor([1.0 + 2.0**-11], dtype=torch.float32)
    assert like_torch(got, wanted, torch.ones(1), 2.0**-11).passed
    assert not like_torch(got, wanted, torch.ones(1), 2.0**-24).passed


def test_roundoffs_are_those_of_the_dtypes() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        assert Rounding.of(dtype, dtype).u_out == torch.finfo(dtype).eps / 2
    mixed = Rounding.of(torch.float32, torch.bfloat16)
    assert (mixed.u_out, mixed.u_in) == (2.0**-24, 2.0**-8)
    assert Rounding.of(torch.float16, torch.float16).tiny == 2.0**-24
    assert Rounding.of(torch.float32, torch.float32).tiny == 2.0**-126


def test_only_bfloat16_is_truncated_in_the_interpreter() -> None:
    for dtype in FLOATS:
        there, here = Rounding.of(dtype, dtype), Rounding.of(dtype, dtype, interpreted=True)
        assert here.u_out == there.u_out * (2 if dtype is torch.bfloat16 else 1)
        assert here.u_in == here.u_out


def fake_op(run: Any, monkeypatch: pytest.MonkeyPatch) -> Op:
    """relu's declaration with another forward behind it."""
    monkeypatch.setattr(compare, "call", lambda op, args, backend: run(*args))
    return registry()["relu"]


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda x: torch.relu(x).half(), "float16"),
        (lambda x: torch.relu(x).t().contiguous().t(), "declared"),
        (lambda x: torch.relu_(x), "argument input was changed"),
        (lambda x: torch.relu(x) + 1e-7, ""),
        (lambda x: torch.relu(x)[0], "declared"),
        (lambda x: 1 / 0, "raised ZeroDivisionError"),
    ],
    ids=["dtype", "strides", "changes its input", "wrong", "shape", "raises"],
)
def test_forward_refuses(run: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = fake_op(run, monkeypatch)
    verdict, _ = compare.forward(op, (X.clone(),), "triton", interpreted=True)
    assert not verdict.passed
    assert says in verdict.message


def test_forward_accepts_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    op = fake_op(torch.relu, monkeypatch)
    verdict, _ = compare.forward(op, (X.clone(),), "triton", interpreted=True)
    assert verdict.passed
    assert verdict.ratio == 0


def test_same_bits_tells_zeros_apart_and_knows_nan() -> None:
    nan = torch.tensor([math.nan])
    assert same_bits([nan], [nan.clone()])
    assert not same_bits([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert not same_bits([torch.zeros(2)], [torch.zeros(1)])  # which would broadcast
    assert not same_bits([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])
    assert not same_bits([None], [nan])
    assert compare.changed(["a", "b"], [nan, None], [nan.clone(), None]) == []
    assert compare.changed(["a", "b"], [nan, torch.ones(1)], [nan, torch.zeros(1)]) == ["b"]


def test_the_summary_counts_failures() -> None:
    good = Result("relu", "random", "triton", "(2,)", "float32", "forward", True, 0.5, 0.1)
    bad = Result("relu", "random", "triton", "(3,)", "float32", "forward", False, 3.0, 0.7, seed=9)
    report = summarise([good, bad], "cpu")
    assert report["checks"][0]["run"] == 2
    assert report["checks"][0]["failed"] == 1
    assert report["numerics"][0]["worst_error"] == 0.7
    (failure,) = report["failures"]
    assert "3.00 of its tolerance" in failure["line"]
    assert "--only random --backend triton --seed 9 --cases 1" in failure["repro"]


# --- layouts -------------------------------------------------------------------------------------

VALUES = torch.arange(6.0 * 128).reshape(BASE)
SHAPED = {"expanded", "5-d leading", "channels last", "two levels"}


@pytest.mark.parametrize("name", layouts.SAME_VALUES)
def test_layout_keeps_the_values(name: str) -> None:
    laid = layouts.LAYOUTS[name](VALUES)
    assert laid.shape == VALUES.shape
    assert same_bits([laid], [VALUES])
    assert laid.is_contiguous() == (name == "misaligned")


def test_only_these_layouts_change_shape_or_values() -> None:
    assert set(layouts.LAYOUTS) - set(layouts.SAME_VALUES) <= SHAPED
    assert len(layouts.LAYOUTS) >= 8


def test_each_layout_is_what_its_name_says() -> None:
    made = {name: layout(VALUES) for name, layout in layouts.LAYOUTS.items()}
    assert made["transposed"].stride() == (256, 1, 2)
    assert made["column slice"].stride() == (384, 192, 1)
    assert made["row step 2"].stride() == (512, 256, 1)
    assert made["fused qkv"].stride() == (768, 128, 1)
    assert made["expanded"].stride() == (256, 0, 1)
    assert same_bits([made["expanded"]], [VALUES[:, :1].expand(BASE)])
    assert made["5-d leading"].dim() == 5
    assert made["5-d leading"].stride(-1) == 1
    assert layouts.rows_of(made["5-d leading"].shape, made["5-d leading"].stride()) is None
    assert made["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert not made["channels last"].is_contiguous()


def test_some_layout_has_rows_of_two_levels() -> None:
    made = [layout(VALUES) for layout in layouts.LAYOUTS.values()]
    views = [layouts.rows_of(m.shape, m.stride()) for m in made]
    assert any(view and view.inner > 1 and view.inner_stride for view in views)


@pytest.mark.parametrize("dtype", FLOATS)
def test_misaligned_is_misaligned(dtype: torch.dtype) -> None:
    laid = layouts.misaligned(VALUES.to(dtype))
    assert laid.data_ptr() % 16
    assert laid.is_contiguous()
    assert not layouts.is_aligned(laid)
    assert layouts.is_aligned(VALUES.to(dtype))


@pytest.mark.parametrize("name", ["column slice", "row step 2", "fused qkv", "misaligned"])
def test_nan_lies_around_a_layout(name: str) -> None:
    """A kernel that reads past its row must not read zeros."""
    laid = layouts.LAYOUTS[name](VALUES)
    outside = laid.untyped_storage().nbytes() // 4 - VALUES.numel()
    room = torch.empty(0).set_(laid.untyped_storage())
    assert int(room.isnan().sum()) == outside > 0


# --- seeds ---------------------------------------------------------------------------------------


def random_case(op: str, seed: int) -> tuple[Any, ...]:
    context = Context(registry()[op], "triton", "cpu", False, 1, seed)
    rng = random.Random(seed)
    dims, dtype = context.op.sample(rng), rng.choice(FLOATS)
    return tuple(_relaid(a, rng) for a in context.inputs(dims, dtype, seed))


@pytest.mark.parametrize("op", OPS)
def test_a_seed_makes_the_whole_case(op: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)  # torch's own generator has no say
        for a, b in zip(random_case(op, 5), random_case(op, 5), strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride()
                assert same_bits([a], [b])
            else:
                assert a == b
    shapes = {tuple(random_case(op, seed)[0].shape) for seed in range(20)}
    assert len(shapes) > 10


@pytest.mark.parametrize("op", OPS)
def test_random_cases_reach_every_layout_and_dtype(op: str) -> None:
    firsts = [random_case(op, seed)[0] for seed in range(300)]
    assert {x.dtype for x in firsts} == set(FLOATS)
    assert {x.dim() for x in firsts} == set(registry()[op].ranks or (1, 2, 3, 4))
    assert any(x.data_ptr() % 16 for x in firsts)
    assert sum(not x.is_contiguous() for x in firsts) > 50


def test_one_seed_gives_one_result(tmp_path: Path) -> None:
    reports = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        words = ("softmax", "--only", "random", "--seed", "41", "--cases", "2")
        reports.append(verify(*words, folder=tmp_path / name)[1])
    assert reports[0]["numerics"] == reports[1]["numerics"] != []


@pytest.mark.drawn(seconds=4.5, family="slow")
def test_the_interpreter_repeats_less_to_the_same_effect() -> None:
    script = (
        "from contextlib import nullcontext\n"
        "import triton.language as tl\n"
        "from triton.language.semantic import TritonSemantic\n"
        "from triton.runtime import interpreter\n"
        "from tilewright.ops import registry\n"
        "from tilewright.verify import CHECKS, Context\n"
        "from tilewright.verify.interpreter import without_repetition\n"
        "places = [(interpreter, '_patch_lang'), (interpreter, 'GridExecutor'),\n"
        "          (TritonSemantic, 'binary_op_sanitize_overflow_impl'),\n"
        "          (TritonSemantic, 'broadcast_impl_value'),\n"
        "          (interpreter, '_get_np_dtype'), (tl.block_type, '__init__'),\n"
        "          (tl.tensor, '__init__')]\n"
        "calls = dict.fromkeys(places, 0)\n"
        "def counted(place):\n"
        "    call = getattr(*place)\n"
        "    def count(*args):\n"
        "        calls[place] += 1\n"
        "        return call(*args)\n"
        "    setattr(*place, count)\n"
        "    return count\n"
        "plain = [counted(place) for place in places]\n"
        "for quick in (without_repetition, nullcontext, without_repetition):\n"
        "    calls.update(dict.fromkeys(places, 0))\n"
        "    with quick():\n"
        "        context = Context(registry()['layer_norm'], 'triton', 'cpu', False, 4, 0)\n"
        "        results = [r.as_dict() for r in CHECKS['random'](context)]\n"
        "    assert [getattr(*place) for place in places] == plain\n"
        "    print([*calls.values(), results])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    runs = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert len(runs) == 3, done.stderr[-1000:]
    (first, launches, overflows, fits, *types, results), unaided, (last, *_, once_more) = runs
    again, _, all_overflows, all_fits, *many, as_ever = unaided
    # Triton never takes back what a helper of its own library replaced: nothing is left to replace
    assert launches == last <= first <= launches + 1
    assert again > 3 * launches
    for once, often in zip(types, many, strict=True):  # NumPy's, those of blocks, of values
        assert often > 100 * once > 0
    assert (overflows, all_overflows > 0) == (0, True)
    assert 0 < 2 * fits < all_fits
    assert results == as_ever == once_more
    assert len(results) == 8


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_available(),
    reason="what is patched here reaches a child that is forked, not one that is spawned",
)
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda *_: "", ""),
        (lambda *_: "wrong beyond 2^31", "wrong beyond 2^31"),
        (lambda *_: 1 // 0, "raised ZeroDivisionError"),
        (lambda *_: os._exit(3), "exit code 3"),
        (lambda *_: os.kill(os.getpid(), signal.SIGKILL), f"exit code {-signal.SIGKILL}"),
        (lambda *_: time.sleep(60), "no end after 0.5 s"),
    ],
    ids=["right", "wrong", "raises", "ends", "dies", "hangs"],
)
def test_what_becomes_of_the_process_that_looks_past_2_31(
    does: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "compare", does)
    monkeypatch.setattr(offsets, "SECONDS", 0.5 if "no end" in said else 60)
    found = offsets.wrong("relu", "triton", "cpu", 0)
    assert found.startswith(said) and bool(found) == bool(said)


# --- what the number of rows decides -------------------------------------------------------------


def half_by_half(op: Op, args: Any, backend: str) -> Any:
    """A product whose sums are added in another order where there are many rows."""
    a, b = (x.float() for x in args[:2])
    first = a.shape[1] // 2 if len(a) > 4 else 1
    return a[:, :first] @ b[:first] + a[:, first:] @ b[first:]


def without_the_end(op: Op, args: Any, backend: str) -> Any:
    """As if the last row's offset had gone past its bits."""
    out = half_by_half(op, args, backend)
    return out if len(out) == 4 else out.index_copy(0, torch.tensor([len(out) - 1]), out[:1])


@pytest.mark.parametrize("name", OPS)
def test_the_last_rows_of_many_are_those_of_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(registry()[name], "torch", "cpu", True, 1, 0)
    results = list(repeat_checks.last_rows(context, 9, 256))
    assert [(one.case, one.passed) for one in results] == [("9 x 256", True)]

    whole, seen = repeat_checks.call, []

    def without(lost: int, op: Op, args: Any, backend: str) -> Any:
        many = [x for x in args if isinstance(x, torch.Tensor) and x.dim() > 1 and len(x) == 9]
        if many:
            seen.append(len(many))
            many[lost][-2:] = many[lost][2]  # 0, as all rows that are not compared
        return whole(op, args, backend)

    for lost in itertools.count():
        monkeypatch.setattr(repeat_checks, "call", partial(without, lost))
        assert not next(repeat_checks.last_rows(context, 9, 256)).passed, lost
        if lost + 1 == seen[-1]:
            break


def test_many_rows_are_more_than_a_32_bit_offset_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(repeat_checks, "last_rows", lambda c, rows, n: asked.append(rows * n) or [])
    for device, full in itertools.product(("cpu", "cuda"), (False, True)):
        assert not list(CHECKS["large"](Context(registry()["relu"], "torch", device, full, 1, 0)))
    assert len(asked) == 1 and asked[0] > 2**31


@pytest.mark.parametrize(("served_by", "passes"), [(half_by_half, True), (without_the_end, False)])
def test_the_last_rows_may_be_added_in_another_order(
    monkeypatch: pytest.MonkeyPatch, served_by: Any, passes: bool
) -> None:
    matmul = registry()["matmul"]
    monkeypatch.setattr(repeat_checks, "call", served_by)
    of_any = Context(replace(matmul, tuning=None), "torch", "cpu", True, 1, 0)
    assert not next(repeat_checks.last_rows(of_any, 9, 4096)).passed  # the order is seen
    found = next(repeat_checks.last_rows(Context(matmul, "torch", "cpu", True, 1, 0), 9, 4096))
    assert found.passed == passes and bool(found.message) != passes


def test_a_kernel_for_few_rows_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Context(registry()["matmul"], "skinny", "cpu", True, 1, 0)
    monkeypatch.setattr(Context, "serves", lambda self, args: len(args[0]) <= 64)
    assert list(repeat_checks.last_rows(few, 65, 256)) == []

    repeated = []
    monkeypatch.setattr(repeat_checks, "_outputs_and_grads", lambda c, args, _: [args[0]])
    monkeypatch.setattr(features, "calls", lambda *_: [])
    monkeypatch.setattr(Context, "inputs", lambda c, *how: meta_inputs(c.op, *how[:2]))
    monkeypatch.setattr(compare, "random_like", lambda *_: None)
    monkeypatch.setattr(compare, "same_bits", lambda *_: True)
    for most in (64, 1000):
        monkeypatch.setattr(Context, "serves", lambda self, args, most=most: len(args[0]) <= most)
        repeated.append({one.case for one in CHECKS["repeat"](replace(few, device="cuda"))})
    rows = [{int(case.split()[0]) for case in cases} for cases in repeated]
    assert rows == [{repeat_checks.FEW_ROWS}, {300}] and {len(cases) for cases in repeated} == {3}
