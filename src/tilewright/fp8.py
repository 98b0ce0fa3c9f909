"""The fp8 formats, and what it means to quantise to them: eager torch, the definition of correct.

A scale is the float32 number that dequantises: `q.float() * scale` is y again, up to the format's
rounding. It is the largest magnitude of a row, of a group of 128 columns or of the whole tensor
over the largest number of the format, so that this number becomes the format's largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import InputError, sentence


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype
    max: float


FORMATS = {
    "e4m3": Format(torch.float8_e4m3fn, 448.0),
    "e5m2": Format(torch.float8_e5m2, 57344.0),
}
SCALINGS = ("row", "group", "tensor")
GROUP = 128  # columns that share a scale under "group"

U32 = 2.0**-24  # unit roundoff of float32
STEP = 2.0**-149  # and its smallest step


def check_options(op: str, format: Any, scaling: Any) -> None:
    for name, got, known in (("format", format, FORMATS), ("scaling", scaling, SCALINGS)):
        if not isinstance(got, str) or got not in known:
            names = ", ".join(repr(word) for word in known)
            fix = f"Pass {name}={next(iter(known))!r}, or leave it out."
            raise InputError(sentence(op, name, f"is {got!r}", f"be one of {names}", fix))


def scale_shape(shape: Sequence[int], scaling: str) -> tuple[int, ...]:
    if scaling == "tensor":
        return ()
    return (*shape[:-1], 1 if scaling == "row" else -(-shape[-1] // GROUP))


def empty_outputs(input: torch.Tensor, format: str, scaling: str) -> tuple[torch.Tensor, ...]:
    """An uninitialised (q, scale) for a norm of `input`."""
    dtype = FORMATS[format].dtype
    q = torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)
    return q, input.new_empty(scale_shape(input.shape, scaling), dtype=torch.float32)


def quantise(y: torch.Tensor, format: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale): y over its scale, saturated, to nearest even; NaN where y is not finite."""
    kind = FORMATS[format]
    if not y.numel():
        scale = y.new_ones(scale_shape(y.shape, scaling), dtype=torch.float32)
        return y.to(kind.dtype), scale
    scale = _scale(_amax(y, scaling), kind.max)
    q = (y / _spread(scale, y, scaling)).clamp(-kind.max, kind.max)
    return torch.where(y.isfinite(), q, math.nan).to(kind.dtype), scale


def error_bounds(
    y: torch.Tensor, error: torch.Tensor, format: str, scaling: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far (q, scale) may be from those of y, for a kernel whose y is off by `error` at most.

    The scale follows the largest error among its elements, and rounds once. An fp8 number is one of
    those that quotients within reach round to: mostly a single one, which the kernel must meet.
    """
    kind = FORMATS[format]
    if not y.numel():
        return torch.zeros_like(y), y.new_zeros(scale_shape(y.shape, scaling))
    amax = _amax(y, scaling)
    scale = _scale(amax, kind.max).to(y.dtype)
    off = _amax(error, scaling) / kind.max + U32 * scale + STEP
    off = torch.where(amax.isfinite(), off, 0.0)  # the scale is 1, exactly
    divisor, wrong = _spread(scale, y, scaling), _spread(off, y, scaling)
    quotient = y / divisor
    reach = error / divisor + quotient.abs() * (wrong / divisor + 2 * U32)
    low, here, high = (
        z.clamp(-kind.max, kind.max).to(kind.dtype).to(y.dtype)
        for z in (quotient - reach, quotient, quotient + reach)
    )
    return torch.maximum(high - here, here - low), off


def every_float16(device: str) -> Iterator[tuple[str, tuple[str, str], torch.Tensor]]:
    """(name, (format, scaling), rows) that hold all 65,536 float16 numbers, for tests of bits.

    In order; and the finite ones shuffled, so that small and large numbers share a scale. As one
    row, and as eight, of which the interpreter, slow and no judge of a GPU's casts, takes one. Then
    finite ones with a single number that is not.
    """
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = numbers[numbers.isfinite()]
    order = torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))
    for format in FORMATS:
        for scaling in SCALINGS:
            for name, row in (("all", numbers), ("finite, shuffled", finite[order])):
                for i, part in enumerate((row, *row.split(8192))):
                    if device == "cpu" and i not in (0, 7):  # from 2 to 512
                        continue
                    which = f"part {i} of 8" if i else "one row"
                    yield f"{format}, {scaling}, {name}, {which}", (format, scaling), part
            for odd in (math.inf, -math.inf, math.nan):
                row = finite[order][:8192].clone()
                row[4000] = odd
                yield f"{format}, {scaling}, finite and {odd}", (format, scaling), row


def _amax(y: torch.Tensor, scaling: str) -> torch.Tensor:
    """The largest |y| that each scale serves; NaN if there is one."""
    if scaling == "tensor":
        return y.abs().amax()
    if scaling == "row":
        return y.abs().amax(-1, keepdim=True)
    padded = torch.nn.functional.pad(y.abs(), (0, -y.shape[-1] % GROUP))
    return padded.reshape(*y.shape[:-1], -1, GROUP).amax(-1)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """amax over the format's largest number; 1 where that is not a normal number."""
    # By a tensor: torch divides a CUDA tensor by a number as a product with its reciprocal.
    scale = (amax / torch.full_like(amax, largest)).to(torch.float32)
    normal = scale.isfinite() & (scale >= torch.finfo(torch.float32).tiny)
    return torch.where(normal, scale, 1.0)


def _spread(scale: torch.Tensor, y: torch.Tensor, scaling: str) -> torch.Tensor:
    """The scale of each element, or what broadcasts to it."""
    if scaling != "group":
        return scale
    return scale.repeat_interleave(GROUP, -1)[..., : y.shape[-1]]
