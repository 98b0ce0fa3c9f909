"""What blocks of the Hopper kernel do: its own text, run as plain Python with a stand-in for Gluon.

Every step of every tile is computed once and in the order of K, nothing is stored twice, and what a
plan's blocks leave to each other stays in the room that was asked for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from products import call, product
from tilewright import gpu
from tilewright.ops.matmul import gluon_impl, hopper_kernels, launches
from tilewright.ops.matmul.launches import Tiles
from tilewright.spec import Args
from tilewright.toolkit import recording, workspace
from tilewright.toolkit.launch import programs

H200 = gpu.pretend("h200")
BFLOAT, SINGLE = torch.bfloat16, torch.float32
WIDTHS = tuple(launches.STEP_US)
LAYOUTS = tuple(itertools.product(("rows", "columns"), repeat=2))  # of a, and of b


class Sums:
    """A tensor of sums: the steps along K that were added, in that order, or a real one."""

    type = SimpleNamespace(layout=None)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.value + other.value)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        found: torch.Tensor = self.value.to(dtype)
        return found


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
            zeros_like=lambda like: Sums(like.value * 0),  # () of a tuple
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
    for name in ("barrier", "tma_store_wait", "fence_async_shared"):
        monkeypatch.setattr(hopper_kernels, name, lambda *_: None)
    monkeypatch.setattr(hopper_kernels, "_flat", lambda x: x)
    monkeypatch.setattr(hopper_kernels, "_unflat", lambda x, like: x)
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
        stored[key] = [x.value for x in found]

    def multiply(first: int, last: int, slot: int, phase: int, *rest: Any) -> Any:
        steps = range(first, last)
        return ((how.COLUMNS, steps), (how.REST, steps)), slot, phase

    def parts(acc: Any, PART: int) -> tuple[Sums, ...]:
        columns, steps = acc
        return (Sums(tuple(steps)),) * (columns // PART)

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
    ((512, 10240, 8192), Tiles(160, 2)),
]
WHOLE_PLANS = [
    ((1000, 1000, 1000), Tiles(128)),
    ((4096, 4096, 128), Tiles(256)),
    ((8200, 136, 328), Tiles(192)),
    ((1, 8, 8), Tiles(64)),
    ((512, 4608, 3584), Tiles(160)),
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
    m, n = sizes[:2]
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    pretended.blocks = blocks
    stored = consumed(pretended, order, where, how)
    columns = how.COLUMNS + how.REST
    assert (how.WORKERS * how.SHARE, columns) == (128, tiles.columns)
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
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_stack_is_dealt_out_matrix_by_matrix(
    pretended: Machine, sizes: tuple[int, int, int], columns: int
) -> None:
    tiles = Tiles(columns, 3)
    where, how, blocks, _ = requested(call(*sizes, count=5), H200, tiles)
    pretended.blocks = blocks
    stored = consumed(pretended, list(range(blocks)), where, how)
    m, n = sizes[:2]
    corners = itertools.product(range(5), range(0, m, 64), range(0, n, tiles.columns))
    assert set(stored) == set(corners)
    assert (where.a_stacked, where.b_stacked) == (1, 1)


@pytest.mark.parametrize("parts", range(1, 9))
def test_a_part_is_put_where_no_store_reads(parts: int) -> None:
    """Two places; a store may be under way until somebody waits for it."""
    under: list[int] = []  # places, the oldest store first
    for _ in range(3):  # tiles
        for j in range(parts):
            left = hopper_kernels.under_way(j)
            under = under[len(under) - left :] if left else []
            assert j % 2 not in under
            under.append(j % 2)


# --- all of it, with numbers ---------------------------------------------------------------------


class Tile:
    """A tile in shared memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.dtype = values, values.dtype

    def reshape(self, sizes: list[int]) -> Tile:
        return Tile(self.values.view(sizes))

    def permute(self, order: tuple[int, ...]) -> Tile:
        return Tile(self.values.permute(order))

    def store(self, values: torch.Tensor) -> None:
        self.values.copy_(values)


class Matrices:
    """What TMA does with a descriptor: beyond the edges it reads zeros, and writes nothing."""

    def __init__(self, how: Any, tensor: torch.Tensor) -> None:
        assert tensor.dtype == how.dtype
        self.block, self.dtype = (
            how.block,
            SimpleNamespace(primitive_bitwidth=8 * how.dtype.itemsize),
        )
        # of the whole storage: a descriptor that reaches beyond it raises
        self.values = torch.as_strided(tensor, how.shape, how.strides)

    def _inside(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        sizes = [
            max(min(i + length, size) - i, 0)
            for i, length, size in zip(at, self.block, self.values.shape, strict=True)
        ]
        here = tuple(slice(i, i + size) for i, size in zip(at, sizes, strict=True))
        return here, tuple(slice(size) for size in sizes)

    def read(self, at: list[int]) -> torch.Tensor:
        here, there = self._inside(at)
        tile = torch.zeros(self.block, dtype=self.values.dtype)
        tile[there] = self.values[here]
        return tile

    def write(self, at: list[int], tile: torch.Tensor) -> None:
        here, there = self._inside(at)
        assert tile.shape == self.block
        self.values[here] = tile[there]


def emulated(machine: Machine, args: Args, tiles: Tiles) -> torch.Tensor:
    """The result of a call: the launcher's descriptors and the kernel's text, with real numbers."""
    kernels: Any = hopper_kernels

    def bind(kernel: Any, grid: Any, described: Any, sizes: Any, constants: Any, **_: Any) -> Any:
        where = SimpleNamespace(**dict(zip(hopper_kernels.SIZES, sizes, strict=True)))
        how = SimpleNamespace(**constants)
        (machine.blocks,) = grid

        def run(*tensors: Any) -> None:
            c, a, b, rest = (
                d and Matrices(d, t) for d, t in zip(described[:4], tensors[:4], strict=True)
            )
            assert (rest is None) == (how.REST == 0)
            for machine.block in range(machine.blocks):
                block(machine, where, how, c, a, b, rest)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_impl, "bind", bind)
        patch.setattr(workspace, "per_stream", lambda *_: lambda: (None, None))
        patch.setattr(launches, "hopper_tiles", lambda *_: tiles)
        patch.setattr(kernels, "_parts", lambda acc, PART: tuple(map(Sums, acc.split(PART, 1))))
        run = gluon_impl.prepare(H200, *args)
        return run(*args)


def block(machine: Machine, where: Any, how: Any, *matrices: Any) -> None:
    """A block: its producer first, then each consumer with what was loaded."""
    kernels: Any = hopper_kernels
    c, *operands = matrices
    loaded: list[dict[Any, torch.Tensor]] = []  # step by step
    expected: list[int] = []  # bytes of a step
    order = itertools.cycle(range(how.STAGES))

    def load(
        matrix: Matrices, at: list[int], full: tuple[str, int], place: tuple[str, int]
    ) -> None:
        name, slot = place
        if name == "a" and slot % how.WORKERS == 0:
            loaded.append({})
            assert full == ("full", next(order))  # one place after another
        assert full[1] == (slot // how.WORKERS if name == "a" else slot)
        loaded[-1][name, slot % how.WORKERS if name == "a" else 0] = matrix.read(at)

    def multiply(first: int, last: int, slot: int, phase: int, *rest: Any) -> Any:
        which = rest[-1]
        acc: list[Any] = [0.0, 0.0]
        for _ in range(first, last):
            tiles = next(steps)
            a = kernels._matrix(tiles["a", which], how.SHARE, how.DEPTH, how.A_BY_ROWS)
            for i, (name, columns) in enumerate((("b", how.COLUMNS), ("rest", how.REST))):
                if columns:
                    b = kernels._matrix(tiles[name, 0], how.DEPTH, columns, how.B_BY_ROWS)
                    acc[i] = acc[i] + a.float() @ b.float()
        return tuple(acc), slot, phase

    ring = lambda name: SimpleNamespace(index=lambda slot: (name, slot))  # noqa: E731
    rings = SimpleNamespace(**{name: ring(name) for name in ("a", "b", "rest", "full", "empty")})
    places = [Tile(torch.empty(c.block, dtype=c.values.dtype)) for _ in range(2 * how.WORKERS)]
    rings.c = SimpleNamespace(index=places.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "tma_load", load)
        barriers = SimpleNamespace(
            wait=lambda *_: None, expect=lambda _, size: expected.append(size)
        )
        patch.setattr(kernels, "mbarrier", barriers)
        patch.setattr(kernels, "tma_store", lambda desc, at, tile: desc.write(at, tile.values))
        patch.setattr(kernels, "_multiply", multiply)
        kernels._produce(*operands, where, rings, how)
        assert expected == [sum(tile.nbytes for tile in step.values()) for step in loaded]
        for which in range(how.WORKERS):
            steps = iter(loaded)
            kernels._consume(which, c, 0, 0, where, rings, how)


def integers(*sizes: int) -> torch.Tensor:
    """Small ones: a sum of some hundred products is exact in float32 and in bfloat16."""
    rng = torch.Generator().manual_seed(sum(sizes))
    some = torch.randint(-2, 3, sizes, generator=rng) * (torch.rand(sizes, generator=rng) < 0.25)
    return some.to(BFLOAT)


def laid(x: torch.Tensor, by: str) -> torch.Tensor:
    return x if by == "rows" else x.mT.contiguous().mT


@pytest.mark.parametrize("out_dtype", [None, SINGLE], ids=["half", "wide"])
@pytest.mark.parametrize("by", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_product_is_right(
    pretended: Machine, columns: int, by: tuple[str, str], out_dtype: Any
) -> None:
    for (m, n, k), splits in (((200, 328, 200), 1), ((200, 328, 200), 3), ((16, 136, 72), 2)):
        a, b = laid(integers(m, k), by[0]), laid(integers(k, n), by[1])
        found = emulated(pretended, (a, b, out_dtype, "ieee", None, False), Tiles(columns, splits))
        assert found.dtype == (out_dtype or BFLOAT)
        assert torch.equal(found, (a.float() @ b.float()).to(found.dtype)), (m, n, k, splits)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_stack_is_right(pretended: Machine, columns: int) -> None:
    stacked, alone = integers(3, 72, 136), integers(136, 168)
    both = integers(3, 136, 168)
    for a, b in ((stacked, both), (stacked, alone), (integers(72, 136), both)):
        found = emulated(pretended, (a, b, None, "ieee", None, False), Tiles(columns, 2))
        assert torch.equal(found, (a.float() @ b.float()).to(BFLOAT))


def test_odd_rows_of_a_pitch_are_right(pretended: Machine) -> None:
    """Rows that no tile ends with, of operands that are part of wider ones."""
    a, b = integers(77, 264)[:, 8:208], integers(136, 328)[:, 64:264].mT
    for columns in WIDTHS:
        found = emulated(pretended, (a, b, None, "ieee", None, False), Tiles(columns, 2))
        assert torch.equal(found, (a.float() @ b.float()).to(BFLOAT))


@pytest.mark.parametrize("on", ["h100", "h200"])
def test_shared_memory_holds_the_rings(on: str) -> None:
    target = gpu.pretend(on)
    kinds = ((BFLOAT, None), (BFLOAT, SINGLE), (SINGLE, None))
    for columns, (dtype, out_dtype) in itertools.product(WIDTHS, kinds):
        args = call(300, 2568, 4104, dtype=dtype, out_dtype=out_dtype, precision="tf32")
        _, how, *_ = requested(args, target, Tiles(columns))
        stage = how.DEPTH * (how.WORKERS * how.SHARE + how.COLUMNS + how.REST) * dtype.itemsize
        places = 2 * how.WORKERS * how.SHARE * how.PART * (out_dtype or dtype).itemsize
        used = how.STAGES * stage + places + gluon_impl.RESERVED
        assert how.STAGES >= 4
        assert used <= target.shared_per_block


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
        ((512, 10240, 8192), None, True),
        ((512, 11264, 16384), None, True),  # a few tiles more than whole waves
    ],
)
def test_tiles_of_an_h200(sizes: tuple[int, int, int], columns: int | None, is_cut: bool) -> None:
    found = launches.hopper_tiles(product(*sizes), BFLOAT, H200)
    assert columns in (None, found.columns)
    assert (launches.work(product(*sizes), found, BFLOAT, H200).cut > 0) == is_cut


@pytest.mark.parametrize("columns", WIDTHS)
def test_columns_that_are_given_are_kept(columns: int) -> None:
    for sizes in ((512, 6144, 4096), (4096, 4096, 4096), (1, 8, 8), (300, 2568, 4104)):
        for dtype in (BFLOAT, SINGLE):
            found = launches.hopper_tiles(product(*sizes), dtype, H200, columns)
            assert found.columns == columns


def test_the_model_grows_with_the_work() -> None:
    def us(m: int, n: int, k: int) -> float:
        return launches.hopper_us(product(m, n, k), Tiles(256), BFLOAT, H200)

    assert us(4096, 4096, 4096) < us(4096, 4096, 8192) < us(8192, 4096, 8192)
    wave = 256 * H200.sm_count // 4  # columns that have a tile of 512 rows on every SM
    assert us(512, wave, 4096) < us(512, wave + 256, 4096)  # a wave more
    assert us(512, wave + 256, 4096) > 1.5 * us(512, wave, 4096)
    assert us(512, 2 * wave, 4096) < 1.1 * us(512, wave + 256, 4096)  # as many, but more bytes
    for few in (1, 64):
        skinny = launches.skinny_us(product(few, 4096, 4096), BFLOAT, H200)
        assert skinny <= us(few, 4096, 4096)
