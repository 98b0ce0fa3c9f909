"""relu and its backward, elementwise over tiles of rows.

One program handles a [ROWS, BLOCK] tile: it reads each input element once and writes each output
element once, so bytes are the whole cost. Output strides are torch's own (empty_like): a dense
tensor is one long row whatever the order of its dims, a strided one is rows (toolkit.rows).
The backward reads the gradient and the *output*: nothing but the output is saved.
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
from tilewright.toolkit.rows import Rows, levels, rows_of, vector_width
from tilewright.toolkit.triton_lib import start_of, tile_position


@dataclass(frozen=True)
class Launch:
    rows: int
    block: int
    warps: int


# One 16-byte load of halves for each operand and thread; short rows share a program.
LONG, SHORT = Launch(1, 1024, 4), Launch(8, 128, 4)


def launch(view: Rows) -> Launch:
    return SHORT if view.count > 1 and view.n <= SHORT.block else LONG


SIZES = ["row_count", "n_vectors", "column_blocks", "inner", "outer_stride", "inner_stride"]
GRAD_STRIDES = ["g_inner", "g_outer_stride", "g_inner_stride"]


@triton.jit(do_not_specialize=SIZES)
def _relu(
    y_ptr, x_ptr, row_count, n_vectors, column_blocks, inner, outer_stride, inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    n = n_vectors.to(tl.int64) * VEC
    row, column, inside = tile_position(row_count, n, column_blocks, ROWS, BLOCK, LEVELS)

    at = start_of(row, inner, outer_stride, inner_stride, VEC, LEVELS) + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]

    y = tl.where(x <= 0.0, 0.0, x)  # a NaN stays a NaN

    to = at if IN_PLACE else row.to(tl.int64) * n + column
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + GRAD_STRIDES)
def _relu_backward(
    dx_ptr, g_ptr, y_ptr, row_count, n_vectors, column_blocks, inner, outer_stride, inner_stride,
    g_inner, g_outer_stride, g_inner_stride,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    n = n_vectors.to(tl.int64) * VEC
    row, column, inside = tile_position(row_count, n, column_blocks, ROWS, BLOCK, LEVELS)

    at = start_of(row, inner, outer_stride, inner_stride, VEC, LEVELS) + column
    g_at = start_of(row, g_inner, g_outer_stride, g_inner_stride, VEC, LEVELS) + column
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    g = tl.load(g_ptr + g_at, mask=inside, other=0.0).to(tl.float32)

    dx = tl.where(y <= 0.0, 0.0, g)

    to = row.to(tl.int64) * n + column
    tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _result_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """torch's own rule for an elementwise result."""
    if tensor.is_contiguous():
        return memory.contiguous_strides(tensor.shape)
    return torch.empty_like(tensor, device="meta").stride()


def _view(tensor: torch.Tensor, strides: tuple[int, ...]) -> Rows | None:
    """The tensor as rows of an output with `strides`, or None if it must be copied first."""
    dims = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size <= 1 or mine == theirs for size, mine, theirs in dims):
        return Rows(1, tensor.numel(), 1, 0, 0)
    if strides == memory.contiguous_strides(tensor.shape):
        return rows_of(tensor.shape, tensor.stride())
    return None


def _bind(
    kernel: Any, views: list[Rows], outs: list[Any], tensors: list[torch.Tensor], flags: Any,
    makes: Callable[[], torch.Tensor] | None,
) -> Callable[..., Any]:  # fmt: skip
    """A view for each of the tensors."""
    view = views[-1]
    vec = vector_width(view.n, *zip(tensors, views, strict=True))
    choice = launch(view)
    column_blocks = programs(view.n, choice.block)
    grid = (column_blocks * programs(view.count, choice.rows),)
    strides = [number for each in reversed(views) for number in each.units(vec)]
    constants = {
        "VEC": vec, "ROWS": choice.rows, "BLOCK": choice.block, "LEVELS": levels(*views), **flags,
    }  # fmt: skip
    return bind(
        kernel, grid, [*outs, *tensors], (view.count, view.n // vec, column_blocks, *strides),
        constants, aligned=vec > 1, num_warps=choice.warps, makes=makes,
    )  # fmt: skip


def prepare(gpu: Gpu, input: torch.Tensor) -> Callable[..., Any]:
    shape, dtype, device = tuple(input.shape), input.dtype, input.device
    strides = _result_strides(input)
    new_y = memory.allocator(shape, strides, dtype, device)
    if not input.numel():
        return lambda *_: new_y()
    view = _view(input, strides)
    if view is None:
        run_on_copy = prepare(gpu, input.clone())
        return lambda x, *_: run_on_copy(x.clone())
    return _bind(_relu, [view], [dtype], [input], {"IN_PLACE": False}, new_y)


def prepare_in_place(gpu: Gpu, input: torch.Tensor) -> Callable[..., None]:
    if not input.numel():
        return lambda *_: None
    view = _view(input, _result_strides(input))
    view = view or rows_of(input.shape, input.stride())
    if view is None:
        run_on_copy = prepare(gpu, input.clone())

        def through_a_copy(x: torch.Tensor, *_: Any) -> None:
            x.copy_(run_on_copy(x.clone()))

        return through_a_copy
    kernel = _bind(_relu, [view], [input], [input], {"IN_PLACE": True}, None)
    return lambda x, *_: kernel(x, x)


def prepare_backward(gpu: Gpu, grad: torch.Tensor, output: torch.Tensor) -> Callable[..., Any]:
    shape, dtype, device = tuple(output.shape), output.dtype, output.device
    strides = _result_strides(output)
    new_dx = memory.allocator(shape, strides, dtype, device)
    if not output.numel():
        return lambda *_: new_dx()
    view, g_view = _view(output, strides), _view(grad, strides)
    if view and g_view and view.n != g_view.n:  # one is a single long row, the other is not
        view, g_view = rows_of(shape, output.stride()), rows_of(shape, grad.stride())
    if view is None or g_view is None:
        # One of the two has strides of its own: bring both to the result's.
        def like_result(t: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(shape, strides, dtype=t.dtype, device=device).copy_(t)

        run_on_copies = prepare_backward(gpu, like_result(grad), like_result(output))
        return lambda g, y, *_: run_on_copies(like_result(g), like_result(y))
    return _bind(_relu_backward, [g_view, view], [dtype], [grad, output], {}, new_dx)
