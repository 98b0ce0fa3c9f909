"""matmul in eager torch: the definition of correct. Products are summed in float32.

A CPU's own products of halves may be summed in halves; they are made in float32 there. A GPU's
tensor cores sum in float32, and its float32 is multiplied as `precision` says.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.multiplying import (
    HALVES,
    Factors,
    factors_of_da,
    factors_of_db,
    torch_multiplies,
)

Tensor = torch.Tensor


def matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, precision: str, *_: Any) -> Tensor:
    out = out_dtype or a.dtype
    if a.dtype == torch.float64:
        return torch.matmul(a, b)
    if a.dtype == torch.float32:
        return _in_float32(a, b, precision)
    if a.is_cuda and out == a.dtype:
        return torch.matmul(a, b)
    if _has_wide_product(a, b):
        return torch.mm(a, b, out_dtype=out)
    # tf32 holds every half: these products are exact, on tensor cores
    return _in_float32(a.float(), b.float(), "tf32").to(out)


def direct(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, *_: Any) -> Any:
    """`run(a, b)` of halves on a GPU, where torch's own function is all of `matmul`. Over a stack
    of matrices b torch may return a result that lies by columns."""
    halves = a.dtype in HALVES and out_dtype in (None, a.dtype)
    if not (a.is_cuda and halves and a.dim() >= 2 and b.dim() == 2):
        return None
    multiply = torch.mm if a.dim() == 2 else torch.matmul
    return lambda a, b, *_: multiply(a, b)


def _in_float32(a: Tensor, b: Tensor, precision: str) -> Tensor:
    if not a.is_cuda:
        return torch.matmul(a, b)
    with torch_multiplies(precision):
        return torch.matmul(a, b)


def _has_wide_product(a: Tensor, b: Tensor) -> bool:
    """torch has halves to float32 for two matrices on a GPU; autograd does not know it."""
    leaves = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return a.is_cuda and a.dim() == b.dim() == 2 and a.numel() * b.numel() > 0 and not leaves


def matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, precision: str,
    deterministic: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dA = dC Bᵀ and dB = Aᵀ dC, summed over the dims that were broadcast.

    The gradient of a float32 result of halves is rounded to them first: tensor cores multiply
    operands of one dtype.
    """
    grad = grad.to(a.dtype)

    def summed(factors: Factors, like: Tensor) -> Tensor:
        wide = torch.promote_types(like.dtype, torch.float32)
        found = matmul(factors.left, factors.right, wide, precision)
        return found.sum_to_size(factors.shape).reshape(like.shape).to(like.dtype)

    return (
        summed(factors_of_da(grad, a, b), a) if need_a else a.new_empty(0),
        summed(factors_of_db(grad, a, b), b) if need_b else b.new_empty(0),
    )
