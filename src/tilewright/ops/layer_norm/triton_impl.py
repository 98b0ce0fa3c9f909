"""layer_norm and its backward over the last dim.

Forward: one program holds [ROWS, BLOCK] in registers; x is read once, y written once. Rows beyond
the widest tile go through a loop and are read twice: their statistics are Welford's, lane by lane,
merged by Chan's rule. The mean comes out in two steps (toolkit.statistics), so that the error is in
proportion to the deviation, however far away the mean lies.
Backward: the statistics are computed again from x, which is read anyway; nothing is saved for it.
dW and dB: a fixed number of programs walk the rows, each with float32 partials of its own, which a
second kernel adds in order: bit-identical from run to run, no atomics.
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
from tilewright.toolkit.statistics import centred, merged, pivot, welford
from tilewright.toolkit.tiles import Tile, tile
from tilewright.toolkit.triton_lib import row_start

SIZES = ["row_count", "n_vectors"]
X_STRIDES = ["x_inner", "x_outer", "x_step"]
G_STRIDES = ["g_inner", "g_outer", "g_step"]


@dataclass(frozen=True)
class Launch:
    tile: Tile
    programs: int


# Columns that stay in registers without a spill on any SM, by what a thread holds and by the bytes
# of an element (compile matrix, 2026-11).
WIDEST = {
    "norm": {2: 32768, 4: 16384},
    "backward": {2: 8192, 4: 8192},
}
# The backward's loop holds seven numbers for each column; 16 columns a thread spill in float32.
WIDE_FLOAT32 = Tile(1, 4096, 16, False)


def launch(
    count: int, n: int, vec: int, gpu: Gpu, form: str, size: int, *, partials: bool = False
) -> Launch:
    """One program per tile; with dW or dB, as many as stay resident, each walking several tiles."""
    choice = tile(n, vec, WIDEST[form][size])
    if form == "backward" and not choice.whole and vec == 4:
        choice = WIDE_FLOAT32
    tiles = programs(count, choice.rows)
    resident = gpu.sm_count * (2 if choice.warps <= 8 else 1)
    return Launch(choice, min(tiles, resident) if partials else tiles)


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _norm_rows(
    y_ptr, x_ptr, w_ptr, b_ptr, row_count, n_vectors, x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = column < n
    if ROWS > 1:  # a tile of one row has no row past the end, and no register to spare
        inside = (row < row_count)[:, None] & inside

    at = row_start(row, x_inner, x_outer, x_step, VEC)
    x = tl.load(x_ptr + at[:, None] + column, mask=inside, other=0.0).to(tl.float32)

    x, rstd = centred(x, inside, n, eps)
    y = x * rstd[:, None]  # [ROWS, BLOCK]
    if w_ptr is not None:
        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + column, mask=column < n, other=0.0).to(tl.float32)

    to = (row.to(tl.int64) * n)[:, None] + column
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + X_STRIDES)
def _norm_wide_rows(
    y_ptr, x_ptr, w_ptr, b_ptr, row_count, n_vectors, x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
    y_row = y_ptr + row.to(tl.int64) * n

    near = pivot(x_row, column, n, BLOCK)
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean, squares = welford(mean, squares, x - near, at < n, start // BLOCK + 1)
    left, variance = merged(mean, squares, column, n, BLOCK)
    rstd = tl.rsqrt(variance + eps)

    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
        y = (x.to(tl.float32) - near - left) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y += tl.load(b_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(y_row + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=SIZES + G_STRIDES + X_STRIDES)
def _backward_rows(
    dx_ptr, g_ptr, x_ptr, w_ptr, partial_ptr, row_count, n_vectors,
    g_inner, g_outer, g_step, x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)

    for first in range(tl.program_id(0) * ROWS, row_count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)  # [ROWS]
        inside = (row < row_count)[:, None] & (column < n)
        g_at = row_start(row, g_inner, g_outer, g_step, VEC)
        x_at = row_start(row, x_inner, x_outer, x_step, VEC)
        g = tl.load(g_ptr + g_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + x_at[:, None] + column, mask=inside, other=0.0).to(tl.float32)

        x, rstd = centred(x, inside, n, eps)
        # with eps = 0 a row past the end would bring 0 * inf = NaN into dw
        rstd = tl.where(row < row_count, rstd, 0.0)[:, None]  # [ROWS, 1]
        x *= rstd
        if WEIGHT_GRAD:
            dw += g * x
        if BIAS_GRAD:
            db += g
        if w_ptr is not None:
            g *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
        along = tl.sum(g * x, 1) / n
        dx = rstd * (g - (tl.sum(g, 1) / n)[:, None] - x * along[:, None])  # [ROWS, BLOCK]

        to = (row.to(tl.int64) * n)[:, None] + column
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    if partial_ptr is not None:  # [programs, n] of dw, then as much of db
        own = partial_ptr + tl.program_id(0).to(tl.int64) * n + column
        if WEIGHT_GRAD:
            tl.store(own, tl.sum(dw, 0)[None, :], mask=column < n)
            own += tl.num_programs(0).to(tl.int64) * n
        if BIAS_GRAD:
            tl.store(own, tl.sum(db, 0)[None, :], mask=column < n)


@triton.jit(do_not_specialize=SIZES + G_STRIDES + X_STRIDES)
def _backward_wide_rows(
    dx_ptr, g_ptr, x_ptr, w_ptr, partial_ptr, row_count, n_vectors,
    g_inner, g_outer, g_step, x_inner, x_outer, x_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)  # [BLOCK]

    for row in range(tl.program_id(0), row_count, tl.num_programs(0)):
        g_row = g_ptr + row_start(row, g_inner, g_outer, g_step, VEC)
        x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
        near = pivot(x_row, column, n, BLOCK)
        mean = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            at = start + column
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32) - near
            mean, squares = welford(mean, squares, x, at < n, start // BLOCK + 1)
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            if w_ptr is not None:
                g *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
            sums += g
            products += g * x
        left, variance = merged(mean, squares, column, n, BLOCK)
        rstd = tl.rsqrt(variance + eps)
        aside = tl.sum(sums, 0) / n
        along = (tl.sum(products, 0) / n - left * aside) * rstd

        dx_row = dx_ptr + tl.cast(row, tl.int64) * n
        later = tl.minimum(row - tl.program_id(0), 1)  # 0 in a program's first row: it starts a sum
        for start in range(0, n, BLOCK):
            at = start + column
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = (x - near - left) * rstd
            if partial_ptr is not None:  # [programs, n] of dw, then as much of db
                own = partial_ptr + tl.program_id(0).to(tl.int64) * n + at
                if WEIGHT_GRAD:
                    dw = tl.load(own, mask=at < n * later, other=0.0) + g * x
                    tl.store(own, dw, mask=at < n)
                    own += tl.num_programs(0).to(tl.int64) * n
                if BIAS_GRAD:
                    db = tl.load(own, mask=at < n * later, other=0.0) + g
                    tl.store(own, db, mask=at < n)
            if w_ptr is not None:
                g *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
            dx = rstd * (g - aside - x * along)
            tl.store(dx_row + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


def _given(*operands: tuple[torch.Tensor | None, Any]) -> list[tuple[torch.Tensor, Any]]:
    return [(t, view) for t, view in operands if t is not None]


def _prepare_backward(
    gpu: Gpu, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, weight_grad: bool, bias_grad: bool,
) -> Callable[..., Any]:  # fmt: skip
    view, g_view, device = rows(input), rows(grad), input.device
    n, wanted = view.n, weight_grad + bias_grad
    vec = vector_width(n, *_given((grad, g_view), (input, view), (weight, None)))
    size = input.element_size()
    choice = launch(view.count, n, vec, gpu, "backward", size, partials=wanted > 0)
    kernel = bind(
        _backward_rows if choice.tile.whole else _backward_wide_rows,
        (choice.programs,),
        [input.dtype, grad, input, weight, torch.float32 if wanted else None],
        (view.count, n // vec, *g_view.units(vec), *view.units(vec), eps),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block,
         "WEIGHT_GRAD": weight_grad, "BIAS_GRAD": bias_grad},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
    )  # fmt: skip
    new_dx = memory.contiguous(input.shape, input.dtype, device)
    if not wanted:

        def run(g: Any, x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, ...]:
            dx = new_dx()
            kernel(dx, g, x, w, None)
            return dx, x.new_empty(0), x.new_empty(0)

        return run
    of = weight if weight_grad else bias
    assert of is not None
    new_partial = memory.contiguous((wanted, choice.programs, n), torch.float32, device)
    new_total = memory.contiguous((n,), of.dtype, device)
    reduce = bind_sum(choice.programs, n, of.dtype, two=wanted == 2)

    def run_with_partials(g: Any, x: Any, w: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        dx, partial, first = new_dx(), new_partial(), new_total()
        second = new_total() if wanted == 2 else None
        kernel(dx, g, x, w, partial)
        reduce(first, second, partial)
        if second is not None:
            return dx, first, second
        none = x.new_empty(0)
        return (dx, first, none) if weight_grad else (dx, none, first)

    return run_with_partials


@on_rows
def prepare(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float,
) -> Callable[..., Any]:  # fmt: skip
    if not input.numel():
        return lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)
    view = rows(input)
    vec = vector_width(view.n, *_given((input, view), (weight, None), (bias, None)))
    choice = launch(view.count, view.n, vec, gpu, "norm", input.element_size())
    return bind(
        _norm_rows if choice.tile.whole else _norm_wide_rows,
        (choice.programs,),
        [input.dtype, input, weight, bias],
        (view.count, view.n // vec, *view.units(vec), eps),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
        makes=memory.contiguous(input.shape, input.dtype, input.device),
    )


@on_rows
def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, weight_grad: bool, bias_grad: bool,
) -> Callable[..., Any]:  # fmt: skip
    weight_grad, bias_grad = weight_grad and weight is not None, bias_grad and bias is not None
    if not input.numel():
        return lambda g, x, w, b, *_: (
            torch.empty_like(x, memory_format=torch.contiguous_format),
            torch.zeros_like(w) if weight_grad else x.new_empty(0),
            torch.zeros_like(b) if bias_grad else x.new_empty(0),
        )
    return _prepare_backward(gpu, grad, input, weight, bias, eps, weight_grad, bias_grad)
