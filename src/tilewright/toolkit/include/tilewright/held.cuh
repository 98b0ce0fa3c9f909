// Rows in shared memory: a thread's packs of them, from the load to the last use.
//
// A long row leaves registers for few blocks, and a block that waits for its cluster needs others
// beside it to keep the memory busy. A thread reads back what it asked for itself, so there is no
// barrier. Beyond the end of a row there are zeros.
#pragma once

#include "tilewright/copy.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

template <class T, int VEC> struct Held {
  uint4* slots;  // [rows][warps][packs][WARP_SIZE]
  int packs;

  __device__ __forceinline__ uint4* slot(int row, int pack) const {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    uint4* mine = slots + (row * blockDim.x + warp * WARP_SIZE) * packs + lane;
    return mine + pack * WARP_SIZE;
  }
  __device__ __forceinline__ uint4* end(int rows) const { return slots + rows * packs * blockDim.x; }
  __device__ __forceinline__ void ask(int row, int pack, const T* from, bool inside) const {
    static_assert(sizeof(T) * VEC == 16);
    fetch(slot(row, pack), from, inside);
  }
  __device__ __forceinline__ void put(int row, int pack, const Pack<T, VEC>& values) const {
    store<VEC>(reinterpret_cast<T*>(slot(row, pack)), values);
  }
  __device__ __forceinline__ Pack<T, VEC> get(int row, int pack) const {
    return load<VEC>(reinterpret_cast<const T*>(slot(row, pack)));
  }
};

}  // namespace tilewright
