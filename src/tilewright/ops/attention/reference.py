"""attention in eager torch: the definition of correct.

Query i of a sequence of Tq sees key j of Tk if −right <= d <= left, where d = i + off − j, and off
is Tk − Tq, or 0 if aligned at the top left. Of the keys it sees,

    s = softcap tanh(scale q·k / softcap) − slope |d| + bias      lse = log(Σ exp s + exp sink)
    P = exp(s − lse)                                              out = P v

A query that sees none gets zeros, and the sink for its lse, or −inf. Products are of the dtype of
their operands, everything else is in float32 (of float64 in float64).

Scores are made of one piece of a call after another, so that memory is bounded; autograd makes a
piece's scores anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

MOST_SCORES = 2**28  # of a piece
forgetful = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Call(NamedTuple):
    """A call's arguments; whatever the layout, tokens lie in (batch, heads, tokens, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    slopes: Tensor | None  # (sequences, heads)
    bias: Tensor | None
    sequences: list[Sequence]
    scale: float
    left: int
    right: int
    top_left: bool
    softcap: float
    precision: str

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return max(self.q.shape[1] // max(self.k.shape[1], 1), 1)

    @property
    def wide(self) -> torch.dtype:
        """What is computed in between products."""
        return torch.promote_types(self.q.dtype, torch.float32)


class Sequence(NamedTuple):
    """One sequence, or all of a batch if they are equally long."""

    batch: slice  # of q, k and v; packed sequences lie in a batch of one
    number: slice  # among the sequences: of bias and slopes
    queries: slice  # tokens
    keys: slice


class Piece(NamedTuple):
    """Some heads and some queries of a sequence, with all of its keys."""

    batch: slice
    number: slice
    heads: slice  # of keys
    group: int
    queries: slice  # tokens among all
    keys: slice
    first: int  # number of the first query in its sequence
    offset: int

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def scores(self) -> int:
        batch, heads = self.batch.stop - self.batch.start, self.heads.stop - self.heads.start
        return int(batch * heads * self.group * math.prod(self.sizes))

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        """Where it lies in q, and what is shaped like q."""
        return self.batch, self.query_heads, self.queries

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        return self.batch, self.heads, self.keys

    def of_bias(self, bias: Tensor) -> tuple[slice, ...]:
        rows, columns = self.sizes
        own = (self.number, self.query_heads, slice(self.first, self.first + rows))
        places = zip((*own, slice(0, columns)), bias.shape, strict=True)
        return tuple(slice(None) if size == 1 else place for place, size in places)

    def grouped(self, x: Tensor) -> Tensor:
        """(batch, query heads, ...) as (batch, key heads, group, ...); one head serves all."""
        if x.shape[1] == 1:
            return x.unsqueeze(2)
        found: Tensor = x.unflatten(1, (self.heads.stop - self.heads.start, self.group))
        return found

    def rows(self, x: Tensor) -> Tensor:
        """(batch, key heads, group, queries, ...) of what is shaped like q."""
        return self.grouped(x[self.of_queries])

    def distance(self, device: torch.device) -> Tensor:
        """d of every query and key."""
        rows, columns = self.sizes
        i = torch.arange(self.first, self.first + rows, device=device)
        return (i + self.offset).unsqueeze(1) - torch.arange(columns, device=device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None,
    bias: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seq_lens_k: Tensor | None, layout: str, *numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = (q, k, v, sinks, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seq_lens_k)
    call = seen(*tensors, layout, *numbers)
    parts = list(pieces(call))
    many = torch.is_grad_enabled() and sum(piece.scores for piece in parts) > MOST_SCORES
    out = call.q.new_zeros((*call.q.shape[:-1], call.v.shape[-1]))
    lse = call.q.new_zeros(call.q.shape[:-1], dtype=call.wide)
    for piece in parts:
        found = forgetful(attend, call, piece) if many else attend(call, piece)
        out[piece.of_queries], lse[piece.of_queries] = (x.flatten(1, 2) for x in found)
    return as_laid_out(out, layout), lse[0] if layout == "thd" else lse


def attend(call: Call, piece: Piece) -> tuple[Tensor, Tensor]:
    """out and lse of a piece, (batch, key heads, group, queries, ...)."""
    s, _ = scores(call, piece)
    sink = sink_of(call, piece)
    most = torch.maximum(s.amax(-1), sink) if s.shape[-1] else sink.expand(s.shape[:-1])
    most = most.detach()
    most = most.masked_fill(most == -math.inf, 0.0)
    powers = (s - most.unsqueeze(-1)).exp()
    total = powers.sum(-1) + (sink - most).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (most + total.log()).masked_fill(nothing, -math.inf)
    weights = (powers / total.unsqueeze(-1)).to(call.v.dtype)
    values = call.v[piece.of_keys]
    out = product(weights.flatten(2, 3), values, call.precision)
    return out.unflatten(2, s.shape[2:4]), lse


def attention_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seq_lens_k: Tensor | None,
    layout: str, scale: float, left: int, right: int, top_left: bool, softcap: float, max_q: int,
    max_k: int, precision: str, need_q: bool, need_kv: bool, need_sinks: bool, need_bias: bool,
) -> Gradients:  # fmt: skip
    """dP = dO vᵀ, dS = P (dP − Σ dO O + dlse); dV = Pᵀ dO, dQ = scale dS k, dK = scale dSᵀ q."""
    tensors = (q, k, v, sinks, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seq_lens_k)
    numbers = (scale, left, right, top_left, softcap, max_q, max_k, precision)
    call = seen(*tensors, layout, *numbers)
    d_out, out = by_heads(grad, layout), by_heads(out, layout)
    if layout == "thd":
        lse, grad_lse = lse[None], None if grad_lse is None else grad_lse[None]
    dq, dk, dv = (torch.zeros_like(x, dtype=call.wide) for x in (call.q, call.k, call.v))
    d_sinks = d_bias = None
    if sinks is not None and need_sinks:
        d_sinks = torch.zeros_like(sinks, dtype=call.wide)
    if bias is not None and need_bias:
        d_bias = torch.zeros_like(bias, dtype=call.wide)

    for piece in pieces(call):
        s, bend = scores(call, piece)
        row_lse, row_grad = piece.rows(lse), piece.rows(d_out)
        known = row_lse.masked_fill(row_lse == -math.inf, 0.0)
        weights = (s - known.unsqueeze(-1)).exp()
        delta = (row_grad.to(call.wide) * piece.rows(out).to(call.wide)).sum(-1)
        if grad_lse is not None:
            delta = delta - piece.rows(grad_lse)
        rows, values = row_grad.flatten(2, 3), call.v[piece.of_keys]
        d_weights = product(rows, values.mT, call.precision).to(call.wide)
        d_weights = d_weights.unflatten(2, s.shape[2:4])
        ds = weights * (d_weights - delta.unsqueeze(-1))
        if d_sinks is not None:
            in_sink = (sink_of(call, piece) - known).exp()
            d_sinks[piece.query_heads] -= (in_sink * delta).sum((0, 3)).flatten()
        if d_bias is not None:
            place = piece.of_bias(d_bias)
            d_bias[place] += ds.flatten(1, 2).sum_to_size(d_bias[place].shape)
        ds = ds if bend is None else ds * bend
        ds = (ds * scale).to(q.dtype).flatten(2, 3)
        weights = weights.to(v.dtype).flatten(2, 3)
        queries, keys = piece.rows(call.q).flatten(2, 3), call.k[piece.of_keys]
        of_rows = product(ds, keys, precision).unflatten(2, s.shape[2:4])
        dq[piece.of_queries] = of_rows.flatten(1, 2).to(call.wide)  # no other piece has these rows
        dk[piece.of_keys] += product(ds.mT, queries, precision)
        dv[piece.of_keys] += product(weights.mT, rows, precision)

    def found_or_nothing(found: Tensor | None, of: Any) -> Tensor:
        return q.new_empty(0) if found is None else found.to(of.dtype)  # outputs share no memory

    return (
        found_or_nothing(as_laid_out(dq, layout) if need_q else None, q),
        found_or_nothing(as_laid_out(dk, layout) if need_kv else None, k),
        found_or_nothing(as_laid_out(dv, layout) if need_kv else None, v),
        found_or_nothing(d_sinks, sinks),
        found_or_nothing(d_bias, bias),
    )


def scores(call: Call, piece: Piece) -> tuple[Tensor, Tensor | None]:
    """s, −inf where a query does not see a key, and the slope of the soft cap.

    The scale goes into q: what float16 cannot hold is a score, not a product before the scale.
    """
    queries, keys = piece.rows(call.q) * call.scale, call.k[piece.of_keys]
    s = product(queries.flatten(2, 3), keys.mT, call.precision).to(call.wide)
    s = s.unflatten(2, queries.shape[2:4])  # (batch, key heads, group, queries, keys)
    distance, bend = piece.distance(s.device), None
    if call.softcap > 0:
        capped = torch.tanh(s / call.softcap)
        s, bend = call.softcap * capped, 1 - capped.square()
    if call.slopes is not None:
        slopes = piece.grouped(call.slopes[piece.number, piece.query_heads]).to(call.wide)
        s = s - slopes[..., None, None] * distance.abs()
    if call.bias is not None:
        s = s + piece.grouped(call.bias[piece.of_bias(call.bias)]).to(call.wide)
    return s.masked_fill(~visible(call, distance), -math.inf), bend


def visible(call: Call, distance: Tensor) -> Tensor:
    sees = torch.ones_like(distance, dtype=torch.bool)
    if call.left >= 0:
        sees = sees & (distance <= call.left)
    if call.right >= 0:
        sees = sees & (distance >= -call.right)
    return sees


def sink_of(call: Call, piece: Piece) -> Tensor:
    """(key heads, group, 1); none is as one of −inf."""
    heads = (piece.heads.stop - piece.heads.start, piece.group, 1)
    if call.sinks is None:
        return call.q.new_full(heads, -math.inf, dtype=call.wide)
    return call.sinks[piece.query_heads].to(call.wide).view(heads)


def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a @ b of operands as tensor cores read them: in tf32 without the last 13 bits."""
    if precision == "tf32" and a.dtype == torch.float32:
        a, b = _truncated(a), _truncated(b)
    return a @ b


def _truncated(x: Tensor) -> Tensor:
    cut = (x.detach().contiguous().view(torch.int32) & -(2**13)).view(torch.float32)
    return x + (cut - x.detach()).nan_to_num()  # a gradient passes; infinity stays


# --- layouts and pieces --------------------------------------------------------------------------


def seen(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None,
    bias: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seq_lens_k: Tensor | None, layout: str, scale: float, left: int, right: int, top_left: bool,
    softcap: float, max_q: int, max_k: int, precision: str,
) -> Call:  # fmt: skip
    q, k, v = (by_heads(x, layout) for x in (q, k, v))
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        borders = pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())
        sequences = [
            Sequence(slice(0, 1), slice(i, i + 1), slice(*of_q), slice(*of_k))
            for i, (of_q, of_k) in enumerate(zip(*borders, strict=True))
        ]
        count = len(sequences)
    else:
        sequences, count = _of_a_batch(q, k, seq_lens_k), q.shape[0]
    slopes = alibi_slopes
    if slopes is not None:
        slopes = slopes.expand(count, q.shape[1])
    rest = (scale, left, right, top_left, softcap, precision)
    return Call(q, k, v, sinks, slopes, bias, sequences, *rest)


def _of_a_batch(q: Tensor, k: Tensor, seq_lens_k: Tensor | None) -> list[Sequence]:
    batch, tokens, keys = q.shape[0], q.shape[2], k.shape[2]
    if seq_lens_k is None and batch * q.shape[1] * tokens * keys <= MOST_SCORES:
        every = slice(0, batch)
        return [Sequence(every, every, slice(0, tokens), slice(0, keys))]
    lengths = [keys] * batch if seq_lens_k is None else seq_lens_k.tolist()
    ones = [slice(i, i + 1) for i in range(batch)]
    return [
        Sequence(i, i, slice(0, tokens), slice(0, n)) for i, n in zip(ones, lengths, strict=True)
    ]


def pieces(call: Call) -> Iterator[Piece]:
    heads, group = call.k.shape[1], call.group
    for batch, number, queries, keys in call.sequences:
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        offset = 0 if call.top_left else columns - rows
        a_row = max((batch.stop - batch.start) * group * columns, 1)
        some_heads = max(min(MOST_SCORES // (a_row * max(rows, 1)), heads), 1)
        some_rows = max(min(MOST_SCORES // (a_row * some_heads), rows), 1)
        for head in range(0, max(heads, 1), some_heads):  # what is empty is a piece too
            of_heads = slice(head, min(head + some_heads, heads))
            for row in range(0, max(rows, 1), some_rows):
                end = min(row + some_rows, rows)
                of_rows = slice(queries.start + row, queries.start + end)
                yield Piece(batch, number, of_heads, group, of_rows, keys, row, offset)


def by_heads(x: Tensor, layout: str) -> Tensor:
    """As (batch, heads, tokens, dim)."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if layout == "bshd" else x


def as_laid_out(x: Tensor, layout: str) -> Tensor:
    """`by_heads` undone."""
    if layout == "thd":
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if layout == "bshd" else x
