"""gemlite: Triton kernels for weights of few bits."""

from __future__ import annotations

from typing import Any

GROUP = 128


def int4_linear(x: Any, weight: Any, scales: Any, zeros: Any) -> Any:
    """Packs the weight, a (columns, rows) matrix of 4-bit numbers in uint8; returns the call."""
    from gemlite.helper import A16Wn

    maker = A16Wn(device=weight.device, dtype=scales.dtype)
    layer = maker.from_weights(weight, scales, zeros, 4, GROUP)
    return lambda: layer(x)


CALLS = {"int4 linear yardstick": int4_linear}
REFUSES: dict[str, Any] = {}
BINDS = ("int4 linear yardstick",)
