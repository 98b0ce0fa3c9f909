"""layer_norm over the last dim, quantised to fp8 before it leaves the registers.

As many programs as stay resident walk down the rows, each with a tile of [ROWS, BLOCK] in registers
and the next one on its way: the arithmetic is as long as the traffic, and one must hide behind the
other. x is read once; one byte per element and the scales are written. A group of 128 columns is an
axis of the tile seen as [ROWS, BLOCK / GROUP, GROUP]; a scale per row is the same with one group.
The mean comes out in two steps, so that one far from zero costs no digits: the row's first element,
and the mean of what differs from it.
One scale for the whole tensor takes two passes: the first keeps each row's statistics and the
largest magnitude of all, by an atomic maximum of integers; the second reads x again and quantises.
Limits: rows stay in registers up to WIDEST columns. Longer ones are read twice with a scale per
group, and three times with one per row: for the statistics, for the maximum, and to quantise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.fp8 import FORMATS, scale_shape
from tilewright.gpu import Gpu
from tilewright.toolkit import memory
from tilewright.toolkit.fp8_tiles import SECOND, launch
from tilewright.toolkit.launch import bind, programs
from tilewright.toolkit.rows import on_rows, rows, vector_width
from tilewright.toolkit.statistics import merged, pivot, welford
from tilewright.toolkit.triton_fp8 import magnitude, quantised, scale_of
from tilewright.toolkit.triton_lib import load_rows, mean_of, row_start

SIZES = ["row_count", "n_vectors"]
X_STRIDES = ["x_inner", "x_outer", "x_step"]


@triton.jit
def _affine(y, w_ptr, b_ptr, column, n):
    """y w + b, and zero in columns past the end if y is: the same bits wherever it is asked for."""
    if w_ptr is not None:
        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _quantise_rows(
    q_ptr, scale_ptr, x_ptr, w_ptr, b_ptr, moments_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    group = tl.arange(0, BLOCK // GROUP)[None, :]  # [1, BLOCK / GROUP]
    first = tl.zeros([1, 1], tl.int32)  # a column
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    stride = tl.num_programs(0) * ROWS
    following = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC)
    following_first = load_rows(x_ptr, row, first, row_count, n, x_inner, x_outer, x_step, VEC)
    largest = tl.zeros([ROWS, 1], tl.int32)

    for _ in range(tl.program_id(0) * ROWS, row_count, stride):
        x, near = following.to(tl.float32), following_first.to(tl.float32)  # near: [ROWS, 1]
        after = row + stride
        following = load_rows(x_ptr, after, column, row_count, n, x_inner, x_outer, x_step, VEC)
        following_first = load_rows(
            x_ptr, after, first, row_count, n, x_inner, x_outer, x_step, VEC
        )

        x = tl.where(column < n, x - near, 0.0)
        left = mean_of(tl.sum(x, 1), n)[:, None]  # [ROWS, 1]
        x = tl.where(column < n, x - left, 0.0)
        rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)[:, None]  # [ROWS, 1]
        y = _affine(x * rstd, w_ptr, b_ptr, column, n)
        y = tl.reshape(y, [ROWS, BLOCK // GROUP, GROUP])
        amax = tl.max(magnitude(y), 2)  # [ROWS, BLOCK / GROUP], bits

        there = (row < row_count)[:, None]
        if amax_ptr is not None:  # one scale for the tensor: the first pass
            keep = moments_ptr + row.to(tl.int64)[:, None] * 3
            tl.store(keep, near, mask=there)
            tl.store(keep + 1, left, mask=there)
            tl.store(keep + 2, rstd, mask=there)
            largest = tl.maximum(largest, tl.where(there, amax, 0))  # past the end may be NaN
        else:
            scale = scale_of(amax, MAX)
            q = quantised(y, scale[:, :, None], MAX, q_ptr.dtype.element_ty)
            q = tl.reshape(q, [ROWS, BLOCK])
            tl.store(q_ptr + (row.to(tl.int64) * n)[:, None] + column, q, mask=there & (column < n))
            groups = tl.cdiv(n, GROUP)
            to = (row.to(tl.int64) * groups)[:, None] + group
            tl.store(scale_ptr + to, scale, mask=there & (group < groups))
        row = after

    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _quantise_wide_rows(
    q_ptr, scale_ptr, x_ptr, w_ptr, b_ptr, moments_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)

    near = pivot(x_row, column, n, BLOCK)
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean, squares = welford(mean, squares, x - near, at < n, start // BLOCK + 1)
    left, variance = merged(mean, squares, column, n, BLOCK)
    rstd = tl.rsqrt(variance + eps)

    scale = 1.0
    if GROUP == BLOCK:  # one scale for the row or for the tensor: the largest of all chunks
        largest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            at = start + column
            x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last")
            x = tl.where(at < n, x.to(tl.float32) - near - left, 0.0)
            y = _affine(x * rstd, w_ptr, b_ptr, at, n)
            largest = tl.maximum(largest, magnitude(y))
        amax = tl.max(largest, 0)
        if amax_ptr is not None:
            keep = moments_ptr + row.to(tl.int64) * 3
            tl.store(keep, near)
            tl.store(keep + 1, left)
            tl.store(keep + 2, rstd)
            tl.atomic_max(amax_ptr, amax, sem="relaxed")
        else:
            scale = scale_of(amax, MAX)
            tl.store(scale_ptr + row, scale)

    if amax_ptr is None:
        q_row = q_ptr + row.to(tl.int64) * n
        scale_row = scale_ptr + row.to(tl.int64) * tl.cdiv(n, GROUP)
        for start in range(0, n, BLOCK):
            at = start + column
            x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
            x = tl.where(at < n, x.to(tl.float32) - near - left, 0.0)
            y = _affine(x * rstd, w_ptr, b_ptr, at, n)
            if GROUP < BLOCK:
                y = tl.reshape(y, [BLOCK // GROUP, GROUP])
                scales = scale_of(tl.max(magnitude(y), 1), MAX)  # [BLOCK / GROUP]
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                tl.store(scale_row + group, scales, mask=group < tl.cdiv(n, GROUP))
                q = quantised(y, scales[:, None], MAX, q_ptr.dtype.element_ty)
                q = tl.reshape(q, [BLOCK])
            else:
                q = quantised(y, scale, MAX, q_ptr.dtype.element_ty)
            tl.store(q_row + at, q, mask=at < n)


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _quantise_tensor(
    q_ptr, scale_ptr, x_ptr, w_ptr, b_ptr, moments_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """The second pass of one scale for the tensor: a tile of [ROWS, BLOCK] of any row."""
    n = n_vectors * VEC
    chunks = tl.cdiv(n, BLOCK)
    row = tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < row_count)[:, None] & (column < n)

    x = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC).to(tl.float32)
    kept = moments_ptr + row.to(tl.int64)[:, None] * 3  # [ROWS, 1]
    there = (row < row_count)[:, None]
    near = tl.load(kept, mask=there, other=0.0)
    left = tl.load(kept + 1, mask=there, other=0.0)
    rstd = tl.load(kept + 2, mask=there, other=0.0)
    scale = scale_of(tl.load(amax_ptr), MAX)

    y = _affine((x - near - left) * rstd, w_ptr, b_ptr, column, n)
    q = quantised(y, scale, MAX, q_ptr.dtype.element_ty)  # [ROWS, BLOCK]

    tl.store(q_ptr + (row.to(tl.int64) * n)[:, None] + column, q, mask=inside)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)


@on_rows
def prepare(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, format: str, scaling: str,
) -> Callable[..., Any]:  # fmt: skip
    shape, device, fp8 = tuple(input.shape), input.device, FORMATS[format]
    new_q = memory.contiguous(shape, fp8.dtype, device)
    new_scale = memory.contiguous(scale_shape(shape, scaling), torch.float32, device)
    if not input.numel():
        return lambda *_: (new_q(), new_scale().fill_(1.0))

    view = rows(input)
    vec = vector_width(view.n, (input, view))
    if any(t is not None and vector_width(view.n, (t, None)) == 1 for t in (weight, bias)):
        vec = 1
    choice = launch(view.count, view.n, vec, gpu, input.element_size(), scaling)
    sizes = (view.count, view.n // vec, *view.units(vec))
    tensors: list[Any] = [fp8.dtype, torch.float32, input, weight, bias]
    statistics: list[Any] = [torch.float32, torch.int32] if scaling == "tensor" else [None, None]
    kernel = bind(
        _quantise_rows if choice.tile.whole else _quantise_wide_rows,
        (choice.programs,),
        [*tensors, *statistics],
        (*sizes, eps),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block, "GROUP": choice.group,
         "MAX": fp8.max},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
    )  # fmt: skip
    if scaling != "tensor":

        def run(x: Any, w: Any, b: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, scale = new_q(), new_scale()
            kernel(q, scale, x, w, b, None, None)
            return q, scale

        return run
    new_moments = memory.contiguous((view.count, 3), torch.float32, device)
    new_amax = memory.contiguous((1,), torch.float32, device)
    quantise = bind(
        _quantise_tensor,
        (programs(view.count, SECOND.rows) * programs(view.n, SECOND.block),),
        [*tensors, *statistics],
        sizes,
        {
            "VEC": vec,
            "ROWS": SECOND.rows,
            "BLOCK": SECOND.block,
            "MAX": fp8.max,
        },
        aligned=vec > 1,
        num_warps=SECOND.warps,
    )

    def run_twice(x: Any, w: Any, b: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale, moments = new_q(), new_scale(), new_moments()
        amax = new_amax().zero_().view(torch.int32)
        kernel(q, scale, x, w, b, moments, amax)
        quantise(q, scale, x, w, b, moments, amax)
        return q, scale

    return run_twice
