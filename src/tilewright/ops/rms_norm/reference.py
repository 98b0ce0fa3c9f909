"""rms_norm over the last dim in eager torch: the definition of correct.

Half precision is computed in float32 and rounded once at the end, as torch's fused kernel does;
casting="llama" rounds the normalised value before it meets the weight, as Llama's module does.
"""

from __future__ import annotations

import torch


def result_dtype(input: torch.Tensor, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    """The input's dtype; a Llama module returns what its last product promotes to."""
    if casting == "llama" and weight is not None:
        return torch.promote_types(input.dtype, weight.dtype)
    return input.dtype


def unrounded(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str = "torch",
) -> torch.Tensor:
    """The norm in the dtype that it is computed in."""
    inside = torch.promote_types(input.dtype, torch.float32)
    x = input.to(inside)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        y = y.to(input.dtype).to(inside)
    if weight is not None:
        w = weight.to(inside)
        y = y * (w + weight_offset if weight_offset else w)
    return y


def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> torch.Tensor:
    y = unrounded(input, weight, eps, weight_offset, casting)
    return y.to(result_dtype(input, weight, casting))


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum): the sum is rounded to the input's dtype before it is normed."""
    total = input + residual
    return rms_norm(total, weight, eps, weight_offset, casting), total


def rms_norm_backward(
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input and of the weight (empty unless `weight_grad`).

    `grad_residual` is what reaches the normed sum past the norm; it is added to the first gradient.
    """
    inside = torch.promote_types(input.dtype, torch.float32)
    x, dy = input.to(inside), grad.to(inside)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    g = dy if weight is None else dy * (weight.to(inside) + weight_offset)
    dx = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    if grad_residual is not None:
        dx = dx + grad_residual.to(inside)
    if not weight_grad or weight is None:
        return dx.to(input.dtype), input.new_empty(0)
    dw = (dy * normed).sum_to_size(weight.shape)
    return dx.to(input.dtype), dw.to(weight.dtype)
