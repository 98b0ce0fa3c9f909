// Rows on their way: each thread keeps STAGES of its own packs in flight, through shared memory.
//
// A persistent kernel that loads a row, reduces it and only then loads the next leaves the memory
// idle during every reduction. Here the next rows travel meanwhile. A thread reads back what it
// asked for itself and nothing else, so the ring needs no barrier. Where loads of 16 bytes are not
// allowed `take` reads from global memory at once.
#pragma once

#include "tilewright/copy.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

template <class T, int VEC, int PACKS, int STAGES> struct Ring {
  static constexpr bool TRAVELS = sizeof(T) * VEC == 16;

  uint4* slots;  // [STAGES][warps][operands][PACKS][WARP_SIZE]
  int operands;

  __device__ __forceinline__ uint4* slot(int stage, int operand, int pack) const {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    uint4* mine = slots + (stage * blockDim.x + warp * WARP_SIZE) * operands * PACKS + lane;
    return mine + (operand * PACKS + pack) * WARP_SIZE;  // a constant, carried in the address
  }

  __device__ __forceinline__ uint4* end() const {
    return TRAVELS ? slots + STAGES * operands * PACKS * blockDim.x : slots;
  }

  // Ask for the pack at `from`, or for zeros. Every stage ends with sent().
  __device__ __forceinline__ void ask(
      int stage, int operand, int pack, const T* from, bool inside) const {
    if constexpr (TRAVELS) fetch(slot(stage, operand, pack), from, inside);
  }
  __device__ __forceinline__ void sent() const { end_batch(); }

  // Wait for the oldest of STAGES stages that were sent.
  __device__ __forceinline__ void arrive() const { wait_batches<STAGES - 1>(); }

  __device__ __forceinline__ Pack<T, VEC> take(int stage, int operand, int pack) const {
    static_assert(TRAVELS);
    return load<VEC>(reinterpret_cast<const T*>(slot(stage, operand, pack)));
  }
  __device__ __forceinline__ Pack<T, VEC> take(
      int stage, int operand, int pack, const T* from, bool inside) const {
    if constexpr (TRAVELS) {
      return take(stage, operand, pack);
    } else {
      return inside ? load<VEC>(from) : Pack<T, VEC>{};
    }
  }
};

}  // namespace tilewright
