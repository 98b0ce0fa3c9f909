// Where the rows of a strided tensor start, and which of its columns a thread holds.
#pragma once

#include "tilewright/reduce.cuh"
#include "tilewright/vector.cuh"

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

// A thread's place among those that own a row. It holds `packs` packs, which start at column(i). The
// packs of a warp are neighbours, and so are those of its lanes: the distance between two packs of a
// thread is a constant that loads and stores carry in their address, except in a group.
template <Owner OWNER, int VEC> struct Seat {
  int lanes;      // threads of this block that share a row
  int first;      // column of this thread's first pack
  unsigned row;   // the first row of this thread
  unsigned step;  // rows that the whole grid owns at a time

  // `group`: lanes of a group or a team; blocks and clusters know their own size.
  __device__ __forceinline__ Seat(int group, int packs) {
    if constexpr (OWNER == CLUSTER || OWNER == BLOCK) {
      const unsigned blocks = OWNER == CLUSTER ? cluster_size() : 1;
      lanes = blockDim.x;
      row = blockIdx.x / blocks;
      step = gridDim.x / blocks;
    } else {
      const unsigned owners = blockDim.x / group;
      lanes = group;
      row = blockIdx.x * owners + threadIdx.x / group;
      step = gridDim.x * owners;
    }
    const int thread = OWNER == CLUSTER || OWNER == BLOCK ? threadIdx.x : threadIdx.x % lanes;
    if constexpr (OWNER == GROUP) {
      first = thread * VEC;
    } else {
      const int warp = thread / WARP_SIZE * packs, lane = thread % WARP_SIZE;
      const int before = OWNER == CLUSTER ? cluster_rank() * packs * blockDim.x : 0;
      first = (before + warp * WARP_SIZE + lane) * VEC;
    }
  }

  __device__ __forceinline__ int stride() const {
    return (OWNER == GROUP ? lanes : WARP_SIZE) * VEC;
  }
  __device__ __forceinline__ int column(int pack) const { return first + pack * stride(); }

  // Groups of a warp may run out of rows at different times, but all take part in every shuffle, so
  // they go on as long as the first of them; so do the teams of a block. Blocks and clusters end by
  // themselves.
  static constexpr bool ENDS_ALONE = OWNER == BLOCK || OWNER == CLUSTER;

  // The row at which the first of those owners is while this one is at `row`, at_once rows apart.
  __device__ __forceinline__ unsigned leader(unsigned row, int at_once) const {
    if constexpr (OWNER == GROUP) return row - threadIdx.x % WARP_SIZE / lanes * at_once;
    if constexpr (OWNER == TEAM) return row - threadIdx.x / lanes * at_once;
    return row;
  }
};

// A thread's packs of a weight or a bias, or `missing` if there is none. Beyond the end are zeros.
template <class T, int VEC, int PACKS, Owner OWNER>
__device__ __forceinline__ void load_parameter(
    Pack<T, VEC> (&packs)[PACKS], const T* parameter, float missing, const Seat<OWNER, VEC>& seat,
    int width) {
  if (parameter) {
    parameter += seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const bool inside = seat.column(i) < width;
      packs[i] = inside ? load<VEC>(parameter + i * seat.stride()) : Pack<T, VEC>{};
    }
  } else {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) packs[i] = filled<T, VEC>(missing);
  }
}

}  // namespace tilewright
