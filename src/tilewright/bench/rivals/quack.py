"""quack: CuTe DSL kernels for Hopper and Blackwell."""

from __future__ import annotations

from typing import Any

from tilewright.bench.rivals import last_dim_only


def rms_norm(x: Any, weight: Any, eps: float, offset: float, casting: str) -> Any:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=eps, weight_offset=offset)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, offset: float, cast: str) -> Any:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def softmax(x: Any, dim: int, dtype: Any) -> Any:
    from quack.softmax import softmax

    return softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


def _no_llama(*args: Any) -> str:
    return "it has no casting of Llama's" if args[-1] == "llama" else ""


CALLS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "softmax": softmax}
REFUSES = {"rms_norm": _no_llama, "add_rms_norm": _no_llama, "softmax": last_dim_only}
BINDS: tuple[str, ...] = ()
