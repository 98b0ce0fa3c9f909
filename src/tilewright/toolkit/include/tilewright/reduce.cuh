// Sums and maxima over the threads that own a row.
//
// Every thread receives the result, bit for bit the same one: a butterfly adds the same pairs in
// every lane, and everybody joins the warps' and the blocks' parts in the same order.
#pragma once

#include "tilewright/cluster.cuh"

namespace tilewright {

constexpr int WARP_SIZE = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_VALUES = 4;  // reduced together
constexpr unsigned FULL_WARP = 0xffffffffu;

// Who owns a row. Several groups or teams share a block and never wait for one another.
enum Owner {
  GROUP,    // `lanes` neighbouring threads of a warp, a power of two
  TEAM,     // `lanes` neighbouring threads, whole warps; at most fifteen teams in a block
  BLOCK,    // all threads of a block
  CLUSTER,  // all threads of all blocks of a cluster
};

struct Sum {
  static __device__ __forceinline__ float identity() { return 0.0f; }
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};

// fmaxf drops NaN; a softmax must not.
struct Max {
  static __device__ __forceinline__ float identity() { return __int_as_float(0xff800000); }
  static __device__ __forceinline__ float join(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a > b || a != a ? a : b;
#endif
  }
};

// Shared memory of a kernel's reductions. They take its two halves in turn: what is written at one
// turn is read before the barrier of the next, so that one barrier a turn is enough.
struct Exchange {
  float warps[2][MAX_VALUES][MAX_WARPS];
  float blocks[2][MAX_VALUES][MAX_CLUSTER];
  Signal signals[2];
};

// The first thing a kernel does. Clusters must not reduce before cluster_wait().
template <Owner OWNER> __device__ __forceinline__ void open(Exchange& exchange) {
  if constexpr (OWNER == CLUSTER) {
    if (threadIdx.x == 0) make_ready(exchange.signals[0]);
    if (threadIdx.x == 0) make_ready(exchange.signals[1]);
    cluster_arrive();
  }
}

template <class Op, int K>
__device__ __forceinline__ void group_reduce(float (&values)[K], int lanes = WARP_SIZE) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (float& value : values) {
      value = Op::join(value, __shfl_xor_sync(FULL_WARP, value, distance));
    }
  }
}

// Barrier 0 is the block's. A barrier whose number is computed takes all sixteen from an SM that has
// few, so a block that is one team uses its own.
template <bool WHOLE_BLOCK> __device__ __forceinline__ void barrier(int lanes) {
  if constexpr (WHOLE_BLOCK) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / lanes), "r"(lanes) : "memory");
  }
}

template <class Op, Owner OWNER, int K>
__device__ __forceinline__ void team_reduce(
    float (&values)[K], int lanes, float (&warps)[MAX_VALUES][MAX_WARPS]) {
  static_assert(K <= MAX_VALUES);
  constexpr bool WHOLE_BLOCK = OWNER != TEAM;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  group_reduce<Op>(values);
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) warps[k][warp] = values[k];
  }
  barrier<WHOLE_BLOCK>(lanes);
  // Each warp joins the warps' values itself: no thread has to broadcast, which saves a barrier.
  const int count = lanes / WARP_SIZE, first = WHOLE_BLOCK ? 0 : threadIdx.x / lanes * count;
  if (OWNER != CLUSTER && count <= 4) {  // fewer steps than a butterfly has
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = warps[k][first];
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = Op::join(values[k], warps[k][first + i]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      values[k] = lane < count ? warps[k][first + lane] : Op::identity();
    }
    group_reduce<Op>(values);
  }
}

template <class Op, int K>
__device__ __forceinline__ void cluster_reduce(
    float (&values)[K], float (&blocks)[MAX_VALUES][MAX_CLUSTER], Signal& signal, unsigned phase) {
  const unsigned size = cluster_size(), rank = cluster_rank();
  if (threadIdx.x == 0) expect(signal, K * sizeof(float) * size);
  if (threadIdx.x < size) {
#pragma unroll
    for (int k = 0; k < K; ++k) send(&blocks[k][rank], values[k], signal, threadIdx.x);
  }
  receive(signal, phase);
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = lane < size ? blocks[k][lane] : Op::identity();
  group_reduce<Op>(values);
}

// All threads of the owner call. `turn` counts the owner's reductions, from 0.
template <class Op, Owner OWNER, int K>
__device__ __forceinline__ void row_reduce(
    float (&values)[K], int lanes, Exchange& exchange, unsigned turn) {
  const unsigned half = turn % 2;
  if constexpr (OWNER == GROUP) {
    group_reduce<Op>(values, lanes);
  } else {
    team_reduce<Op, OWNER>(values, lanes, exchange.warps[half]);
  }
  if constexpr (OWNER == CLUSTER) {
    cluster_reduce<Op>(values, exchange.blocks[half], exchange.signals[half], turn / 2 % 2);
  }
}

template <class Op, Owner OWNER>
__device__ __forceinline__ float row_reduce(
    float value, int lanes, Exchange& exchange, unsigned turn) {
  float values[1] = {value};
  row_reduce<Op, OWNER>(values, lanes, exchange, turn);
  return values[0];
}

}  // namespace tilewright
