"""@triton.jit helpers of the attention kernels: where a program is, what a row sees, its logits.

Row i of a sequence sees the keys j with i + off - left <= j <= i + off + right and j < keys, where
`off` is keys - rows if bottom_right is 1 (the last row sees the last key), else 0. A bound that is
absent (LEFT, RIGHT) costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def place(
    blocks, head_count, lines, together,
    sequences=0, longest=0, cu_ptr=None, TILE: tl.constexpr = 1, LAST_FIRST: tl.constexpr = True,
):  # fmt: skip
    """(block, head, batch) of a program: `together` lines side by side, last blocks first.

    A line is a head of one sequence, with as many blocks as the longest has; if `sequences` are
    given, a head of all these packed ones, with the blocks of all. The last rows see most keys, so
    what takes longest starts first (of keys it is the first ones); heads that run side by side
    leave their keys to one another in L2.
    """
    program = tl.program_id(0)
    group = program // (together * blocks)
    rest = program % (together * blocks)
    size = tl.minimum(together, lines - group * together)
    slot, line = rest // size, group * together + rest % size
    block = blocks - 1 - slot if LAST_FIRST else slot
    head, batch = line % head_count, line // head_count
    if cu_ptr is not None:  # noqa: SIM102
        if sequences > 0:  # known when a kernel runs, not when it is compiled
            block, batch = _in_slot(slot, sequences, longest, cu_ptr, TILE, LAST_FIRST)
            head = line
    return block, head, batch


@triton.jit
def _in_slot(slot, sequences, longest, cu_ptr, TILE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(block, sequence) of a slot, where sequence n has those from cu[n] // TILE + n on: enough for
    its tiles and one too many at most. Slots of tokens that no sequence has, and of rows beyond the
    `longest` that was promised, get a block beyond their sequence."""
    found, after = 0, sequences
    while after - found > 1:
        middle = (found + after) // 2
        begun = tl.load(cu_ptr + middle) // TILE + middle <= slot
        found = tl.where(begun, middle, found)
        after = tl.where(begun, after, middle)
    first = tl.load(cu_ptr + found) // TILE + found
    last = tl.load(cu_ptr + found + 1) // TILE + found
    block = last - slot if LAST_FIRST else slot - first
    is_its_own = (first <= slot) & (slot <= last) & (block * TILE < longest)
    return tl.where(is_its_own, block, last - first + 1), found


@triton.jit
def sequence(batch, rows, keys, bottom_right, cu_rows_ptr, cu_keys_ptr, key_counts_ptr):
    """(first row, first key, rows, keys, off) of a sequence; packed ones start where cu_* say."""
    first_row, first_key = 0, 0
    if cu_rows_ptr is not None:
        first_row = tl.load(cu_rows_ptr + batch)
        rows = tl.load(cu_rows_ptr + batch + 1) - first_row
        first_key = tl.load(cu_keys_ptr + batch)
        keys = tl.load(cu_keys_ptr + batch + 1) - first_key
    if key_counts_ptr is not None:
        keys = tl.load(key_counts_ptr + batch)
    return first_row, first_key, rows, keys, (keys - rows) * bottom_right


@triton.jit
def keys_seen(
    first, off, left, right, keys,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, all_begin, all_end, end) of the keys that ROWS rows from `first` see, in whole tiles.

    Every row sees all keys from all_begin to all_end: there nothing is masked. begin and the two
    in the middle are multiples of KEYS.
    """
    begin, all_begin, end, all_end = 0, 0, keys, keys
    if RIGHT:
        end = tl.minimum(keys, first + ROWS + off + right)
        all_end = tl.minimum(keys, first + 1 + off + right)
    if LEFT:
        begin = tl.maximum(first + off - left, 0) // KEYS * KEYS
        all_begin = tl.cdiv(tl.maximum(first + ROWS - 1 + off - left, 0), KEYS) * KEYS
    all_end = tl.maximum(all_end, 0) // KEYS * KEYS
    all_begin = tl.minimum(all_begin, tl.cdiv(tl.maximum(end, 0), KEYS) * KEYS)
    return begin, all_begin, tl.maximum(all_end, all_begin), end


@triton.jit
def rows_seeing(
    first, off, left, right, rows,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, all_begin, all_end, end) of the rows that see KEYS keys from `first`: `keys_seen`
    the other way round."""
    begin, all_begin, end, all_end = 0, 0, rows, rows
    if RIGHT:
        begin = tl.maximum(first - off - right, 0) // ROWS * ROWS
        all_begin = tl.cdiv(tl.maximum(first + KEYS - 1 - off - right, 0), ROWS) * ROWS
    if LEFT:
        end = tl.minimum(rows, first + KEYS - off + left)
        all_end = tl.minimum(rows, first + 1 - off + left)
    all_end = tl.maximum(all_end, 0) // ROWS * ROWS
    all_begin = tl.minimum(all_begin, tl.cdiv(tl.maximum(end, 0), ROWS) * ROWS)
    return begin, all_begin, tl.maximum(all_end, all_begin), end


@triton.jit
def seen(i, j, inside, off, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which of these keys these rows see, of those that are `inside`; all broadcast to the tile."""
    if RIGHT:
        inside &= j <= i + (off + right)
    if LEFT:
        inside &= j >= i + (off - left)
    return inside


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """acc + a b. WIDE: Triton's interpreter cannot multiply bfloat16; a product of float32 is the
    same one."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh(x):
    """1 - 2 / (exp(2x) + 1): the exponential may overflow, the quotient is then 0.

    Near 0 that is right to 2^-24 and no more, which a large cap multiplies: Cephes' polynomial is
    taken there.
    """
    far = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2_E)) + 1.0)
    z = x * x
    near = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    near = ((near + 1.33314422036e-1) * z - 3.33332819422e-1) * z * x + x
    return tl.where(z < 0.39, near, far)


@triton.jit
def logits(
    s, i, j, off, scale, softcap, slope, bias_ptr, bias_i, bias_j, rows, keys,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """(logits, the part of the slope that softcap leaves) of raw products."""
    s *= scale
    kept = 1.0
    if SOFTCAP:
        capped = tanh(s / softcap)
        s = capped * softcap
        kept = 1.0 - capped * capped
    if ALIBI:
        s -= slope * tl.abs(i + off - j).to(tl.float32)
    if bias_ptr is not None:
        at = i.to(tl.int64) * bias_i + j.to(tl.int64) * bias_j
        s += tl.load(bias_ptr + at, mask=(i < rows) & (j < keys), other=0.0).to(tl.float32)
    return s, kept


@triton.jit
def load_tile(
    ptr, first, count, step, width, batch, head, origin,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr, TMA: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Rows of a head from row `first` on, [ROWS, COLUMNS]; zeros beyond `count` and `width`.

    `ptr` points at the head's first row; with TMA it is a descriptor of the whole tensor, in which
    the sequence starts at `origin`. PADDED: the tile is wider than the head. `width` must be known
    to be a multiple of VEC, or the mask would take the load apart.
    """
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    if TMA:
        tile = tl.reshape(ptr.load([batch, head, origin + first, 0]), (ROWS, COLUMNS))
    else:
        at = ptr + row.to(tl.int64) * step * VEC + column
        if PADDED:
            tile = tl.load(at, mask=(row < count) & (column < width), other=0.0)
        else:
            tile = tl.load(at, mask=row < count, other=0.0)
    return tile


@triton.jit
def store_tile(
    ptr, tile, row, inside, step, width,
    COLUMNS: tl.constexpr, VEC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows `row` (64 bits) of a head, where they are `inside`; `ptr` points at the first."""
    column = tl.arange(0, COLUMNS)[None, :]
    at = ptr + row[:, None] * step * VEC + column
    tile = tile.to(ptr.dtype.element_ty)
    if PADDED:
        tl.store(at, tile, mask=inside[:, None] & (column < width))
    else:
        tl.store(at, tile, mask=inside[:, None])
