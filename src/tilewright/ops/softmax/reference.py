"""softmax in eager torch: the definition of correct. Half precision is computed in float32."""

from __future__ import annotations

import torch


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    out = dtype or input.dtype
    inside = torch.promote_types(out, torch.float32)
    return torch.softmax(input.to(out).to(inside), dim).to(out)


def softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    inside = torch.promote_types(output.dtype, torch.float32)
    g, y = grad.to(inside), output.to(inside)
    return (y * (g - (g * y).sum(dim, keepdim=True))).to(input_dtype)
