"""FlashAttention-4: CuTe DSL attention for Hopper and Blackwell."""

from __future__ import annotations

from typing import Any


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """(batch, heads, tokens, head dim) in and out; the package takes tokens before heads."""
    from flash_attn.cute import flash_attn_func

    result = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


CALLS = {"attention yardstick": attention}
REFUSES: dict[str, Any] = {}
BINDS: tuple[str, ...] = ()
