"""rms_norm_swiglu over the last dim in eager torch: the definition of correct.

Half precision is computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch


def rms_norm_swiglu(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    inside = torch.promote_types(x.dtype, torch.float32)
    wide, g = x.to(inside), gate.to(inside)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(inside)
    return (y * (g * torch.sigmoid(g))).to(x.dtype)


def rms_norm_swiglu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of the gate and of the weight (empty unless `weight_grad`)."""
    inside = torch.promote_types(x.dtype, torch.float32)
    wide, g, dy = x.to(inside), gate.to(inside), grad.to(inside)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    sigma = torch.sigmoid(g)
    silu = g * sigma
    slope = sigma + silu * (1 - sigma)

    weighed = dy if weight is None else dy * weight.to(inside)
    h = weighed * silu  # what reaches the normalised row
    dx = rstd * (h - normed * (h * normed).mean(-1, keepdim=True))
    dgate = weighed * normed * slope
    if not weight_grad or weight is None:
        return dx.to(x.dtype), dgate.to(x.dtype), x.new_empty(0)
    dw = (dy * silu * normed).sum_to_size(weight.shape)
    return dx.to(x.dtype), dgate.to(x.dtype), dw.to(weight.dtype)
