"""How the kernels for few rows and for Hopper would compute a product, and what a model says of it.

Pure functions of sizes, layouts and a Gpu. The model is for shapes, not for truth: it knows full
waves, cut tiles, bytes and that an H200 which multiplies for long gets slower. So it carries a time
that was measured at one shape to another, and it speaks where no GPU was tuned. Its constants were
fitted to all times of the table of an H200 (2026-11, notes.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit.launch import programs
from tilewright.toolkit.matmul_call import Product

BASE_US = 4.1  # launch, first tiles, last results
HEAT, HEAT_US = 0.3, 150.0  # so much slower in the end, and half of it after so long


def _us(
    computing: float, moving: float,
    base: float = BASE_US, heat: float = HEAT, heat_us: float = HEAT_US,
) -> float:  # fmt: skip
    """Of a kernel that would multiply so long, and move its bytes so long: both at a time, but in
    each other's way where neither is short."""
    return base + math.hypot(computing * (1 + heat * computing / (computing + heat_us)), moving)


# --- Hopper --------------------------------------------------------------------------------------

WORKERS = 2  # consumers of a block
ROWS = 128  # of a tile
# microseconds of a step, 128 bytes along K, by the columns that a tile may have
STEP_US = {256: 0.62, 192: 0.475, 160: 0.435, 128: 0.32, 64: 0.255}
LEAVE_US = 0.0068  # for each column of a cut tile: its sums go to memory
GATHER_US = 0.0026  # for each part of it: its sums come back
SUMS_PER_US = 3.4e6  # bytes, of all parts at a time
BYTES_PER_US = 4.3e6
MOST_SPLITS = 12
MOST_ROUNDS = 2  # of parts
FEWEST_STEPS = 4  # of a part


@dataclass(frozen=True)
class Tiles:
    """Columns of those of `hopper_kernels`, and parts along K of those left over."""

    columns: int
    splits: int = 1

    @property
    def sums(self) -> int:
        return ROWS * self.columns


@dataclass(frozen=True)
class Work:
    """How tiles are dealt out."""

    m_tiles: int
    n_tiles: int
    whole: int  # tiles that are not cut
    cut: int  # tiles that are
    splits: int
    steps: int  # of a tile, along K
    blocks: int

    @property
    def parts(self) -> int:
        return self.cut * self.splits

    @property
    def longest(self) -> int:
        """Steps of the block that has most to do."""
        waves, late = divmod(self.whole, self.blocks)
        whole = (waves + (late > 0)) * self.steps
        return whole + programs(self.parts, self.blocks) * programs(self.steps, self.splits)


def depth(dtype: torch.dtype) -> int:
    """Elements of a step along K: 128 bytes, as wgmma reads them."""
    return 128 // dtype.itemsize


def work(product: Product, tiles: Tiles, dtype: torch.dtype, gpu: Gpu) -> Work:
    m_tiles, n_tiles = programs(product.m, ROWS), programs(product.n, tiles.columns)
    count, steps = m_tiles * n_tiles * product.count, programs(product.k, depth(dtype))
    splits = min(tiles.splits, steps)
    cut = count % gpu.sm_count if splits > 1 else 0
    blocks = min(count - cut + cut * splits, gpu.sm_count)
    return Work(m_tiles, n_tiles, count - cut, cut, splits if cut else 1, steps, blocks)


def hopper_us(product: Product, tiles: Tiles, dtype: torch.dtype, gpu: Gpu) -> float:
    plan = work(product, tiles, dtype, gpu)
    computing = plan.longest * STEP_US[tiles.columns]
    us = _us(computing, _bytes(product, dtype) / BYTES_PER_US)
    if plan.cut:
        us += (LEAVE_US + plan.splits * GATHER_US) * tiles.columns
        us += plan.parts * 4 * tiles.sums / SUMS_PER_US
    return us


def hopper_tiles(product: Product, dtype: torch.dtype, gpu: Gpu, columns: int = 0) -> Tiles:
    """The quickest by the model, of all or of so many columns; fewer parts if in doubt."""
    widths = [columns] if columns else list(STEP_US)
    found = [Tiles(width, splits) for width in widths for splits in _splits(product, width, gpu)]
    return min(found, key=lambda tiles: hopper_us(product, tiles, dtype, gpu))


def _splits(product: Product, columns: int, gpu: Gpu) -> list[int]:
    """Parts that leftover tiles may have, on which all SMs work for a few rounds at most."""
    left = programs(product.m, ROWS) * programs(product.n, columns) * product.count % gpu.sm_count
    most = min(MOST_SPLITS, product.k // (FEWEST_STEPS * 64))
    return [1, *(s for s in range(2, most + 1) if left * s <= MOST_ROUNDS * gpu.sm_count)]


# --- Hopper, in CUDA C++ -------------------------------------------------------------------------

SHARE = 64  # rows of a consumer: a tile has one or two
WIDTHS = (64, 80, 112, 128, 144, 160, 192, 224, 256)  # columns of a tile
NARROW = (40, 48)  # and of one where a tile has all rows
# Parts of SMs on which clusters of so many blocks find room, and how many a tile's sums may have.
ROOM = {1: 1.0, 2: 1.0, 3: 117 / 132, 4: 120 / 132}
# A step takes as long as its products or as its bytes from L2, and some clocks more.
CLOCKS_PER_US, COLUMN_CLOCKS, LINE_CLOCKS, STEP_CLOCKS = 2186.0, 3.29, 1.495, 38.0
CLUSTER_BASE_US, CLUSTER_HEAT, CLUSTER_HEAT_US = 2.6, 1.085, 34.3
CLUSTER_BYTES_PER_US = 4.21e6
STORE_US = 0.0125  # for each column
MEET_US = 0.5 / 8192  # for each part but one, and each sum of a tile


@dataclass(frozen=True)
class Cluster:
    """A tile of `cuda_impl`, and the blocks of a cluster: their tiles lie one below another, or
    they have parts of one tile along K."""

    rows: int
    columns: int
    tall: int = 1
    deep: int = 1


def cluster(product: Product, dtype: torch.dtype, gpu: Gpu, *launch: int) -> Cluster:
    """The quickest by the model, of all or of so many columns."""
    wanted = launch or widths(product)
    able = [one for columns in wanted for one in _clusters(product, columns, gpu)]
    return min(able, key=lambda one: cluster_us(product, one, dtype, gpu))


def widths(product: Product) -> tuple[int, ...]:
    return (*NARROW, *WIDTHS) if product.m <= ROWS else WIDTHS


def _clusters(product: Product, columns: int, gpu: Gpu) -> list[Cluster]:
    """Where b lies by rows, 64 columns are fetched at a time, and some of them for nothing if a
    tile has others: two blocks then share what they fetch. Tiles are cut along K where all of their
    parts run at a time: such a block does not stay for a second tile, and its like comes late."""
    rows = SHARE if product.m <= SHARE else ROWS
    if product.b.by_rows and product.m > ROWS and columns > 64 and columns % 64:
        return [Cluster(rows, columns, tall=2)]
    most = product.k // (FEWEST_STEPS * 64)
    every = [Cluster(rows, columns, deep=deep) for deep in ROOM if deep <= most]
    cut = [one for one in every if one.deep > 1 and _waves(product, one, gpu) == 1]
    return [Cluster(rows, columns), *cut]


def _waves(product: Product, found: Cluster, gpu: Gpu) -> int:
    """Tiles of the block that has most of them."""
    tiles = programs(programs(product.m, found.rows), found.tall) * found.tall
    tiles *= programs(product.n, found.columns) * product.count
    return programs(tiles * found.deep, int(gpu.sm_count * ROOM[found.deep]))


def cluster_us(product: Product, found: Cluster, dtype: torch.dtype, gpu: Gpu) -> float:
    multiplied = COLUMN_CLOCKS * found.columns * found.rows / ROWS
    clocks = max(multiplied, LINE_CLOCKS * (found.rows + found.columns)) + STEP_CLOCKS
    steps = _waves(product, found, gpu) * programs(programs(product.k, depth(dtype)), found.deep)
    us = _us(
        steps * clocks / CLOCKS_PER_US, _bytes(product, dtype) / CLUSTER_BYTES_PER_US,
        CLUSTER_BASE_US, CLUSTER_HEAT, CLUSTER_HEAT_US,
    )  # fmt: skip
    return us + STORE_US * found.columns + MEET_US * (found.deep - 1) * found.rows * found.columns


# --- few rows ------------------------------------------------------------------------------------

MOST_ROWS = 64
STRIP_DEPTH = 128
STRIP_BASE_US, STRIP_BYTES_PER_US = 3.4, 4.28e6
STRIP_AGAIN = 0.106  # what a byte of a costs, read from L2 by every strip, beside one from memory
# of a step: for each column of b, and for each row of a tile
STRIP_COLUMN_US, STRIP_ROW_US = 0.0017, 0.004
STRIP_GATHER_US = 0.000105  # for each part of a strip, row and column: sums go and come back
# By the columns of b that a program multiplies: steps under way, the most first. One program of an
# SM has the first, two have the others. Wide strips read a less often, and are more to add up.
STAGES = {64: (6, 4, 3), 128: (4,)}
WIDE, WIDE_SM = 128, 90  # on SM 80 wide strips spill where b lies by rows


@dataclass(frozen=True)
class Strips:
    """Of `skinny_impl`."""

    rows: int  # of a tile: 16, 32 or 64
    columns: int
    stages: int
    splits: int
    each: int  # programs of an SM at a time


def strips(product: Product, gpu: Gpu, *launch: int) -> Strips:
    """With these columns and stages, or with those that the model likes best."""
    if not launch:
        able = strip_launches(product, gpu)
        launch = min(able, key=lambda one: skinny_us(product, torch.bfloat16, gpu, *one))
    columns, stages = launch
    count, steps = programs(product.n, columns), programs(product.k, STRIP_DEPTH)
    each = 2 if 2 * stages <= _held(product, gpu, columns) else 1
    splits = max(min(each * gpu.sm_count // count, steps), 1)
    return Strips(_tile_rows(product), columns, stages, splits, each)


def strip_launches(product: Product, gpu: Gpu) -> list[tuple[int, int]]:
    """Those that shared memory holds: the most stages for one program of an SM, others for two."""
    found = []
    for columns, every in STAGES.items():
        held = _held(product, gpu, columns) if columns < WIDE or gpu.sm >= WIDE_SM else 0
        most = next((stages for stages in every if stages <= held), 0)
        found += [(columns, some) for some in every if some == most or 2 * some <= held]
    return found


def _held(product: Product, gpu: Gpu, columns: int) -> int:
    """Stages, of halves, that shared memory has room for."""
    return gpu.shared_per_block // (2 * STRIP_DEPTH * (columns + _tile_rows(product)))


def _tile_rows(product: Product) -> int:
    return next(rows for rows in (16, 32, 64) if product.m <= rows)


def skinny_us(product: Product, dtype: torch.dtype, gpu: Gpu, *launch: int) -> float:
    """Wave after wave: the last one may have few programs, which read slowly."""
    found = strips(product, gpu, *launch)
    steps = programs(programs(product.k, STRIP_DEPTH), found.splits)
    count = programs(product.n, found.columns) * found.splits
    most = found.each * gpu.sm_count
    step_us = STRIP_COLUMN_US * found.columns + STRIP_ROW_US * found.rows
    moved = _bytes(product, dtype) * (1 + STRIP_AGAIN * found.rows / found.columns)

    def wave(size: int) -> float:
        reading = programs(size, gpu.sm_count) * steps * step_us
        return max(reading, moved * size / count / STRIP_BYTES_PER_US)

    whole = (count - 1) // most
    us = STRIP_BASE_US + whole * wave(most) + wave(count - whole * most)
    parts = found.splits * found.columns if found.splits > 1 else 0
    return us + STRIP_GATHER_US * parts * found.rows


# --- others --------------------------------------------------------------------------------------


# floating-point operations of an SM in a microsecond, and bytes of all
RATES = {"torch": (6.5e6, 4.3e6), "triton": (5.1e6, 3.3e6)}


def any_us(backend: str, product: Product, dtype: torch.dtype, gpu: Gpu) -> float:
    """Of somebody whose tiles are not looked at: the roofs alone, with tiles of 64 rows."""
    flops, moved = RATES[backend]
    products = max(product.m, 64) * product.n * product.k * product.count
    products *= dtype.itemsize // 2  # of tf32 half as many are multiplied at a time
    return _us(2 * products / flops / gpu.sm_count, _bytes(product, dtype) / moved)


def _bytes(product: Product, dtype: torch.dtype) -> float:
    """Of operands and result, each once."""
    m, n, k = product.m, product.n, product.k
    return (m * k + k * n + m * n) * product.count * dtype.itemsize
