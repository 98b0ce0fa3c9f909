"""rope in eager torch: the definition of correct.

A head's first `rotary_dim` elements are pairs (a, b), each turned by an angle of its token:

    a' = a cos − b sin        b' = b cos + a sin

`style` says where pairs lie: "halves", i and i + rotary_dim/2 (Llama); "pairs", 2i and 2i + 1
(GPT-J); "to_halves", read as pairs and written as halves (DeepSeek). A table as wide as the rotated
part has an entry for each element of the result; one half as wide, for each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
PAIRS_IN = {"halves": False, "pairs": True, "to_halves": True}
PAIRS_OUT = {"halves": False, "pairs": True, "to_halves": False}

Turn = Callable[..., tuple[Tensor, Tensor]]


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    style: str, rotary_dim: int, layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return rotated((q, k), (cos, sin), position_ids, style, rotary_dim, layout, turn)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    style: str, rotary_dim: int, layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The transposed rotation: the inverse one, where both elements of a pair share an angle."""
    tables, grads = (cos, sin), (grad_q, grad_k)
    return rotated(grads, tables, position_ids, style, rotary_dim, layout, turn_back, back=True)


def rope_in_place(q: Tensor, k: Tensor, *rest: Any) -> None:
    q_out, k_out = rope(q, k, *rest)
    q.copy_(q_out)
    k.copy_(k_out)


def turn(a: Tensor, b: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` hold two tables each: of the first elements of pairs, and of the second."""
    return a * cos[0] - b * sin[0], b * cos[1] + a * sin[1]


def turn_back(a: Tensor, b: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
    return a * cos[0] + b * sin[1], b * cos[1] - a * sin[0]


def rotated(
    heads: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], position_ids: Tensor | None,
    style: str, rotary_dim: int, layout: str, turn: Turn, *, back: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    reads, writes = PAIRS_IN[style], PAIRS_OUT[style]
    tokens = heads[0].shape[token_dim(layout)]
    wide = torch.promote_types(heads[0].dtype, torch.float32)
    by_token = [_by_token(table, position_ids, tokens, layout).to(wide) for table in tables]
    cos, sin = (
        split(table, writes) if table.shape[-1] == rotary_dim else (table, table)
        for table in by_token
    )
    if back:
        reads, writes = writes, reads

    def one(x: Tensor) -> Tensor:
        a, b = turn(*split(x[..., :rotary_dim].to(wide), reads), cos, sin)
        joined = torch.stack((a, b), -1).flatten(-2) if writes else torch.cat((a, b), -1)
        return torch.cat((joined.to(x.dtype), x[..., rotary_dim:]), -1)

    q, k = heads
    return one(q), one(k)


def split(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """The first elements of all pairs, and the second ones."""
    if pairs:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def token_dim(layout: str) -> int:
    return {"bhsd": 2, "bshd": 1, "thd": 0}[layout]


def _by_token(table: Tensor, position_ids: Tensor | None, tokens: int, layout: str) -> Tensor:
    """The table's rows of the tokens, with a dim of one head."""
    if position_ids is not None:
        known = (position_ids >= 0) & (position_ids < len(table))
        rows = table[position_ids.clamp(0, max(len(table) - 1, 0))]
        table = rows.where(known.unsqueeze(-1), torch.nan)  # outside the table: NaN
    elif table.dim() == 4:
        table = table[:, 0]
    table = table[..., :tokens, :]
    if layout == "thd":
        return table.unsqueeze(-2)
    if table.dim() == 2:
        table = table.unsqueeze(0)
    return table.unsqueeze(1 if layout == "bhsd" else 2)
