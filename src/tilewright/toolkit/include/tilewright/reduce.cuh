// Sums and maxima over the threads of a group (a power of two within a warp) or of a block.
//
// Every thread receives the result, bit for bit the same one: a butterfly adds the same pairs in
// every lane. All threads of the warp (group) or block must call; the block forms need full warps.
#pragma once

namespace tilewright {

constexpr int WARP_SIZE = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

struct Sum {
  static __device__ __forceinline__ float identity() { return 0.0f; }
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};

// fmaxf drops NaN; a softmax must not.
struct Max {
  static __device__ __forceinline__ float identity() { return __int_as_float(0xff800000); }
  static __device__ __forceinline__ float join(float a, float b) {
    return a > b || a != a ? a : b;
  }
};

template <class Op>
__device__ __forceinline__ float group_reduce(float value, int lanes = WARP_SIZE) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = Op::join(value, __shfl_xor_sync(FULL_WARP, value, distance));
  }
  return value;
}

template <class Op> __device__ __forceinline__ float block_reduce(float value) {
  __shared__ float partial[WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE;
  const int warps = blockDim.x / WARP_SIZE;

  value = group_reduce<Op>(value);
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  // Each warp joins the partials itself: no thread has to broadcast, which saves a barrier.
  value = group_reduce<Op>(lane < warps ? partial[lane] : Op::identity());
  __syncthreads();  // the next reduction writes `partial` again
  return value;
}

// One row per group of `lanes` threads, or one row per block.
template <class Op, bool GROUP>
__device__ __forceinline__ float row_reduce(float value, int lanes) {
  if constexpr (GROUP) {
    return group_reduce<Op>(value, lanes);
  } else {
    return block_reduce<Op>(value);
  }
}

}  // namespace tilewright
