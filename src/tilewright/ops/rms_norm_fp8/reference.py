"""rms_norm whose result is quantised to fp8, in eager torch: the definition of correct.

The float32 result of the norm is quantised as it is, without a rounding to the input's dtype.
"""

from __future__ import annotations

import torch

from tilewright import fp8
from tilewright.ops.rms_norm import reference as rms_norm


def unrounded(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float
) -> torch.Tensor:
    """What is quantised: the norm in the dtype that it is computed in."""
    return rms_norm.unrounded(input, weight, eps, weight_offset)


def rms_norm_fp8(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    format: str,
    scaling: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale)."""
    return fp8.quantise(unrounded(input, weight, eps, weight_offset), format, scaling)
