// Sums and maxima over the threads that own a row.
//
// Every thread receives the result, bit for bit the same one: a butterfly adds the same pairs in
// every lane, and everybody joins the warps' and the blocks' parts in the same order.
#pragma once

#include "tilewright/cluster.cuh"

namespace tilewright {

constexpr int WARP_SIZE = 32;
constexpr int MAX_WARPS = 32;
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
// turn is read before the barrier of the next, so that one barrier a turn is enough. VALUES: as many
// as are reduced together at most; they lie side by side.
template <int VALUES> struct Exchange {
  float warps[2][MAX_WARPS * VALUES];
  float blocks[2][MAX_CLUSTER * VALUES];
  Signal signals[2];
};

// The first thing a kernel does. Clusters must not reduce before cluster_wait().
template <Owner OWNER, int VALUES>
__device__ __forceinline__ void open(Exchange<VALUES>& exchange) {
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

// The warp's result of value k, in the lanes of the k-th of K equal parts of the warp. Each half
// keeps half of the values and gives the other half away, so that K values take hardly more shuffles
// than one: a warp's shuffle keeps an SM busy four times as long as an addition.
template <class Op, int K> __device__ __forceinline__ float warp_reduce(float (&values)[K]) {
  int distance = WARP_SIZE / 2;
#pragma unroll
  for (int kept = K / 2; kept > 0; kept /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const float given = upper ? values[k] : values[k + kept];
      const float mine = upper ? values[k + kept] : values[k];
      values[k] = Op::join(mine, __shfl_xor_sync(FULL_WARP, given, distance));
    }
    distance /= 2;
  }
#pragma unroll
  for (; distance > 0; distance /= 2) {
    values[0] = Op::join(values[0], __shfl_xor_sync(FULL_WARP, values[0], distance));
  }
  return values[0];
}

// `parts` holds `count` times K values; the result of value k goes to the lanes k, k + K, ...
template <class Op, int K>
__device__ __forceinline__ float join_parts(const float* parts, int count) {
  const int lane = threadIdx.x % WARP_SIZE;
  float value = lane < count * K ? parts[lane] : Op::identity();
  if (K > 1) {  // one value has a lane for each of its parts
#pragma unroll 1
    for (int i = lane + WARP_SIZE; i < count * K; i += WARP_SIZE) {
      value = Op::join(value, parts[i]);
    }
  }
#pragma unroll
  for (int distance = WARP_SIZE / 2; distance >= K; distance /= 2) {
    value = Op::join(value, __shfl_xor_sync(FULL_WARP, value, distance));
  }
  return value;
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

// `value` and the result are as join_parts leaves them.
template <class Op, int K, int VALUES>
__device__ __forceinline__ float cluster_reduce(
    float value, Exchange<VALUES>& exchange, unsigned turn) {
  float* blocks = exchange.blocks[turn % 2];
  Signal& signal = exchange.signals[turn % 2];
  const unsigned size = cluster_size();
  if (threadIdx.x == 0) expect(signal, K * sizeof(float) * size);
  for (unsigned i = threadIdx.x; i < size * K; i += blockDim.x) {  // blockDim.x is a multiple of K
    send(&blocks[cluster_rank() * K + i % K], value, signal, i / K);
  }
  receive(signal, turn / 2 % 2);
  return join_parts<Op, K>(blocks, size);
}

// Every warp joins the warps' values itself: no thread has to broadcast, which saves a barrier.
template <class Op, Owner OWNER, int K, int VALUES>
__device__ __forceinline__ void team_reduce(
    float (&values)[K], int lanes, Exchange<VALUES>& exchange, unsigned turn) {
  static_assert(K <= VALUES && (K & (K - 1)) == 0);
  constexpr bool WHOLE_BLOCK = OWNER != TEAM;
  constexpr int PART = WARP_SIZE / K;  // lanes that end with the same value
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  float* warps = exchange.warps[turn % 2];
  float value = warp_reduce<Op>(values);
  if (lane % PART == 0) warps[warp * K + lane / PART] = value;
  barrier<WHOLE_BLOCK>(lanes);

  const int count = lanes / WARP_SIZE;
  if (!WHOLE_BLOCK) warps += threadIdx.x / lanes * count * K;
  if (OWNER != CLUSTER && K <= 2 && count <= 4) {  // fewer steps than shuffles would take
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = warps[k];
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = Op::join(values[k], warps[i * K + k]);
    }
    return;
  }
  value = join_parts<Op, K>(warps, count);
  if constexpr (OWNER == CLUSTER) {
    value = cluster_reduce<Op, K>(value, exchange, turn);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = K > 1 ? __shfl_sync(FULL_WARP, value, k) : value;
}

// All threads of the owner call. `turn` counts the owner's reductions, from 0.
template <class Op, Owner OWNER, int K, int VALUES>
__device__ __forceinline__ void row_reduce(
    float (&values)[K], int lanes, Exchange<VALUES>& exchange, unsigned turn) {
  if constexpr (OWNER == GROUP) {
    group_reduce<Op>(values, lanes);
  } else {
    team_reduce<Op, OWNER>(values, lanes, exchange, turn);
  }
}

template <class Op, Owner OWNER, int VALUES>
__device__ __forceinline__ float row_reduce(
    float value, int lanes, Exchange<VALUES>& exchange, unsigned turn) {
  float values[1] = {value};
  row_reduce<Op, OWNER>(values, lanes, exchange, turn);
  return values[0];
}

}  // namespace tilewright
