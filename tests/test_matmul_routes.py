"""Who multiplies: routes by rules and by a table, and the kernel for few rows.

Nothing here needs a GPU: the kernel runs in Triton's interpreter, and tables are made up.
"""

from __future__ import annotations

import importlib
import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from products import call, product
from test_matmul import interpret
from tilewright import dispatch, explain, gpu, multiplying, tuned
from tilewright.dims import meta_inputs
from tilewright.errors import UnsupportedError
from tilewright.explain import explain_call
from tilewright.ops.matmul import (
    cuda_impl,
    gluon_impl,
    launches,
    op,
    reference,
    routes,
    skinny_impl,
)
from tilewright.spec import Args, Choice
from tilewright.toolkit import launch as launching
from tilewright.toolkit import matmul_call, recording, workspace
from tilewright.toolkit.launch import programs
from tilewright.toolkit.matmul_call import flat
from tilewright.tuned import file
from tilewright.tuned.file import Bucket, Device, Timed
from tilewright.tuning.plan import grid
from tilewright.tuning.run import source_of

# whose name in the package is its function's
BUILD = importlib.import_module("tilewright.matrix.build")
H200, T4, L40 = gpu.pretend("h200"), gpu.pretend("t4"), gpu.pretend("sm_89")
EVERY_GPU = [gpu.pretend(f"sm_{sm}") for sm in gpu.ARCHS]
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


# --- launch choices of few rows ------------------------------------------------------------------


@pytest.mark.parametrize("on", EVERY_GPU, ids=lambda g: g.name)
def test_strips_fit_their_gpu(on: gpu.Gpu) -> None:
    """In shared memory, as many times as SMs hold programs; and no split is without a step."""
    if on.sm < 80:
        assert not [name for name in able(on, 16, 4096, 4096) if name.startswith("skinny")]
        return
    for m in (1, 16, 17, 32, 33, 64):
        for n, k in itertools.product((8, 64, 520, 4096, 28_672, 128_256), (8, 128, 136, 4096)):
            for launch in ((), *launches.strip_launches(product(m, n, k), on)):
                found = launches.strips(product(m, n, k), on, *launch)
                assert not launch or launch == (found.columns, found.stages)
                assert found.rows == next(rows for rows in (16, 32, 64) if m <= rows)
                stage = 2 * launches.STRIP_DEPTH * (found.columns + found.rows)
                assert found.stages * stage <= on.shared_per_block
                fits_twice = 2 * found.stages * stage <= on.shared_per_block
                assert found.each == (2 if fits_twice else 1)
                assert found.stages >= 3
                steps = programs(k, launches.STRIP_DEPTH)
                assert 1 <= found.splits <= steps  # none is without one
                # all programs of a split sum run at a time
                strips = programs(n, found.columns)
                assert found.splits == 1 or strips * found.splits <= found.each * on.sm_count


def test_the_models_strips_are_near_the_quickest_that_were_measured() -> None:
    """As on an H200: the worst is 48 rows of 4608 x 3584, where six stages outrun three."""
    table = tuned.table(H200, "matmul")
    assert table is not None
    parts = []
    for one in table.buckets:
        skinny = [choice for choice in one.times if choice.backend == "skinny"]
        us = {choice.launch: one.times[choice].us for choice in skinny}
        m, k, n = (int(size) for size in re.findall(r"\d+", one.dims)[:3])
        if m <= launches.MOST_ROWS:
            able = launches.strip_launches(product(m, n, k), H200)
            own = launches.strips(product(m, n, k), H200)
            parts.append(min(us[launch] for launch in able) / us[own.columns, own.stages])
    assert len(parts) > 80 and statistics.geometric_mean(parts) > 0.99 and min(parts) > 0.9


def test_deep_products_of_few_columns_are_split() -> None:
    assert launches.strips(product(16, 4096, 4096), H200).splits > 1
    assert launches.strips(product(16, 64, 128), H200).splits == 1
    assert launches.strips(product(16, 128_256, 4096), H200).splits == 1


@pytest.mark.parametrize("m", [1, 17, 64])
def test_the_room_of_few_rows(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    asked = []

    def room(sums: int, flags: int, device: Any) -> Any:
        asked.append((sums, flags))
        return lambda: (None, None)

    monkeypatch.setattr(workspace, "per_stream", room)
    sizes = ((4096, 4096), (520, 2056), (28_672, 4096), (64, 128))
    for (n, k), columns in itertools.product(sizes, launches.STAGES):
        forced = Choice("skinny", (columns, launches.STAGES[columns][0]))
        with tuned.forcing(forced), recording.recording() as requests:
            skinny_impl.prepare(H200, *call(m, n, k))
        constants = dict(requests[0].constants)
        splits, tiles = requests[0].arguments[-1], programs(n, constants["BLOCK_N"])
        assert constants["BLOCK_N"] == columns
        assert constants["SPLIT"] == (splits > 1)
        if splits == 1:
            assert not asked
            continue
        # the last program's sums end where the room does, and each tile has a flag
        size = constants["BLOCK_N"] * constants["BLOCK_M"]
        assert asked.pop() == (tiles * splits * size, tiles)


@pytest.mark.parametrize(("on", "follows"), [("sm_80", False), ("sm_89", False), ("h200", True)])
def test_few_rows_follow_the_kernel_before_them(on: str, follows: bool) -> None:
    with recording.recording() as requests:
        skinny_impl.prepare(gpu.pretend(on), *call(16, 4096, 4096))
    (request,) = requests
    assert dict(request.options).get("launch_pdl", False) == follows
    assert dict(request.constants)["FOLLOWS"] == follows


@pytest.mark.parametrize("b", ["rows", "columns"])
def test_few_rows_wait_before_they_touch_a_tensor(b: str) -> None:
    with recording.recording() as requests:
        skinny_impl.prepare(H200, *call(16, 4096, 4096, b=b))
    ptx = BUILD._triton(requests[0], 90)[3]
    touched = re.search(r"\b(cp\.async\.c|ld\.global|st\.global|atom\.|red\.|prefetch)", ptx)
    assert touched and ptx.index("griddepcontrol.wait") < touched.start()
    assert "launch_dependents" not in ptx  # measured: it made them slower


@pytest.mark.parametrize(("version", "knows"), [(12020, False), (12030, True), (13000, True)])
def test_drivers_that_cannot_capture_followers(
    monkeypatch: pytest.MonkeyPatch, version: int, knows: bool
) -> None:
    asked = lambda: version  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", asked, raising=False)
    launching.driver_knows_followers.cache_clear()
    assert launching.driver_knows_followers() == knows
    launching.driver_knows_followers.cache_clear()


SHAPES = [
    product(m, n, k, b=b)
    for m in (1, 64, 65, 128, 129, 512, 8192)
    for n, k in ((8, 8), (1024, 512), (1024, 4096), (4608, 3584), (2048, 8192), (57_344, 8192))
    for b in ("rows", "columns")
]


def test_clusters_along_k_run_at_a_time() -> None:
    """A block of one has one tile: a second round of them would begin when the first ends."""
    most = set()
    for one in SHAPES:
        for columns in launches.widths(one):
            found = launches.cluster(one, BFLOAT, H200, columns)
            plan = cuda_impl.plan(H200, one, BFLOAT, found)
            assert found.columns == columns and 1 <= found.tall * found.deep <= 4
            if found.deep > 1:
                assert plan.blocks == plan.sizes.pieces * found.deep
                assert plan.blocks <= H200.sm_count * launches.ROOM[found.deep]
                # each part has steps enough to fill its stages once
                assert one.k // found.deep >= 64 * launches.FEWEST_STEPS
                most.add(found.deep)
            else:
                assert plan.blocks <= H200.sm_count
    assert most == {2, 3, 4}


def test_clusters_fit_a_block() -> None:
    """The ring, the rows that wait and the barriers; two steps at the least."""
    for one in SHAPES:
        for columns, dtype in itertools.product(launches.widths(one), (HALF, BFLOAT)):
            for found in launches._clusters(one, columns, H200):
                plan = cuda_impl.plan(H200, one, dtype, found)
                assert 2 <= plan.stages <= cuda_impl.MOST_STAGES
                assert plan.shared <= H200.shared_per_block
                assert plan.workers == (1 if one.m <= 64 else 2)
                assert plan.workers * 64 == found.rows


def instances(args: Args, *forced: Choice) -> set[str]:
    """The binaries of `cuda` for a call, or for each of these launches."""
    found = set()
    for choice in forced:
        with tuned.forcing(choice), recording.recording() as requests:
            cuda_impl.prepare(H200, *args)
        found |= {request.kernel for request in requests}
    return found


def test_binaries_that_the_table_names_are_watched() -> None:
    """verify and the sanitizers take cases of two groups, in every launch."""
    named: dict[str, set[str]] = {"half T": set(), "half N": set()}
    for job in grid(op.OP):
        decision = routes.ours(H200, args := job.meta())
        assert decision is not None
        if decision.choice.backend == "cuda":
            named[job.place(args)[0]] |= instances(args, decision.choice)
    watched = set()
    for case in op.CASES:
        if case.group in ("edge", "plan"):
            args = meta_inputs(op.OP, case.dims, BFLOAT)
            watched |= instances(
                args, *(c for c in routes.choices(H200, *args) if c.backend == "cuda")
            )
    assert set().union(*named.values()) <= watched
    assert 10 < len(named["half T"]) <= 40 and len(named["half N"]) <= 40


def test_the_models_clusters_are_near_the_quickest_that_were_measured() -> None:
    """The worst are few rows of 4608 x 3584 where b lies by rows: of it 80 columns are fetched as
    128, and the model does not know."""
    table = tuned.table(H200, "matmul")
    assert table is not None
    parts = []
    for one in table.buckets:
        us = {c.launch[0]: timed.us for c, timed in one.times.items() if c.backend == "cuda"}
        m, k, n = (int(size) for size in re.findall(r"\d+", one.dims)[:3])
        by = "rows" if one.kind == "half N" else "columns"
        if us:
            own = launches.cluster(product(m, n, k, b=by), BFLOAT, H200)
            parts.append(min(us.values()) / us[own.columns])
    assert len(parts) > 400 and statistics.geometric_mean(parts) > 0.98 and min(parts) > 0.75


def test_the_table_of_the_h200_is_of_these_kernels() -> None:
    """Every product of the grid, with the model's word of now, and winners that are no worse than
    an incumbent may be."""
    table = tuned.table(H200, "matmul")
    assert table is not None
    assert table.source == source_of(op.OP)
    jobs = {job.place(job.meta()): job for job in grid(op.OP)}
    assert [bucket.key for bucket in table.buckets] == list(jobs)
    for one in table.buckets:
        model = jobs[one.key].expected(H200, jobs[one.key].meta())
        for choice, timed in one.times.items():  # of four digits
            assert timed.expected == pytest.approx(model[choice], rel=1e-3), (one.dims, choice)
        assert one.choice is not None
        best = min(timed.us for timed in one.times.values())
        assert one.times[one.choice].us <= best * (1 + tuned.STAY)


# --- the route of cuBLAS --------------------------------------------------------------------------


def test_halves_on_a_gpu_go_straight_to_torch() -> None:
    def given(dim: int, dtype: torch.dtype = BFLOAT, is_cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, dim=lambda: dim)

    def direct(a: Any, b: Any, out_dtype: Any = None) -> Any:
        return reference.direct(a, b, out_dtype, "ieee", None, False)

    for dim, out_dtype in itertools.product((2, 3), (None, BFLOAT)):
        run = direct(given(dim), given(2), out_dtype)
        for flip_a, flip_b in itertools.product((False, True), repeat=2):
            for m, n, k in itertools.product((4, 1, 0), (6, 1, 0), (5, 1, 0)):
                a, b = torch.randn(*[3] * (dim - 2), m, k), torch.randn(k, n)
                a = a.mT.contiguous().mT if flip_a else a
                b = b.mT.contiguous().mT if flip_b else b
                found = run(a, b, None, "ieee", None, False, None)
                assert torch.equal(found, torch.matmul(a, b))
                assert found.stride() == multiplying.outputs(a, b, None).stride()
    assert direct(given(2), given(2), SINGLE) is None
    assert direct(given(2), given(3)) is None  # torch's result may lie by columns
    assert direct(given(1), given(2)) is None
    assert direct(given(2, SINGLE), given(2, SINGLE)) is None
    assert direct(given(2, is_cuda=False), given(2)) is None


# --- routes: who can -----------------------------------------------------------------------------


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of no GPU, whatever the package brings along."""
    monkeypatch.setattr(tuned, "table", lambda *_: None)
    yield


def able(on: gpu.Gpu, *sizes: int, **how: Any) -> list[str]:
    return [str(choice) for choice in routes.choices(on, *call(*sizes, **how))]


GLUON = [f"gluon:{columns}" for columns in (256, 192, 160, 128, 64)]
CUDA = [f"cuda:{columns}" for columns in (64, 80, 112, 128, 144, 160, 192, 224, 256)]
HOPPER = [*GLUON, *CUDA]
FEWER = [*GLUON, "cuda:40", "cuda:48", *CUDA]  # than 129 rows
SKINNY = [f"skinny:{launch}" for launch in ("64x6", "64x4", "64x3", "128x4")]


def test_who_can_serve_a_call() -> None:
    assert able(H200, 129, 4096, 4096) == [*HOPPER, "triton", "torch"]
    assert able(H200, 65, 4096, 4096) == [*FEWER, "triton", "torch"]
    for rows in (64, 33, 32, 17, 16, 1):
        skinny = SKINNY if rows <= 32 else [SKINNY[0], *SKINNY[2:]]  # no room for two of four
        assert able(H200, rows, 4096, 4096) == [*skinny, *FEWER, "triton", "torch"]
        assert able(H200, rows, 4096, 4096, count=2) == [*FEWER, "triton", "torch"]
    for on in EVERY_GPU:
        found = able(on, 16, 4096, 4096)
        assert found[-2:] == ["triton", "torch"]
        assert ("skinny:64x4" in found) == (on.sm >= 80)
        large = on.sm in (80, 90, 100)  # shared memory: six stages are 123 KB
        assert ("skinny:64x6" in found) == ("skinny:64x3" in found) == large
        assert ("skinny:128x4" in found) == (on.sm in (90, 100))  # where it does not spill
        assert (set(HOPPER) <= set(found)) == (on.sm == 90)
    assert able(H200, 64, 4096, 4096, dtype=torch.float64) == ["torch"]


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((128, 4096, 4097), {}),  # rows of 8194 bytes
        ((128, 4097, 4096), {}),  # so has the result
        ((128, 4097, 4096), {"b": "rows"}),
        ((127, 4096, 4096), {"a": "columns"}),
        ((128, 4096, 4096), {"dtype": SINGLE}),  # ieee
        ((128, 4096, 4096), {"dtype": SINGLE, "precision": "tf32", "b": "rows"}),
        ((128, 4096, 4096), {"dtype": SINGLE, "precision": "tf32", "a": "columns"}),
        ((128, 4096, 4096), {"block": (64, 64, 64)}),
    ],
)
def test_what_the_hopper_kernel_leaves_to_others(sizes: Any, how: Any) -> None:
    assert able(H200, *sizes, **how) == ["triton", "torch"]
    for backend in ("gluon", "cuda"):
        with pytest.raises(UnsupportedError):
            dispatch.choose(op.OP, call(*sizes, **how), backend=backend, gpu=H200)


def test_what_the_hopper_kernel_takes() -> None:
    for a, b in itertools.product(("rows", "columns"), repeat=2):
        assert set(HOPPER) < set(able(H200, 128, 4096, 4096, a=a, b=b))
    found = able(H200, 128, 4096, 4096, dtype=SINGLE, precision="tf32")
    assert found == [*GLUON, "triton", "torch"]
    assert set(HOPPER) < set(able(H200, 127, 4096, 4096))  # TMA stops at the last row
    assert set(HOPPER) < set(able(H200, 128, 4100, 4096, out_dtype=SINGLE, b="columns"))


def test_operands_that_begin_off_16_bytes() -> None:
    a, b, *rest = call(16, 4096, 4096)
    shifted = torch.empty(16 * 4096 + 1, dtype=BFLOAT, device="meta")[1:].view(16, 4096)
    weights = torch.empty(4096, 4096 + 8, dtype=BFLOAT, device="meta")
    for left, right in ((shifted, b), (a, weights[:, 1:4097].mT)):
        assert [c.backend for c in routes.choices(H200, left, right, *rest)] == ["triton", "torch"]
    wide = weights[:, 8:].mT
    found = [c.backend for c in routes.choices(H200, a, wide, *rest)]
    assert found == [*["skinny"] * 4, *["gluon"] * 5, *["cuda"] * 11, "triton", "torch"]


def test_the_kind_and_place_of_a_call() -> None:
    def placed(*sizes: int, **how: Any) -> Any:
        return routes.place(*call(*sizes, **how))

    assert placed(16, 32, 64) == ("half T", (4.0, 5.0, 6.0))
    assert placed(16, 32, 64, dtype=HALF) == placed(16, 32, 64)
    assert placed(16, 32, 64, a="columns") == placed(16, 32, 64)
    assert placed(16, 32, 64, b="rows")[0] == "half N"
    assert placed(16, 32, 64, dtype=SINGLE)[0] == "ieee T"
    assert placed(16, 32, 64, dtype=SINGLE, precision="tf32")[0] == "tf32 T"
    assert placed(16, 32, 64, count=4)[1] == (6.0, 5.0, 6.0)
    assert placed(0, 32, 64)[1][0] == 0.0


@pytest.mark.parametrize("sizes", [(5, 7, 9), (300, 40, 16), (20, 400, 8), (1, 1, 3)])
def test_a_part_of_a_product_is_that_part_of_the_whole(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, s, generator=rng).float() for s in ((m, k), (k, n)))
    (left, right, *rest), take = routes.part(rng, a, b, None, "ieee", None, False)
    assert rest == [None, "ieee", None, False]
    whole = a @ b
    assert torch.equal(left @ right, take(whole))
    # corners are among it
    first, last = left[-2], left[-1]
    assert torch.equal(first, a[0]) and torch.equal(last, a[-1])
    assert torch.equal(right[:, -2], b[:, 0]) and torch.equal(right[:, -1], b[:, -1])
    wrong = whole.clone()
    wrong[-1, -1] += 1
    assert not torch.equal(left @ right, take(wrong))


# --- routes: who shall, without a table ----------------------------------------------------------


def chosen(on: gpu.Gpu, *sizes: int, **how: Any) -> str:
    return dispatch.choose(op.OP, call(*sizes, **how), gpu=on).backend.name


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_hopper_our_kernels_serve_what_they_can(deterministic: bool) -> None:
    how = {"deterministic": deterministic}
    for m in (1, 16, 64):
        assert chosen(H200, m, 4096, 4096, **how) == "skinny"
    for m in (65, 512, 8192):
        assert chosen(H200, m, 4096, 4096, **how) in ("gluon", "cuda")
    assert chosen(H200, 16, 4096, 4096, count=200, **how) in ("torch", "triton")  # each of few rows
    left_over = "triton" if deterministic else "torch"
    assert chosen(H200, 512, 4096, 4097, **how) == left_over
    assert chosen(H200, 16, 4096, 4097, **how) == left_over
    assert chosen(H200, 512, 4096, 4096, dtype=SINGLE, **how) == left_over
    assert chosen(H200, 512, 4096, 4096, dtype=SINGLE, precision="tf32", **how) == "gluon"


@pytest.mark.usefixtures("no_table")
def test_of_the_hopper_kernels_the_model_names_one() -> None:
    """And it says so."""
    named = set()
    for m, n in itertools.product((96, 512, 4096), (1024, 4608, 10_240)):
        args = call(m, n, 3584)
        us = {name: routes.expected(H200, Choice(name), *args) for name in ("gluon", "cuda")}
        first, second = sorted(us, key=lambda name: us[name])
        assert chosen(H200, m, n, 3584) == first
        named.add(first)
        yields = {"gluon": routes.yields_gluon, "cuda": routes.yields_cuda}
        assert yields[first](H200, *args) is None
        told = f"the model finds {first} quicker: {us[first]:.1f} us, not {us[second]:.1f}"
        assert yields[second](H200, *args) == told
    assert "cuda" in named


class OnCuda(torch.Tensor):
    """A meta tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.usefixtures("no_table")
def test_a_missing_cuda_core_leaves_calls_to_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "_missing", lambda technology: "no cuda-core" if technology == "cuda" else None
    )
    a, b, *rest = call(512, 4608, 3584)
    pretended, there = (a, b, *rest), (a.as_subclass(OnCuda), b.as_subclass(OnCuda), *rest)
    able_to = [{c.backend for c in routes.choices(H200, *args)} for args in (pretended, there)]
    assert able_to[0] - able_to[1] == {"cuda"}
    assert routes.yields_gluon(H200, *pretended) is not None
    assert routes.yields_gluon(H200, *there) is None


@pytest.mark.usefixtures("tuned_h200")
def test_a_decision_knows_whether_cuda_core_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a meta tensor nothing is missing: what `explain` was told is no word for a real call."""
    monkeypatch.setattr(
        dispatch, "_missing", lambda technology: "no cuda-core" if technology == "cuda" else None
    )
    monkeypatch.setattr(routes, "_decided", {})
    a, b, *rest = call(300, 4096, 4096)
    for args in ((a, b, *rest), (a.as_subclass(OnCuda), b.as_subclass(OnCuda), *rest)):
        found = routes.decision(H200, args)
        assert found is not None and "gluon" in found.best
    assert len(routes._decided) == 2


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize("on", [g for g in EVERY_GPU if g.sm != 90], ids=lambda g: g.name)
def test_elsewhere_cublas_serves_unless_bits_must_repeat(on: gpu.Gpu) -> None:
    for m in (1, 64, 65, 4096):
        assert chosen(on, m, 4096, 4096) == "torch"
        is_few = m <= 64 and on.sm >= 80
        assert chosen(on, m, 4096, 4096, deterministic=True) == ("skinny" if is_few else "triton")
        assert chosen(on, m, 4095, 4097, deterministic=True) == "triton"
    told = dict(dispatch.choose(op.OP, call(512, 4096, 4096), gpu=on).refused)
    assert "where no table says better" in told["triton"]


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize("on", EVERY_GPU, ids=lambda g: g.name)
def test_a_deterministic_call_never_comes_to_cublas(on: gpu.Gpu) -> None:
    for m, n, k in itertools.product((1, 64, 65, 500), (8, 33, 4096), (8, 35, 4096)):
        for dtype, b in itertools.product((BFLOAT, SINGLE), ("rows", "columns")):
            how = {"dtype": dtype, "b": b, "deterministic": True}
            assert chosen(on, m, n, k, **how) != "torch"
    asked = dispatch.choose(op.OP, call(8, 8, 8, deterministic=True), gpu=on, backend="torch")
    assert asked.backend.name == "torch"  # unless it is asked for


@pytest.mark.usefixtures("no_table")
def test_a_block_is_the_portable_kernels() -> None:
    for on in (H200, L40, T4):
        for m in (16, 512):
            assert chosen(on, m, 4096, 4096, block=(64, 64, 64)) == "triton"


@pytest.mark.usefixtures("no_table")
def test_without_a_table_nothing_is_predicted() -> None:
    assert explain_call(op.OP, call(512, 4096, 4096), gpu=H200).predicted_us is None
    assert routes.launch("gluon", H200, *call(512, 4096, 4096)) == ()


@pytest.mark.usefixtures("no_table")
def test_a_backward_of_few_rows_is_not_the_hopper_kernels() -> None:
    rule = op.OP.autograd
    assert rule is not None

    def serves(on: gpu.Gpu, rows: int, **how: Any) -> str:
        args = call(rows, 4096, 4096, **how)
        grad = torch.empty(rows, 4096, dtype=BFLOAT, device="meta")
        args = op.OP.backward_call(args, (grad,), (grad,))
        return dispatch.choose(rule.op, args, gpu=on).backend.name

    assert [serves(H200, rows) for rows in (64, 65)] == ["torch", "gluon"]
    assert [serves(H200, rows, deterministic=True) for rows in (64, 65)] == ["triton", "gluon"]
    assert serves(L40, 512) == "torch"
    assert serves(L40, 512, deterministic=True) == "triton"


# --- routes: who shall, by a table ---------------------------------------------------------------


def bucket(times: dict[str, float], winner: str, *sizes: int, **how: Any) -> Bucket:
    args = call(*sizes, **how)
    kind, coordinates = routes.place(*args)
    timed = {
        Choice.of(name): Timed(us, routes.expected(H200, Choice.of(name), *args))
        for name, us in times.items()
    }
    dims = "x".join(map(str, sizes))
    return Bucket(dims, "bfloat16", kind, coordinates, Choice.of(winner), timed)


FEW = {
    "skinny:64x6": 21.0, "skinny:64x4": 20.0, "gluon:64": 26.0, "triton": 40.0,
    "torch": 30.0,
}  # fmt: skip
MANY = {
    "gluon:256": 300.0, "gluon:192": 270.0, "gluon:64": 500.0, "triton": 600.0,
    "torch": 290.0,
}  # fmt: skip
LARGE = {"gluon:256": 3000.0, "gluon:192": 3300.0, "triton": 6000.0, "torch": 2500.0}


@pytest.fixture
def tuned_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's table: few rows are skinny's, some gluon's, many cuBLAS's."""
    buckets = (
        bucket(FEW, "skinny:64x4", 16, 4096, 4096),
        bucket(MANY, "gluon:192", 512, 4096, 4096),
        bucket(LARGE, "torch", 8192, 4096, 4096),
        bucket({"torch": 5.0, "triton": 4.0}, "triton", 128, 512, 512, b="rows"),
    )
    table = file.Table(H200.name, 0.02, {"torch": "2.11"}, "digest", buckets)
    text = file.text(Device.of(H200), {"matmul": table})
    (tmp_path / f"{H200.short_name}.json").write_text(text)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    tuned.reset()
    yield
    tuned.reset()


@pytest.mark.usefixtures("tuned_h200")
def test_a_table_decides() -> None:
    assert chosen(H200, 16, 4096, 4096) == "skinny"
    assert chosen(H200, 512, 4096, 4096) == "gluon"
    assert chosen(H200, 8192, 4096, 4096) == "torch"
    assert chosen(H200, 128, 512, 512, b="rows") == "triton"
    assert chosen(H200, 7000, 4096, 4096, dtype=HALF) == "torch"  # the nearest; halves are alike
    assert chosen(H200, 512, 4096, 4096, dtype=SINGLE, precision="tf32") == "gluon"  # no bucket
    assert chosen(gpu.pretend("h100"), 8192, 4096, 4096) != "torch"  # another GPU's table
    told = dict(dispatch.choose(op.OP, call(8192, 4096, 4096), gpu=H200).refused)
    assert "torch is the choice of the table of NVIDIA H200: 2500.0 us, not 3000.0" in told["gluon"]


@pytest.mark.usefixtures("tuned_h200")
def test_a_decision_is_made_once_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Args] = []
    decide = routes._decide
    monkeypatch.setattr(routes, "_decide", lambda gpu, args: made.append(args) or decide(gpu, args))
    monkeypatch.setattr(routes, "_decided", {})
    for _ in range(2):
        assert chosen(H200, 8192, 4096, 4096) == "torch"  # every backend asked
    assert len(made) == 1
    for how in ({"a": "columns"}, {"dtype": HALF}, {"deterministic": True}):
        chosen(H200, 8192, 4096, 4096, **how)
    assert len(made) == 4
    a, b, *rest = call(8192, 4096, 4096)
    shifted = torch.empty(8192 * 4096 + 1, dtype=BFLOAT, device="meta")[1:].view(8192, 4096)
    assert dispatch.choose(op.OP, (shifted, b, *rest), gpu=H200).backend.name == "torch"
    assert len(made) == 5
    twin = replace(H200, memory_bytes=H200.memory_bytes // 2)  # with the same table
    assert dispatch.choose(op.OP, (a, b, *rest), gpu=twin).backend.name == "torch"
    assert len(made) == 6
    tuned.reset()  # another table
    assert chosen(H200, 8192, 4096, 4096) == "torch"
    assert len(made) == 7
    monkeypatch.setattr(routes, "MOST_DECIDED", 4)
    chosen(H200, 8192, 4096, 8192)
    assert len(routes._decided) == 1


@pytest.mark.usefixtures("tuned_h200")
def test_one_that_cannot_serve_is_passed_over_in_the_table() -> None:
    assert chosen(H200, 512, 4096, 4097) == "torch"  # nearest to gluon's; then cuBLAS is quickest
    assert chosen(H200, 16, 4096, 4097) == "torch"


@pytest.mark.usefixtures("tuned_h200")
def test_the_launch_of_a_table_is_taken() -> None:
    few, args, large = (call(m, 4096, 4096) for m in (16, 512, 8192))
    assert routes.launch("gluon", H200, *args) == (192,)
    assert routes.launch("gluon", H200, *large) == (256,)  # its best, though torch is quicker
    assert routes.launch("gluon", H200, *few) == (64,)
    assert routes.launch("skinny", H200, *few) == (64, 4)
    assert routes.launch("skinny", H200, *large) == ()
    assert columns(args) == 192
    assert columns(few) == 64
    assert stages(few) == 4
    with tuned.forcing(Choice("gluon", (128,))):
        assert columns(args) == 128
        assert stages(few) == 4
    with tuned.forcing(Choice("skinny", (64, 6))):
        assert stages(few) == 6
        assert columns(few) == 64


def columns(args: Args) -> int:
    """Of the tiles that the Hopper kernel is launched with."""
    with recording.recording() as requests:
        gluon_impl.prepare(H200, *args)
    how = dict(requests[0].constants)
    found: int = how["COLUMNS"] + how["REST"]
    return found


def stages(args: Args) -> int:
    with recording.recording() as requests:
        skinny_impl.prepare(H200, *args)
    return dict(requests[0].options)["num_stages"]


@pytest.mark.usefixtures("tuned_h200")
def test_a_block_stands_above_the_table() -> None:
    for m in (16, 512, 8192):
        assert chosen(H200, m, 4096, 4096, block=(64, 64, 64)) == "triton"


@pytest.mark.usefixtures("tuned_h200")
def test_a_deterministic_call_heeds_a_table_but_for_cublas() -> None:
    assert chosen(H200, 8192, 4096, 4096, deterministic=True) == "gluon"
    assert chosen(H200, 512, 4096, 4096, deterministic=True) == "gluon"
    assert chosen(H200, 16, 4096, 4096, deterministic=True) == "skinny"
    assert chosen(H200, 128, 512, 512, b="rows", deterministic=True) == "triton"
    for sizes in ((512, 4096, 4097), (8192, 4097, 4096), (16, 4096, 4097)):
        assert chosen(H200, *sizes, deterministic=True) == "triton"


@pytest.mark.usefixtures("tuned_h200")
def test_explain_tells_what_the_table_predicts() -> None:
    args = call(512, 4096, 4096)
    found = explain("matmul", *args[:2], gpu="h200")
    assert (found.backend, found.predicted_us) == ("gluon", 270.0)
    assert "gluon 270.0" in str(found) and "torch 290.0" in str(found)
    assert "_matmul_on_hopper" in found.kernels
    assert explain("matmul", *args[:2], gpu="h200", backend="torch").predicted_us == 290.0
    # the model carries a time over to another shape
    deeper = explain("matmul", *call(512, 4096, 8192)[:2], gpu="h200")
    assert deeper.predicted_us is not None and found.predicted_us is not None
    assert found.predicted_us < deeper.predicted_us < 3 * found.predicted_us


def test_the_shipped_table_serves_layers_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer after another is left out, and what was measured there judges the decisions."""
    shipped = tuned.table(H200, routes.NAME)
    assert shipped is not None
    parts: dict[bool, list[float]] = {True: [], False: []}
    for left_out in shipped.buckets:
        layer = left_out.kind, left_out.coordinates[1:]
        rest = [b for b in shipped.buckets if (b.kind, b.coordinates[1:]) != layer]
        monkeypatch.setattr(tuned, "table", lambda *_, rest=rest: replace(shipped, buckets=rest))
        m, k, n = map(int, re.findall(r"\d+", left_out.dims)[:3])
        args = call(m, n, k, b="rows" if left_out.kind == "half N" else "columns")
        model = {choice: routes.expected(H200, choice, *args) for choice in left_out.times}
        found = tuned.decide(H200, routes.NAME, routes.place(*args), model)
        assert found is not None and found.bucket in rest
        us = {choice: timed.us for choice, timed in left_out.times.items()}
        # where our tiles compute up to a half too many rows, and cuBLAS is hard to foretell
        parts[160 <= m <= 320].append(min(us.values()) / us[found.choice])
    for hard, mean, low in ((False, 0.98, 0.08), (True, 0.95, 0.28)):
        assert statistics.geometric_mean(parts[hard]) >= mean
        assert sum(part < 0.93 for part in parts[hard]) <= low * len(parts[hard])


# --- few rows, in the interpreter ----------------------------------------------------------------


FAR = """
import torch, tilewright

rng = torch.Generator().manual_seed(0)
a, b = torch.randn(17, 136, generator=rng).half(), torch.randn(136, 24, generator=rng).half()
room = torch.empty(135 * 2**24 + 24, dtype=b.dtype)  # paged in where it is written
far = room.as_strided((136, 24), (2**24, 1)).copy_(b)
wanted = tilewright.matmul(a, b, backend="skinny")
assert torch.equal(tilewright.matmul(a, far, backend="skinny"), wanted)
columns = tilewright.matmul(b.t(), far, backend="skinny")
far_rows = room.as_strided((24, 136), (1, 2**24))
assert torch.equal(tilewright.matmul(far_rows, b, backend="skinny"), columns)
"""


@pytest.mark.drawn(seconds=3.2, family="slow")
def test_rows_of_b_may_lie_far_apart_for_few_rows_too() -> None:
    interpret(FAR)


SPLITS = """
import torch, tilewright
from tilewright.gpu import interpreter
from tilewright.ops.matmul import launches, skinny_impl
from tilewright.ops.matmul.launches import Strips

rng = torch.Generator().manual_seed(0)
on = interpreter()
for m, n, k in ((17, 72, 1096), (5, 136, 1024)):
    for dtype in (torch.float16, torch.bfloat16):
        a = torch.randint(-2, 3, (m, k), generator=rng).to(dtype)
        b = torch.randint(-2, 3, (k, n), generator=rng).to(dtype)
        wanted = (a.double() @ b.double()).float()
        for columns, splits in ((64, 1), (64, 2), (64, 3), (64, 8), (128, 1), (128, 3)):
            skinny_impl.strips = lambda product, gpu: Strips(32, columns, 2, splits, 1)
            run = skinny_impl.prepare(on, a, b, torch.float32, "ieee", None, False)
            assert torch.equal(run(a, b), wanted), (m, n, k, dtype, columns, splits)

# floats: the same bits again, and a room whose flags are as they were
a, b = torch.randn(17, 1096, generator=rng).half(), torch.randn(1096, 136, generator=rng).half()
for columns in (64, 128):
    tiles = -(-136 // columns)
    sums, flags = torch.empty(tiles * 8 * 32 * columns), torch.zeros(tiles, dtype=torch.int32)
    skinny_impl.strips = lambda product, gpu: Strips(32, columns, 2, 8, 1)
    skinny_impl.workspace.per_stream = lambda *_: lambda: (sums, flags)
    run = skinny_impl.prepare(on, a, b, None, "ieee", None, False)
    first = run(a, b)
    assert not flags.any()
    sums.fill_(float("nan"))
    assert torch.equal(run(a, b), first)
    assert not flags.any() and not sums.isnan().any()  # each split has a place of its own
"""


@pytest.mark.drawn(seconds=7.2, family="slow")
def test_splits_give_the_bits_of_one() -> None:
    interpret(SPLITS)


PARTS = """
import torch, triton, triton.language as tl
from tilewright.toolkit.triton_lib import part_of

@triton.jit(do_not_specialize=["count", "parts"])
def dealt(to, count, parts):
    part = tl.program_id(0)
    first, end = part_of(count, part, parts)
    tl.store(to + 2 * part, first)
    tl.store(to + 2 * part + 1, end)

# 2^24 steps are 2^31 deep: a part's number by theirs has more than 32 bits
for count in (1, 7, 32, 264, 2**24 - 1, 2**24):
    for parts in {1, min(3, count), min(264, count)}:
        to = torch.full((parts, 2), -1, dtype=torch.int32)
        dealt[parts,](to, count, parts)
        first, end = to.T.tolist()
        assert [0, *end] == [*first, count], (count, parts)
        sizes = {b - a for a, b in zip(first, end)}
        assert sizes <= {count // parts, -(-count // parts)}, (count, parts)
"""


@pytest.mark.drawn(seconds=4.3, family="slow")
def test_parts_along_k_are_even_and_miss_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads a kernel's text from its file
    program.write_text(PARTS)
    interpret(f"import runpy; runpy.run_path({str(program)!r})")


ROWS = """
import torch, tilewright

rng = torch.Generator().manual_seed(0)
b = torch.randint(-2, 3, (264, 136), generator=rng).half()
for m in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64):
    a = torch.randint(-2, 3, (m, 264), generator=rng).half()
    wanted = tilewright.matmul(a, b, backend="torch")
    for weights in (b, b.t().contiguous().t()):
        assert torch.equal(tilewright.matmul(a, weights, backend="skinny"), wanted), m
try:
    tilewright.matmul(torch.zeros(65, 264).half(), b, backend="skinny")
except tilewright.UnsupportedError as e:
    assert "65 rows" in str(e), e
else:
    raise AssertionError("65 rows are too many")
"""


@pytest.mark.drawn(seconds=4.7, family="slow")
def test_rows_around_the_tiles() -> None:
    interpret(ROWS)


# --- what only some calls have -------------------------------------------------------------------


def test_other_kinds_of_calls_are_in_no_table() -> None:
    """A stack of matrices reads more than its rows tell, and a block or a wider result is another
    kernel: where nothing was measured, nothing is predicted."""
    plain = routes.place(*call(64, 4096, 4096))
    assert explain_call(op.OP, call(64, 4096, 4096), gpu=H200).predicted_us is not None
    for how in ({"count": 64}, {"block": (64, 64, 64)}, {"out_dtype": SINGLE}):
        args = call(64, 4096, 4096, **how)
        assert routes.place(*args)[0] != plain[0]
        assert explain_call(op.OP, args, gpu=H200).predicted_us is None
    shared = torch.empty(3, 8, 64, device="meta").mT, torch.empty(8, 16, device="meta")
    assert "stack" not in routes.place(*shared, None, "ieee", None, False)[0]  # one b for all


@pytest.mark.parametrize("sizes", [(1, 2**31, 8), (8, 8, 2**31), (2**31, 8, 8)])
def test_sizes_that_32_bits_do_not_number(sizes: tuple[int, int, int]) -> None:
    args = call(*sizes, dtype=HALF)
    for backend in ("gluon", "skinny", "triton"):
        with pytest.raises(UnsupportedError, match="32 bits"):
            dispatch.choose(op.OP, args, backend=backend, gpu=H200)
    assert dispatch.choose(op.OP, args, gpu=H200).backend.name == "torch"


def test_choosing_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of three levels are copied when they are multiplied, not to learn their sizes."""
    a, b = torch.empty(2, 1, 3, 8, 16), torch.empty(2, 1, 16, 8)
    asked = []
    monkeypatch.setattr(matmul_call, "flat", lambda *x: asked.append(x) or flat(*x))
    assert matmul_call.seen(a, b).count == 12
    assert [x.is_meta for x in asked[0]] == [True, True]


@pytest.mark.parametrize(("theirs", "serves"), [(9.0, "torch"), (11.0, "gluon")])
def test_a_backward_goes_by_the_table_too(
    monkeypatch: pytest.MonkeyPatch, theirs: float, serves: str
) -> None:
    def told(gpu: Any, args: Args) -> Any:
        return SimpleNamespace(best={"gluon": (None, 10.0), "torch": (None, theirs)})

    monkeypatch.setattr(routes, "decision", told)
    backward, args = op.OP.in_phase(call(256, 512, 1024), "backward")
    choice = dispatch.choose(backward, args, gpu=H200)
    assert choice.backend.name == serves
    if serves == "torch":
        assert "18.0 us, not 20.0" in dict(choice.refused)["gluon"]


def test_small_tf32_products_are_cublas() -> None:
    for size, serves in ((1024, "torch"), (4096, "gluon")):
        args = call(size, size, size, dtype=SINGLE, precision="tf32")
        assert dispatch.choose(op.OP, args, gpu=H200).backend.name == serves
