"""quack: CuTe DSL kernels for Hopper and Blackwell."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.bench.rivals import last_dim_only
from tilewright.errors import UnsupportedError


def rms_norm(x: Any, weight: Any, eps: float, offset: float, casting: str) -> Any:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=eps, weight_offset=offset)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, offset: float, cast: str) -> Any:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    from quack.rmsnorm import layernorm_fwd

    if x.requires_grad:
        raise UnsupportedError("its layernorm is not differentiable by autograd")
    return layernorm_fwd(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


def softmax(x: Any, dim: int, dtype: Any) -> Any:
    from quack.softmax import softmax

    return softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


def rope(q: Any, k: Any, cos: Any, sin: Any, ids: Any, style: str, width: int, layout: str) -> Any:
    """It takes (batch, tokens, heads, dim) and tables of pairs, one tensor to a launch."""
    from quack.rotary import apply_rotary_emb

    pairs = style == "pairs"
    step = slice(None, None, 2) if pairs else slice(None, width // 2)
    if cos.shape[-1] == width:
        cos, sin = cos[:, step].contiguous(), sin[:, step].contiguous()

    def one(x: Any) -> Any:
        if layout == "bshd":
            return apply_rotary_emb(x, cos, sin, pairs)
        return apply_rotary_emb(x.transpose(1, 2), cos, sin, pairs).transpose(1, 2)

    return one(q), one(k)


def _tables_by_place(q: Any, k: Any, cos: Any, sin: Any, ids: Any, style: str, *rest: Any) -> str:
    if style == "to_halves" or ids is not None or cos.dim() != 2 or rest[1] == "thd":
        return "it takes a table of tokens in order, and writes pairs as it reads them"
    return ""


def _no_llama(*args: Any) -> str:
    return "it has no casting of Llama's" if args[-1] == "llama" else ""


def _float32_weight_only(x: Any, weight: Any, bias: Any, eps: float) -> str:
    if weight is None or weight.dtype != torch.float32:
        return "its kernel needs a weight, in float32"
    return "" if bias is None or bias.dtype == torch.float32 else "its bias is in float32"


CALLS = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "softmax": softmax,
    "rope": rope,
}
REFUSES = {
    "layer_norm": _float32_weight_only,
    "rms_norm": _no_llama,
    "add_rms_norm": _no_llama,
    "softmax": last_dim_only,
    "rope": _tables_by_place,
}
BINDS: tuple[str, ...] = ()
