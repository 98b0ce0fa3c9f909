"""How far float32 sums and the roundings of the dtypes may take a product from the truth."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.ops.matmul import reference
from tilewright.spec import Args, Rounding

Tensor = torch.Tensor

TF32 = 2.0**-10  # what tensor cores drop of a float32 operand, which they may truncate


def _of_sums(terms: float, precision: str) -> float:
    """In units of the sum of absolute products: so many terms err like the root of their number.

    2^-23 each, not 2^-24, because tensor cores may truncate.
    """
    operands = 2 * TF32 if precision == "tf32" else 0.0
    return 4 * math.sqrt(terms) * 2.0**-23 + operands


def tolerance(
    rounding: Rounding, outputs: Args, a: Tensor, b: Tensor, out_dtype: Any, precision: str,
    block: Any, deterministic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (c,) = outputs
    reach = torch.matmul(a.abs(), b.abs())
    bound = c.abs() * rounding.u_out + reach * _of_sums(a.shape[-1], precision)
    return (bound + rounding.tiny,)


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Tensor, a: Tensor, b: Tensor, out_dtype: Any,
    precision: str, deterministic: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same of two more products. Where the result has a dtype of its own, its gradient is
    rounded to the operands' first."""
    reaches = reference.matmul_backward(
        grad.abs(), a.abs(), b.abs(), None, "ieee", False, need_a, need_b
    )
    first = 0.0 if out_dtype is None else rounding.u_in
    bounds = []
    for found, reach, operand in zip(outputs, reaches, (a, b), strict=True):
        products = grad.numel() * a.shape[-1]  # each of them in a sum of one element
        terms = products / operand.numel() if operand.numel() else 0.0
        inside = first + _of_sums(terms, precision)
        bounds.append(found.abs() * rounding.u_out + reach * inside + rounding.tiny)
    return tuple(bounds)
