"""The torch.nn.functional-compatible face: the same functions under torch's names and signatures.

    import tilewright.functional as F

Arguments that torch has deprecated are left out: softmax's implicit dim (here -1) and _stacklevel.
scaled_dot_product_attention stands here alone: it is torch's view of `tilewright.attention`.
"""

from __future__ import annotations

import torch

from tilewright import checks, library, sdpa
from tilewright.errors import InputError, sentence
from tilewright.ops.attention.op import OP as ATTENTION
from tilewright.ops.attention.op import attention
from tilewright.ops.layer_norm.op import layer_norm
from tilewright.ops.relu.op import relu
from tilewright.ops.rms_norm.op import rms_norm
from tilewright.ops.softmax.op import softmax

__all__ = ["layer_norm", "relu", "rms_norm", "scaled_dot_product_attention", "softmax"]

SDPA = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(query @ key.T * scale + mask) @ value, as torch's function of this name.

    query: (..., tokens, elements), key and value: (..., other tokens, elements), with any number of
    dims in front, which broadcast. attn_mask broadcasts to the scores: booleans, True for what
    takes part, or numbers to add, which have a gradient. is_causal aligns to the top left, and
    excludes a mask, as torch's documentation says. enable_gqa lets heads of query share those of
    key and value, equally many of both. A row that is masked whole gives 0. Under autocast all are
    cast to its dtype.

    Dropout goes to torch's own function, the kernels have none: with a `backend` other than torch
    it is refused, and `tilewright.explain` says so.

    >>> import torch, tilewright.functional as F
    >>> query, key = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
    >>> F.scaled_dot_product_attention(query, key, torch.arange(3.0)[None, :, None], is_causal=True)
    tensor([[[0.0000],
             [0.5000]]])
    """
    if attn_mask is not None and is_causal:
        fix = "Put the triangle into the mask, or leave the mask out."
        raise InputError(sentence(SDPA, "attn_mask", "came with is_causal=True", "be None", fix))
    if dropout_p.__class__ is not float or dropout_p != 0.0:
        checks.number(SDPA, "dropout_p", dropout_p, at_least=0.0)
    if dropout_p != 0.0:
        for name, x in zip(sdpa.NAMES, (query, key, value), strict=True):
            checks.tensor(SDPA, name, x)
        _leave_dropout_to_torch(query, dropout_p, backend)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    checks.tensor(SDPA, "query", query)
    query, key, value, attn_mask = sdpa.as_autocast_says(query, key, value, attn_mask)
    query, key, value, bias, shape = sdpa.arrange(SDPA, query, key, value, attn_mask, enable_gqa)
    output: torch.Tensor = attention(
        query,
        key,
        value,
        causal=is_causal,
        causal_alignment="top_left",
        scale=scale,
        bias=bias,
        backend=backend,
    )
    return output if shape is None else output.reshape(shape)


def _leave_dropout_to_torch(query: torch.Tensor, dropout_p: float, backend: str | None) -> None:
    if dropout_p > 1:
        got, fix = f"is {dropout_p}", "Pass a probability."
        raise InputError(sentence(SDPA, "dropout_p", got, "be 1 or less", fix))
    why = f"dropout_p is {dropout_p}, and the kernels have no dropout"
    library.leave_to_torch(SDPA, ATTENTION, query, backend, why)
