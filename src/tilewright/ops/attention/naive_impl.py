"""softmax(Q K^T) V as one reads it, for short sequences: all keys of a head in one tile.

A program computes up to 64 rows of one head from one tile of scores, with one maximum and one sum:
no loop, nothing to rescale, and tiles no larger than the sequence. Every element is read once (the
keys once per 64 rows) and written once. That beats the walk of `triton_impl` for up to 64 keys
(notes.md); there is no backward here, because that of `triton_impl` serves both.
Limits: 64 keys, heads of 16 to 128 elements, no options beyond causal and window.
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
from tilewright.toolkit.attention_call import Call, describe, like, lse_shape, vector_width, width
from tilewright.toolkit.heads import Heads, is_tame, tame, taming
from tilewright.toolkit.launch import bind, is_interpreted, programs
from tilewright.toolkit.triton_attention import (
    LN_2,
    LOG2_E,
    MINUS_INF,
    dot,
    load_tile,
    place,
    seen,
    store_tile,
)  # fmt: skip

MOST_KEYS = 64  # beyond, the walk is as fast: measured on an H200, 2026-11
WIDEST = 128


@dataclass(frozen=True)
class Launch:
    rows: int  # of a program
    keys: int  # all there are
    warps: int


TILES = (Launch(16, 16, 1), Launch(32, 32, 1), Launch(64, 64, 4))


def launch(rows: int, keys: int) -> Launch:
    """The smallest that holds all keys, and the rows too if it can."""
    longest = max(min(rows, TILES[-1].rows), keys)
    return next(one for one in TILES if longest <= one.keys)


def refuses(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, alibi_slopes: Any,
    bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, scale: float,
    left: int, right: int, top_left: bool, softcap: float, max_q: int, max_k: int, precision: str,
) -> str | None:  # fmt: skip
    options = {
        "sinks": sinks, "alibi_slopes": alibi_slopes, "bias": bias, "seq_lens_k": seq_lens_k,
        "cu_seqlens_q": cu_seqlens_q, "softcap": softcap or None,
    }  # fmt: skip
    used = [name for name, value in options.items() if value is not None]
    if used:
        return f"it has no {used[0]}"
    if not 1 <= max_k <= MOST_KEYS:
        return f"k has {max_k} tokens; it holds all keys in one tile, up to {MOST_KEYS}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"q or v has heads of more than {WIDEST} elements"
    return attention_call.refuses(q, v)


SIZES = ["blocks", "heads", "total_heads", "group", "rows", "keys", "dim", "value_dim"]
SIZES += ["left", "right", "off"]
STRIDES = [f"{x}_{dim}" for x in ("o", "q", "k", "v") for dim in "bth"] + ["lse_b", "lse_h"]


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _attend_at_once(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr,
    blocks, heads, total_heads, group, rows, keys, dim, value_dim, left, right, off,
    o_b, o_t, o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, lse_b, lse_h, scale,
    VEC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    dim, value_dim = dim * VEC, value_dim * VEC
    block, head, batch = place(blocks, heads, total_heads, 1)
    far, wide_head = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    key_head = tl.cast(head // group, tl.int64)
    first = block * ROWS
    i, j = first + tl.arange(0, ROWS), tl.arange(0, KEYS)

    q_ptr += (far * q_b + wide_head * q_h) * VEC
    k_ptr += (far * k_b + key_head * k_h) * VEC
    v_ptr += (far * v_b + key_head * v_h) * VEC
    q = load_tile(q_ptr, first, rows, q_t, dim, 0, 0, 0, ROWS, COLUMNS, VEC, False, PADDED)
    k = load_tile(k_ptr, 0, keys, k_t, dim, 0, 0, 0, KEYS, COLUMNS, VEC, False, PADDED)
    v = load_tile(v_ptr, 0, keys, v_t, value_dim, 0, 0, 0, KEYS, VALUE_COLUMNS, VEC, False, PADDED)

    s = dot(q, tl.trans(k), None, PRECISION, WIDE)  # [ROWS, KEYS]
    visible = seen(i[:, None], j[None, :], (j < keys)[None, :], off, left, right, LEFT, RIGHT)
    s = tl.where(visible, s * scale, MINUS_INF)
    peak = tl.max(s, 1)
    shift = tl.where(peak == MINUS_INF, 0.0, peak)  # a row that sees no key
    p = tl.exp2((s - shift[:, None]) * LOG2_E)
    total = tl.sum(p, 1)
    out = dot(p.to(v.dtype), v, None, PRECISION, WIDE)  # [ROWS, VALUE_COLUMNS]

    nothing = total == 0.0
    out = out / tl.where(nothing, 1.0, total)[:, None]
    lse = tl.where(nothing, MINUS_INF, peak + tl.log2(total) * LN_2)
    inside, row = i < rows, i.to(tl.int64)
    tl.store(lse_ptr + far * lse_b + wide_head * lse_h + row, lse, mask=inside)
    out_ptr += (far * o_b + wide_head * o_h) * VEC
    store_tile(out_ptr, out, row, inside, o_t, value_dim, VALUE_COLUMNS, VEC, PADDED)


def _bind(call: Call, given: list[torch.Tensor], out: Heads) -> Callable[..., None]:
    """`run(out, lse, q, k, v)`."""
    heads = (out, call.q, call.k, call.v)
    vec = vector_width(given, heads)
    columns, value_columns = width(call.q.dim, vec), width(call.v.dim, vec)
    choice = launch(call.rows, call.keys)
    blocks = programs(call.rows, choice.rows)
    off = 0 if call.top_left else call.keys - call.rows
    return bind(
        _attend_at_once,
        (blocks * call.heads,),
        [call.dtype, torch.float32, *given],
        (
            blocks, call.q.heads, call.heads, call.group, call.rows, call.keys,
            call.q.dim // vec, call.v.dim // vec, call.left, call.right, off,
            *(stride // vec for each in heads for stride in each.strides), *call.lse_strides,
            call.scale,
        ),
        {
            "VEC": vec, "ROWS": choice.rows, "KEYS": choice.keys, "COLUMNS": columns,
            "VALUE_COLUMNS": value_columns,
            "PADDED": columns != call.q.dim or value_columns != call.v.dim,
            "LEFT": call.left >= 0, "RIGHT": call.right >= 0, "PRECISION": call.precision,
            "WIDE": is_interpreted(_attend_at_once) and call.dtype == torch.bfloat16,
        },
        aligned=vec > 1,
        num_warps=choice.warps,
    )  # fmt: skip


def prepare(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, alibi_slopes: Any,
    bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, *rest: Any,
) -> Callable[..., Any]:  # fmt: skip
    given = [tame(x) for x in (q, k, v)]
    call = describe(given, None, layout, *rest)
    new_out, out = like(q, v.shape[-1], layout)
    new_lse = memory.contiguous(lse_shape(call, False), torch.float32, q.device)
    if call.is_empty:
        return lambda *_: (new_out(), new_lse())
    kernel = _bind(call, given, out)

    def run(q: Any, k: Any, v: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = new_out(), new_lse()
        kernel(out, lse, q, k, v)
        return out, lse

    return run if all(map(is_tame, (q, k, v))) else taming(run, 3)
