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
def tile_position(
    row_count, n, column_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    """(rows, columns, which of them exist) of a program of an elementwise kernel.

    A long row takes `column_blocks` programs. LEVELS: how much arithmetic finds a row; none if
    there is but one, a product, or a division too (`toolkit.rows.levels`).
    """
    block = tl.program_id(0)
    if LEVELS == 0:
        row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        column = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    else:
        row = (block // column_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (block % column_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < row_count) & (column < n)


@triton.jit
def start_of(row, inner, outer, step, VEC: tl.constexpr, LEVELS: tl.constexpr):
    """`row_start`, with no more arithmetic than it takes."""
    if LEVELS == 2:
        return row_start(row, inner, outer, step, VEC)
    elif LEVELS == 1:
        return row.to(tl.int64) * outer * VEC
    else:
        return row.to(tl.int64) * 0


LOG2_E = tl.constexpr(1.4426950216293335)  # as a float32, and what that leaves of it
LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + exp(-x)); exp overflows to infinity for x < -88, and the quotient is then 0.

    A GPU's exp is exp2 of a product, whose rounding costs it |x| ulps. That is nothing to halves;
    EXACT, for float32, mends the result by what the product has lost.
    """
    if EXACT:
        z = -tl.minimum(tl.maximum(x, -150.0), 150.0)
        product = z * LOG2_E
        lost = tl.fma(z, LOG2_E, -product) + z * LOG2_E_REST
        power = tl.exp2(product) * (1.0 + lost * LN_2)
    else:
        power = tl.exp(-x)
    return 1.0 / (1.0 + power)


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


@triton.jit
def indices_inside(first, size, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Indices of a tile, of which those beyond the end are 0: what they read is never stored.

    Then no load along them has a mask. VEC: so many lie side by side, and none of them beyond.
    """
    index = first + tl.arange(0, BLOCK)
    index = tl.where(index < size, index, 0)
    return tl.max_contiguous(tl.multiple_of(index, VEC), VEC)


@triton.jit
def part_of(count, part, parts):
    """The first one of a part and the one after its last, where `count` are dealt out evenly.

    Not part * count // parts: that product may have more than 32 bits.
    """
    each, more = count // parts, count % parts
    first = part * each + tl.minimum(part, more)
    return first, first + each + (part < more).to(tl.int32)
