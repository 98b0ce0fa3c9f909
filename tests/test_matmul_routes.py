"""Who multiplies, and how the work is cut: routes, launch choices, and memory that calls share.

Nothing here needs a GPU. What blocks of the Hopper kernel do is its own text, run as plain Python
with a stand-in for Gluon; the kernel for few rows runs in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from test_matmul import interpret
from tilewright import dispatch, explain, gpu, tuned
from tilewright.errors import UnsupportedError
from tilewright.explain import explain_call
from tilewright.ops.matmul import gluon_impl, hopper_kernels, launches, op, routes, skinny_impl
from tilewright.ops.matmul.launches import Tiles
from tilewright.spec import Args, Choice
from tilewright.toolkit import matmul_call, memory, recording, workspace
from tilewright.toolkit.launch import programs
from tilewright.toolkit.matmul_call import Product, flat, see
from tilewright.tuned import file
from tilewright.tuned.file import Bucket, Device, Timed

H200, T4, L40 = gpu.pretend("h200"), gpu.pretend("t4"), gpu.pretend("sm_89")
EVERY_GPU = [gpu.pretend(f"sm_{sm}") for sm in gpu.ARCHS]
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
WIDTHS = (256, 192, 128, 64)


def call(m: int, n: int, k: int, **how: Any) -> Args:
    """A call's arguments, on meta tensors. b lies by columns, as a linear layer's weight."""
    dtype, count = how.get("dtype", BFLOAT), how.get("count", 1)
    lead = (count,) if count > 1 else ()

    def laid(rows: int, columns: int, by: str) -> torch.Tensor:
        sizes = (rows, columns) if by == "rows" else (columns, rows)
        x = torch.empty(*lead, *sizes, dtype=dtype, device="meta")
        return x if by == "rows" else x.mT

    a, b = laid(m, k, how.get("a", "rows")), laid(k, n, how.get("b", "columns"))
    precision, deterministic = how.get("precision", "ieee"), how.get("deterministic", False)
    return a, b, how.get("out_dtype"), precision, how.get("block"), deterministic


def product(m: int, n: int, k: int, **how: Any) -> Product:
    found = see(*call(m, n, k, **how)[:2])
    assert found is not None
    return found


# --- what blocks of the Hopper kernel do ---------------------------------------------------------


class Sums:
    """A tensor of sums: the steps along K that were added, in that order."""

    type = SimpleNamespace(layout=None)

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __add__(self, other: Sums) -> Sums:
        return Sums(*self.steps, *other.steps)


class Machine:
    """A stand-in for Gluon, and the memory that the kernel works in."""

    def __init__(self) -> None:
        self.block = self.blocks = 0
        self.sums: dict[int, Sums] = {}
        self.flags: dict[int, int] = {}

    def gl(self) -> SimpleNamespace:
        return SimpleNamespace(
            program_id=lambda axis: self.block,
            num_programs=lambda axis: self.blocks,
            where=lambda condition, x, y: x if condition else y,
            minimum=min,
            static_range=range,
            arange=lambda first, last, layout: 0,
            zeros_like=lambda like: Sums(),
            store=self.sums.__setitem__,
            load=lambda at, cache_modifier: self.sums[at],
            atomic_add=self.add,
            atomic_xchg=lambda at, value, sem: self.flags.__setitem__(at, value),
            constexpr=None,
        )

    def add(self, at: int, value: int, sem: str) -> int:
        assert sem == "acq_rel"  # whoever comes last sees what the others stored
        self.flags[at] = self.flags.get(at, 0) + value
        return self.flags[at] - value


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The kernel's functions as plain Python; multiplying and TMA say what they were asked for."""
    machine = Machine()
    for name, value in list(vars(hopper_kernels).items()):
        if name.startswith("_") and hasattr(value, "fn"):
            monkeypatch.setattr(hopper_kernels, name, value.fn)
    monkeypatch.setattr(hopper_kernels, "gl", machine.gl())
    for name in ("barrier", "tma_store_wait"):
        monkeypatch.setattr(hopper_kernels, name, lambda *_: None)
    monkeypatch.setattr(hopper_kernels, "_flat", lambda x: x)
    monkeypatch.setattr(hopper_kernels, "_unflat", lambda x, how: x)
    ignored = SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None)
    monkeypatch.setattr(hopper_kernels, "mbarrier", ignored)
    return machine


def requested(args: Args, on: gpu.Gpu, tiles: Tiles | None = None) -> tuple[Any, Any, Any, Any]:
    """(Where, How, blocks, (sums, flags)) that `prepare` binds for a call."""
    asked: list[tuple[int, int]] = [(0, 0)]
    grids: list[tuple[int, ...]] = []

    def room(sums: int, flags: int, device: torch.device) -> Callable[[], Any]:
        asked.append((sums, flags))
        return lambda: (None, None)

    def bound(kernel: Any, grid: tuple[int, ...], *rest: Any, **options: Any) -> Any:
        grids.append(grid)
        return real(kernel, grid, *rest, **options)

    real = gluon_impl.bind
    with pytest.MonkeyPatch.context() as patch, recording.recording() as requests:
        patch.setattr(workspace, "per_stream", room)
        patch.setattr(gluon_impl, "bind", bound)
        if tiles is not None:
            patch.setattr(launches, "hopper_tiles", lambda *_: tiles)
        gluon_impl.prepare(on, *args)
    (request,) = requests
    sizes = dict(zip(hopper_kernels.SIZES, request.arguments[6:16], strict=True))
    where, how = SimpleNamespace(**sizes), SimpleNamespace(**dict(request.constants))
    return where, how, grids[0][0], asked[-1]


def consumed(machine: Machine, order: list[int], where: Any, how: Any) -> dict[Any, Any]:
    """What all blocks store, by (matrix, row, column), when they run in this order."""
    stored: dict[Any, Any] = {}
    kernels: Any = hopper_kernels

    def store(found: Any, matrix: int, row: int, column: int, *rest: Any) -> None:
        *_, which = rest
        key = matrix, row + which * how.SHARE, column
        assert key not in stored, "a tile is stored twice"
        stored[key] = [x.steps for x in found]

    def multiply(first: int, last: int, slot: int, phase: int, *rest: Any) -> Any:
        steps = range(first, last)
        return ((how.COLUMNS, steps), (how.REST, steps)), slot, phase

    def parts(acc: Any, PART: int) -> tuple[Sums, ...]:
        columns, steps = acc
        return (Sums(*steps),) * (columns // PART)

    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {"_multiply": multiply, "_parts": parts, "_store": store}.items():
            patch.setattr(kernels, name, stand_in)
        for machine.block in order:
            for which in range(how.WORKERS):
                kernels._consume(which, None, 0, 0, where, None, how)
    return stored


SPLIT_PLANS = [
    ((512, 10240, 8192), Tiles(128, 2)),
    ((300, 2568, 4104), Tiles(256, 5)),
    ((300, 2568, 4104), Tiles(192, 3)),
    ((130, 8200, 200), Tiles(64, 12)),  # fewer steps than parts
    ((65, 136, 4096), Tiles(64, 8)),  # fewer rows than a tile has: its second consumer rests
    ((2200, 2304, 2048), Tiles(192, 7)),
]
WHOLE_PLANS = [
    ((1000, 1000, 1000), Tiles(128)),
    ((4096, 4096, 128), Tiles(256)),
    ((8200, 136, 328), Tiles(192)),
    ((1, 8, 8), Tiles(64)),
]


def random_plans() -> list[tuple[tuple[int, int, int], Tiles]]:
    rng = random.Random(0)
    sizes = [8 * rng.randint(1, 500) for _ in range(80)]
    found = []
    for _ in range(40):
        m, n, k = rng.randint(1, 4000), rng.choice(sizes), rng.choice(sizes)
        found.append(((m, n, k), Tiles(rng.choice(WIDTHS), rng.randint(1, 12))))
    return found


@pytest.mark.parametrize(("sizes", "tiles"), [*SPLIT_PLANS, *WHOLE_PLANS, *random_plans()], ids=str)
def test_every_step_of_every_tile_is_computed_once(
    pretended: Machine, sizes: tuple[int, int, int], tiles: Tiles
) -> None:
    """In the order of K, whoever comes last; sums and flags stay in the room that was asked for."""
    where, how, blocks, (sums, flags) = requested(call(*sizes), H200, tiles)
    m, n, _ = sizes
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    pretended.blocks = blocks
    stored = consumed(pretended, order, where, how)
    columns = how.COLUMNS + how.REST
    assert columns == tiles.columns
    corners = itertools.product((0,), range(0, m, how.SHARE), range(0, n, columns))
    assert set(stored) == set(corners)
    every = tuple(range(where.steps))
    assert where.steps * how.DEPTH >= sizes[2] > (where.steps - 1) * how.DEPTH
    assert all(found == [every] * (columns // how.PART) for found in stored.values())
    # the room: parts do not overlap, and flags are as they were
    size = how.SHARE * how.PART
    assert all(at % size == 0 and 0 <= at and at + size <= sums for at in pretended.sums)
    assert all(0 <= at < flags for at in pretended.flags)
    assert not any(pretended.flags.values())
    assert bool(sums) == bool(flags) == bool(where.cut) == how.SPLIT


def test_some_plans_cut_tiles_and_leave_sums() -> None:
    cut = [requested(call(*sizes), H200, tiles)[0].cut for sizes, tiles in SPLIT_PLANS]
    assert all(cut)
    assert not any(requested(call(*s), H200, tiles)[0].cut for s, tiles in WHOLE_PLANS)


def test_bits_do_not_depend_on_who_comes_first(pretended: Machine) -> None:
    where, how, blocks, _ = requested(call(300, 2568, 4104), H200, Tiles(256, 5))
    pretended.blocks = blocks
    first = consumed(pretended, list(range(blocks)), where, how)
    pretended.sums.clear()
    assert consumed(pretended, list(range(blocks))[::-1], where, how) == first


@pytest.mark.parametrize("sizes", [(300, 520, 264), (1100, 1000, 136)], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_stack_is_dealt_out_matrix_by_matrix(
    pretended: Machine, sizes: tuple[int, int, int], width: int
) -> None:
    where, how, blocks, _ = requested(call(*sizes, count=5), H200, Tiles(width, 3))
    pretended.blocks = blocks
    stored = consumed(pretended, list(range(blocks)), where, how)
    m, n, _ = sizes
    assert set(stored) == set(itertools.product(range(5), range(0, m, 64), range(0, n, width)))
    assert (where.a_stacked, where.b_stacked) == (1, 1)


@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_producer_loads_what_consumers_multiply(
    pretended: Machine, monkeypatch: pytest.MonkeyPatch, width: int, by: str
) -> None:
    columns = 1032
    args = call(304, columns, 1104, a=by, b=by)
    where, how, blocks, _ = requested(args, H200, Tiles(width, 3))
    pretended.blocks = blocks
    loads: list[tuple[str, list[int], Any]] = []
    expected: list[int] = []

    def load(desc: Any, at: list[int], full: Any, place: Any) -> None:
        loads.append((desc.name, at, place))

    monkeypatch.setattr(hopper_kernels, "tma_load", load)
    barriers = SimpleNamespace(wait=lambda *_: None, expect=lambda full, n: expected.append(n))
    monkeypatch.setattr(hopper_kernels, "mbarrier", barriers)
    ring = lambda name: SimpleNamespace(index=lambda slot: (name, slot))  # noqa: E731
    rings = SimpleNamespace(**{name: ring(name) for name in ("a", "b", "rest", "full", "empty")})
    dtype = SimpleNamespace(primitive_bitwidth=16)
    descs = [SimpleNamespace(name=name, dtype=dtype) for name in ("a", "b", "rest")]
    produce: Any = hopper_kernels._produce
    for pretended.block in range(blocks):
        produce(*descs, where, rings, how)
    found = {name: [at for desc, at, _ in loads if desc == name] for name in ("a", "b", "rest")}
    steps = len(expected)
    tiles = where.whole + where.cut
    assert steps == tiles * where.steps
    assert set(expected) == {2 * how.DEPTH * (how.WORKERS * how.SHARE + width)}
    assert [len(found[name]) for name in ("a", "b", "rest")] == [
        how.WORKERS * steps, steps, steps if how.REST else 0
    ]  # fmt: skip
    k_of_a, k_of_b = (2, 1) if by == "rows" else (1, 2)
    depths = {step * how.DEPTH for step in range(where.steps)}
    assert {at[k_of_a] for at in found["a"]} == {at[k_of_b] for at in found["b"]} == depths
    assert {at[3 - k_of_a] for at in found["a"]} == set(range(0, 3 * 128, how.SHARE))
    starts = {at[3 - k_of_b] for at in found["b"]}
    assert starts == set(range(0, columns, width))
    assert {at[3 - k_of_b] for at in found["rest"]} == (
        {start + how.COLUMNS for start in starts} if how.REST else set()
    )
    # a stage of shared memory for each of them
    slots = {place[1] for desc, _, place in loads if desc == "b"}
    assert slots == set(range(how.STAGES))


# --- launch choices ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("on", ["h100", "h200"])
def test_work_is_what_the_model_counts(on: str, dtype: torch.dtype) -> None:
    target = gpu.pretend(on)
    for (m, n, k), tiles in (*SPLIT_PLANS, *WHOLE_PLANS, *random_plans()):
        plan = launches.work(product(m, n, k), tiles, dtype, target)
        assert plan.whole + plan.cut == plan.m_tiles * plan.n_tiles
        assert plan.whole % target.sm_count == 0 or not plan.cut
        assert 1 <= plan.splits <= max(plan.steps, 1)
        assert (plan.splits > 1) == (plan.cut > 0)
        assert 1 <= plan.blocks <= min(target.sm_count, plan.whole + plan.parts)
        pieces = [*[plan.steps] * plan.whole]
        for part in range(plan.splits if plan.cut else 0):
            ends = [i * plan.steps // plan.splits for i in (part, part + 1)]
            pieces += [ends[1] - ends[0]] * plan.cut
        assert all(pieces)
        assert sum(pieces) == plan.steps * (plan.whole + plan.cut)
        busiest = max(sum(pieces[b :: plan.blocks]) for b in range(plan.blocks))
        assert busiest <= plan.longest <= busiest + programs(plan.parts, plan.blocks)


@pytest.mark.parametrize(
    ("sizes", "columns", "is_cut"),
    [
        ((512, 6144, 4096), 192, False),  # one wave, where 256 columns leave SMs without work
        ((4096, 4096, 4096), 256, False),
        ((1024, 1024, 1024), 64, False),  # few tiles: narrow ones, for more SMs
        ((512, 10240, 8192), None, True),  # a few tiles more than whole waves
    ],
)
def test_tiles_of_an_h200(sizes: tuple[int, int, int], columns: int | None, is_cut: bool) -> None:
    found = launches.hopper_tiles(product(*sizes), BFLOAT, H200)
    assert columns in (None, found.columns)
    assert (launches.work(product(*sizes), found, BFLOAT, H200).cut > 0) == is_cut


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_width_that_is_given_is_kept(columns: int) -> None:
    for sizes in ((512, 6144, 4096), (4096, 4096, 4096), (1, 8, 8), (300, 2568, 4104)):
        for dtype in (BFLOAT, SINGLE):
            assert launches.hopper_tiles(product(*sizes), dtype, H200, columns).columns == columns


def test_the_model_grows_with_the_work() -> None:
    def us(m: int, n: int, k: int) -> float:
        return launches.hopper_us(product(m, n, k), Tiles(256), BFLOAT, H200)

    assert us(4096, 4096, 4096) < us(4096, 4096, 8192) < us(8192, 4096, 8192)
    wave = 256 * H200.sm_count // 4  # columns that have a tile of 512 rows on every SM
    assert us(512, wave, 4096) < us(512, wave + 256, 4096)  # a wave more
    assert us(512, wave + 256, 4096) == us(512, 2 * wave, 4096)  # as many
    for few in (1, 64):
        skinny = launches.skinny_us(product(few, 4096, 4096), BFLOAT)
        assert skinny <= us(few, 4096, 4096)


@pytest.mark.parametrize("on", EVERY_GPU, ids=lambda g: g.name)
def test_strips_fit_their_gpu(on: gpu.Gpu) -> None:
    """In shared memory, as many times as SMs hold programs; and no split is without a step."""
    for m in (1, 16, 17, 32, 33, 64):
        for n, k in itertools.product((8, 64, 520, 4096, 28_672, 128_256), (8, 128, 136, 4096)):
            found = launches.strips(product(m, n, k), on)
            assert found.rows == next(rows for rows in (16, 32, 64) if m <= rows)
            stage = 2 * launches.STRIP_DEPTH * (launches.STRIP + found.rows)
            assert 1 <= found.stages <= on.shared_per_block // stage
            steps = programs(k, launches.STRIP_DEPTH)
            assert 1 <= found.splits <= steps
            splits = range(found.splits + 1)
            cuts = [split * steps // found.splits for split in splits]
            assert all(cuts[i] < cuts[i + 1] for i in range(found.splits))
            # all programs of a split sum run at a time, or at least are not many more
            strips = programs(n, launches.STRIP)
            assert found.splits == 1 or strips * found.splits <= 2 * on.sm_count


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
    for n, k in ((4096, 4096), (520, 2056), (28_672, 4096), (64, 128)):
        with recording.recording() as requests:
            skinny_impl.prepare(H200, *call(m, n, k))
        constants = dict(requests[0].constants)
        splits, tiles = requests[0].arguments[-1], programs(n, launches.STRIP)
        assert constants["SPLIT"] == (splits > 1)
        if splits == 1:
            assert not asked
            continue
        # the last program's sums end where the room does, and each tile has a flag
        size = constants["BLOCK_N"] * constants["BLOCK_M"]
        assert asked.pop() == (tiles * splits * size, tiles)


# --- routes: who can -----------------------------------------------------------------------------


@pytest.fixture
def no_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of no GPU, whatever the package brings along."""
    monkeypatch.setattr(tuned, "table", lambda *_: None)
    yield


def able(on: gpu.Gpu, *sizes: int, **how: Any) -> list[str]:
    return [str(choice) for choice in routes.choices(on, *call(*sizes, **how))]


GLUON = [f"gluon:{columns}" for columns in WIDTHS]


def test_who_can_serve_a_call() -> None:
    assert able(H200, 64, 4096, 4096) == ["skinny", *GLUON, "triton", "torch"]
    assert able(H200, 65, 4096, 4096) == [*GLUON, "triton", "torch"]
    assert able(H200, 64, 4096, 4096, count=2) == [*GLUON, "triton", "torch"]
    for on in EVERY_GPU:
        found = able(on, 16, 4096, 4096)
        assert found[-2:] == ["triton", "torch"]
        assert ("skinny" in found) == (on.sm >= 80)
        assert (set(GLUON) <= set(found)) == (on.sm == 90)
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
    with pytest.raises(UnsupportedError):
        dispatch.choose(op.OP, call(*sizes, **how), backend="gluon", gpu=H200)


def test_what_the_hopper_kernel_takes() -> None:
    for a, b in itertools.product(("rows", "columns"), repeat=2):
        assert set(GLUON) < set(able(H200, 128, 4096, 4096, a=a, b=b))
    assert set(GLUON) < set(able(H200, 128, 4096, 4096, dtype=SINGLE, precision="tf32"))
    assert set(GLUON) < set(able(H200, 127, 4096, 4096))  # TMA stops at the last row
    assert set(GLUON) < set(able(H200, 128, 4100, 4096, out_dtype=SINGLE, b="columns"))


def test_operands_that_begin_off_16_bytes() -> None:
    a, b, *rest = call(16, 4096, 4096)
    shifted = torch.empty(16 * 4096 + 1, dtype=BFLOAT, device="meta")[1:].view(16, 4096)
    weights = torch.empty(4096, 4096 + 8, dtype=BFLOAT, device="meta")
    for left, right in ((shifted, b), (a, weights[:, 1:4097].mT)):
        assert [c.backend for c in routes.choices(H200, left, right, *rest)] == ["triton", "torch"]
    wide = weights[:, 8:].mT
    found = [c.backend for c in routes.choices(H200, a, wide, *rest)]
    assert found == ["skinny", *["gluon"] * 4, "triton", "torch"]


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
        assert chosen(H200, m, 4096, 4096, **how) == "gluon"
    assert chosen(H200, 16, 4096, 4096, count=200, **how) != "gluon"  # each of few rows
    left_over = "triton" if deterministic else "torch"
    assert chosen(H200, 512, 4096, 4097, **how) == left_over
    assert chosen(H200, 16, 4096, 4097, **how) == left_over
    assert chosen(H200, 512, 4096, 4096, dtype=SINGLE, **how) == left_over
    assert chosen(H200, 512, 4096, 4096, dtype=SINGLE, precision="tf32", **how) == "gluon"


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


FEW = {"skinny": 20.0, "gluon:64": 24.0, "triton": 40.0, "torch": 30.0}
MANY = {"gluon:256": 300.0, "gluon:192": 270.0, "gluon:64": 500.0, "triton": 600.0, "torch": 290.0}
LARGE = {"gluon:256": 3000.0, "gluon:192": 3300.0, "triton": 6000.0, "torch": 2500.0}


@pytest.fixture
def tuned_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's table: few rows are skinny's, some gluon's, many cuBLAS's."""
    buckets = (
        bucket(FEW, "skinny", 16, 4096, 4096),
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
    assert chosen(gpu.pretend("h100"), 8192, 4096, 4096) == "gluon"  # another GPU's table
    told = dict(dispatch.choose(op.OP, call(8192, 4096, 4096), gpu=H200).refused)
    assert "torch is the choice of the table of NVIDIA H200: 2500.0 us, not 3000.0" in told["gluon"]


@pytest.mark.usefixtures("tuned_h200")
def test_one_that_cannot_serve_is_passed_over_in_the_table() -> None:
    assert chosen(H200, 512, 4096, 4097) == "torch"  # nearest to gluon's; then cuBLAS is quickest
    assert chosen(H200, 16, 4096, 4097) == "torch"


@pytest.mark.usefixtures("tuned_h200")
def test_the_tile_of_a_table_is_launched() -> None:
    args = call(512, 4096, 4096)
    assert routes.launch("gluon", H200, *args) == (192,)
    where, how, *_ = requested(args, H200)
    assert how.COLUMNS + how.REST == 192
    large = call(8192, 4096, 4096)
    assert routes.launch("gluon", H200, *large) == (256,)  # its best, though torch is quicker
    assert routes.launch("skinny", H200, *large) == ()
    with tuned.forcing(Choice("gluon", (64,))):
        assert routes.launch("gluon", H200, *args) == (64,)
        assert routes.launch("skinny", H200, *args) == ()
        _, how, *_ = requested(args, H200)
        assert how.COLUMNS + how.REST == 64


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


# --- memory that calls share ---------------------------------------------------------------------


class Stream:
    """The current one, and whether it captures."""

    number = 1
    captures = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A pretended CUDA device, whose memory lies on the CPU."""
    cpu, current = torch.device("cpu"), Stream()
    cleared, sums = workspace._cleared, workspace._sums
    monkeypatch.setattr(workspace, "_rooms", {})
    monkeypatch.setattr(workspace, "_spare", {})
    monkeypatch.setattr(workspace, "SPARE", 16)
    monkeypatch.setattr(workspace, "_current_stream", lambda index: current.number)
    monkeypatch.setattr(workspace, "_is_capturing", lambda: current.captures)
    monkeypatch.setattr(workspace, "_cleared", lambda count, device: cleared(count, cpu))
    monkeypatch.setattr(workspace, "_sums", lambda count, device: sums(count, cpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return current


CUDA = torch.device("cuda", 0)


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (x, y)]
    return max(ends[0][0], ends[1][0]) < min(ends[0][1], ends[1][1])


def apart_from(*rooms: workspace.Room) -> bool:
    return not any(
        overlap(x, y)
        for one, other in itertools.combinations(rooms, 2)
        for x, y in zip(one, other, strict=True)
    )


def is_room(room: workspace.Room, sums: int, flags: int) -> bool:
    floats, ints = room
    fits = len(floats) >= sums and len(ints) >= flags
    return fits and (floats.dtype, ints.dtype) == (SINGLE, torch.int32) and not ints.any()


def test_calls_of_one_stream_share_a_room_and_others_have_their_own(stream: Stream) -> None:
    first, second = (workspace.per_stream(sums, 4, CUDA) for sums in (100, 50))
    room = first()
    assert is_room(room, 100, 4)
    assert second() is room is first()
    stream.number = 2
    other = first()
    assert is_room(other, 100, 4)
    assert apart_from(room, other)
    stream.number = 1
    assert first() is room


def test_a_room_grows_and_never_shrinks(stream: Stream) -> None:
    wide, flagged, small = (
        workspace.per_stream(*size, CUDA) for size in ((1000, 2), (10, 50), (10, 2))
    )
    assert is_room(small(), 10, 2)
    assert is_room(wide(), 1000, 2)
    assert is_room(flagged(), 1000, 50)  # as large as both want it
    assert small() is wide() is flagged()


def test_captured_calls_have_rooms_of_their_own(stream: Stream) -> None:
    call_of = workspace.per_stream(100, 3, CUDA)
    outside = call_of()
    stream.captures = True
    rooms = [call_of() for _ in range(4)]
    assert all(is_room(room, 100, 3) for room in rooms)
    assert apart_from(outside, *rooms)
    assert all(room[1].data_ptr() % 16 == 0 for room in rooms)
    spare = workspace._spare[0]
    late = call_of()  # of 16 spare flags there is none left: the graph clears its own
    assert len(spare) == 0
    assert is_room(late, 100, 3)
    assert apart_from(outside, late, *rooms)
    stream.captures = False
    assert call_of() is outside


def test_flags_that_a_graph_clears_are_spared_for_no_other(stream: Stream) -> None:
    """Of a first call inside a capture, clearing would be a node of that graph alone."""
    stream.captures = True
    inside = workspace.per_stream(100, 3, CUDA)
    first, second = inside(), inside()
    assert is_room(first, 100, 3) and is_room(second, 100, 3)
    assert apart_from(first, second)
    assert not workspace._spare
    stream.captures = False
    outside = workspace.per_stream(100, 3, CUDA)
    stream.captures = True
    assert len(workspace._spare[0]) == 16
    assert apart_from(first, outside(), inside())
    assert len(workspace._spare[0]) == 8


def test_elsewhere_and_under_guard_every_call_has_a_new_room(stream: Stream) -> None:
    on_cpu = workspace.per_stream(10, 2, torch.device("cpu"))
    assert apart_from(on_cpu(), on_cpu())
    assert is_room(on_cpu(), 10, 2)
    with memory.guarded():
        guarded = workspace.per_stream(10, 2, CUDA)
        rooms = guarded(), guarded()
    assert all(room[0].isnan().all() for room in rooms)  # sums that nobody wrote would show
    assert apart_from(*rooms)
    assert not workspace._rooms


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
        for splits in (1, 2, 3, 8):
            skinny_impl.strips = lambda product, gpu: Strips(32, splits, 2)
            run = skinny_impl.prepare(on, a, b, torch.float32, "ieee", None, False)
            assert torch.equal(run(a, b), wanted), (m, n, k, dtype, splits)

# floats: the same bits again, and a room whose flags are as they were
a, b = torch.randn(17, 1096, generator=rng).half(), torch.randn(1096, 72, generator=rng).half()
sums, flags = torch.empty(2 * 8 * 32 * 64), torch.zeros(2, dtype=torch.int32)
skinny_impl.strips = lambda product, gpu: Strips(32, 8, 2)
skinny_impl.workspace.per_stream = lambda *_: lambda: (sums, flags)
run = skinny_impl.prepare(on, a, b, None, "ieee", None, False)
first = run(a, b)
assert not flags.any()
sums.fill_(float("nan"))
assert torch.equal(run(a, b), first)
assert not flags.any() and not sums.isnan().any()  # each split has a place of its own
"""


def test_splits_give_the_bits_of_one() -> None:
    interpret(SPLITS)


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


def test_what_lives_on_is_made_in_another_thread(stream: Stream) -> None:
    """torch.compile may send this thread's allocations to the pool of a graph."""
    makers = []
    workspace._apart(lambda: makers.append(get_ident()))
    assert makers != [get_ident()]
    with pytest.raises(ZeroDivisionError):  # such as memory that is not there
        workspace._apart(lambda: 1 // 0)
