"""geglu in eager torch: the definition of correct. Halves are computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.gated import halves, joined, wide


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> torch.Tensor:
    return (F.gelu(wide(gate), approximate=approximate) * wide(up)).to(gate.dtype)


def geglu_packed(x: torch.Tensor, order: str, approximate: str) -> torch.Tensor:
    return geglu(*halves(x, order), approximate)


def geglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own derivative of gelu."""
    g, x = wide(grad), wide(gate)
    dgate = torch.ops.aten.gelu_backward(g * wide(up), x, approximate=approximate)
    dup = g * F.gelu(x, approximate=approximate)
    return dgate.to(gate.dtype), dup.to(up.dtype)


def geglu_packed_backward(
    grad: torch.Tensor, x: torch.Tensor, order: str, approximate: str
) -> torch.Tensor:
    return joined(geglu_backward(grad, *halves(x, order), approximate), order)
