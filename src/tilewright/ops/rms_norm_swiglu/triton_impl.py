"""rms_norm_swiglu over the last dim, and its backward.

Forward: one program holds [ROWS, BLOCK] of x and of the gate in registers; both are read once, y is
written once. Rows beyond the widest tile go through a loop that reads x twice.
Backward: the norm and silu are computed again from x and the gate, which are read anyway, so
nothing but the inputs is saved.
dW: a fixed number of programs walk the rows, each keeps its own float32 partial, and a second
kernel adds the partials in order: bit-identical from run to run, no atomics.
Limits: rows stay in registers up to WIDEST columns; up to 2^31 beyond by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from tilewright.toolkit.triton_lib import load_rows, mean_of, row_start, sigmoid

SIZES = ["row_count", "n_vectors"]
X_STRIDES = ["x_inner", "x_outer", "x_step"]
G_STRIDES = ["g_inner", "g_outer", "g_step"]
DY_STRIDES = ["dy_inner", "dy_outer", "dy_step"]


@dataclass(frozen=True)
class Launch:
    tile: Tile
    programs: int


# Columns that stay in registers, by the bytes of an element, without a spill on any SM (compile
# matrix, 2026-11).
WIDEST = {"forward": {2: 8192, 4: 8192}, "backward": {2: 8192, 4: 4096}}
# The forward's loops, up to so many columns: longer rows want larger steps. They find x in L2 the
# second time; rows that fill three quarters of a tile at most are faster so, too (H200, 2026-11).
LOOPS = {6144: Tile(1, 1024, 4, False), 15360: Tile(1, 2048, 8, False)}
LONGEST = Tile(1, 4096, 16, False)
# The backward's loop holds eight numbers for each column; 16 columns a thread spill in float32.
WIDE_FLOAT32 = Tile(1, 4096, 16, False)
# Programs of the backward that an SM runs at a time, by the columns that they hold.
RESIDENT = {2048: 4, 4096: 2}


def launch(
    count: int, n: int, vec: int, gpu: Gpu, form: str, size: int, *, partials: bool = False
) -> Launch:
    """One program per tile; with dW, as many as stay resident, each walking several tiles."""
    choice = tile(n, vec, WIDEST[form][size])
    if form == "forward" and vec > 1 and (not choice.whole or 4096 < n <= 6144):
        choice = next((loop for most, loop in LOOPS.items() if n <= most), LONGEST)
    if form == "backward" and choice.whole and choice.block >= 4096:
        choice = replace(choice, warps=16)
    if form == "backward" and not choice.whole and vec == 4:
        choice = WIDE_FLOAT32
    tiles = programs(count, choice.rows)
    resident = next((each for most, each in RESIDENT.items() if choice.block <= most), 1)
    return Launch(choice, min(tiles, resident * gpu.sm_count) if partials else tiles)


@triton.jit(do_not_specialize=SIZES + X_STRIDES + G_STRIDES)
def _forward_rows(
    y_ptr, x_ptr, g_ptr, w_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, g_inner, g_outer, g_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]

    # [ROWS, BLOCK]; the gate waits as it was loaded until the norm is done
    x = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC).to(tl.float32)
    g = load_rows(g_ptr, row, column, row_count, n, g_inner, g_outer, g_step, VEC)

    rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)  # [ROWS]
    y = x * rstd[:, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    g = g.to(tl.float32)
    y *= g * sigmoid(g, g_ptr.dtype.element_ty == tl.float32)

    to = (row.to(tl.int64) * n)[:, None] + column
    inside = (row < row_count)[:, None] & (column < n)
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + X_STRIDES + G_STRIDES)
def _forward_wide_rows(
    y_ptr, x_ptr, g_ptr, w_ptr, row_count, n_vectors,
    x_inner, x_outer, x_step, g_inner, g_outer, g_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
    g_row = g_ptr + row_start(row, g_inner, g_outer, g_step, VEC)
    y_row = y_ptr + row.to(tl.int64) * n

    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), n) + eps)

    for start in range(0, n, BLOCK):
        at = start + column
        x = tl.load(x_row + at, mask=at < n, other=0.0, eviction_policy="evict_first")
        g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
        y = x.to(tl.float32) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        y *= g * sigmoid(g, g_ptr.dtype.element_ty == tl.float32)
        tl.store(y_row + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=SIZES + DY_STRIDES + X_STRIDES + G_STRIDES)
def _backward_rows(
    dx_ptr, dg_ptr, dy_ptr, x_ptr, g_ptr, w_ptr, partial_ptr, row_count, n_vectors,
    dy_inner, dy_outer, dy_step, x_inner, x_outer, x_step, g_inner, g_outer, g_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)

    for first in range(tl.program_id(0) * ROWS, row_count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)  # [ROWS]
        dy = load_rows(dy_ptr, row, column, row_count, n, dy_inner, dy_outer, dy_step, VEC)
        x = load_rows(x_ptr, row, column, row_count, n, x_inner, x_outer, x_step, VEC)
        g = load_rows(g_ptr, row, column, row_count, n, g_inner, g_outer, g_step, VEC)
        dy, x, g = dy.to(tl.float32), x.to(tl.float32), g.to(tl.float32)

        rstd = tl.rsqrt(mean_of(tl.sum(x * x, 1), n) + eps)
        # with eps = 0 a row past the end would bring 0 * inf = NaN into dw
        rstd = tl.where(row < row_count, rstd, 0.0)[:, None]  # [ROWS, 1]
        x *= rstd
        sigma = sigmoid(g, g_ptr.dtype.element_ty == tl.float32)
        silu = g * sigma
        slope = sigma + silu * (1 - sigma)
        if partial_ptr is not None:
            dw += dy * silu * x
        if w_ptr is not None:
            dy *= tl.load(w_ptr + column, mask=column < n, other=0.0).to(tl.float32)
        dg = dy * x * slope
        h = dy * silu  # what reaches the normalised row
        dx = rstd * (h - x * (tl.sum(h * x, 1) / n)[:, None])  # [ROWS, BLOCK]

        to = (row.to(tl.int64) * n)[:, None] + column
        inside = (row < row_count)[:, None] & (column < n)
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dg_ptr + to, dg.to(dg_ptr.dtype.element_ty), mask=inside)

    if partial_ptr is not None:
        to = tl.program_id(0).to(tl.int64) * n + column
        tl.store(partial_ptr + to, tl.sum(dw, 0)[None, :], mask=column < n)


@triton.jit(do_not_specialize=SIZES + DY_STRIDES + X_STRIDES + G_STRIDES)
def _backward_wide_rows(
    dx_ptr, dg_ptr, dy_ptr, x_ptr, g_ptr, w_ptr, partial_ptr, row_count, n_vectors,
    dy_inner, dy_outer, dy_step, x_inner, x_outer, x_step, g_inner, g_outer, g_step, eps,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = n_vectors * VEC
    column = tl.arange(0, BLOCK)  # [BLOCK]

    for row in range(tl.program_id(0), row_count, tl.num_programs(0)):
        dy_row = dy_ptr + row_start(row, dy_inner, dy_outer, dy_step, VEC)
        x_row = x_ptr + row_start(row, x_inner, x_outer, x_step, VEC)
        g_row = g_ptr + row_start(row, g_inner, g_outer, g_step, VEC)
        squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            at = start + column
            h = tl.load(dy_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32)
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            if w_ptr is not None:
                h *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
            squares += x * x
            products += h * (g * sigmoid(g, g_ptr.dtype.element_ty == tl.float32)) * x
        rstd = tl.rsqrt(mean_of(tl.sum(squares, 0), n) + eps)
        mean = tl.sum(products, 0) * rstd / n

        to_row = tl.cast(row, tl.int64) * n
        for start in range(0, n, BLOCK):
            at = start + column
            dy = tl.load(dy_row + at, mask=at < n, other=0.0).to(tl.float32)
            x = tl.load(x_row + at, mask=at < n, other=0.0).to(tl.float32) * rstd
            g = tl.load(g_row + at, mask=at < n, other=0.0).to(tl.float32)
            sigma = sigmoid(g, g_ptr.dtype.element_ty == tl.float32)
            silu = g * sigma
            slope = sigma + silu * (1 - sigma)
            if partial_ptr is not None:
                # each program owns a row of partials; its first row starts the sum
                own = partial_ptr + tl.program_id(0).to(tl.int64) * n + at
                later = at < n * tl.minimum(row - tl.program_id(0), 1)
                tl.store(own, tl.load(own, mask=later, other=0.0) + dy * silu * x, mask=at < n)
            if w_ptr is not None:
                dy *= tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
            dg = dy * x * slope
            dx = rstd * (dy * silu - x * mean)
            tl.store(dx_ptr + to_row + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)
            tl.store(dg_ptr + to_row + at, dg.to(dg_ptr.dtype.element_ty), mask=at < n)


@on_rows
def prepare(
    gpu: Gpu, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Callable[..., Any]:
    if not x.numel():
        return lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)
    view, g_view = rows(x), rows(gate)
    given = [(x, view), (gate, g_view), (weight, None)]
    vec = vector_width(view.n, *((t, r) for t, r in given if t is not None))
    choice = launch(view.count, view.n, vec, gpu, "forward", x.element_size())
    return bind(
        _forward_rows if choice.tile.whole else _forward_wide_rows,
        (choice.programs,),
        [x.dtype, x, gate, weight],
        (view.count, view.n // vec, *view.units(vec), *g_view.units(vec), eps),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
        makes=memory.contiguous(x.shape, x.dtype, x.device),
    )


def _bind_backward(
    gpu: Gpu, grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None,
    eps: float, weight_grad: bool,
) -> tuple[Callable[..., Any], int]:  # fmt: skip
    """`kernel(dx, dgate, grad, x, gate, weight, partial)`, and how many partials it writes."""
    views = [rows(grad), rows(x), rows(gate)]
    given = [*zip((grad, x, gate), views, strict=True), (weight, None)]
    n, count = views[1].n, views[1].count
    vec = vector_width(n, *((t, r) for t, r in given if t is not None))
    choice = launch(count, n, vec, gpu, "backward", x.element_size(), partials=weight_grad)
    partial = torch.float32 if weight_grad else None
    kernel = bind(
        _backward_rows if choice.tile.whole else _backward_wide_rows,
        (choice.programs,),
        [x.dtype, x.dtype, grad, x, gate, weight, partial],
        (count, n // vec, *(unit for view in views for unit in view.units(vec)), eps),
        {"VEC": vec, "ROWS": choice.tile.rows, "BLOCK": choice.tile.block},
        aligned=vec > 1,
        num_warps=choice.tile.warps,
    )
    return kernel, choice.programs


@on_rows
def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None,
    eps: float, weight_grad: bool,
) -> Callable[..., Any]:  # fmt: skip
    new = memory.contiguous(x.shape, x.dtype, x.device)
    if not x.numel():
        return lambda dy, x, g, w, *_: (
            new(),
            new(),
            torch.zeros_like(w) if weight_grad else x.new_empty(0),
        )
    wanted = weight_grad and weight is not None
    kernel, count = _bind_backward(gpu, grad, x, gate, weight, eps, wanted)
    if not wanted or weight is None:

        def run(dy: Any, x: Any, g: Any, w: Any, *_: Any) -> tuple[torch.Tensor, ...]:
            dx, dg = new(), new()
            kernel(dx, dg, dy, x, g, w, None)
            return dx, dg, x.new_empty(0)

        return run
    n = x.shape[-1]
    new_partial = memory.contiguous((count, n), torch.float32, x.device)
    new_dw = memory.contiguous((n,), weight.dtype, x.device)
    add_up = bind_sum(count, n, weight.dtype)

    def run_with_dw(dy: Any, x: Any, g: Any, w: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        dx, dg, partial, dw = new(), new(), new_partial(), new_dw()
        kernel(dx, dg, dy, x, g, w, partial)
        add_up(dw, None, partial)
        return dx, dg, dw

    return run_with_dw
