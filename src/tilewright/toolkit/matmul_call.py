"""What a matmul kernel is told about its operands: stacks of matrices by strides, nothing copied.

`see` turns torch.matmul's shape rules (vectors, stacks, broadcast) into one product of two stacks
of matrices. Leading dims of `a` over a single `b` become rows; other leading dims are merged as far
as the strides of both operands allow, and what remains must be at most two levels. `gradients`
makes the backward of a matmul from its own `prepare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import multiplying
from tilewright.multiplying import Factors, factors_of_da, factors_of_db
from tilewright.toolkit.rows import VECTOR_BYTES

result_shape = multiplying.result_shape  # torch.matmul's
Prepare = Callable[..., Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Operand:
    """A stack of matrices, in elements. A dim of one has a stride that suits (`_matrix`)."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    outer_stride: int = 0  # between matrices of the stack; 0: one matrix for all
    inner_stride: int = 0

    @property
    def by_rows(self) -> bool:
        """The elements of a row lie side by side."""
        return self.column_stride == 1

    @property
    def by_columns(self) -> bool:
        return self.row_stride == 1 and not self.by_rows

    @property
    def pitch(self) -> int:
        """From a row to the next, or from a column where those lie side by side."""
        return self.row_stride if self.by_rows else self.column_stride


@dataclass(frozen=True)
class Product:
    """outer x inner products of [m, k] and [k, n] matrices; the result is contiguous."""

    m: int
    n: int
    k: int
    outer: int
    inner: int
    a: Operand
    b: Operand
    shape: tuple[int, ...]  # of the result, as torch.matmul has it

    @property
    def count(self) -> int:
        return self.outer * self.inner

    @property
    def is_empty(self) -> bool:
        return not math.prod(self.shape)


def see(a: torch.Tensor, b: torch.Tensor) -> Product | None:
    """The product of two tensors of shapes that fit; None: their stacks have more than two levels,
    and one of them must be copied (`flat`)."""
    shape = result_shape(a.shape, b.shape)
    a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if math.prod(b.shape[:-2]) == 1:  # one matrix for all: leading dims are rows
        levels = _merged(a.shape[:-1], [a.stride()[:-1]])
        if len(levels) <= 1:
            size, (stride,) = levels[0] if levels else (1, (0,))
            left, right = _matrix(size, k, stride, a.stride(-1)), _matrix_of(b)
            return Product(size, n, k, 1, 1, left, right, shape)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    expanded = a.expand(*batch, m, k), b.expand(*batch, k, n)
    levels = _merged(batch, [x.stride()[:-2] for x in expanded])
    if len(levels) > 2:
        return None
    (outer, (a_outer, b_outer)), (inner, (a_inner, b_inner)) = [(1, (0, 0))] * (
        2 - len(levels)
    ) + levels
    left = replace(_matrix_of(a), outer_stride=a_outer, inner_stride=a_inner)
    right = replace(_matrix_of(b), outer_stride=b_outer, inner_stride=b_inner)
    return Product(m, n, k, outer, inner, left, right, shape)


def flat(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with one leading dim, copied where that takes a copy: stacks of any number of levels.
    Over a single b, those of a are rows."""
    if math.prod(b.shape[:-2]) == 1:
        return a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b.reshape(b.shape[-2:])
    a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    return tuple(x.expand(*batch, *x.shape[-2:]).reshape(count, *x.shape[-2:]) for x in (a, b))  # type: ignore[return-value]


def seen(a: torch.Tensor, b: torch.Tensor) -> Product:
    """The product as it is, or as it will be of `flat` operands; nothing is copied to learn it."""
    found = see(a, b)
    if found is None:
        a, b = (torch.empty_strided(x.shape, x.stride(), device="meta") for x in (a, b))
        found = see(*flat(a, b))
    assert found is not None
    return found


def _matrix_of(x: torch.Tensor) -> Operand:
    return _matrix(x.shape[-2], x.shape[-1], x.stride(-2), x.stride(-1))


def _matrix(rows: int, columns: int, row_stride: int, column_stride: int) -> Operand:
    """Nobody steps along a dim of one, so its stride may be what suits: 1 in a matrix that has no
    other, and else a pitch as wide as the row or column, which keeps its alignment."""
    if columns <= 1:
        column_stride = 1 if row_stride != 1 or rows <= 1 else max(rows, 1)
    if rows <= 1:
        row_stride = max(columns, 1) if column_stride == 1 else 1
    return Operand(rows, columns, row_stride, column_stride)


def _merged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, its stride in each tensor) of the fewest levels that these dims make."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if levels:
            before, its = levels[-1]
            if all(its_step == size * step for its_step, step in zip(its, steps, strict=True)):
                levels[-1] = (before * size, tuple(steps))
                continue
        levels.append((size, tuple(steps)))
    return levels


LONGEST = 2**31 - 2**16  # sizes and tiles are numbered in 32 bits
HIGHEST = 2**26  # matrices of a stack: whose result fits in memory has fewer than 32 tiles of each


def too_long(product: Product) -> str | None:
    """Why no kernel numbers its rows, columns and tiles."""
    if max(product.m, product.n, product.k) > LONGEST:
        sizes = f"{product.m}, {product.n} and {product.k}"
        return f"sizes are {sizes}; its kernels number them in 32 bits"
    if product.count > HIGHEST:
        return f"it is a stack of {product.count} matrices; its kernels number up to {HIGHEST}"
    return None


def vector(element_size: int, aligned: bool, *steps: int) -> int:
    """How many elements a load of 16 bytes takes, if all of these steps are whole ones; else 1."""
    wide = VECTOR_BYTES // element_size
    return wide if aligned and all(step % wide == 0 for step in steps) else 1


def gradients(
    prepare: Prepare, gpu: Any, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    out_dtype: Any, precision: str, deterministic: bool, need_a: bool, need_b: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """A matmul_backward made of a matmul's own `prepare`: `run(grad, a, b)` gives (da, db)."""

    def gradient(factors: Callable[..., Factors], like: torch.Tensor) -> Any:
        dtype, shape = like.dtype, like.shape

        def made(*given: torch.Tensor) -> Factors:
            grad, a, b = given
            return factors(grad.to(dtype), a, b)  # of a float32 result of halves it is rounded

        left, right, target = made(grad, a, b)
        whole = result_shape(left.shape, right.shape) == target  # nothing was broadcast
        out = None if whole else torch.promote_types(dtype, torch.float32)
        product = prepare(gpu, left, right, out, precision, None, deterministic)
        if whole:
            return lambda *given: product(*made(*given)[:2]).view(shape)
        return lambda *given: product(*made(*given)[:2]).sum_to_size(target).to(dtype).view(shape)

    of_a = gradient(factors_of_da, a) if need_a else lambda grad, a, b: a.new_empty(0)
    of_b = gradient(factors_of_db, b) if need_b else lambda grad, a, b: b.new_empty(0)
    return lambda grad, a, b, *_: (of_a(grad, a, b), of_b(grad, a, b))
