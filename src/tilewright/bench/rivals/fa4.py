"""FlashAttention-4: CuTe DSL attention for Hopper and Blackwell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.bench.rivals import Attention

WIDEST = 256  # elements of a head, on Hopper


def yardstick(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """(batch, heads, tokens, head dim) in and out; the package takes tokens before heads."""
    from flash_attn.cute import flash_attn_func

    result = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
    return _output(result).transpose(1, 2)


def attention(*args: Any) -> Callable[[], Any]:
    """Its window is ours, with None for no border, and aligned bottom right."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    call = Attention(*args)
    q, k, v = args[:3]
    how = {
        "softmax_scale": call.scale,
        "window_size": tuple(None if side < 0 else side for side in (call.left, call.right)),
        "learnable_sink": call.sinks,
        "softcap": call.softcap,
    }
    if call.layout == "thd":
        how |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        how |= {"max_seqlen_q": call.max_q, "max_seqlen_k": call.max_k}
        return lambda: _output(flash_attn_varlen_func(q, k, v, **how))
    if call.layout == "bshd":
        return lambda: _output(flash_attn_func(q, k, v, **how))
    return lambda: _output(
        flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
    ).transpose(1, 2)


def _output(result: Any) -> Any:
    """Its functions give (output, lse), whether the second was asked for or not."""
    return result[0] if isinstance(result, tuple) else result


def _no_other_terms(*args: Any) -> str:
    call = Attention(*args)
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return "it takes float16 and bfloat16"
    if max(call.q.shape[-1], call.v.shape[-1]) > WIDEST:
        return f"its heads have at most {WIDEST} elements"
    if call.alibi_slopes is not None or call.bias is not None or call.seq_lens_k is not None:
        return "it takes no ALiBi, no bias and no padded sequences"
    if call.top_left and max(call.left, call.right) >= 0 and not call.is_square:
        return "its masks are aligned bottom right"
    return ""


CALLS = {"attention yardstick": yardstick, "attention": attention}
REFUSES = {"attention": _no_other_terms}
BINDS = ("attention",)
