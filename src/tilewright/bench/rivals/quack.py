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
}
REFUSES = {
    "layer_norm": _float32_weight_only,
    "rms_norm": _no_llama,
    "add_rms_norm": _no_llama,
    "softmax": last_dim_only,
}
BINDS: tuple[str, ...] = ()
