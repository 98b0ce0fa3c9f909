"""rope of q and k in one launch, its backward and its form in place: one kernel.

A program turns some heads of a few tokens, of q or of k. It reads the tokens' rows of the tables
once and keeps them in registers from head to head; each element of q and k is read once and written
once. Pairs that are neighbours are loaded together and split in registers, so that loads and stores
are whole vectors in every style. The backward turns the other way.
Limits: heads of up to 512 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.toolkit import rotary
from tilewright.toolkit.launch import bind, programs

WIDEST = 512  # elements of a head


@dataclass(frozen=True)
class Launch:
    tokens: int  # per program
    heads: int  # of each of its tokens
    half: int  # pairs of a head, at most
    warps: int


# 8 pairs per thread and head, of four heads; the narrowest that holds a head is taken.
ALIGNED = (
    Launch(32, 4, 32, 4),
    Launch(16, 4, 64, 4),
    Launch(8, 4, 128, 4),
    Launch(4, 4, 256, 4),
)
UNALIGNED = (Launch(8, 2, 64, 4), Launch(2, 2, 256, 4))


def launch(half: int, vec: int, neighbours: bool) -> Launch:
    """For heads of `half` pairs; what is not rotated is copied in pieces of the same size.

    Where the elements of a pair are neighbours half as many tokens are faster: of seven choices for
    each style these were the fastest (H200, 2026-11).
    """
    choice = next(one for one in (ALIGNED if vec > 1 else UNALIGNED) if half <= one.half)
    return replace(choice, tokens=choice.tokens // 2) if neighbours else choice


def refuses(gpu: Gpu, q: torch.Tensor, *_: Any) -> str | None:
    if q.shape[-1] > WIDEST:
        return f"q has heads of {q.shape[-1]} elements; its tiles hold up to {WIDEST}"
    return None


SIZES = ["token_count", "tokens", "q_heads", "k_heads", "q_blocks", "head_blocks"]
SIZES += ["half_vectors", "rest_vectors", "table_rows", "direction"]
STRIDES = [f"{x}_{way}_{dim}" for x in "qk" for way in ("to", "at") for dim in "bth"]
STRIDES += ["table_b", "table_t", "position_b", "position_t"]


@triton.jit
def _load_parts(
    ptr, at, inside, half, HALF: tl.constexpr, PAIRS: tl.constexpr, other: tl.constexpr
):
    """The first elements of a row's pairs and the second ones, in float32, both [TOKENS, HALF]."""
    pair = tl.arange(0, HALF)[None, :]
    if PAIRS:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(ptr + at + column, mask=inside & (column < 2 * half), other=other)
        a, b = tl.split(tl.reshape(both, (both.shape[0], HALF, 2)))
    else:
        a = tl.load(ptr + at + pair, mask=inside & (pair < half), other=other)
        b = tl.load(ptr + at + half + pair, mask=inside & (pair < half), other=other)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_parts(ptr, at, a, b, inside, half, HALF: tl.constexpr, PAIRS: tl.constexpr):
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if PAIRS:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * HALF))
        tl.store(ptr + at + column, both, mask=inside & (column < 2 * half))
    else:
        pair = tl.arange(0, HALF)[None, :]
        tl.store(ptr + at + pair, a, mask=inside & (pair < half))
        tl.store(ptr + at + half + pair, b, mask=inside & (pair < half))


@triton.jit
def _turn_heads(
    out_ptr, x_ptr, first_head, heads, number, count, batch, token, to_b, to_t, to_h,
    at_b, at_t, at_h, cos_a, cos_b, sin_a, sin_b, half, rest,
    VEC: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr,
):  # fmt: skip
    """`number`, `batch`, `token`: [TOKENS, 1]; the tables' parts: [TOKENS, HALF]."""
    for i in tl.static_range(HEADS):
        head = first_head + i
        here = number < tl.where(head < heads, count, 0)  # past the last head there are no tokens
        at = (batch * at_b + token * at_t + tl.cast(head, tl.int64) * at_h) * VEC
        to = (batch * to_b + token * to_t + tl.cast(head, tl.int64) * to_h) * VEC

        a, b = _load_parts(x_ptr, at, here, half, HALF, READS_PAIRS, 0.0)
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
        _store_parts(out_ptr, to, turned_a, turned_b, here, half, HALF, WRITES_PAIRS)

    for start in range(0, rest, 2 * HALF):  # what is not turned
        column = start + tl.arange(0, 2 * HALF)[None, :]
        for j in tl.static_range(HEADS):
            other = first_head + j
            more = (number < tl.where(other < heads, count, 0)) & (column < rest)
            source = (batch * at_b + token * at_t + tl.cast(other, tl.int64) * at_h) * VEC
            target = (batch * to_b + token * to_t + tl.cast(other, tl.int64) * to_h) * VEC
            x = tl.load(x_ptr + source + 2 * half + column, mask=more, other=0.0)
            tl.store(out_ptr + target + 2 * half + column, x, mask=more)


@triton.jit(do_not_specialize=SIZES + STRIDES)
def _rope(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr,
    token_count, tokens, q_heads, k_heads, q_blocks, head_blocks, half_vectors, rest_vectors,
    table_rows, direction,
    q_to_b, q_to_t, q_to_h, q_at_b, q_at_t, q_at_h, k_to_b, k_to_t, k_to_h, k_at_b, k_at_t, k_at_h,
    table_b, table_t, position_b, position_t,
    VEC: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr, FULL_TABLE: tl.constexpr,
    TABLE_PAIRS: tl.constexpr,
):  # fmt: skip
    half, rest = half_vectors * VEC, rest_vectors * VEC
    back = direction < 0
    head_block = tl.program_id(0) % head_blocks  # the heads of a token run side by side
    number = (tl.program_id(0) // head_blocks) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = number < token_count  # [TOKENS, 1]
    batch, token = (number // tokens).to(tl.int64), (number % tokens).to(tl.int64)

    position = token
    if position_ptr is not None:
        at = batch * position_b + token * position_t
        position = tl.load(position_ptr + at, mask=inside, other=0).to(tl.int64)
    known = inside & (position >= 0) & (position < table_rows)
    row = (batch * table_b + position * table_t) * VEC
    # outside the table: NaN, and nothing is read there
    if FULL_TABLE:
        cos_a, cos_b = _load_parts(cos_ptr, row, known, half, HALF, TABLE_PAIRS, float("nan"))
        sin_a, sin_b = _load_parts(sin_ptr, row, known, half, HALF, TABLE_PAIRS, float("nan"))
        # back: the transposed rotation
        sin_a, sin_b = tl.where(back, -sin_b, sin_a), tl.where(back, -sin_a, sin_b)
    else:
        pair = tl.arange(0, HALF)[None, :]
        there = known & (pair < half)
        cos_a = tl.load(cos_ptr + row + pair, mask=there, other=float("nan")).to(tl.float32)
        sin_a = tl.load(sin_ptr + row + pair, mask=there, other=float("nan")).to(tl.float32)
        sin_a = tl.where(back, -sin_a, sin_a)
        cos_b, sin_b = cos_a, sin_a

    if head_block < q_blocks:
        _turn_heads(
            q_out_ptr, q_ptr, head_block * HEADS, q_heads, number, token_count, batch, token,
            q_to_b, q_to_t, q_to_h, q_at_b, q_at_t, q_at_h, cos_a, cos_b, sin_a, sin_b, half, rest,
            VEC, HEADS, HALF, READS_PAIRS, WRITES_PAIRS,
        )  # fmt: skip
    else:
        _turn_heads(
            k_out_ptr, k_ptr, (head_block - q_blocks) * HEADS, k_heads, number, token_count, batch,
            token, k_to_b, k_to_t, k_to_h, k_at_b, k_at_t, k_at_h, cos_a, cos_b, sin_a, sin_b, half,
            rest,
            VEC, HEADS, HALF, READS_PAIRS, WRITES_PAIRS,
        )  # fmt: skip


def _bind(
    call: rotary.Call, heads: list[Any], cos: Any, sin: Any, position_ids: Any, style: str,
    *, back: bool, in_place: bool,
) -> Callable[..., None]:  # fmt: skip
    """`run(q_out, k_out, q, k, cos, sin, position_ids)`."""
    reads, writes = rotary.STYLES[style]
    by_element = writes and call.full_table  # it has an entry for each element of the result
    if back:
        reads, writes = writes, reads
    q, k = call.given
    vec = rotary.vector_width(call, *heads, cos, sin)
    choice = launch(call.rotary_dim // 2, vec, reads or writes)
    blocks = programs(q.heads, choice.heads), programs(k.heads, choice.heads)
    sizes = (call.tokens, q.tokens, q.heads, k.heads, blocks[0], sum(blocks))
    strides = [
        stride // vec
        for of in zip(call.made, call.given, strict=True)
        for part in of
        for stride in part.strides
    ]
    return bind(
        _rope,
        (programs(call.tokens, choice.tokens) * sum(blocks),),
        [*[heads[0].dtype] * 2, *heads, cos, sin, position_ids],
        (
            *sizes, call.rotary_dim // 2 // vec, 0 if in_place else call.rest // vec,
            call.table_rows, -1 if back else 1, *strides,
            *(stride // vec for stride in call.table_strides), *call.position_strides,
        ),
        {
            "VEC": vec, "TOKENS": choice.tokens, "HEADS": choice.heads, "HALF": choice.half,
            "READS_PAIRS": reads, "WRITES_PAIRS": writes, "FULL_TABLE": call.full_table,
            "TABLE_PAIRS": by_element,
        },
        aligned=vec > 1,  # positions may not be, but they are loaded one by one
        num_warps=choice.warps,
    )  # fmt: skip


def _prepare(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_ids: torch.Tensor | None, style: str, rotary_dim: int, layout: str, *, back: bool,
) -> Callable[..., Any]:  # fmt: skip
    call = rotary.describe(q, k, cos, position_ids, rotary_dim, layout)
    new_q, new_k = rotary.new_results(call, q, k)
    if not (q.numel() or k.numel()):
        return lambda *_: (new_q(), new_k())
    kernel = _bind(call, [q, k], cos, sin, position_ids, style, back=back, in_place=False)

    def run(q: Any, k: Any, cos: Any, sin: Any, positions: Any, *_: Any) -> tuple[Any, Any]:
        q_out, k_out = new_q(), new_k()
        kernel(q_out, k_out, q, k, cos, sin, positions)
        return q_out, k_out

    return run


@rotary.on_heads
def prepare(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return _prepare(*args, back=False)


@rotary.on_heads
def prepare_backward(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return _prepare(*args, back=True)


@rotary.on_heads_in_place
def prepare_in_place(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_ids: torch.Tensor | None, style: str, rotary_dim: int, layout: str,
) -> Callable[..., None]:  # fmt: skip
    if not (q.numel() or k.numel()) or not rotary_dim:
        return lambda *_: None
    if style == "to_halves":  # what one thread writes another may still have to read
        apart = prepare(gpu, q, k, cos, sin, position_ids, style, rotary_dim, layout)
        return rotary.written_back(apart)
    call = rotary.describe(q, k, cos, position_ids, rotary_dim, layout, in_place=True)
    kernel = _bind(call, [q, k], cos, sin, position_ids, style, back=False, in_place=True)

    def run(q: Any, k: Any, cos: Any, sin: Any, positions: Any, *_: Any) -> None:
        kernel(q, k, q, k, cos, sin, positions)

    return run
