"""Tensors seen as rows: what lets one kernel serve any leading dims and most strides, uncopied.

A tensor of shape (..., n) whose last dim is contiguous is `count` rows of n elements. Leading dims
are merged where their strides allow; what remains must be at most two levels, so that a kernel
finds row r at `(r // inner) * outer_stride + (r % inner) * inner_stride`. That covers slices,
steps, expanded dims and fused-QKV views. Anything wilder is copied once (`rows_of` returns None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

VECTOR_BYTES = 16  # the widest load of one thread


@dataclass(frozen=True)
class Rows:
    count: int  # rows
    n: int  # elements in a row
    inner: int  # rows in the inner level
    outer_stride: int  # elements between outer steps
    inner_stride: int  # elements between inner steps

    def units(self, vec: int) -> tuple[int, int, int]:
        """(inner, outer_stride, inner_stride) with the strides in vectors of `vec` elements."""
        return self.inner, self.outer_stride // vec, self.inner_stride // vec


def rows_of(shape: Sequence[int], strides: Sequence[int]) -> Rows | None:
    """The rows of a tensor with this shape and these strides, or None if it needs a copy."""
    n = shape[-1]
    if n > 1 and strides[-1] != 1:
        return None
    levels: list[tuple[int, int]] = []  # (size, stride), outermost first, mergeable dims merged
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    count = math.prod(shape[:-1])
    if not levels:
        return Rows(count, n, 1, n, n)
    if len(levels) == 1:
        # one level: r // 1 = r, so the outer stride does all the work
        return Rows(count, n, 1, levels[0][1], 0)
    (_, outer), (inner_size, inner) = levels
    return Rows(count, n, inner_size, outer, inner)


def levels(*views: Rows) -> int:
    """How much arithmetic finds a row: none if there is one, a product, or a division too."""
    if views[0].count == 1:
        return 0
    return 1 if all(view.inner == 1 for view in views) else 2


def contiguous_rows(shape: Sequence[int]) -> Rows:
    n = shape[-1]
    return Rows(math.prod(shape[:-1]), n, 1, n, 0)


def vector_width(n: int, *operands: tuple[torch.Tensor, Rows | None]) -> int:
    """Elements per 16-byte load if every operand allows it, else 1.

    The widest dtype decides, so that all operands of a kernel share one width. This is the
    alignment class of a call: calls of one class run the same binary and give the same bits.
    """
    vec = min(VECTOR_BYTES // tensor.element_size() for tensor, _ in operands)
    for tensor, rows in operands:
        strides = (rows.outer_stride, rows.inner_stride) if rows else ()
        if tensor.data_ptr() % VECTOR_BYTES or any(stride % vec for stride in strides):
            return 1
    return vec if n % vec == 0 else 1


def common_width(n: int, *tensors: torch.Tensor | None) -> int:
    """`vector_width` of rows of n columns of all these tensors; those that are None have no say."""
    given = (t for t in tensors if t is not None)
    return vector_width(n, *((t, rows_of(t.shape, t.stride())) for t in given))


def on_rows(prepare: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """A `prepare` whose tensors are all rows: those that are not are copied first, on each call."""

    @wraps(prepare)
    def prepared(gpu: Any, *args: Any) -> Callable[..., Any]:
        wild = [
            i
            for i, a in enumerate(args)
            if isinstance(a, torch.Tensor) and rows_of(a.shape, a.stride()) is None
        ]
        if not wild:
            return prepare(gpu, *args)

        def tame(args: tuple[Any, ...]) -> list[Any]:
            return [a.contiguous() if i in wild else a for i, a in enumerate(args)]

        run = prepare(gpu, *tame(args))
        return lambda *args: run(*tame(args))

    return prepared


def rows(tensor: torch.Tensor) -> Rows:
    """`rows_of` a tensor that `on_rows` has let through."""
    found = rows_of(tensor.shape, tensor.stride())
    assert found is not None
    return found
