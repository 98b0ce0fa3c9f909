// Activations of gated layers, in float, and their derivatives.
//
// The reciprocal is the approximate one, an instruction. A power beyond the range of float becomes
// infinity and its reciprocal zero: no argument, however large, is a special case. For operands of
// type T = float the exponential is the exact one; halves have far fewer digits, and take the
// approximate one, whose e^-x carries the rounding of its exponent: 2 * |x| * 2^-24 of itself.
#pragma once

namespace tilewright {

// 1 / (1 + e^-x). Below 2^-126 it is zero.
template <class T> __device__ __forceinline__ float sigmoid(float x) {
  float power, quotient;
  if constexpr (sizeof(T) == sizeof(float)) {
    power = expf(-x);
  } else {
    constexpr float LOG2_E = 1.4426950408889634f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -LOG2_E));
  }
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
  return quotient;
}

template <class T> __device__ __forceinline__ float silu(float x) { return x * sigmoid<T>(x); }

// The derivative of silu at x, from sigma = sigmoid(x) and silu = x * sigma.
__device__ __forceinline__ float silu_slope(float silu, float sigma) {
  return sigma + silu * (1.0f - sigma);
}

}  // namespace tilewright
