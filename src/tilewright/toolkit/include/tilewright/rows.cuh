// Where the rows of a strided tensor start. Mirrors RowsArgument in cuda_args.py, field by field.
#pragma once

namespace tilewright {

struct Rows {
  long long outer_stride;  // elements
  long long inner_stride;
  unsigned inner;  // rows in the inner level, at least 1

  __device__ __forceinline__ long long start(unsigned row) const {
    return static_cast<long long>(row / inner) * outer_stride +
           static_cast<long long>(row % inner) * inner_stride;
  }
};

}  // namespace tilewright
