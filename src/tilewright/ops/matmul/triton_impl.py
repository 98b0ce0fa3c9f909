"""A matrix product in tiles, portable: SM 75 and newer, and Triton's interpreter.

A program computes one tile of one product of the stack. It walks along the depth, BLOCK_K at a
time: a tile of a and a tile of b are copied to shared memory some steps ahead, multiplied by the
tensor cores and added up in float32. Tiles are numbered in groups of rows, so that programs that
run side by side find their operands in L2; all together read k m n (1 / BLOCK_M + 1 / BLOCK_N)
elements and write m n. Few tiles of deep sums are split along the depth: each part leaves its sums
in float32, and a second kernel adds them in order, so that every bit repeats.
Operands may lie by rows, by columns or with any strides; whole 16 bytes are copied at once where
addresses, pitches and sizes allow it. Limits: sizes below 2^31.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.multiplying import block_bytes
from tilewright.toolkit import memory
from tilewright.toolkit.launch import MAX_GRID, bind, is_interpreted, programs
from tilewright.toolkit.matmul_call import (
    Product,
    flat,
    gradients,
    result_shape,
    see,
    seen,
    too_long,
    vector,
)
from tilewright.toolkit.triton_lib import indices_inside


@dataclass(frozen=True)
class Launch:
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int  # steps that are on their way; fewer where shared memory is short
    splits: int = 1  # of the depth
    group: int = 8  # rows of tiles

    @property
    def block(self) -> tuple[int, int, int]:
        return self.block_m, self.block_n, self.block_k


# By what multiplies, the largest first; the last is for few rows. Compiled for, not tuned.
HALVES = (
    Launch(128, 256, 64, 8, 3, group=16),
    Launch(128, 128, 64, 8, 4),
    Launch(64, 64, 64, 4, 4),
    Launch(16, 128, 64, 4, 4),
)
# The largest where b lies by rows: shorter steps are quicker there. Of a b that lies by columns
# they would read pieces of 64 bytes.
SHORT_STEPS = Launch(128, 256, 32, 8, 5, group=16)
TF32 = (Launch(128, 128, 32, 8, 3), Launch(64, 64, 32, 4, 4), Launch(16, 64, 32, 4, 4))
# Halves that are read one by one pass through registers on their way to shared memory.
ONE_BY_ONE = (Launch(64, 64, 32, 4, 2), Launch(16, 128, 64, 4, 2))
# Without tensor cores, the operands of a whole step do.
WITHOUT = (Launch(128, 64, 16, 8, 3), Launch(64, 64, 16, 4, 3), Launch(16, 64, 32, 4, 3))
FEW_ROWS = 32
WORTH = 3  # stages without which a large tile waits for its operands
PART = 512  # the shortest part of a sum that is worth a program
BLOCK_SUM = 1024


def launch(
    m: int, n: int, k: int, count: int, dtype: torch.dtype, precision: str, whole: bool, gpu: Gpu,
    block: tuple[int, ...] | None = None, b_by_rows: bool = False,
) -> Launch:  # fmt: skip
    """For `count` products of [m, k] and [k, n]; `whole` 16 bytes are read at once."""
    exact = dtype == torch.float32 and precision == "ieee"
    on_tensor_cores = gpu.arch.triton_tensor_cores and not exact
    if block is not None:
        return _given(block, dtype, on_tensor_cores, gpu)
    table = TF32 if dtype == torch.float32 else HALVES if whole else ONE_BY_ONE
    *large, small, few = (_fitted(c, dtype, gpu) for c in (table if on_tensor_cores else WITHOUT))
    choice = small
    for each in reversed(large):  # the largest that leaves no SM idle
        if each.stages >= WORTH and _tiles(each, m, n) * count >= gpu.sm_count:
            choice = each
    if choice == HALVES[0] and b_by_rows:
        choice = SHORT_STEPS
    if m <= FEW_ROWS:
        choice = few
    parts = min(gpu.sm_count // (_tiles(choice, m, n) * count), k // PART)
    if parts > 1:
        choice = replace(choice, splits=programs(k, _steps(k, parts, choice) * choice.block_k))
    return choice


def _tiles(choice: Launch, m: int, n: int) -> int:
    return programs(m, choice.block_m) * programs(n, choice.block_n)


def _steps(k: int, parts: int, choice: Launch) -> int:
    """Steps of each of so many parts of the depth."""
    return programs(programs(k, parts), choice.block_k)


def _fitted(choice: Launch, dtype: torch.dtype, gpu: Gpu) -> Launch:
    """With as many stages as shared memory holds."""
    room = gpu.shared_per_block // block_bytes(choice.block, dtype.itemsize)
    return replace(choice, stages=max(min(choice.stages, room), 1))


def _given(block: tuple[int, ...], dtype: torch.dtype, on_tensor_cores: bool, gpu: Gpu) -> Launch:
    """Tiles that somebody asked for: so many warps that a thread has 128 sums, or 32 without tensor
    cores, for which its registers hold operands too."""
    rows, columns, depth = block
    sums = 128 if on_tensor_cores else 32
    warps = min(max(rows * columns // (32 * sums), 4), 16)
    return _fitted(Launch(rows, columns, depth, warps, 4), dtype, gpu)


SIZES = ["m", "n_units", "k_units", "inner", "tiles_m", "tiles_n", "splits", "steps"]
STRIDES = [f"{x}_{dim}" for x in "ab" for dim in ("outer", "inner", "row", "column")]


@triton.jit
def _place(tiles_m, tiles_n, splits, GROUP: tl.constexpr):
    """(row, column, part, number of the product) of a program's tile: down a group of rows of
    tiles, then on to its next column."""
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    rest = program // (tiles_m * tiles_n)
    first = tile // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)  # the last group may be cut short
    of_group = tile % (GROUP * tiles_n)
    return first + of_group % size, of_group // size, rest % splits, rest // splits


@triton.jit
def _at(row, column, row_stride, column_stride, LAYOUT: tl.constexpr, VEC: tl.constexpr):
    """Offsets in 64 bits. A stride of 1 is known, others are whole vectors."""
    row, column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    if LAYOUT == "rows":
        at = row * row_stride * VEC + column
    elif LAYOUT == "columns":
        at = row + column * column_stride * VEC
    else:
        at = row * row_stride + column * column_stride
    return at


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _matmul(
    c_ptr, a_ptr, b_ptr,
    m, n_units, k_units, inner, tiles_m, tiles_n, splits, steps,
    a_outer, a_inner, a_row, a_column, b_outer, b_inner, b_row, b_column,
    A: tl.constexpr, B: tl.constexpr, VEC: tl.constexpr, VEC_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # sizes along which somebody reads vectors are whole ones: masks must not take them apart
    VEC_K: tl.constexpr = VEC if A == "rows" or B == "columns" else 1
    tile_m, tile_n, part, number = _place(tiles_m, tiles_n, splits, GROUP)
    n = n_units * VEC_C
    begin = part * steps * BLOCK_K
    end = tl.minimum(k_units, (part + 1) * steps * (BLOCK_K // VEC_K)) * VEC_K
    outer, within = (number // inner).to(tl.int64), (number % inner).to(tl.int64)

    i = indices_inside(tile_m * BLOCK_M, m, BLOCK_M, VEC if A == "columns" else 1)
    j = indices_inside(tile_n * BLOCK_N, n, BLOCK_N, VEC if B == "rows" else 1)
    depth = tl.arange(0, BLOCK_K)
    a_ptr += (outer * a_outer + within * a_inner) * VEC
    b_ptr += (outer * b_outer + within * b_inner) * VEC
    a_at = a_ptr + _at(i, begin + depth, a_row, a_column, A, VEC)  # [BLOCK_M, BLOCK_K]
    b_at = b_ptr + _at(begin + depth, j, b_row, b_column, B, VEC)  # [BLOCK_K, BLOCK_N]
    on = tl.cast(BLOCK_K, tl.int64)  # a step further
    a_on = on if A == "rows" else on * a_column * VEC
    b_on = on if B == "columns" else on * b_row * VEC

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            left = end - start
            a = tl.load(a_at, mask=depth[None, :] < left, other=0.0)
            b = tl.load(b_at, mask=depth[:, None] < left, other=0.0)
        if WIDE:  # the interpreter multiplies no bfloat16; a product of float32 is the same one
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += a_on
        b_at += b_on

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_inside = (row < m) & (column < n)
    if splits > 1:  # every part has a float32 result of its own
        count = tl.num_programs(0) // (tiles_m * tiles_n * splits)
        place = (tl.cast(part, tl.int64) * count + number) * m
        parts_ptr = c_ptr.to(tl.pointer_type(tl.float32))
        tl.store(parts_ptr + (place + row) * n + column, acc, mask=is_inside)
    else:
        to = (tl.cast(number, tl.int64) * m + row) * n + column
        tl.store(c_ptr + to, acc.to(c_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["units", "splits"])
def _sum_parts(c_ptr, parts_ptr, units, splits, VEC: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.cast(units, tl.int64) * VEC
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < total
    acc = tl.zeros([BLOCK], tl.float32)
    for _ in range(splits):  # always in this order
        acc += tl.load(parts_ptr + at, mask=is_inside, other=0.0)
        parts_ptr += total
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=is_inside)


def _vector(p: Product, a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of a 16-byte load, if all of both operands can be read by them; else 1."""
    steps: list[int] = []
    for x, along in ((p.a, p.k if p.a.by_rows else p.m), (p.b, p.n if p.b.by_rows else p.k)):
        if not (x.by_rows or x.by_columns):
            return 1
        steps += [x.pitch, x.outer_stride, x.inner_stride, along]
    aligned = not (a.data_ptr() % 16 or b.data_ptr() % 16)
    return vector(a.element_size(), aligned, *steps)


def _bind(
    p: Product, choice: Launch, vec: int, a: torch.Tensor, b: torch.Tensor, out: torch.dtype,
    precision: str, makes: Callable[[], torch.Tensor] | None,
) -> Callable[..., Any]:  # fmt: skip
    """`run(a, b)`, which makes the result, or `run(parts, a, b)`."""
    layouts = [
        "rows" if x.by_rows else "columns" if x.by_columns else "strided" for x in (p.a, p.b)
    ]
    vec_c = vec if p.n % vec == 0 else 1
    vec_k = vec if layouts[0] == "rows" or layouts[1] == "columns" else 1
    tiles = programs(p.m, choice.block_m), programs(p.n, choice.block_n)
    steps = _steps(p.k, choice.splits, choice)
    strides = [
        stride // vec if stride % vec == 0 else stride  # a stride of 1 is known and not read
        for x in (p.a, p.b)
        for stride in (x.outer_stride, x.inner_stride, x.row_stride, x.column_stride)
    ]
    even = choice.block_n >= 256 and vec > 1 and p.k % choice.block_k == 0  # worth a binary
    return bind(
        _matmul,
        (tiles[0] * tiles[1] * p.count * choice.splits,),
        [out, a, b],
        (p.m, p.n // vec_c, p.k // vec_k, p.inner, *tiles, choice.splits, steps, *strides),
        {
            "A": layouts[0], "B": layouts[1], "VEC": vec, "VEC_C": vec_c,
            "BLOCK_M": choice.block_m, "BLOCK_N": choice.block_n, "BLOCK_K": choice.block_k,
            "GROUP": choice.group, "EVEN": even,
            "PRECISION": precision if a.dtype == torch.float32 else "ieee",
            "WIDE": is_interpreted(_matmul) and a.dtype == torch.bfloat16,
        },
        aligned=vec > 1,
        num_warps=choice.warps,
        num_stages=choice.stages,
        makes=makes,
    )  # fmt: skip


def _bind_sum(total: int, splits: int, out: torch.dtype) -> Callable[..., Any]:
    """`run(c, parts)`."""
    vec = 4 if total % 4 == 0 else 1  # both are fresh: aligned
    return bind(
        _sum_parts,
        (programs(total, BLOCK_SUM),),
        [out, torch.float32],
        (total // vec, splits),
        {"VEC": vec, "BLOCK": BLOCK_SUM},
        aligned=True,
        num_warps=4,
    )


def refuses(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: Any, precision: str, block: Any,
    deterministic: bool,
) -> str | None:  # fmt: skip
    if block is not None:
        needs = block_bytes(block, a.element_size())
        if needs > gpu.shared_per_block:
            return (
                f"block is {tuple(block)}, whose tiles take {needs} bytes of shared memory; "
                f"a block of {gpu.name} has {gpu.shared_per_block}"
            )
    p = seen(a, b)
    reason = too_long(p)
    if reason is not None:
        return reason
    choice = HALVES[-1] if block is None else _given(block, a.dtype, True, gpu)  # the smallest
    if _tiles(choice, p.m, p.n) * p.count > MAX_GRID[0]:
        return f"{p.count} products of {p.m} by {p.n} may have more tiles than a grid"
    return None


def prepare(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str,
    block: Any, deterministic: bool,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    out, p = out_dtype or a.dtype, see(a, b)
    if p is None:
        run_flat = prepare(gpu, *flat(a, b), out, precision, block, deterministic)
        shape = result_shape(a.shape, b.shape)
        return lambda a, b, *_: run_flat(*flat(a, b)).view(shape)
    new_c = memory.contiguous(p.shape, out, a.device)
    if p.is_empty:
        return lambda *_: new_c()
    if not p.k:
        return lambda *_: new_c().zero_()
    vec = _vector(p, a, b)
    by_rows = p.b.by_rows
    choice = launch(p.m, p.n, p.k, p.count, a.dtype, precision, vec > 1, gpu, block, by_rows)
    if choice.splits == 1:
        return _bind(p, choice, vec, a, b, out, precision, new_c)
    total = p.count * p.m * p.n
    new_parts = memory.contiguous((choice.splits, total), torch.float32, a.device)
    multiply = _bind(p, choice, vec, a, b, out, precision, None)
    add_up = _bind_sum(total, choice.splits, out)

    def run(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        parts, c = new_parts(), new_c()
        multiply(parts, a, b)
        add_up(c, parts)
        return c

    return run


def prepare_backward(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return gradients(prepare, gpu, *args)
