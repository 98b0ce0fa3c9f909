"""layer_norm over the last dim in eager torch: the definition of correct.

Half precision is computed in float32 and rounded once at the end, as torch's fused kernel does. The
mean is taken out before the squares are summed, so a mean far above the deviation costs no digits.
"""

from __future__ import annotations

import torch


def _normed(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the normalised rows, 1 / deviation)."""
    # A quotient of tensors: on a GPU torch's mean, and its quotient by a number, multiply by 1 / n,
    # and a constant row would keep a rest.
    total = x.sum(-1, keepdim=True)
    centred = x - total / torch.full_like(total, x.shape[-1])
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def unrounded(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The norm in the dtype that it is computed in."""
    inside = torch.promote_types(input.dtype, torch.float32)
    y, _ = _normed(input.to(inside), eps)
    if weight is not None:
        y = y * weight.to(inside)
    if bias is not None:
        y = y + bias.to(inside)
    return y


def layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return unrounded(input, weight, bias, eps).to(input.dtype)


def layer_norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input, of the weight and of the bias (the last two empty unless wanted)."""
    inside = torch.promote_types(input.dtype, torch.float32)
    normed, rstd = _normed(input.to(inside), eps)
    dy = grad.to(inside)
    g = dy if weight is None else dy * weight.to(inside)
    along = (g * normed).mean(-1, keepdim=True)
    dx = rstd * (g - g.mean(-1, keepdim=True) - normed * along)
    dw = db = input.new_empty(0)
    if weight_grad and weight is not None:
        dw = (dy * normed).sum_to_size(weight.shape).to(weight.dtype)
    if bias_grad and bias is not None:
        db = dy.sum_to_size(bias.shape).to(bias.dtype)
    return dx.to(input.dtype), dw, db
