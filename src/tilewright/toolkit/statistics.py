"""@triton.jit helpers: mean and deviation of rows, safe however far from zero the mean lies.

The float32 mean of a row is itself rounded, by as much as 2^-24 of the mean, which may be more than
a deviation can bear. So the mean comes out in two steps: a first one that is near enough that the
differences are small, and then what it left behind, found among those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.toolkit.triton_lib import mean_of


@triton.jit
def centred(x, inside, n, eps):
    """Rows [ROWS, BLOCK] without their mean, and 1 / deviation [ROWS]; read nothing outside."""
    x = tl.where(inside, x - mean_of(tl.sum(x, 1), n)[:, None], 0.0)
    left = mean_of(tl.sum(x, 1), n)  # by the rounding of the mean
    variance = mean_of(tl.sum(x * x, 1), n) - left * left
    return x - left[:, None], tl.rsqrt(variance + eps)


@triton.jit
def pivot(x_row, column, n, BLOCK: tl.constexpr):
    """The mean of a wide row's first chunk: within sqrt(chunks) deviations of the row's own."""
    x = tl.load(x_row + column, mask=column < n, other=0.0).to(tl.float32)
    return mean_of(tl.sum(x, 0), tl.minimum(n, BLOCK))


@triton.jit
def welford(mean, squares, x, inside, seen):
    """One more element for each lane, its `seen`th: the mean, the sum of squares around it."""
    step = tl.where(inside, x - mean, 0.0)
    mean += step * (1.0 / seen)
    return mean, squares + step * (x - mean)


@triton.jit
def merged(mean, squares, column, n, BLOCK: tl.constexpr):
    """Chan's rule for all lanes at once: the row's mean and variance."""
    seen = tl.cdiv(n - column, BLOCK).to(tl.float32)  # [BLOCK]: the last chunk may be short
    whole = mean_of(tl.sum(seen * mean, 0), n)
    apart = mean - whole
    return whole, mean_of(tl.sum(squares + seen * apart * apart, 0), n)
