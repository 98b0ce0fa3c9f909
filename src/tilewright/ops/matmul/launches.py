"""How the kernels for few rows and for Hopper would compute a product, and what a model says of it.

Pure functions of sizes, layouts and a Gpu. The model is for shapes, not for truth: it knows full
waves, cut tiles and bytes, so it carries a time that was measured at one shape to another, and it
speaks where no GPU was tuned. Its constants were fitted to an H200 (2026-11, notes.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit.launch import programs
from tilewright.toolkit.matmul_call import Product

HALVES = (torch.float16, torch.bfloat16)
BASE_US = 5.5  # launch, first tiles, last results
BYTES_PER_US = 3.9e6  # of weights that are read once


# --- Hopper --------------------------------------------------------------------------------------

WORKERS = 2  # consumers of a block
ROWS = 128  # of a tile
STEP_US = {256: 0.66, 192: 0.5, 128: 0.345, 64: 0.225}  # by columns of a tile: 128 bytes along K
LEAVE_US = {256: 7.0, 192: 5.5, 128: 3.5, 64: 2.0}  # of a cut tile: its sums go to memory
GATHER_US = {256: 1.2, 192: 0.9, 128: 0.6, 64: 0.3}  # for each part of it: its sums come back
SUMS_PER_US = 3e6  # bytes, of all parts at a time
MOST_SPLITS = 12
FEWEST_STEPS = 4  # of a part


@dataclass(frozen=True)
class Tiles:
    """Of `hopper_kernels`: ROWS by so many columns, and parts along K of those left over."""

    columns: int
    splits: int = 1


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
    if plan.cut:
        computing += LEAVE_US[tiles.columns] + plan.splits * GATHER_US[tiles.columns]
        computing += plan.parts * 4 * ROWS * tiles.columns / SUMS_PER_US
    return BASE_US + max(computing, _bytes(product, dtype) / BYTES_PER_US)


def hopper_tiles(product: Product, dtype: torch.dtype, gpu: Gpu, columns: int = 0) -> Tiles:
    """The quickest by the model: of all widths, or of the one given; fewer parts if in doubt."""
    widths = (columns,) if columns else tuple(STEP_US)
    found = [Tiles(width, splits) for width in widths for splits in _splits(product, width, gpu)]
    return min(found, key=lambda tiles: hopper_us(product, tiles, dtype, gpu))


def _splits(product: Product, columns: int, gpu: Gpu) -> list[int]:
    """Parts that leftover tiles may have, on which all SMs work for two rounds at most."""
    left = programs(product.m, ROWS) * programs(product.n, columns) * product.count
    left %= gpu.sm_count
    deepest = product.k // (FEWEST_STEPS * 64)
    return [
        1,
        *(s for s in range(2, min(MOST_SPLITS, deepest) + 1) if left * s <= 2 * gpu.sm_count),
    ]


# --- few rows ------------------------------------------------------------------------------------

MOST_ROWS = 64
STRIP = 64  # columns of b that a program multiplies
STRIP_DEPTH = 128


@dataclass(frozen=True)
class Strips:
    """Of `skinny_impl`."""

    rows: int  # of a tile: 16, 32 or 64
    splits: int
    stages: int


def strips(product: Product, gpu: Gpu) -> Strips:
    """One program for each SM, with much on its way, if that suits the columns; else two."""
    rows = next(rows for rows in (16, 32, 64) if product.m <= rows)
    held = gpu.shared_per_block // (2 * STRIP_DEPTH * (STRIP + rows))  # stages, of halves
    count, steps = programs(product.n, STRIP), programs(product.k, STRIP_DEPTH)
    for programs_of_sm, stages in ((1, 6), (2, 4 if rows < 64 else 3)):
        room = programs_of_sm * gpu.sm_count
        splits = min(room // count, steps)
        if splits and count * splits >= 0.9 * room:
            return Strips(rows, splits, min(stages, held))
    splits = max(min(2 * gpu.sm_count // count, steps), 1)
    many = count * splits > 2 * gpu.sm_count or rows == 64
    return Strips(rows, splits, min(3 if many else 4, held))


def skinny_us(product: Product, dtype: torch.dtype) -> float:
    return BASE_US + _bytes(product, dtype) / BYTES_PER_US


# --- others --------------------------------------------------------------------------------------


def any_us(product: Product, dtype: torch.dtype, gpu: Gpu) -> float:
    """Of somebody whose tiles nobody knows: the roofs alone."""
    filled = replace(product, n=max(product.n, 1), m=max(product.m, 1))
    steps = filled.count * programs(filled.m, ROWS) * filled.n / 256 * filled.k / depth(dtype)
    computing = steps / gpu.sm_count * STEP_US[256]
    return BASE_US + max(computing, _bytes(product, dtype) / BYTES_PER_US)


def _bytes(product: Product, dtype: torch.dtype) -> float:
    """Of operands and result, each once."""
    m, n, k = product.m, product.n, product.k
    return (m * k + k * n + m * n) * product.count * dtype.itemsize
