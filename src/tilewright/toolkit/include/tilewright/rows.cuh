// Where the rows of a strided tensor start, and which of its columns a thread holds.
#pragma once

#include "tilewright/reduce.cuh"

namespace tilewright {

// Mirrors RowsArgument in cuda_args.py, field by field.
struct Rows {
  long long outer_stride;  // elements
  long long inner_stride;
  unsigned inner;  // rows in the inner level, at least 1

  __device__ __forceinline__ long long start(unsigned row) const {
    if (inner == 1) return static_cast<long long>(row) * outer_stride;  // spares a division
    return static_cast<long long>(row / inner) * outer_stride +
           static_cast<long long>(row % inner) * inner_stride;
  }
};

// A thread's place among those that own a row. It holds `packs` packs, which start at column(i);
// packs of neighbouring threads are neighbours, and a block of a cluster holds one stretch of a row.
template <Owner OWNER, int VEC> struct Seat {
  int lanes;      // threads of this block that share a row
  int first;      // column of this thread's first pack
  unsigned row;   // the first row of this thread
  unsigned step;  // rows that the whole grid owns at a time

  // `group`: lanes of a group or a team; blocks and clusters know their own size.
  __device__ __forceinline__ Seat(int group, int packs) {
    if constexpr (OWNER == CLUSTER) {
      lanes = blockDim.x;
      first = (cluster_rank() * packs * blockDim.x + threadIdx.x) * VEC;
      row = blockIdx.x / cluster_size();
      step = gridDim.x / cluster_size();
    } else if constexpr (OWNER == BLOCK) {
      lanes = blockDim.x;
      first = threadIdx.x * VEC;
      row = blockIdx.x;
      step = gridDim.x;
    } else {
      const unsigned owners = blockDim.x / group;
      lanes = group;
      first = threadIdx.x % group * VEC;
      row = blockIdx.x * owners + threadIdx.x / group;
      step = gridDim.x * owners;
    }
  }

  __device__ __forceinline__ int column(int pack) const { return first + pack * lanes * VEC; }

  // The row of the warp's first group. Groups of a warp may run out of rows at different times, but
  // all take part in every shuffle, so they go on as long as the first of them.
  __device__ __forceinline__ unsigned first_of_warp(unsigned row) const {
    return OWNER == GROUP ? row - threadIdx.x % WARP_SIZE / lanes : row;
  }
};

}  // namespace tilewright
