// Rows in shared memory: a thread's packs of them, from the load to the last use.
//
// A long row leaves registers for few blocks, and a block that waits for its cluster needs others
// beside it to keep the memory busy. A thread reads back what it asked for itself, so there is no
// barrier. Beyond the end of a row there are zeros.
#pragma once

#include "tilewright/copy.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

template <class T, int VEC> struct Held {
  static_assert(sizeof(T) * VEC == 16);
  uint4* slots;  // [rows][packs][blockDim.x]
  int packs;

  __device__ __forceinline__ uint4* slot(int row, int pack) const {
    return slots + (row * packs + pack) * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ void ask(int row, int pack, const T* from, bool inside) const {
    fetch(slot(row, pack), from, inside);
  }
  __device__ __forceinline__ Pack<T, VEC> get(int row, int pack) const {
    return load<VEC>(reinterpret_cast<const T*>(slot(row, pack)));
  }
};

}  // namespace tilewright
