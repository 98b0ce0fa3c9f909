"""rms_norm over the last dim, quantised to fp8 before it leaves the registers.

As many programs as stay resident walk down the rows, each with the weight and a tile of [ROWS,
BLOCK] in registers, and the next tile on its way: the arithmetic is as long as the traffic, and one
must hide behind the other. x is read once; one byte per element and the scales are written. A group
of 128 columns is an axis of the tile seen as [ROWS, BLOCK / GROUP, GROUP]; a scale per row is the
same with one group.
One scale for the whole tensor takes two passes: the first keeps each row's rstd and the largest
magnitude of all, by an atomic maximum of integers; the second reads x again and quantises.
Limits: rows stay in registers up to WIDEST columns. Longer ones are read twice with a scale per
group, and three times with one per row: for the rms, for the maximum, and to quantise.
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
from tilewright.toolkit.triton_fp8 import magnitude, quantised, scale_of
from tilewright.toolkit.triton_lib import load_rows, mean_of, row_start

SIZES = ["row_count", "n_vectors"]
X_STRIDES = ["x_inner", "x_outer", "x_step"]


@triton.jit
def _weight(w_ptr, column, n, offset, OFFSET: tl.constexpr):
    """What a normalised element is multiplied by; zero in columns past the end."""
    w = tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    return w + offset if OFFSET else w  # an addition for each element counts here


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _quantise_rows(
    q_ptr, scale_ptr, x_ptr, w_ptr, rstd_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    group = tl.arange(0, BLOCK // GROUP)[None, :]  # [1, BLOCK / GROUP]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    stride = tl.num_programs(0) * ROWS
    following = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC)
    if w_ptr is not None:
        w = _weight(w_ptr, column, n, offset, OFFSET)
    largest = tl.zeros([ROWS, 1], tl.int32)

    for _ in range(tl.program_id(0) * ROWS, row_count, stride):
        x = following.to(tl.float32)
        after = row + stride
        following = load_rows(x_ptr, after, column, row_count, n, x_inner, x_outer, x_step, VEC)

        rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)  # [ROWS]
        y = x * rstd[:, None]  # [ROWS, BLOCK]
        if w_ptr is not None:
            y *= w
        y = tl.reshape(y, [ROWS, BLOCK // GROUP, GROUP])
        amax = tl.max(magnitude(y), 2)  # [ROWS, BLOCK / GROUP], bits

        there = (row < row_count)[:, None]
        if amax_ptr is not None:  # one scale for the tensor: the first pass
            tl.store(rstd_ptr + row, rstd, mask=row < row_count)
            largest = tl.maximum(largest, tl.where(there, amax, 0))  # past the end may be NaN
        else:
            scale = scale_of(amax, MAX)
            q = tl.reshape(
                quantised(y, scale[:, :, None], MAX, q_ptr.dtype.element_ty), [ROWS, BLOCK]
            )
            tl.store(q_ptr + (row.to(tl.int64) * n)[:, None] + column, q, mask=there & (column < n))
            groups = tl.cdiv(n, GROUP)
            to = (row.to(tl.int64) * groups)[:, None] + group
            tl.store(scale_ptr + to, scale, mask=there & (group < groups))
        row = after

    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0), sem="relaxed")


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _quantise_wide_rows(
    q_ptr, scale_ptr, x_ptr, w_ptr, rstd_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MAX: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)

    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), n) + eps)

    scale = 1.0
    if GROUP == BLOCK:  # one scale for the row or for the tensor: the largest of all chunks
        largest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            at = start + column
            x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last")
            y = x.to(tl.float32) * rstd
            if w_ptr is not None:
                y *= _weight(w_ptr, at, n, offset, OFFSET)
            largest = tl.maximum(largest, magnitude(y))
        amax = tl.max(largest, 0)
        if amax_ptr is not None:
            tl.store(rstd_ptr + row, rstd)
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
            y = x.to(tl.float32) * rstd
            if w_ptr is not None:
                y *= _weight(w_ptr, at, n, offset, OFFSET)
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
    q_ptr, scale_ptr, x_ptr, w_ptr, rstd_ptr, amax_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """The second pass of one scale for the tensor: a tile of [ROWS, BLOCK] of any row."""
    n = n_vectors * VEC
    chunks = tl.cdiv(n, BLOCK)
    row = tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < row_count)[:, None] & (column < n)

    x = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < row_count, other=0.0)
    scale = scale_of(tl.load(amax_ptr), MAX)

    y = x * rstd[:, None]
    if w_ptr is not None:
        y *= _weight(w_ptr, column, n, offset, OFFSET)
    q = quantised(y, scale, MAX, q_ptr.dtype.element_ty)  # [ROWS, BLOCK]

    tl.store(q_ptr + (row.to(tl.int64) * n)[:, None] + column, q, mask=inside)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)


@on_rows
def prepare(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float,
    format: str, scaling: str,
) -> Callable[..., Any]:  # fmt: skip
    shape, device, fp8 = tuple(input.shape), input.device, FORMATS[format]
    new_q = memory.contiguous(shape, fp8.dtype, device)
    new_scale = memory.contiguous(scale_shape(shape, scaling), torch.float32, device)
    if not input.numel():
        return lambda *_: (new_q(), new_scale().fill_(1.0))

    view = rows(input)
    vec = vector_width(view.n, (input, view))
    if weight is not None and vector_width(view.n, (weight, None)) == 1:
        vec = 1
    choice = launch(view.count, view.n, vec, gpu, input.element_size(), scaling)
    sizes = (view.count, view.n // vec, *view.units(vec))
    tensors: list[Any] = [fp8.dtype, torch.float32, input, weight]
    statistics: list[Any] = [torch.float32, torch.int32] if scaling == "tensor" else [None, None]
    kernel = bind(
        _quantise_rows if choice.tile.whole else _quantise_wide_rows,
        (choice.programs,),
        [*tensors, *statistics],
        (*sizes, eps, weight_offset),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block, "GROUP": choice.group,
         "MAX": fp8.max, "OFFSET": weight_offset != 0},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
    )  # fmt: skip
    if scaling != "tensor":

        def run(x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, scale = new_q(), new_scale()
            kernel(q, scale, x, w, None, None)
            return q, scale

        return run
    new_rstd = memory.contiguous((view.count,), torch.float32, device)
    new_amax = memory.contiguous((1,), torch.float32, device)
    quantise = bind(
        _quantise_tensor,
        (programs(view.count, SECOND.rows) * programs(view.n, SECOND.block),),
        [*tensors, *statistics],
        (*sizes, weight_offset),
        {
            "VEC": vec,
            "ROWS": SECOND.rows,
            "BLOCK": SECOND.block,
            "MAX": fp8.max,
            "OFFSET": weight_offset != 0,
        },
        aligned=vec > 1,
        num_warps=SECOND.warps,
    )

    def run_twice(x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale, rstd = new_q(), new_scale(), new_rstd()
        amax = new_amax().zero_().view(torch.int32)
        kernel(q, scale, x, w, rstd, amax)
        quantise(q, scale, x, w, rstd, amax)
        return q, scale

    return run_twice
