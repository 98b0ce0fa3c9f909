"""How far float32 arithmetic and the roundings of the dtypes may take attention from the truth."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.ops.attention import reference
from tilewright.ops.attention.reference import Call, Piece
from tilewright.spec import Args, Rounding, sum_path

Tensor = torch.Tensor

FLUSHED = 2.0**-126  # a weight below float32's smallest normal number may be 0 on a GPU
TF32 = 2.0**-10  # what tensor cores drop of a float32 operand, which they may truncate


class Errors:
    """What arithmetic may do to a piece of a call, in units of the quantity itself."""

    def __init__(self, rounding: Rounding, call: Call, piece: Piece) -> None:
        self.tf32 = TF32 if call.precision == "tf32" else 0.0
        self.u32, self.rounding = rounding.u32, rounding
        self.queries, self.keys = piece.rows(call.q), call.k[piece.of_keys]
        self.values = call.v[piece.of_keys]
        # of P, and of what is rounded as it is before a product
        self.rounded = rounding.u_in + self.tf32
        # a running sum is rescaled with every tile of keys, at least 16
        self.path = (sum_path(piece.sizes[1]) + 2 * math.sqrt(piece.sizes[1] / 16) + 8) * self.u32
        self.score = self._of_scores(call, piece)  # absolute, (batch, key heads, group, queries)
        self.weight = self.rounded + 2 * self.score + self.path

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Absolute, of the products of the rows of a (.., group, rows, dim) and b (.., rows, dim).

        A sum of n products errs like the root of n; truncated operands all err to one side.
        """
        reach = _norms(a) * _most(_norms(b))[..., None, None]
        return ((2 * math.sqrt(a.shape[-1]) + 16) * self.u32 + 2 * self.tf32) * reach

    def _of_scores(self, call: Call, piece: Piece) -> Tensor:
        found = abs(call.scale) * self.product(self.queries, self.keys)
        terms = torch.zeros_like(found)
        if call.softcap:  # what it leaves of the largest score
            reach = _norms(self.queries) * _most(_norms(self.keys))[..., None, None]
            terms = (abs(call.scale) * reach).clamp(max=call.softcap)
        if call.slopes is not None:
            slopes = piece.grouped(call.slopes[piece.number, piece.query_heads])
            terms = terms + slopes.abs().unsqueeze(-1) * sum(piece.sizes)
        if call.bias is not None:
            bias = call.bias[piece.of_bias(call.bias)].abs()
            terms = terms + piece.grouped(_most(bias.masked_fill(bias == math.inf, 0.0)))
        return (found + 16 * self.u32 * terms).nan_to_num(0.0, 0.0, 0.0)


def _norms(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def _most(x: Tensor) -> Tensor:
    """The largest of the last dim, 0 of none."""
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def tolerance(rounding: Rounding, outputs: Args, *args: Any) -> tuple[Tensor, ...]:
    """Errors of scores are relative ones of weights, and those average values.

    Weights are rounded to the dtype of v before the second product, which sums in float32; float16
    also drops what is below its smallest number.
    """
    out, lse = outputs
    call, layout = reference.seen(*args), args[9]
    of_out = call.q.new_zeros((*call.q.shape[:-1], call.v.shape[-1]))
    of_lse = call.q.new_zeros(call.q.shape[:-1])
    for piece in reference.pieces(call):
        e = Errors(rounding, call, piece)
        most = _most(e.values.abs().mT)[:, :, None, None]  # of each element over all keys
        lost = e.tf32 + rounding.tiny_in * piece.sizes[1]
        bound = (e.weight.unsqueeze(-1) + lost) * most
        of_out[piece.of_queries] = bound.flatten(1, 2)
        of_lse[piece.of_queries] = (e.score + e.path).flatten(1, 2)
    of_out = reference.as_laid_out(of_out, layout).nan_to_num(0.0)
    of_lse = of_lse[0] if layout == "thd" else of_lse
    return (
        rounding.u_out * out.abs() + of_out + rounding.tiny,
        of_lse + 4 * rounding.u32 * lse.abs() + rounding.tiny,
    )


def tolerance_backward(rounding: Rounding, outputs: Args, *args: Any) -> tuple[Tensor, ...]:
    """Every factor of dS = P (dP − Σ dO O + dlse) and of the sums over it brings its own errors."""
    grad, grad_lse, q, k, v, out, lse, sinks, slopes, bias, *rest = args
    layout, needs = rest[3], rest[-4:]
    call = reference.seen(q, k, v, sinks, slopes, bias, *rest[:-4])
    d_out, out = (reference.by_heads(x, layout) for x in (grad, out))
    if layout == "thd":
        lse, grad_lse = lse[None], None if grad_lse is None else grad_lse[None]
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    of_sinks, of_bias = (torch.zeros_like(q if x is None else x) for x in (sinks, bias))

    for piece in reference.pieces(call):
        e = Errors(rounding, call, piece)
        s, bend = reference.scores(call, piece)
        known = piece.rows(lse).masked_fill(piece.rows(lse) == -math.inf, 0.0)
        p = (s - known.unsqueeze(-1)).exp()
        rows, values = piece.rows(d_out), e.values.unsqueeze(2)
        d_lse = torch.zeros_like(known) if grad_lse is None else piece.rows(grad_lse)
        o = piece.rows(out)
        delta = (rows * o).sum(-1)
        # the saved output carries the forward's errors into delta
        carried = e.weight.unsqueeze(-1) * (p @ values.abs()) + rounding.u_in * o.abs()
        of_delta = (rows.abs() * carried).sum(-1) + 16 * e.u32 * (delta.abs() + d_lse.abs())
        factors = (rows @ values.mT).abs() + (delta.abs() + d_lse.abs()).unsqueeze(-1)
        reach = factors * p
        absolute = of_delta + e.product(rows, e.values)
        of_ds = e.weight.unsqueeze(-1) * reach + p * absolute.unsqueeze(-1) + FLUSHED * factors
        many = sum_path(math.prod(piece.sizes) * piece.group) * e.u32
        if bias is not None:
            place = piece.of_bias(bias)
            of_bias[place] += (of_ds + many * reach).flatten(1, 2).sum_to_size(of_bias[place].shape)
        if sinks is not None:
            in_sink = (reference.sink_of(call, piece) - known).exp()
            moved = (e.weight + many) * (delta.abs() + d_lse.abs()) + of_delta
            of_sinks[piece.query_heads] += (in_sink * moved).sum((0, 3)).flatten()
        if bend is not None:  # the slope of the cap errs too
            steps = 2 * (4 * e.u32 + e.score / call.softcap).unsqueeze(-1)
            of_ds = of_ds * bend + reach * steps
            reach = reach * bend
        # rounded for the next products, or lost below the smallest number
        sees = (s > -math.inf).to(s.dtype)
        of_ds = of_ds + (e.rounded + e.tf32 + many) * reach + rounding.tiny_in * sees
        of_ds = abs(call.scale) * of_ds.flatten(2, 3)
        of_p = (e.weight + e.tf32 + many).unsqueeze(-1) * p + rounding.tiny_in * sees
        found = (of_ds @ e.keys.abs()).unflatten(2, s.shape[2:4])
        of_q[piece.of_queries] = found.flatten(1, 2)
        of_k[piece.of_keys] += of_ds.mT @ e.queries.flatten(2, 3).abs()
        of_v[piece.of_keys] += of_p.flatten(2, 3).mT @ rows.flatten(2, 3).abs()

    laid = [reference.as_laid_out(x, layout) for x in (of_q, of_k, of_v)]
    given = (needs[0], needs[1], needs[1], needs[2] and sinks is not None,
             needs[3] and bias is not None)  # fmt: skip
    return tuple(
        rounding.u_out * x.abs() + bound.nan_to_num(0.0) + rounding.tiny if has else x
        for x, bound, has in zip(outputs, (*laid, of_sinks, of_bias), given, strict=True)
    )
