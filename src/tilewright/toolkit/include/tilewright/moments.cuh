// Mean and variance of a row in one pass: both are taken around its first element.
//
// That costs digits of the variance where the first element is far from the mean. Then, and for
// floats always, a second pass takes them around the mean that the first one found.
#pragma once

namespace tilewright {

struct Moments {
  float centre;    // what was taken from every element
  float rest;      // the mean of what was left
  float variance;  // of either

  __device__ __forceinline__ Moments(float centre, float sum, float squares, int n)
      : centre(centre), rest(sum / n), variance(squares / n - rest * rest) {}

  // How far apart, in squared deviations, first element and mean may be: sums of squares lose a
  // digit for every factor of two. Halves keep eleven digits at most, of twenty-four.
  // Squares that overflow are far.
  template <class T> __device__ __forceinline__ bool far() const {
    return sizeof(T) == 4 || !(rest * rest <= 8.0f * variance);
  }
};

}  // namespace tilewright
