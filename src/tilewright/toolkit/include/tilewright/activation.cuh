// Activations of gated layers, in float, and their derivatives.
//
// The exponential and the reciprocal are the approximate ones, an instruction each. A power beyond
// the range of float becomes infinity and its reciprocal zero: no argument, however large, is a
// special case. e^-x carries the rounding of its exponent: 2 * |x| * 2^-24 of itself.
#pragma once

namespace tilewright {

// 1 / (1 + e^-x). Below 2^-126 it is zero.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -LOG2_E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
  return quotient;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// The derivative of silu at x, from sigma = sigmoid(x) and silu = x * sigma.
__device__ __forceinline__ float silu_slope(float silu, float sigma) {
  return sigma + silu * (1.0f - sigma);
}

}  // namespace tilewright
