"""@triton.jit helpers that more than one op's kernels use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_start(row, inner, outer_stride, inner_stride, VEC: tl.constexpr):
    """First element of each row, as toolkit.rows lays rows out; strides come in vectors of VEC.

    Multiplying by the constexpr VEC is how the compiler learns that a row starts at a multiple of a
    16-byte vector: integers are not specialised, so one binary serves every size of a class.
    """
    outer_index = (row // inner).to(tl.int64)
    inner_index = (row % inner).to(tl.int64)
    return (outer_index * outer_stride + inner_index * inner_stride) * VEC


@triton.jit
def mean_of(total, n):
    """total / n, rounded to nearest: the plain quotient may be off by two ulps on a GPU."""
    return tl.div_rn(total, tl.zeros_like(total) + n)


@triton.jit
def load_rows(x_ptr, row, column, row_count, n, inner, outer, step, VEC: tl.constexpr):
    """A tile of rows, as it lies in memory, with zeros outside."""
    at = row_start(row, inner, outer, step, VEC)
    inside = (row < row_count)[:, None] & (column < n)
    return tl.load(x_ptr + at[:, None] + column, mask=inside, other=0.0)
