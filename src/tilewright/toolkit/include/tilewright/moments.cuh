// Mean and variance of a row out of one pass: from the sums of its elements and of their squares.
//
// Their difference costs digits where the mean is far from zero. There, and for floats always, a
// second pass sums what is left of the elements without the mean that the first one found.
#pragma once

namespace tilewright {

// Squared deviations that a mean may be from zero: a sum of squares loses a digit for every factor of
// two, and a result in halves shows eleven of twenty-four.
constexpr float FAR = 8.0f;

// total / n, nearly always rounded as a division is; `inverse` is 1 / n.
__device__ __forceinline__ float mean_of(float total, int n, float inverse) {
  const float mean = total * inverse;
  const float left = fmaf(-mean, static_cast<float>(n), total);  // NaN for an infinite total
  return left == left ? fmaf(left, inverse, mean) : mean;
}

struct Moments {
  float centre;    // what was taken from every element: 0, or the mean of a first pass
  float rest;      // the mean of what was left
  float variance;  // of either

  // `sums`: of what was left, and of its squares.
  __device__ __forceinline__ Moments(float centre, const float* sums, int n, float inverse)
      : centre(centre),
        rest(mean_of(sums[0], n, inverse)),
        variance(mean_of(sums[1], n, inverse) - rest * rest) {}

  // Whether the mean is farther from zero than that, or its square is more than a float holds. (Squares
  // of near elements whose sum overflows have an infinite variance: torch's row of zeros.)
  template <class T> __device__ __forceinline__ bool far(float squared_deviations = FAR) const {
    return sizeof(T) == 4 || !(rest * rest <= squared_deviations * variance);
  }
};

}  // namespace tilewright
