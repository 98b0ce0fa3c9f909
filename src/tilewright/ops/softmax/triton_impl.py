"""softmax and its backward, along the last dim or along any other.

Rows: one program holds [ROWS, BLOCK] of the input in registers, so each element is read once and
written once. Rows beyond the widest tile are read twice, with a running maximum and sum in between.
Columns (dim is not the last): one program walks down N for BLOCK_D neighbouring columns, twice;
neighbouring threads read neighbouring columns, so loads stay coalesced.
A NaN spreads over its own row through the sum; a row of -inf gives NaN, as torch's does.
Limits: BLOCK * ROWS in registers up to 32,768 columns; up to 2^31 beyond by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.toolkit import memory
from tilewright.toolkit.launch import bind, programs
from tilewright.toolkit.rows import on_rows, rows, rows_of, vector_width
from tilewright.toolkit.tiles import Tile, tile
from tilewright.toolkit.triton_lib import row_start

WIDEST_BACKWARD = 16384  # two operands live in registers

ROW_SIZES = ["row_count", "n_vectors", "inner", "outer_stride", "inner_stride"]
GRAD_STRIDES = ["g_inner", "g_outer_stride", "g_inner_stride"]
COLUMN_SIZES = ["n", "d", "d_blocks", "outer_stride", "n_stride"]


def launch(n: int, vec: int, *, backward: bool = False) -> Tile:
    return tile(n, vec, WIDEST_BACKWARD if backward else 32768)


@triton.jit
def _online(m, s, x):
    """Take a chunk into the running maximum m and sum s of exp(x - m). Reduces axis 1."""
    m_new = tl.maximum(m, tl.max(x, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # all -inf so far: exp(-inf) = 0, not NaN
    s = s * tl.exp(m - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
    return m_new, s


@triton.jit(do_not_specialize=ROW_SIZES)
def _softmax_rows(
    y_ptr, x_ptr, row_count, n_vectors, inner, outer_stride, inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < row_count)[:, None] & (column < n)

    at = row_start(row, inner, outer_stride, inner_stride, VEC)
    x = tl.load(x_ptr + at[:, None] + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)  # [ROWS, BLOCK]

    e = tl.exp(x - tl.max(x, 1)[:, None])
    y = e / tl.sum(e, 1)[:, None]

    to = (row.to(tl.int64) * n)[:, None] + column
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ROW_SIZES)
def _softmax_wide_rows(
    y_ptr, x_ptr, row_count, n_vectors, inner, outer_stride, inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    x_row = x_ptr + row_start(row, inner, outer_stride, inner_stride, VEC)

    m = tl.full([1], float("-inf"), tl.float32)
    s = tl.zeros([1], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=float("-inf"), eviction_policy="evict_last")
        m, s = _online(m, s, x.to(tl.float32))

    y_row = y_ptr + row.to(tl.int64) * n
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
        y = tl.exp(x.to(tl.float32) - m[:, None]) / s[:, None]
        tl.store(y_row + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=COLUMN_SIZES)
def _softmax_columns(
    y_ptr, x_ptr, n, d, d_blocks, outer_stride, n_stride,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    outer = (tl.program_id(0) // d_blocks).to(tl.int64)
    block = (tl.program_id(0) % d_blocks).to(tl.int64)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)[:, None]  # [BLOCK_D, 1]
    step = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    x_slice = x_ptr + outer * outer_stride + column

    m = tl.full([BLOCK_D], float("-inf"), tl.float32)
    s = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, n, BLOCK_N):
        at = start + step
        inside = (column < d) & (at < n)
        x = tl.load(x_slice + at.to(tl.int64) * n_stride, mask=inside, other=float("-inf"))
        m, s = _online(m, s, x.to(tl.float32))

    y_slice = y_ptr + outer * n * d + column
    for start in range(0, n, BLOCK_N):
        at = start + step
        inside = (column < d) & (at < n)
        x = tl.load(x_slice + at.to(tl.int64) * n_stride, mask=inside, other=0.0)
        y = tl.exp(x.to(tl.float32) - m[:, None]) / s[:, None]
        tl.store(y_slice + at.to(tl.int64) * d, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ROW_SIZES + GRAD_STRIDES)
def _backward_rows(
    dx_ptr, g_ptr, y_ptr, row_count, n_vectors, inner, outer_stride, inner_stride,
    g_inner, g_outer_stride, g_inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < row_count)[:, None] & (column < n)

    at = row_start(row, inner, outer_stride, inner_stride, VEC)
    g_at = row_start(row, g_inner, g_outer_stride, g_inner_stride, VEC)
    y = tl.load(y_ptr + at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + g_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)

    dx = y * (g - tl.sum(g * y, 1)[:, None])  # [ROWS, BLOCK]

    to = (row.to(tl.int64) * n)[:, None] + column
    tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ROW_SIZES + GRAD_STRIDES)
def _backward_wide_rows(
    dx_ptr, g_ptr, y_ptr, row_count, n_vectors, inner, outer_stride, inner_stride,
    g_inner, g_outer_stride, g_inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    y_row = y_ptr + row_start(row, inner, outer_stride, inner_stride, VEC)
    g_row = g_ptr + row_start(row, g_inner, g_outer_stride, g_inner_stride, VEC)

    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        y = tl.load(y_row + at, mask=at < n, other=0.0, eviction_policy="evict_last")
        g = tl.load(g_row + at, mask=at < n, other=0.0, eviction_policy="evict_last")
        partial += y.to(tl.float32) * g.to(tl.float32)
    dot = tl.sum(partial, 0)

    dx_row = dx_ptr + row.to(tl.int64) * n
    for start in range(0, n, BLOCK):
        at = start + column
        y = tl.load(y_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
        g = tl.load(g_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
        dx = y.to(tl.float32) * (g.to(tl.float32) - dot)
        tl.store(dx_row + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=[*COLUMN_SIZES, "g_outer_stride", "g_n_stride"])
def _backward_columns(
    dx_ptr, g_ptr, y_ptr, n, d, d_blocks, g_outer_stride, g_n_stride, outer_stride, n_stride,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    outer = (tl.program_id(0) // d_blocks).to(tl.int64)
    block = (tl.program_id(0) % d_blocks).to(tl.int64)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)[:, None]  # [BLOCK_D, 1]
    step = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    y_slice = y_ptr + outer * outer_stride + column
    g_slice = g_ptr + outer * g_outer_stride + column

    dot = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, n, BLOCK_N):
        at = (start + step).to(tl.int64)
        inside = (column < d) & (at < n)
        y = tl.load(y_slice + at * n_stride, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_slice + at * g_n_stride, mask=inside, other=0.0).to(tl.float32)
        dot += tl.sum(y * g, 1)

    dx_slice = dx_ptr + outer * n * d + column
    for start in range(0, n, BLOCK_N):
        at = (start + step).to(tl.int64)
        inside = (column < d) & (at < n)
        y = tl.load(y_slice + at * n_stride, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_slice + at * g_n_stride, mask=inside, other=0.0).to(tl.float32)
        dx = y * (g - dot[:, None])
        tl.store(dx_slice + at * d, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@on_rows
def _prepare_rows(gpu: Gpu, input: torch.Tensor, out: torch.dtype) -> Callable[..., Any]:
    view = rows(input)
    vec = vector_width(view.n, (input, view), (input.new_empty(0, dtype=out), None))
    choice = launch(view.n, vec)
    return bind(
        _softmax_rows if choice.whole else _softmax_wide_rows,
        (programs(view.count, choice.rows),),
        [out, input],
        (view.count, view.n // vec, *view.units(vec)),
        {"VEC": vec, "ROWS": choice.rows, "BLOCK": choice.block},
        aligned=vec > 1,
        num_warps=choice.warps,
        makes=memory.contiguous(input.shape, out, input.device),
    )


@on_rows
def _prepare_rows_backward(
    gpu: Gpu, grad: torch.Tensor, output: torch.Tensor, out: torch.dtype
) -> Callable[..., Any]:
    view, g_view = rows(output), rows(grad)
    narrow = (output.new_empty(0, dtype=out), None)
    vec = vector_width(view.n, (output, view), (grad, g_view), narrow)
    choice = launch(view.n, vec, backward=True)
    return bind(
        _backward_rows if choice.whole else _backward_wide_rows,
        (programs(view.count, choice.rows),),
        [out, grad, output],
        (view.count, view.n // vec, *view.units(vec), *g_view.units(vec)),
        {"VEC": vec, "ROWS": choice.rows, "BLOCK": choice.block},
        aligned=vec > 1,
        num_warps=choice.warps,
        makes=memory.contiguous(output.shape, out, output.device),
    )


def _slices(tensor: torch.Tensor, dim: int) -> tuple[int, int] | None:
    """Strides (outer, n) of a tensor seen as [outer, n, d] with d contiguous, or None."""
    sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
    step = 1
    for size, stride in reversed(sizes[dim + 1 :]):
        if size > 1 and stride != step:
            return None
        step *= size
    outer = rows_of([*tensor.shape[:dim], 1], [*tensor.stride()[:dim], 1])
    if outer is None or outer.inner > 1:
        return None
    return outer.outer_stride, tensor.stride(dim)


def _prepare_columns(
    kernel_function: Any, tensors: list[torch.Tensor], dim: int, out: torch.dtype
) -> Callable[..., Any]:
    """The kernel's strides come in the order of its tensors."""
    slices = [_slices(t, dim) for t in tensors]
    if None in slices:
        tame = [t if s else t.contiguous() for t, s in zip(tensors, slices, strict=True)]
        run_on_copies = _prepare_columns(kernel_function, tame, dim, out)

        def with_copies(*tensors: Any) -> torch.Tensor:
            pairs = zip(tensors, slices, strict=False)
            tame = (t if s else t.contiguous() for t, s in pairs)
            return run_on_copies(*tame)  # type: ignore[no-any-return]

        return with_copies
    shape = tensors[0].shape
    n, d = shape[dim], math.prod(shape[dim + 1 :])
    block_d, block_n = (32, 128) if d >= 32 else (4, 1024)
    d_blocks = programs(d, block_d)
    return bind(
        kernel_function,
        (math.prod(shape[:dim]) * d_blocks,),
        [out, *tensors],
        (n, d, d_blocks, *(stride for pair in slices for stride in pair or ())),
        {"BLOCK_N": block_n, "BLOCK_D": block_d},
        aligned=False,
        num_warps=4,
        makes=memory.contiguous(shape, out, tensors[0].device),
    )


def prepare(
    gpu: Gpu, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> Callable[..., Any]:
    out = dtype or input.dtype
    if not input.numel():
        new_y = memory.contiguous(input.shape, out, input.device)
        return lambda *_: new_y()
    if dim in (-1, input.dim() - 1):
        return _prepare_rows(gpu, input, out)
    return _prepare_columns(_softmax_columns, [input], dim % input.dim(), out)


def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> Callable[..., Any]:
    if not output.numel():
        new_dx = memory.contiguous(output.shape, input_dtype, output.device)
        return lambda *_: new_dx()
    if dim in (-1, output.dim() - 1):
        return _prepare_rows_backward(gpu, grad, output, input_dtype)
    return _prepare_columns(_backward_columns, [grad, output], dim % output.dim(), input_dtype)
