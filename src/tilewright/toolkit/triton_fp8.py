"""@triton.jit helpers that quantise to fp8: the largest magnitude, its scale, the rounded quotient.

What they compute is fp8.quantise. Magnitudes are compared as integers: the bits of |y| are ordered
as the numbers are, with NaN above infinity. So a maximum keeps a NaN, in any order of comparisons,
and an atomic maximum gives the same bits on every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.toolkit.launch import is_interpreted

INFINITY = tl.constexpr(0x7F800000)
SMALLEST = tl.constexpr(2.0**-126)  # normal number
# 1/7 in two float32 parts: the largest number of either format is 7 times a power of two
SEVENTH = tl.constexpr(float.fromhex("0x1.24924ap-3"))
SEVENTH_REST = tl.constexpr(float.fromhex("-0x1.b6db6ep-28"))


@triton.jit
def magnitude(y):
    """The bits of |y|."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


INTERPRETED = tl.constexpr(is_interpreted(magnitude))


@triton.jit
def scale_of(amax, MAX: tl.constexpr):
    """The largest magnitude, in bits, over MAX; 1 where that is not a normal number."""
    largest = amax.to(tl.float32, bitcast=True)
    if INTERPRETED:  # its fma rounds twice
        scale = tl.div_rn(largest, tl.zeros_like(largest) + MAX)
    else:
        # the bits of the IEEE quotient without a division (see the notes of rms_norm_fp8)
        POWER: tl.constexpr = 7.0 / MAX
        inverse = tl.zeros_like(largest) + SEVENTH * POWER
        scale = tl.fma(largest, inverse, largest * (SEVENTH_REST * POWER))
    return tl.where((amax < INFINITY) & (scale >= SMALLEST), scale, 1.0)


@triton.jit
def quantised(y, scale, MAX: tl.constexpr, FP8: tl.constexpr):
    """y / scale in fp8, to nearest even; saturated at MAX, and NaN where y is not finite.

    An IEEE division is some ten instructions. Few scales serve many y, so here it is two products
    with a reciprocal in two parts, which give the same fp8 numbers (the notes of rms_norm_fp8 tell
    why).
    """
    if INTERPRETED:
        q = tl.div_rn(y, scale + tl.zeros_like(y))
    else:
        one = tl.zeros_like(scale) + 1.0
        inverse = tl.div_rn(one, scale)
        short = tl.fma(-scale, inverse, one)  # what its rounding took
        rest = inverse * short
        rest = tl.fma(rest, short, rest)
        q = tl.fma(y, inverse, y * rest)  # NaN for an infinite y: its scale is 1, and the rest 0

    q = tl.clamp(q, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    return rounded_by_hand(q, y, FP8) if INTERPRETED else q.to(FP8)


@triton.jit
def rounded_by_hand(q, y, FP8: tl.constexpr):
    """What a GPU's clamp and cast give; the interpreter's lose NaN and round wrongly."""
    MANTISSA: tl.constexpr = 3 if tl.float8e4nv == FP8 else 2
    LOWEST: tl.constexpr = 121 if tl.float8e4nv == FP8 else 113  # exponent of the smallest normal
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = magnitude(q)
    normal = (bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED
    normal -= (LOWEST - 1) << MANTISSA
    # a sum with this power of two has the step of fp8's subnormals for its last place
    power = tl.zeros_like(bits) + ((LOWEST + DROPPED) << 23)
    subnormal = bits.to(tl.float32, bitcast=True) + power.to(tl.float32, bitcast=True)
    subnormal = subnormal.to(tl.int32, bitcast=True) - power
    code = tl.where(bits < (LOWEST << 23), subnormal, normal)
    code |= (q.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(magnitude(y) < INFINITY, code, 0x7F).to(tl.uint8).to(FP8, bitcast=True)
