"""The kernels of FlashAttention-2's backward without atomics: every gradient has one writer.

Scores are computed again from the saved LSE. With P the weights and dP = dO V^T,
    dV = P^T dO,  dS = P (dP - delta),  dK = scale dS^T Q,  dQ = scale dS K,
where delta is the row sum of O dO, less the gradient of the LSE. Four kernels: `_summaries` reads O
and dO once; `_grad_keys` holds some keys and values of one key head and walks over the rows (of all
its query heads) that see them; `_grad_queries` holds rows and walks over keys, as the forward does;
`_grad_bias` holds a tile of the bias and walks over all that share it. Seven products where five
would do with atomics: two of them are the price of bits that repeat (notes.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.toolkit.triton_attention import (
    LOG2_E,
    MINUS_INF,
    dot,
    keys_seen,
    load_tile,
    logits,
    place,
    rows_seeing,
    seen,
    sequence,
    store_tile,
)  # fmt: skip

SIZES = ["blocks", "heads", "lines", "together", "sequences", "group", "rows", "keys", "dim"]
SIZES += ["value_dim", "left", "right", "bottom_right", "key_blocks", "row_blocks", "height"]
SIZES += ["width", "total_heads"]
SIZES += ["b_count", "h_count", "i_count", "j_count"]
STRIDES = [f"{x}_{dim}" for x in ("do", "o", "q", "k", "v", "dq", "dk", "dv") for dim in "bth"]
STRIDES += ["lse_b", "lse_h", "alibi_b", "bias_b", "bias_h", "bias_i", "bias_j"]
STRIDES += ["row_b", "row_h", "half", "dlse_b", "dlse_h", "dlse_t"]


@triton.jit
def _stretch(first_row, number, cu_q_ptr):
    """Where a sequence's summaries start in its head's line: packed ones at whole 16 bytes too."""
    return 0 if cu_q_ptr is None else (first_row // 4 + number) * 4


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _summaries(
    summary_ptr, part_ptr, out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, sinks_ptr, cu_q_ptr,
    blocks, heads, total_heads, rows, value_dim, half,
    o_b, o_t, o_h, do_b, do_t, do_h, lse_b, lse_h, row_b, row_h, dlse_b, dlse_h, dlse_t,
    VEC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The two numbers that a row's weights and gradients hang on, `half` elements apart: its LSE in
    units of log 2 (+inf if it saw nothing: its weights are then 0) and its delta. And what the rows
    add to the gradient of their head's sink."""
    block, head, number = place(blocks, heads, total_heads, 1)
    first_row, _, rows, _, _ = sequence(number, rows, 0, 0, cu_q_ptr, cu_q_ptr, None)
    batch = tl.cast(0 if cu_q_ptr is not None else number, tl.int64)
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < rows
    row, far = (first_row + i).to(tl.int64), tl.cast(head, tl.int64)
    start, width = tl.cast(first_row, tl.int64), value_dim * VEC
    out_ptr += (batch * o_b + far * o_h + start * o_t) * VEC
    grad_ptr += (batch * do_b + far * do_h + start * do_t) * VEC
    first = block * ROWS
    out = load_tile(out_ptr, first, rows, o_t, width, 0, 0, 0, ROWS, COLUMNS, VEC, False, PADDED)
    grad = load_tile(grad_ptr, first, rows, do_t, width, 0, 0, 0, ROWS, COLUMNS, VEC, False, PADDED)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        at = batch * dlse_b + far * dlse_h + row * dlse_t
        delta -= tl.load(grad_lse_ptr + at, mask=inside, other=0.0)
    at = batch * lse_b + far * lse_h + row
    lse = tl.load(lse_ptr + at, mask=inside, other=MINUS_INF)
    lse = tl.where(lse == MINUS_INF, float("inf"), lse) * LOG2_E
    to = batch * row_b + far * row_h + _stretch(first_row, number, cu_q_ptr) + i
    filled = i < tl.cdiv(rows, 4) * 4  # TMA reads whole 16 bytes: with 0 the rest adds nothing
    tl.store(summary_ptr + to, lse, mask=filled)
    tl.store(summary_ptr + half + to, delta, mask=filled)
    if sinks_ptr is not None:
        weight = tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - lse)
        part = tl.cast(number, tl.int64) * blocks + block
        tl.store(part_ptr + part * heads + head, -tl.sum(weight * delta, 0))


@triton.jit
def _load_summary(ptr, at, first, rows, ROWS: tl.constexpr, TMA: tl.constexpr):
    """One number for each of ROWS rows; `at` is the line of a descriptor, or an offset."""
    if TMA:
        found = tl.reshape(ptr.load([at, first]), (ROWS,))
    else:
        i = first + tl.arange(0, ROWS)
        found = tl.load(ptr + at + i, mask=i < rows, other=0.0)
    return found


@triton.jit
def _weights(
    s, lse, i, j, cut, inside, off, rows, keys, left, right, scale, softcap, slope,
    bias_ptr, bias_i, bias_j,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """(P, what softcap leaves of the slope) from raw products.

    i, j, lse and what is `inside` broadcast to the tile, so that a transposed one will do. `cut`:
    not every row of it sees every key.
    """
    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI) and bias_ptr is None
    kept = 1.0
    if PLAIN:
        p = tl.exp2(s * (scale * LOG2_E) - lse)
    else:
        s, kept = logits(
            s, i, j, off, scale, softcap, slope, bias_ptr, bias_i, bias_j, rows, keys,
            SOFTCAP, ALIBI,
        )  # fmt: skip
        p = tl.exp2(s * LOG2_E - lse)
    if cut:
        p = tl.where(seen(i, j, inside, off, left, right, LEFT, RIGHT), p, 0.0)
    return p, kept


@triton.jit
def _walk_rows(
    dk, dv, k, v, q_ptr, grad_ptr, summary_ptr, at, half, stretch, begin, all_begin, all_end, end,
    j, batch, head, origin, rows, keys, off, left, right, q_t, do_t, dim, value_dim, scale, softcap,
    slope, bias_ptr, bias_i, bias_j,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VEC: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Add what the rows from `begin` to `end` give to dk and dv, [KEYS, ...]; tiles lie on their
    side, [KEYS, ROWS], so that both products take them from registers.

    TAIL: some of the rows are the next sequence's, which may be NaN.
    """
    for start in tl.range(begin, end, ROWS):
        i = start + tl.arange(0, ROWS)
        q = load_tile(
            q_ptr, start, rows, q_t, dim, batch, head, origin, ROWS, COLUMNS, VEC, TMA, PADDED
        )
        grad = load_tile(
            grad_ptr, start, rows, do_t, value_dim, batch, head, origin,
            ROWS, VALUE_COLUMNS, VEC, TMA, PADDED,
        )  # fmt: skip
        if TAIL:
            q = tl.where((i < rows)[:, None], q, 0.0)
            grad = tl.where((i < rows)[:, None], grad, 0.0)
        first = stretch + start
        lse = _load_summary(summary_ptr, at, first, rows, ROWS, TMA)[None, :]
        s = dot(k, tl.trans(q), None, PRECISION, WIDE)
        cut = (start < all_begin) | (start >= all_end)
        p, kept = _weights(
            s, lse, i[None, :], j[:, None], cut, (i < rows)[None, :], off, rows, keys, left, right,
            scale, softcap, slope, bias_ptr, bias_i, bias_j, LEFT, RIGHT, SOFTCAP, ALIBI,
        )  # fmt: skip
        dv = dot(p.to(grad.dtype), grad, dv, PRECISION, WIDE)
        dp = dot(v, tl.trans(grad), None, PRECISION, WIDE)
        delta = _load_summary(summary_ptr, at + half, first, rows, ROWS, TMA)[None, :]
        if TAIL:
            delta = tl.where((i < rows)[None, :], delta, 0.0)
        ds = p * (dp - delta) * kept
        dk = dot(ds.to(q.dtype), q, dk, PRECISION, WIDE)
    return dk, dv


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _grad_keys(
    dk_ptr, dv_ptr, q_ptr, grad_ptr, k_ptr, v_ptr, summary_ptr, alibi_ptr, bias_ptr,
    cu_q_ptr, cu_k_ptr, key_counts_ptr,
    blocks, heads, lines, together, sequences, group, rows, keys, dim, value_dim, left, right,
    bottom_right,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, q_b, q_t, q_h, do_b, do_t, do_h, k_b, k_t, k_h,
    v_b, v_t, v_h, row_b, row_h, half, alibi_b, bias_b, bias_h, bias_i, bias_j, scale, softcap,
    VEC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TMA: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = alibi_ptr is not None
    block, key_head, number = place(
        blocks, heads, lines, together, sequences, keys, cu_k_ptr, KEYS, LAST_FIRST=False
    )
    first_row, first_key, rows, seen_keys, off = sequence(
        number, rows, keys, bottom_right, cu_q_ptr, cu_k_ptr, key_counts_ptr
    )
    # keys beyond a padded sequence's own get a gradient too: 0
    all_keys = seen_keys if PACKED else keys
    first = block * KEYS
    if first >= all_keys:
        return
    dim, value_dim = dim * VEC, value_dim * VEC
    batch = 0 if PACKED else number
    far, wide_head = tl.cast(batch, tl.int64), tl.cast(key_head, tl.int64)
    k_row, q_row = tl.cast(first_key, tl.int64), tl.cast(first_row, tl.int64)

    j = first + tl.arange(0, KEYS)
    k_ptr += (far * k_b + k_row * k_t + wide_head * k_h) * VEC
    v_ptr += (far * v_b + k_row * v_t + wide_head * v_h) * VEC
    k = load_tile(k_ptr, first, seen_keys, k_t, dim, 0, 0, 0, KEYS, COLUMNS, VEC, False, PADDED)
    v = load_tile(
        v_ptr, first, seen_keys, v_t, value_dim, 0, 0, 0,
        KEYS, VALUE_COLUMNS, VEC, False, PADDED,
    )  # fmt: skip
    dk = tl.zeros([KEYS, COLUMNS], tl.float32)
    dv = tl.zeros([KEYS, VALUE_COLUMNS], tl.float32)
    # of keys that do not exist, a walk sees no rows
    its_rows = tl.where(first < seen_keys, rows, 0)
    begin, all_begin, all_end, end = rows_seeing(
        first, off, left, right, its_rows, ROWS, KEYS, LEFT, RIGHT
    )
    whole_end = tl.minimum(end, rows // ROWS * ROWS) if PACKED and TMA else end

    start_of_summaries = _stretch(first_row, number, cu_q_ptr)
    for member in range(group):
        head = key_head * group + member
        query_head = tl.cast(head, tl.int64)
        if TMA:
            head_q, head_grad, line = q_ptr, grad_ptr, batch * (heads * group) + head
            stretch = start_of_summaries
        else:
            line, stretch = far * row_b + query_head * row_h + start_of_summaries, 0
            head_q = q_ptr + (far * q_b + q_row * q_t + query_head * q_h) * VEC
            head_grad = grad_ptr + (far * do_b + q_row * do_t + query_head * do_h) * VEC
        head_bias = bias_ptr
        if bias_ptr is not None:
            head_bias = bias_ptr + tl.cast(number, tl.int64) * bias_b + query_head * bias_h
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_ptr + number * alibi_b + head)
        dk, dv = _walk_rows(
            dk, dv, k, v, head_q, head_grad, summary_ptr, line, half, stretch, begin, all_begin,
            all_end, whole_end, j, batch, head, first_row, rows, seen_keys, off, left, right, q_t,
            do_t, dim, value_dim, scale, softcap, slope, head_bias, bias_i, bias_j, ROWS, COLUMNS,
            VALUE_COLUMNS, VEC, TMA, PADDED, False, LEFT, RIGHT, SOFTCAP, ALIBI, PRECISION, WIDE,
        )  # fmt: skip
        if PACKED and TMA:
            dk, dv = _walk_rows(
                dk, dv, k, v, head_q, head_grad, summary_ptr, line, half, stretch,
                tl.maximum(whole_end, begin), end, end, end, j, batch, head, first_row, rows,
                seen_keys, off, left, right, q_t, do_t, dim, value_dim, scale, softcap, slope,
                head_bias, bias_i, bias_j, ROWS, COLUMNS, VALUE_COLUMNS, VEC, TMA, PADDED, True,
                LEFT, RIGHT, SOFTCAP, ALIBI, PRECISION, WIDE,
            )  # fmt: skip

    # the weights of keys that do not exist were not masked in tiles that all rows see
    row, inside, real = (first_key + j).to(tl.int64), j < all_keys, (j < seen_keys)[:, None]
    dk_ptr += (far * dk_b + wide_head * dk_h) * VEC
    dv_ptr += (far * dv_b + wide_head * dv_h) * VEC
    dk, dv = tl.where(real, dk * scale, 0.0), tl.where(real, dv, 0.0)
    store_tile(dk_ptr, dk, row, inside, dk_t, dim, COLUMNS, VEC, PADDED)
    store_tile(dv_ptr, dv, row, inside, dv_t, value_dim, VALUE_COLUMNS, VEC, PADDED)


@triton.jit
def _walk_keys(
    dq, q, grad, k_ptr, v_ptr, lse, delta, begin, all_begin, all_end, end, i, batch, head, origin,
    rows, keys, off, left, right, k_t, v_t, dim, value_dim, scale, softcap, slope,
    bias_ptr, bias_i, bias_j,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VEC: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `begin` to `end` give to dq, [ROWS, COLUMNS].

    TAIL: some of them are the next sequence's, which may be NaN.
    """
    for start in tl.range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_tile(
            k_ptr, start, keys, k_t, dim, batch, head, origin, KEYS, COLUMNS, VEC, TMA, PADDED
        )
        v = load_tile(
            v_ptr, start, keys, v_t, value_dim, batch, head, origin,
            KEYS, VALUE_COLUMNS, VEC, TMA, PADDED,
        )  # fmt: skip
        if TAIL:
            k = tl.where((j < keys)[:, None], k, 0.0)
            v = tl.where((j < keys)[:, None], v, 0.0)
        s = dot(q, tl.trans(k), None, PRECISION, WIDE)
        dp = dot(grad, tl.trans(v), None, PRECISION, WIDE)
        cut = (start < all_begin) | (start >= all_end)
        p, kept = _weights(
            s, lse, i[:, None], j[None, :], cut, (j < keys)[None, :], off, rows, keys, left, right,
            scale, softcap, slope, bias_ptr, bias_i, bias_j, LEFT, RIGHT, SOFTCAP, ALIBI,
        )  # fmt: skip
        ds = p * (dp - delta) * kept
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, WIDE)
    return dq


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _grad_queries(
    dq_ptr, q_ptr, grad_ptr, k_ptr, v_ptr, summary_ptr, alibi_ptr, bias_ptr,
    cu_q_ptr, cu_k_ptr, key_counts_ptr,
    blocks, heads, lines, together, sequences, group, rows, keys, dim, value_dim, left, right,
    bottom_right,
    dq_b, dq_t, dq_h, q_b, q_t, q_h, do_b, do_t, do_h, k_b, k_t, k_h, v_b, v_t, v_h,
    row_b, row_h, half, alibi_b, bias_b, bias_h, bias_i, bias_j, scale, softcap,
    VEC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TMA: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = alibi_ptr is not None
    block, head, number = place(blocks, heads, lines, together, sequences, rows, cu_q_ptr, ROWS)
    first_row, first_key, rows, keys, off = sequence(
        number, rows, keys, bottom_right, cu_q_ptr, cu_k_ptr, key_counts_ptr
    )
    first = block * ROWS
    if first >= rows:
        return
    dim, value_dim = dim * VEC, value_dim * VEC
    batch = 0 if PACKED else number
    far, wide_head = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    key_head = head // group
    q_row, k_row = tl.cast(first_row, tl.int64), tl.cast(first_key, tl.int64)

    i = first + tl.arange(0, ROWS)
    q_ptr += (far * q_b + q_row * q_t + wide_head * q_h) * VEC
    grad_ptr += (far * do_b + q_row * do_t + wide_head * do_h) * VEC
    q = load_tile(q_ptr, first, rows, q_t, dim, 0, 0, 0, ROWS, COLUMNS, VEC, False, PADDED)
    grad = load_tile(
        grad_ptr, first, rows, do_t, value_dim, 0, 0, 0,
        ROWS, VALUE_COLUMNS, VEC, False, PADDED,
    )  # fmt: skip
    at = far * row_b + wide_head * row_h + _stretch(first_row, number, cu_q_ptr)
    lse = _load_summary(summary_ptr, at, first, rows, ROWS, False)[:, None]
    delta = _load_summary(summary_ptr, at + half, first, rows, ROWS, False)[:, None]
    if not TMA:
        k_ptr += (far * k_b + k_row * k_t + tl.cast(key_head, tl.int64) * k_h) * VEC
        v_ptr += (far * v_b + k_row * v_t + tl.cast(key_head, tl.int64) * v_h) * VEC
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + number * alibi_b + head)
    if bias_ptr is not None:
        bias_ptr += tl.cast(number, tl.int64) * bias_b + wide_head * bias_h

    dq = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin, all_begin, all_end, end = keys_seen(
        first, off, left, right, keys, ROWS, KEYS, LEFT, RIGHT
    )
    # pointers stop at the last key, and TMA at the end of the tensor
    MAY_RUN_OVER: tl.constexpr = TMA and (PACKED or key_counts_ptr is not None)
    whole_end = tl.minimum(end, keys // KEYS * KEYS) if MAY_RUN_OVER else end
    dq = _walk_keys(
        dq, q, grad, k_ptr, v_ptr, lse, delta, begin, all_begin, all_end, whole_end, i, batch,
        key_head, first_key, rows, keys, off, left, right, k_t, v_t, dim, value_dim, scale,
        softcap, slope, bias_ptr, bias_i, bias_j, KEYS, COLUMNS, VALUE_COLUMNS, VEC, TMA,
        PADDED, False, LEFT, RIGHT, SOFTCAP, ALIBI, PRECISION, WIDE,
    )  # fmt: skip
    if MAY_RUN_OVER:
        dq = _walk_keys(
            dq, q, grad, k_ptr, v_ptr, lse, delta, tl.maximum(whole_end, begin), end, end, end, i,
            batch, key_head, first_key, rows, keys, off, left, right, k_t, v_t, dim, value_dim,
            scale, softcap, slope, bias_ptr, bias_i, bias_j, KEYS, COLUMNS, VALUE_COLUMNS, VEC,
            TMA, PADDED, True, LEFT, RIGHT, SOFTCAP, ALIBI, PRECISION, WIDE,
        )  # fmt: skip

    row = (first_row + i).to(tl.int64)
    dq_ptr += (far * dq_b + wide_head * dq_h) * VEC
    store_tile(dq_ptr, dq * scale, row, i < rows, dq_t, dim, COLUMNS, VEC, PADDED)


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _grad_bias(
    dbias_ptr, q_ptr, grad_ptr, k_ptr, v_ptr, summary_ptr, alibi_ptr, bias_ptr,
    cu_q_ptr, cu_k_ptr, key_counts_ptr,
    row_blocks, key_blocks, height, width, heads, group, rows, keys, dim, value_dim, left, right,
    bottom_right, b_count, h_count, i_count, j_count,
    q_b, q_t, q_h, do_b, do_t, do_h, k_b, k_t, k_h, v_b, v_t, v_h,
    row_b, row_h, half, alibi_b, bias_b, bias_h, bias_i, bias_j, scale, softcap,
    VEC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, ONE_ROW: tl.constexpr, ONE_KEY: tl.constexpr,
):  # fmt: skip
    """A tile of the bias: the sum of dS over the batches, heads, rows and keys that share it.

    *_count: how many of each do, rows and keys in tiles. The bias has `heads` / h_count heads of
    `height` rows and `width` keys; one that all rows or keys share (ONE_ROW, ONE_KEY) is summed
    over them at the end.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = alibi_ptr is not None
    program = tl.program_id(0)
    key_block = program % key_blocks
    row_block = program // key_blocks % row_blocks
    bias_head = program // (key_blocks * row_blocks) % (heads // h_count)
    bias_batch = program // (key_blocks * row_blocks) // (heads // h_count)

    dim, value_dim = dim * VEC, value_dim * VEC
    total = tl.zeros([ROWS, KEYS], tl.float32)
    for one in range(b_count * h_count):
        number = bias_batch * b_count + one // h_count
        head = bias_head * h_count + one % h_count
        first_row, first_key, its_rows, its_keys, off = sequence(
            number, rows, keys, bottom_right, cu_q_ptr, cu_k_ptr, key_counts_ptr
        )
        far = tl.cast(0 if PACKED else number, tl.int64)
        wide_head, key_head = tl.cast(head, tl.int64), tl.cast(head // group, tl.int64)
        q_row, k_row = tl.cast(first_row, tl.int64), tl.cast(first_key, tl.int64)
        head_q = q_ptr + (far * q_b + q_row * q_t + wide_head * q_h) * VEC
        head_grad = grad_ptr + (far * do_b + q_row * do_t + wide_head * do_h) * VEC
        head_k = k_ptr + (far * k_b + k_row * k_t + key_head * k_h) * VEC
        head_v = v_ptr + (far * v_b + k_row * v_t + key_head * v_h) * VEC
        at = far * row_b + wide_head * row_h + _stretch(first_row, number, cu_q_ptr)
        head_bias = bias_ptr + tl.cast(number, tl.int64) * bias_b + wide_head * bias_h
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_ptr + number * alibi_b + head)
        for tile in range(i_count * j_count):
            first = (row_block * i_count + tile // j_count) * ROWS
            start = (key_block * j_count + tile % j_count) * KEYS
            i, j = first + tl.arange(0, ROWS), start + tl.arange(0, KEYS)
            q = load_tile(
                head_q, first, its_rows, q_t, dim, 0, 0, 0,
                ROWS, COLUMNS, VEC, False, PADDED,
            )  # fmt: skip
            grad = load_tile(
                head_grad, first, its_rows, do_t, value_dim, 0, 0, 0,
                ROWS, VALUE_COLUMNS, VEC, False, PADDED,
            )  # fmt: skip
            k = load_tile(
                head_k, start, its_keys, k_t, dim, 0, 0, 0,
                KEYS, COLUMNS, VEC, False, PADDED,
            )  # fmt: skip
            v = load_tile(
                head_v, start, its_keys, v_t, value_dim, 0, 0, 0,
                KEYS, VALUE_COLUMNS, VEC, False, PADDED,
            )  # fmt: skip
            lse = _load_summary(summary_ptr, at, first, its_rows, ROWS, False)
            delta = _load_summary(summary_ptr, at + half, first, its_rows, ROWS, False)
            s = dot(q, tl.trans(k), None, PRECISION, WIDE)
            dp = dot(grad, tl.trans(v), None, PRECISION, WIDE)
            p, _ = _weights(
                s, lse[:, None], i[:, None], j[None, :], True,
                (i < its_rows)[:, None] & (j < its_keys)[None, :],
                off, its_rows, its_keys, left, right, scale, softcap, slope, head_bias, bias_i,
                bias_j, LEFT, RIGHT, SOFTCAP, ALIBI,
            )  # fmt: skip
            total += p * (dp - delta[:, None])

    if ONE_ROW:
        total = tl.sum(total, 0)[None, :] + tl.zeros([ROWS, KEYS], tl.float32)
    if ONE_KEY:
        total = tl.sum(total, 1)[:, None] + tl.zeros([ROWS, KEYS], tl.float32)
    row, key = row_block * ROWS + tl.arange(0, ROWS), key_block * KEYS + tl.arange(0, KEYS)
    plane = (tl.cast(bias_batch, tl.int64) * (heads // h_count) + bias_head) * height
    at = (plane + row)[:, None] * width + key[None, :]
    inside = (row < height)[:, None] & (key < width)[None, :]
    tl.store(dbias_ptr + at, total.to(dbias_ptr.dtype.element_ty), mask=inside)
