"""swiglu in eager torch: the definition of correct. Halves are computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.gated import halves, joined, wide


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def swiglu_packed(x: torch.Tensor, order: str) -> torch.Tensor:
    return swiglu(*halves(x, order))


def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu' = s (1 + gate (1 - s)) with s = sigmoid(gate)."""
    g, x = wide(grad), wide(gate)
    s = torch.sigmoid(x)
    dgate = g * (s * (1 + x * (1 - s))) * wide(up)
    return dgate.to(gate.dtype), (g * F.silu(x)).to(up.dtype)


def swiglu_packed_backward(grad: torch.Tensor, x: torch.Tensor, order: str) -> torch.Tensor:
    return joined(swiglu_backward(grad, *halves(x, order)), order)
