"""rms_norm, its residual-add form and their shared backward, over the last dim.

Forward: one program holds [ROWS, BLOCK] in registers; x (and the residual) is read once, y (and the
new residual) written once. Rows beyond the widest tile are read twice.
Backward: rstd is recomputed from x, which is read anyway, so nothing but the inputs is saved.
dW: a fixed number of programs walk the rows, each keeps its own float32 partial, and a second
kernel adds the partials in order: bit-identical from run to run, no atomics.
Limits: rows stay in registers up to WIDEST columns; up to 2^31 beyond by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.toolkit import memory
from tilewright.toolkit.launch import bind, programs
from tilewright.toolkit.partials import bind_sum
from tilewright.toolkit.rows import on_rows, rows, vector_width
from tilewright.toolkit.tiles import Tile, tile
from tilewright.toolkit.triton_lib import mean_of, row_start

SIZES = ["row_count", "n_vectors"]
X_STRIDES = ["x_inner", "x_outer", "x_step"]
R_STRIDES = ["r_inner", "r_outer", "r_step"]
G_STRIDES = ["g_inner", "g_outer", "g_step"]


@dataclass(frozen=True)
class Launch:
    tile: Tile
    programs: int


# Columns that stay in registers without a spill on any SM, by what a thread holds and by the bytes
# of an element (compile matrix, 2026-11).
WIDEST = {
    "norm": {2: 32768, 4: 16384},
    "add": {2: 16384, 4: 16384},
    "backward": {2: 8192, 4: 8192},
}


def launch(
    count: int, n: int, vec: int, gpu: Gpu, form: str, size: int, *, partials: bool = False
) -> Launch:
    """One program per tile; with dW, as many as stay resident, each walking several tiles."""
    choice = tile(n, vec, WIDEST[form][size])
    tiles = programs(count, choice.rows)
    resident = gpu.sm_count * (2 if choice.warps <= 8 else 1)
    return Launch(choice, min(tiles, resident) if partials else tiles)


@triton.jit(do_not_specialize=SIZES + X_STRIDES + R_STRIDES)
def _norm_rows(
    y_ptr, x_ptr, w_ptr, r_ptr, s_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, r_inner, r_outer, r_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < row_count)[:, None] & (column < n)
    to = (row.to(tl.int64) * n)[:, None] + column

    at = row_start(row, x_inner, x_outer, x_step, VEC)
    x = tl.load(x_ptr + at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    if r_ptr is not None:
        r_at = row_start(row, r_inner, r_outer, r_step, VEC)
        r = tl.load(r_ptr + r_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        total = (x + r).to(s_ptr.dtype.element_ty)  # rounded before it is normed
        tl.store(s_ptr + to, total, mask=inside)
        x = total.to(tl.float32)

    rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)  # [ROWS]
    y = x * rstd[:, None]  # [ROWS, BLOCK]
    if ROUND_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if w_ptr is not None:
        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32) + offset

    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + X_STRIDES + R_STRIDES)
def _norm_wide_rows(
    y_ptr, x_ptr, w_ptr, r_ptr, s_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, r_inner, r_outer, r_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
    to_row = row.to(tl.int64) * n

    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if r_ptr is not None:
            r_row = r_ptr + row_start(row, r_inner, r_outer, r_step, VEC)
            r = tl.load(r_row + at, mask=at < n, other=0.0).to(tl.float32)
            total = (x + r).to(s_ptr.dtype.element_ty)  # rounded before it is normed
            tl.store(s_ptr + to_row + at, total, mask=at < n)
            x = total.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), n) + eps)

    for start in range(0, n, BLOCK):
        at = start + column
        if r_ptr is not None:
            x = tl.load(s_ptr + to_row + at, mask=at < n, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
        y = x * rstd
        if ROUND_FIRST:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32) + offset
        tl.store(y_ptr + to_row + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=SIZES + G_STRIDES + X_STRIDES + R_STRIDES)
def _backward_rows(
    dx_ptr, g_ptr, x_ptr, w_ptr, r_ptr, partial_ptr, row_count, n_vectors,
    g_inner, g_outer, g_step, x_inner, x_outer, x_step, r_inner, r_outer, r_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)

    for first in range(tl.program_id(0) * ROWS, row_count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)  # [ROWS]
        inside = (row < row_count)[:, None] & (column < n)
        g_at = row_start(row, g_inner, g_outer, g_step, VEC)
        x_at = row_start(row, x_inner, x_outer, x_step, VEC)
        g = tl.load(g_ptr + g_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + x_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)

        rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)
        # with eps = 0 a row past the end would bring 0 * inf = NaN into dw
        rstd = tl.where(row < row_count, rstd, 0.0)[:, None]  # [ROWS, 1]
        x *= rstd
        if partial_ptr is not None:
            dw += g * x
        if w_ptr is not None:
            g *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32) + offset
        dx = rstd * (g - x * (tl.sum(g * x, 1) / n)[:, None])  # [ROWS, BLOCK]
        if r_ptr is not None:
            r_at = row_start(row, r_inner, r_outer, r_step, VEC)
            dx += tl.load(r_ptr + r_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)

        to = (row.to(tl.int64) * n)[:, None] + column
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    if partial_ptr is not None:
        to = tl.program_id(0).to(tl.int64) * n + column
        tl.store(partial_ptr + to, tl.sum(dw, 0)[None, :], mask=column < n)


@triton.jit(do_not_specialize=SIZES + G_STRIDES + X_STRIDES + R_STRIDES)
def _backward_wide_rows(
    dx_ptr, g_ptr, x_ptr, w_ptr, r_ptr, partial_ptr, row_count, n_vectors,
    g_inner, g_outer, g_step, x_inner, x_outer, x_step, r_inner, r_outer, r_step, eps, offset,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)  # [BLOCK]

    for row in range(tl.program_id(0), row_count, tl.num_programs(0)):
        g_row = g_ptr + row_start(row, g_inner, g_outer, g_step, VEC)
        x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
        squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            at = start + column
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32)
            if w_ptr is not None:
                g *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32) + offset
            squares += x * x
            products += g * x
        rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), n) + eps)
        mean = tl.sum(products, 0) * rstd / n

        to_row = tl.cast(row, tl.int64) * n
        for start in range(0, n, BLOCK):
            at = start + column
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32) * rstd
            if partial_ptr is not None:
                # each program owns a row of partials; its first row starts the sum
                own = partial_ptr + tl.program_id(0).to(tl.int64) * n + at
                later = at < n * tl.minimum(row - tl.program_id(0), 1)
                tl.store(own, tl.load(own, mask=later, other=0.0) + g * x, mask=at < n)
            if w_ptr is not None:
                g *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32) + offset
            dx = rstd * (g - x * mean)
            if r_ptr is not None:
                r_row = r_ptr + row_start(row, r_inner, r_outer, r_step, VEC)
                dx += tl.load(r_row + at, mask=at < n, other=0.0).to(tl.float32)
            tl.store(dx_ptr + to_row + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def _prepare(
    gpu: Gpu, input: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    eps: float, weight_offset: float, round_first: bool, out: torch.dtype,
) -> Callable[..., Any]:  # fmt: skip
    """`run(x, w)`, or `run(x, w, residual)`."""
    shape, dtype, device = tuple(input.shape), input.dtype, input.device
    new_y = memory.contiguous(shape, out, device)
    new_total = memory.contiguous(shape, dtype, device)
    view = rows(input)
    r_view = view if residual is None else rows(residual)
    given = [
        (input, view),
        (residual, r_view),
        (weight, None),
        (input.new_empty(0, dtype=out), None),
    ]
    vec = vector_width(view.n, *((t, r) for t, r in given if t is not None))
    form = "norm" if residual is None else "add"
    choice = launch(view.count, view.n, vec, gpu, form, input.element_size())
    pointers: list[Any] = [out, input, weight, *([] if residual is None else [residual, dtype])]
    kernel = bind(
        _norm_rows if choice.tile.whole else _norm_wide_rows,
        (choice.programs,),
        pointers,
        (view.count, view.n // vec, *view.units(vec), *r_view.units(vec), eps, weight_offset),
        {
            "VEC": vec,
            "ROWS": choice.tile.rows,
            "BLOCK": choice.tile.block,
            "ROUND_FIRST": round_first,
        },
        aligned=vec > 1,
        num_warps=choice.tile.warps,
        absent=2 if residual is None else 0,
        makes=new_y if residual is None else None,
    )
    if residual is None:
        return kernel

    def run_add(x: Any, r: Any, w: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = new_y(), new_total()
        kernel(y, x, w, r, total)
        return y, total

    return run_add


def _prepare_backward(
    gpu: Gpu, grad: torch.Tensor, grad_residual: torch.Tensor | None, input: torch.Tensor,
    weight: torch.Tensor | None, eps: float, weight_offset: float, weight_grad: bool,
) -> Callable[..., Any]:  # fmt: skip
    shape, dtype, device = tuple(input.shape), input.dtype, input.device
    new_dx = memory.contiguous(shape, dtype, device)
    view, g_view = rows(input), rows(grad)
    r_view = view if grad_residual is None else rows(grad_residual)
    given = [(grad, g_view), (grad_residual, r_view), (input, view), (weight, None)]
    n, vec = view.n, vector_width(view.n, *((t, r) for t, r in given if t is not None))
    size = input.element_size()
    choice = launch(view.count, n, vec, gpu, "backward", size, partials=weight_grad)
    kernel = bind(
        _backward_rows if choice.tile.whole else _backward_wide_rows,
        (choice.programs,),
        [dtype, grad, input, weight, grad_residual, torch.float32 if weight_grad else None],
        (view.count, n // vec, *g_view.units(vec), *view.units(vec), *r_view.units(vec),
         eps, weight_offset),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
    )  # fmt: skip
    count = choice.programs
    if not weight_grad or weight is None:

        def run(g: Any, r: Any, x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            dx = new_dx()
            kernel(dx, g, x, w, r, None)
            return dx, x.new_empty(0)

        return run
    new_partial = memory.contiguous((count, n), torch.float32, device)
    new_dw = memory.contiguous((n,), weight.dtype, device)
    reduce = bind_sum(count, n, weight.dtype)

    def run_with_dw(g: Any, r: Any, x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dx, partial, dw = new_dx(), new_partial(), new_dw()
        kernel(dx, g, x, w, r, partial)
        reduce(dw, None, partial)
        return dx, dw

    return run_with_dw


@on_rows
def prepare(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float,
    casting: str,
) -> Callable[..., Any]:  # fmt: skip
    out = _result_dtype(input, weight, casting)
    if not input.numel():
        return lambda x, *_: torch.empty_like(x, dtype=out, memory_format=torch.contiguous_format)
    return _prepare(gpu, input, None, weight, eps, weight_offset, casting == "llama", out)


@on_rows
def prepare_add(
    gpu: Gpu, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float,
    weight_offset: float, casting: str,
) -> Callable[..., Any]:  # fmt: skip
    out = _result_dtype(input, weight, casting)
    if not input.numel():
        return lambda x, r, *_: (
            torch.empty_like(x, dtype=out, memory_format=torch.contiguous_format),
            torch.empty_like(x, memory_format=torch.contiguous_format),
        )
    return _prepare(gpu, input, residual, weight, eps, weight_offset, casting == "llama", out)


@on_rows
def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, grad_residual: torch.Tensor | None, input: torch.Tensor,
    weight: torch.Tensor | None, eps: float, weight_offset: float, weight_grad: bool,
) -> Callable[..., Any]:  # fmt: skip
    if not input.numel():
        return lambda g, r, x, w, *_: (
            torch.empty_like(x, memory_format=torch.contiguous_format),
            torch.zeros_like(w) if weight_grad else x.new_empty(0),
        )
    return _prepare_backward(
        gpu, grad, grad_residual, input, weight, eps, weight_offset, weight_grad
    )


def _result_dtype(input: torch.Tensor, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    if casting == "llama" and weight is not None:
        return torch.promote_types(input.dtype, weight.dtype)
    return input.dtype
