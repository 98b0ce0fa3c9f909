"""FlashAttention-2's forward, portable: SM 80 and newer, and Triton's interpreter.

A program computes some rows of one head. It reads its queries once and walks over the keys they
see, tile by tile: scores, a running maximum and a running sum in float32, and the values weighted
by the powers so far, rescaled whenever the maximum grows. Scores never leave the SM, so memory is
linear in the tokens. Tiles that no row sees are never read; only those that a border cuts (the
window's, the diagonal, the end) are masked, by a branch inside the one loop.
On SM 90 and 100, calls with much work fetch keys and values by TMA, which takes fewer registers
than pointers do (notes.md).
Limits: heads of 16 to 512 elements, a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.toolkit import attention_call, memory
from tilewright.toolkit.attention_call import (
    Call,
    alibi_stride,
    bias_strides,
    describe,
    described,
    fits_tma,
    like,
    lse_shape,
    places,
    tidy,
    vector_width,
    width,
)  # fmt: skip
from tilewright.toolkit.heads import Heads, is_tame, tame, taming
from tilewright.toolkit.launch import bind, is_interpreted
from tilewright.toolkit.triton_attention import (
    LN_2,
    LOG2_E,
    MINUS_INF,
    dot,
    keys_seen,
    load_tile,
    logits,
    place,
    seen,
    sequence,
    store_tile,
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    rows: int  # of a program
    keys: int  # of a step
    warps: int
    stages: int


# By the width of a tile, the wider of q's and v's. Measured on an H200, 2026-11.
BY_TMA = {
    64: Launch(64, 128, 4, 2),
    128: Launch(64, 64, 4, 3),
    256: Launch(128, 64, 8, 2),
    512: Launch(64, 32, 8, 2),
}
# By TMA too, for few keys, and for lengths that the GPU knows: their last tile takes registers.
FEW = {64: Launch(64, 64, 4, 2)}
FEW_KEYS = 1024
BY_POINTERS = {
    64: Launch(64, 64, 4, 3),
    128: Launch(64, 64, 4, 3),
    256: Launch(128, 64, 8, 2),
    512: Launch(64, 16, 8, 2),
}
# With softcap, ALiBi or a bias a score needs more registers; and blocks of SM 80 have 163 KB, those
# of SM 86, 89 and 120 99. Compiled for, not tuned.
SMALL = {
    64: Launch(64, 64, 4, 2),
    128: Launch(64, 32, 4, 2),
    256: Launch(64, 32, 8, 2),
    512: Launch(32, 16, 4, 1),
}
FLOATS = {
    64: Launch(64, 32, 4, 1),
    128: Launch(32, 32, 4, 1),
    256: Launch(16, 32, 4, 1),
    512: Launch(16, 16, 8, 1),
}
ROOM = 200 * 1024  # bytes of shared memory that the large tiles need
SMALLEST = 2.0**-126  # a scale below it is 0 or turns scores round: they are masked after it
MUCH = 2**26  # scores: below, encoding two descriptors on the host takes longer than they save


def launch(columns: int, few: bool, dtype: torch.dtype, plain: bool, tma: bool, gpu: Gpu) -> Launch:
    """For tiles of so many columns; `few` keys are better taken in smaller steps."""
    narrow = max(columns, 64)
    if dtype == torch.float32:
        return FLOATS[narrow]
    if not plain or gpu.shared_per_block < ROOM:
        return SMALL[narrow]
    if not tma:
        return BY_POINTERS[narrow]
    return FEW.get(narrow, BY_TMA[narrow]) if few else BY_TMA[narrow]


def refuses(gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> str | None:
    return attention_call.refuses(q, v)


SIZES = ["blocks", "heads", "lines", "together", "sequences", "group", "rows", "keys", "dim"]
SIZES += ["value_dim", "left", "right", "bottom_right"]
STRIDES = [f"{x}_{dim}" for x in ("o", "q", "k", "v") for dim in "bth"]
STRIDES += ["lse_b", "lse_h", "alibi_b", "bias_b", "bias_h", "bias_i", "bias_j"]


@triton.jit
def _walk(
    acc, total, peak, q, k_ptr, v_ptr, begin, all_begin, all_end, end, i, batch, head, origin,
    rows, keys, off, left, right, k_t, v_t, dim, value_dim, scale, softcap, slope,
    bias_ptr, bias_i, bias_j,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VEC: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    PLAIN: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take the keys from `begin` to `end` into (acc, total, peak), [ROWS, ...].

    PLAIN: a score is a scaled product and nothing else; `peak` is then in units of log 2. TAIL:
    some of the keys are the next sequence's, which may be NaN.
    """
    STAGES: tl.constexpr = 1 if TAIL else None  # a tail is one tile
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        j = start + tl.arange(0, KEYS)
        k = load_tile(
            k_ptr, start, keys, k_t, dim, batch, head, origin, KEYS, COLUMNS, VEC, TMA, PADDED
        )
        s = dot(q, tl.trans(k), None, PRECISION, WIDE)  # [ROWS, KEYS]
        if not PLAIN:
            s, _ = logits(
                s, i[:, None], j[None, :], off, scale, softcap, slope, bias_ptr, bias_i, bias_j,
                rows, keys, SOFTCAP, ALIBI,
            )  # fmt: skip
        if (start < all_begin) | (start >= all_end):  # not all rows see all of these keys
            inside = (j < keys)[None, :]
            visible = seen(i[:, None], j[None, :], inside, off, left, right, LEFT, RIGHT)
            s = tl.where(visible, s, MINUS_INF)
        if PLAIN:  # scaled while the maximum is taken off: one instruction
            new_peak = tl.maximum(peak, tl.max(s, 1) * (scale * LOG2_E))
            shift = tl.where(new_peak == MINUS_INF, 0.0, new_peak)  # a row that has seen no key yet
            p = tl.exp2(s * (scale * LOG2_E) - shift[:, None])
            shrink = tl.exp2(peak - shift)
        else:
            new_peak = tl.maximum(peak, tl.max(s, 1))
            shift = tl.where(new_peak == MINUS_INF, 0.0, new_peak)
            p = tl.exp2((s - shift[:, None]) * LOG2_E)
            shrink = tl.exp2((peak - shift) * LOG2_E)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(
            v_ptr, start, keys, v_t, value_dim, batch, head, origin,
            KEYS, VALUE_COLUMNS, VEC, TMA, PADDED,
        )  # fmt: skip
        if TAIL:
            v = tl.where((j < keys)[:, None], v, 0.0)
        acc = dot(p.to(v.dtype), v, acc, PRECISION, WIDE)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _attend(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, sinks_ptr, alibi_ptr, bias_ptr, cu_q_ptr, cu_k_ptr,
    key_counts_ptr,
    blocks, heads, lines, together, sequences, group, rows, keys, dim, value_dim, left, right,
    bottom_right,
    o_b, o_t, o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, lse_b, lse_h, alibi_b,
    bias_b, bias_h, bias_i, bias_j, scale, softcap,
    VEC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TMA: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = alibi_ptr is not None
    HALVES: tl.constexpr = q_ptr.dtype.element_ty != tl.float32  # float32 loses to a scaled peak
    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI or FLIPPED) and bias_ptr is None and HALVES
    UNIT: tl.constexpr = LN_2 if PLAIN else 1.0  # of `peak`, a natural logarithm
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

    i = first + tl.arange(0, ROWS)
    q_ptr += (far * q_b + tl.cast(first_row, tl.int64) * q_t + wide_head * q_h) * VEC
    q = load_tile(q_ptr, first, rows, q_t, dim, 0, 0, 0, ROWS, COLUMNS, VEC, False, PADDED)
    if not TMA:
        start = tl.cast(first_key, tl.int64)
        k_ptr += (far * k_b + start * k_t + tl.cast(key_head, tl.int64) * k_h) * VEC
        v_ptr += (far * v_b + start * v_t + tl.cast(key_head, tl.int64) * v_h) * VEC
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + number * alibi_b + head)
    if bias_ptr is not None:
        bias_ptr += tl.cast(number, tl.int64) * bias_b + wide_head * bias_h

    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    if sinks_ptr is not None:  # a key without a value, taken first
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) / UNIT
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        peak = tl.full([ROWS], MINUS_INF, tl.float32)
        total = tl.zeros([ROWS], tl.float32)

    begin, all_begin, all_end, end = keys_seen(
        first, off, left, right, keys, ROWS, KEYS, LEFT, RIGHT
    )
    # pointers stop at the last key, and TMA at the end of the tensor
    MAY_RUN_OVER: tl.constexpr = TMA and (PACKED or key_counts_ptr is not None)
    whole_end = tl.minimum(end, keys // KEYS * KEYS) if MAY_RUN_OVER else end
    acc, total, peak = _walk(
        acc, total, peak, q, k_ptr, v_ptr, begin, all_begin, all_end, whole_end, i, batch,
        key_head, first_key, rows, keys, off, left, right, k_t, v_t, dim, value_dim, scale,
        softcap, slope, bias_ptr, bias_i, bias_j, KEYS, COLUMNS, VALUE_COLUMNS, VEC, TMA,
        PADDED, False, LEFT, RIGHT, SOFTCAP, ALIBI, PLAIN, PRECISION, WIDE,
    )  # fmt: skip
    if MAY_RUN_OVER:
        acc, total, peak = _walk(
            acc, total, peak, q, k_ptr, v_ptr, tl.maximum(whole_end, begin), end, end, end, i,
            batch, key_head, first_key, rows, keys, off, left, right, k_t, v_t, dim, value_dim,
            scale, softcap, slope, bias_ptr, bias_i, bias_j, KEYS, COLUMNS, VALUE_COLUMNS, VEC,
            TMA, PADDED, True, LEFT, RIGHT, SOFTCAP, ALIBI, PLAIN, PRECISION, WIDE,
        )  # fmt: skip

    nothing = total == 0.0  # no key was seen: the row is 0 and its LSE -inf
    out = acc * (1.0 / tl.where(nothing, 1.0, total))[:, None]
    lse = tl.where(nothing, MINUS_INF, peak * UNIT + tl.log2(total) * LN_2)
    inside = i < rows
    row = (first_row + i).to(tl.int64)
    tl.store(lse_ptr + far * lse_b + wide_head * lse_h + row, lse, mask=inside)
    out_ptr += (far * o_b + wide_head * o_h) * VEC
    store_tile(out_ptr, out, row, inside, o_t, value_dim, VALUE_COLUMNS, VEC, PADDED)


def _bind(
    call: Call, gpu: Gpu, given: list[Any], options: list[Any], out: Heads
) -> Callable[..., None]:
    """`run(out, lse, q, k, v, sinks, alibi_slopes, bias, cu_q, cu_k, key_counts)`."""
    q, k, v = given
    _, alibi, bias, *_ = options
    heads = (out, call.q, call.k, call.v)
    vec = vector_width(given, heads)
    columns, value_columns = width(call.q.dim, vec), width(call.v.dim, vec)
    plain = call.is_plain(alibi, bias)
    tma = gpu.sm >= 90 and gpu.shared_per_block >= ROOM and call.work >= MUCH
    tma = tma and plain and vec > 1 and call.dtype != torch.float32
    tma = tma and fits_tma(call.k) and fits_tma(call.v)
    *_, cu_k, key_counts = options
    few = call.keys <= FEW_KEYS or cu_k is not None or key_counts is not None
    choice = launch(max(columns, value_columns), few, call.dtype, plain, tma, gpu)
    tiles = places(call, call.q, call.rows, choice.rows)
    if tma:
        k = described(call.dtype, call.k, choice.keys, columns)
        v = described(call.dtype, call.v, choice.keys, value_columns)
    strides = [stride // vec for each in heads for stride in each.strides]
    return bind(
        _attend,
        (tiles.programs,),
        [call.dtype, torch.float32, q, k, v, *options],
        (
            *tiles.arguments, call.group, call.rows, call.keys, call.q.dim // vec,
            call.v.dim // vec, call.left, call.right, call.bottom_right, *strides,
            *call.lse_strides, alibi_stride(alibi), *bias_strides(bias), call.scale,
            call.softcap or 1.0,
        ),
        {
            "VEC": vec, "ROWS": choice.rows, "KEYS": choice.keys, "COLUMNS": columns,
            "VALUE_COLUMNS": value_columns, "TMA": tma,
            "PADDED": columns != call.q.dim or value_columns != call.v.dim,
            "FLIPPED": call.scale < SMALLEST, **call.flags,
            "WIDE": is_interpreted(_attend) and call.dtype == torch.bfloat16,
        },
        aligned=vec > 1,  # what else there is, is loaded one by one
        num_warps=choice.warps,
        num_stages=choice.stages,
    )  # fmt: skip


@tidy(3, 4, 6, 7, 8)
def prepare(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, alibi_slopes: Any,
    bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, *rest: Any,
) -> Callable[..., Any]:  # fmt: skip
    options = [sinks, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seq_lens_k]
    given = [tame(x) for x in (q, k, v)]
    call = describe(given, cu_seqlens_q, layout, *rest)
    new_out, out = like(q, v.shape[-1], layout)
    packed = cu_seqlens_q is not None
    new_lse = memory.contiguous(lse_shape(call, packed), torch.float32, q.device)
    if call.is_empty:
        return lambda *_: (new_out(), new_lse())
    kernel = _bind(call, gpu, given, options, out)

    def run(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = new_out(), new_lse()
        kernel(out, lse, q, k, v, *rest[:6])
        return out, lse

    return run if all(map(is_tame, (q, k, v))) else taming(run, 3)
