"""act(gate) * up and its backward, elementwise over tiles of rows; swiglu and geglu name the act.

One program handles a [ROWS, BLOCK] tile: it reads gate and up once and writes the product once, so
bytes are the whole cost. One kernel serves two tensors and the two halves of a packed one: it takes
a pointer for each, which may be the same, and how far into a row each starts (toolkit.gated_rows).
The backward reads gradient, gate and up, recomputes the activation, and writes both gradients: into
one packed tensor, if that is what was given. Contiguous tensors are one long row, which needs no
arithmetic to be found (LEVELS).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.toolkit import gated_rows, memory
from tilewright.toolkit.gated_rows import Operands
from tilewright.toolkit.launch import bind, programs
from tilewright.toolkit.rows import on_rows
from tilewright.toolkit.triton_lib import sigmoid, start_of, tile_position


@dataclass(frozen=True)
class Launch:
    rows: int
    block: int
    warps: int


# Small programs, one 16-byte load of halves for each operand and thread, two of floats (H200,
# 2026-11); short rows share a program.
SHORT = 128
LAUNCHES = {"long": Launch(1, 1024, 4), "short": Launch(8, SHORT, 4)}


def launch(operands: Operands) -> Launch:
    short = operands.count > 1 and operands.n <= SHORT
    return LAUNCHES["short" if short else "long"]


SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))  # of gelu's 2u at zero
CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
ROOT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL = tl.constexpr(1 / math.sqrt(2 * math.pi))  # the normal density at zero
SATURATED = tl.constexpr(256.0)  # the square of a gate that passes whole, or not at all

SIZES = ["row_count", "n_vectors", "column_blocks", "gate_at", "up_at"]
STRIDES = ["x_inner", "x_outer", "x_step", "u_inner", "u_outer", "u_step"]
GRAD_STRIDES = ["step", "g_inner", "g_outer", "g_step"]


@triton.jit
def _below_normal(x):
    """The part of a normal distribution below x, within 2^-22, in far fewer steps than erf.

    Beyond -|x| lies 2^-P(|x|), P a polynomial that was fitted to it: it is 1 at 0, and grows with
    |x| to infinity, where nothing is left.
    """
    z = tl.abs(x)
    bits = 2.772158268271596e-06 * z - 3.862207449856214e-05
    bits = (bits * z + 0.00018255403847433627) * z + 0.0001458540791645646
    bits = (bits * z - 0.007075449917465448) * z + 0.052505012601614
    bits = (bits * z + 0.45920491218566895) * z + 1.1511057615280151
    tail = tl.exp2(-(bits * z + 1.0))
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _share(x, ACT: tl.constexpr, HALVES: tl.constexpr):
    """The part of x that passes: act(x) = x * share(x); halves are rounded to far fewer digits."""
    if ACT == "silu":
        return sigmoid(x, not HALVES)
    elif ACT == "gelu_tanh":
        # (1 + tanh u) / 2 = sigmoid(2u)
        return sigmoid(x * (SLOPE + CUBIC * tl.minimum(x * x, SATURATED)), False)
    elif HALVES:
        return _below_normal(x)
    else:
        return 0.5 + 0.5 * tl.erf(x * ROOT_HALF)


@triton.jit
def _share_slope(x, share, ACT: tl.constexpr):
    """Its derivative: act'(x) = share(x) + x * share'(x)."""
    if ACT == "silu":
        return share * (1.0 - share)
    elif ACT == "gelu_tanh":
        # the minimum: where the square would be infinite, its product with 0 would be NaN
        return share * (1.0 - share) * (SLOPE + 3.0 * CUBIC * tl.minimum(x * x, SATURATED))
    else:
        return NORMAL * tl.exp(-0.5 * x * x)


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _gated(
    y_ptr, gate_ptr, up_ptr, row_count, n_vectors, column_blocks, gate_at, up_at,
    x_inner, x_outer, x_step, u_inner, u_outer, u_step,
    ACT: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    n = n_vectors.to(tl.int64) * VEC
    row, column, inside = tile_position(row_count, n, column_blocks, ROWS, BLOCK, LEVELS)

    x_at = start_of(row, x_inner, x_outer, x_step, VEC, LEVELS) + gate_at.to(tl.int64) * VEC
    u_at = start_of(row, u_inner, u_outer, u_step, VEC, LEVELS) + up_at.to(tl.int64) * VEC
    x = tl.load(gate_ptr + x_at + column, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    up = tl.load(up_ptr + u_at + column, mask=inside, other=0.0).to(tl.float32)

    y = x * _share(x, ACT, y_ptr.dtype.element_ty != tl.float32) * up

    to = row.to(tl.int64) * n + column
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + STRIDES + GRAD_STRIDES)
def _gated_backward(
    dgate_ptr, dup_ptr, g_ptr, gate_ptr, up_ptr,
    row_count, n_vectors, column_blocks, gate_at, up_at,
    x_inner, x_outer, x_step, u_inner, u_outer, u_step, step, g_inner, g_outer, g_step,
    ACT: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    n = n_vectors.to(tl.int64) * VEC
    row, column, inside = tile_position(row_count, n, column_blocks, ROWS, BLOCK, LEVELS)
    gate_column = gate_at.to(tl.int64) * VEC + column
    up_column = up_at.to(tl.int64) * VEC + column

    x_at = start_of(row, x_inner, x_outer, x_step, VEC, LEVELS) + gate_column
    u_at = start_of(row, u_inner, u_outer, u_step, VEC, LEVELS) + up_column
    g_at = start_of(row, g_inner, g_outer, g_step, VEC, LEVELS) + column
    x = tl.load(gate_ptr + x_at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    up = tl.load(up_ptr + u_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + g_at, mask=inside, other=0.0).to(tl.float32)

    share = _share(x, ACT, gate_ptr.dtype.element_ty != tl.float32)
    dup = g * (x * share)
    # from the inside out: the derivative is near 1 at most, and g * up alone might overflow
    dgate = g * (share + x * _share_slope(x, share, ACT)) * up

    to = row.to(tl.int64) * step * VEC
    tl.store(dgate_ptr + to + gate_column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + to + up_column, dup.to(dup_ptr.dtype.element_ty), mask=inside)


Tensors = list["torch.Tensor | torch.dtype"]


def _bind(
    kernel: Any, act: str, operands: Operands, tensors: Tensors, more: tuple[int, ...],
    makes: Callable[[], torch.Tensor] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    vec, choice = operands.vec, launch(operands)
    column_blocks = programs(operands.n, choice.block)
    grid = (column_blocks * programs(operands.count, choice.rows),)
    starts = (operands.gate_at // vec, operands.up_at // vec)
    sizes = (operands.count, operands.n // vec, column_blocks, *starts)
    strides = (*operands.gate.units(vec), *operands.up.units(vec), *more)
    constants = {
        "ACT": act, "VEC": vec, "ROWS": choice.rows, "BLOCK": choice.block,
        "LEVELS": operands.levels,
    }  # fmt: skip
    return bind(
        kernel, grid, tensors, (*sizes, *strides), constants,
        aligned=vec > 1, num_warps=choice.warps, makes=makes,
    )  # fmt: skip


def _bind_backward(act: str, operands: Operands, tensors: Tensors) -> Callable[..., Any]:
    vec = operands.vec
    more = (operands.step // vec, *operands.grad.units(vec))
    return _bind(_gated_backward, act, operands, tensors, more)


def prepare(gpu: Gpu, act: str, gate: torch.Tensor, up: torch.Tensor) -> Callable[..., Any]:
    new_y = memory.contiguous(gate.shape, gate.dtype, gate.device)
    if not gate.numel():
        return lambda *_: new_y()

    def bound(gpu: Gpu, gate: torch.Tensor, up: torch.Tensor) -> Callable[..., Any]:
        operands = gated_rows.separate(gate, up)
        return _bind(_gated, act, operands, [gate.dtype, gate, up], (), new_y)

    as_rows = bound if gated_rows.are_contiguous(gate, up) else on_rows(bound)
    return as_rows(gpu, gate, up)


def prepare_packed(gpu: Gpu, act: str, x: torch.Tensor, order: str) -> Callable[..., Any]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    new_y = memory.contiguous(shape, x.dtype, x.device)
    if not x.numel():
        return lambda *_: new_y()

    def bound(gpu: Gpu, x: torch.Tensor) -> Callable[..., Any]:
        operands = gated_rows.packed(x, order)
        kernel = _bind(_gated, act, operands, [x.dtype, x, x], (), new_y)
        return lambda x, *_: kernel(x, x)

    return on_rows(bound)(gpu, x)


def prepare_backward(
    gpu: Gpu, act: str, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The run returns (gradient of gate, gradient of up)."""
    new = memory.contiguous(gate.shape, gate.dtype, gate.device)
    if not gate.numel():
        return lambda *_: (new(), new())

    def bound(
        gpu: Gpu, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> Callable[..., Any]:
        operands = gated_rows.separate(gate, up, grad)
        kernel = _bind_backward(act, operands, [gate.dtype, up.dtype, grad, gate, up])

        def run(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *_: Any) -> Any:
            dgate, dup = new(), new()
            kernel(dgate, dup, g, gate, up)
            return dgate, dup

        return run

    as_rows = bound if gated_rows.are_contiguous(grad, gate, up) else on_rows(bound)
    return as_rows(gpu, grad, gate, up)


def prepare_packed_backward(
    gpu: Gpu, act: str, grad: torch.Tensor, x: torch.Tensor, order: str
) -> Callable[..., torch.Tensor]:
    """The run returns the gradient of both halves in one tensor."""
    new_dx = memory.contiguous(x.shape, x.dtype, x.device)
    if not x.numel():
        return lambda *_: new_dx()

    def bound(gpu: Gpu, grad: torch.Tensor, x: torch.Tensor) -> Callable[..., Any]:
        operands = gated_rows.packed(x, order, grad)
        kernel = _bind_backward(act, operands, [x.dtype, x.dtype, grad, x, x])

        def run(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
            dx = new_dx()
            kernel(dx, dx, g, x, x)
            return dx

        return run

    return on_rows(bound)(gpu, grad, x)
