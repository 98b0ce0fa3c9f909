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

BASE_US = 4.3  # launch, first tiles, last results
HEAT, HEAT_US = 0.38, 95.0  # so much slower in the end, and half of it after so long


def _us(computing: float, moving: float) -> float:
    """Of a kernel that would multiply so long, and move its bytes so long: both at a time, but in
    each other's way where neither is short."""
    return BASE_US + math.hypot(computing * (1 + HEAT * computing / (computing + HEAT_US)), moving)


# --- Hopper --------------------------------------------------------------------------------------

WORKERS = 2  # consumers of a block
SIDE = 128  # of a tile, which its consumers share: rows, or columns where rows are few
# Microseconds of a step, 128 bytes along K, by (rows, columns) of the tiles that there are; guesses
# for those of 160 columns and of few rows, which were not measured yet.
STEP_US = {
    (16, 128): 0.19, (32, 128): 0.21, (64, 128): 0.24,
    (128, 256): 0.58, (128, 192): 0.45, (128, 160): 0.375, (128, 128): 0.3, (128, 64): 0.24,
}  # fmt: skip
UNMEASURED = [shape for shape in STEP_US if shape[0] < SIDE or shape[1] == 160]  # `tune` tries them
LEAVE_US = 0.0067  # of a cut tile, by its other side: its sums go to memory
GATHER_US = 0.0021  # for each part of it: its sums come back
SUMS_PER_US = 3.9e6  # bytes, of all parts at a time
BYTES_PER_US = 3.9e6
MOST_SPLITS = 12
MOST_ROUNDS = 2  # of parts
FEWEST_STEPS = 4  # of a part


@dataclass(frozen=True)
class Tiles:
    """Of `hopper_kernels`, and parts along K of those left over."""

    rows: int
    columns: int
    splits: int = 1

    @property
    def is_turned(self) -> bool:
        """Computed as C^T = B^T A^T: the columns are the side that consumers share."""
        return self.rows < SIDE

    @property
    def other_side(self) -> int:
        return self.rows if self.is_turned else self.columns

    @property
    def sums(self) -> int:
        return self.rows * self.columns


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
    m_tiles, n_tiles = programs(product.m, tiles.rows), programs(product.n, tiles.columns)
    count, steps = m_tiles * n_tiles * product.count, programs(product.k, depth(dtype))
    splits = min(tiles.splits, steps)
    cut = count % gpu.sm_count if splits > 1 else 0
    blocks = min(count - cut + cut * splits, gpu.sm_count)
    return Work(m_tiles, n_tiles, count - cut, cut, splits if cut else 1, steps, blocks)


def hopper_us(product: Product, tiles: Tiles, dtype: torch.dtype, gpu: Gpu) -> float:
    plan = work(product, tiles, dtype, gpu)
    computing = plan.longest * STEP_US[tiles.rows, tiles.columns]
    us = _us(computing, _bytes(product, dtype) / BYTES_PER_US)
    if plan.cut:
        us += (LEAVE_US + plan.splits * GATHER_US) * tiles.other_side
        us += plan.parts * 4 * tiles.sums / SUMS_PER_US
    return us


def hopper_tiles(
    product: Product, dtype: torch.dtype, gpu: Gpu, rows: int = 0, columns: int = 0
) -> Tiles:
    """The quickest by the model: the one given, or of those that suit and were measured; fewer
    parts if in doubt."""
    shapes = [(rows, columns)] if rows else [s for s in suitable(product) if s not in UNMEASURED]
    found = [Tiles(*shape, splits) for shape in shapes for splits in _splits(product, shape, gpu)]
    return min(found, key=lambda tiles: hopper_us(product, tiles, dtype, gpu))


def suitable(product: Product) -> list[tuple[int, int]]:
    """(rows, columns) of tiles: of few rows that shape which has just enough."""
    few = min((rows for rows, _ in STEP_US if rows >= product.m), default=SIDE)
    return [shape for shape in STEP_US if shape[0] in (SIDE, few)]


def _splits(product: Product, shape: tuple[int, int], gpu: Gpu) -> list[int]:
    """Parts that leftover tiles may have, on which all SMs work for a few rounds at most."""
    left = programs(product.m, shape[0]) * programs(product.n, shape[1]) * product.count
    left %= gpu.sm_count
    rounds = MOST_ROUNDS if shape[0] == SIDE else 2 * MOST_ROUNDS  # narrow tiles have few sums
    most = min(MOST_SPLITS, product.k // (FEWEST_STEPS * 64))
    return [1, *(s for s in range(2, most + 1) if left * s <= rounds * gpu.sm_count)]


# --- few rows ------------------------------------------------------------------------------------

MOST_ROWS = 64
STRIP = 64  # columns of b that a program multiplies
STRIP_DEPTH = 128
STRIP_BYTES_PER_US = 4.6e6
STRIP_STEP_US, STRIP_ROW_US = 0.2, 0.002  # of a step, and more for each row of a tile
STAGES = (6, 4, 3)  # the first for one program of an SM, the others for two or more


@dataclass(frozen=True)
class Strips:
    """Of `skinny_impl`."""

    rows: int  # of a tile: 16, 32 or 64
    splits: int
    stages: int


def strips(product: Product, gpu: Gpu, stages: int = 0) -> Strips:
    """With so many stages on their way; 0: six of one program for each SM, if that suits the
    columns, else of two programs as many as they have room for."""
    rows = next(rows for rows in (16, 32, 64) if product.m <= rows)
    held = gpu.shared_per_block // (2 * STRIP_DEPTH * (STRIP + rows))  # stages, of halves
    count, steps = programs(product.n, STRIP), programs(product.k, STRIP_DEPTH)

    one, two = (max(min(n * gpu.sm_count // count, steps), 1) for n in (1, 2))  # parts along K
    if stages == 0:
        fills = 0.9 * gpu.sm_count <= count * one <= gpu.sm_count
        many = rows == 64 or count > 2 * gpu.sm_count
        stages = STAGES[0] if fills else STAGES[2 if many else 1]
    stages = next((some for some in STAGES if some <= min(stages, held)), held)
    return Strips(rows, one if stages == STAGES[0] else two, stages)


def stages(product: Product, gpu: Gpu) -> list[tuple[int]]:
    """Those that shared memory holds."""
    return [(some,) for some in STAGES if strips(product, gpu, some).stages == some]


def skinny_us(product: Product, dtype: torch.dtype, gpu: Gpu, stages: int = 0) -> float:
    found, steps = strips(product, gpu, stages), programs(product.k, STRIP_DEPTH)
    busiest = programs(programs(product.n, STRIP) * found.splits, gpu.sm_count)  # programs of an SM
    longest = busiest * programs(steps, found.splits)
    reading = longest * (STRIP_STEP_US + STRIP_ROW_US * found.rows)
    return _us(reading, _bytes(product, dtype) / STRIP_BYTES_PER_US)


# --- others --------------------------------------------------------------------------------------


# floating-point operations of an SM in a microsecond, and bytes of all
RATES = {"torch": (6.9e6, 4.3e6), "triton": (5.6e6, 3.4e6)}


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
