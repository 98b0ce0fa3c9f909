"""Liger Kernel: Triton kernels for training."""

from __future__ import annotations

from typing import Any

from tilewright.bench.rivals import last_dim_only

CASTINGS = {"torch": "gemma", "gemma": "gemma", "llama": "llama"}  # "gemma": float32 throughout


def rms_norm(x: Any, weight: Any, eps: float, offset: float, casting: str) -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, eps, offset, CASTINGS[casting], False)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, offset: float, cast: str) -> Any:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return liger_fused_add_rms_norm(x, residual, weight, eps, offset, CASTINGS[cast], False)


def softmax(x: Any, dim: int, dtype: Any) -> Any:
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax(x)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, weight, bias, eps)


def swiglu(gate: Any, up: Any) -> Any:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu(gate, up)


def geglu(gate: Any, up: Any, approximate: str) -> Any:
    from liger_kernel.transformers.functional import liger_geglu

    return liger_geglu(gate, up)


def _tanh_only(gate: Any, up: Any, approximate: str) -> str:
    return "" if approximate == "tanh" else "its gelu is the one with a tanh"


def rope(q: Any, k: Any, cos: Any, sin: Any, *_: Any) -> Any:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return liger_rotary_pos_emb(q, k, cos.unsqueeze(0), sin.unsqueeze(0))


def _dense_halves(q: Any, k: Any, cos: Any, sin: Any, ids: Any, style: str, *rest: Any) -> str:
    rotary_dim, layout = rest
    if style != "halves" or ids is not None or cos.dim() != 2 or cos.shape[-1] != rotary_dim:
        return "it takes halves, a table as wide as they are, and no positions"
    if layout != "bhsd" or not (q.is_contiguous() and k.is_contiguous()):
        return "where the heads of a token are neighbours it writes its result over q and k"
    return ""


def _no_weight(x: Any, weight: Any, *_: Any) -> str:
    return "" if weight is not None else "its kernel needs a weight"


def _no_weight_add(x: Any, residual: Any, *rest: Any) -> str:
    return _no_weight(x, *rest)


def _no_weight_or_bias(x: Any, weight: Any, bias: Any, eps: float) -> str:
    both = weight is not None and bias is not None
    return "" if both else "its kernel needs a weight and a bias"


CALLS = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "softmax": softmax,
    "swiglu": swiglu,
    "geglu": geglu,
    "rope": rope,
}
REFUSES = {
    "layer_norm": _no_weight_or_bias,
    "rms_norm": _no_weight,
    "add_rms_norm": _no_weight_add,
    "softmax": last_dim_only,
    "geglu": _tanh_only,
    "rope": _dense_halves,
}
BINDS: tuple[str, ...] = ()
