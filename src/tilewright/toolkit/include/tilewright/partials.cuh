// Gradients of a row kernel's parameters: each owner of rows sums its own, a second kernel sums the
// owners'. No atomics, and an order that depends on nothing but the launch: the same bits every run.
#pragma once

#include "tilewright/held.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

// A thread's sums over its rows, aside: in shared memory, where registers have no room for them.
template <int VEC, int PACKS> struct Aside {
  Held<float, 4> held;  // PACKS * VEC floats of each thread

  __device__ __forceinline__ explicit Aside(uint4* slots) : held{slots, PACKS * VEC / 4} {}
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int i = 0; i < PACKS * VEC / 4; ++i) held.put(0, i, Pack<float, 4>{});
  }
  template <class T> __device__ __forceinline__ void add(int i, const Pack<T, VEC>& row) const {
#pragma unroll
    for (int j = 0; j < VEC; j += 4) {
      Pack<float, 4> sums = held.get(0, (i * VEC + j) / 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums.words[k] += row[j + k];
      held.put(0, (i * VEC + j) / 4, sums);
    }
  }
  __device__ __forceinline__ void read(float (&sums)[PACKS][VEC]) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) sums[i][j] = held.get(0, (i * VEC + j) / 4)[j % 4];
    }
  }
};

// One row of partials per block or cluster. A block with several owners joins theirs in `scratch`, a
// float for each owner (each warp, if groups own rows) and column; the ring is over, all call.
template <int VEC, int PACKS, Owner OWNER>
__device__ __forceinline__ void write_partial(
    float* partial, float (&sums)[PACKS][VEC], const Seat<OWNER, VEC>& seat, int n, float* scratch) {
  constexpr int WIDE = VEC % 4 == 0 ? 4 : 1;
  int share = OWNER == GROUP ? WARP_SIZE : seat.lanes;
  // What follows from it is computed again: kept over the loop over rows, it would be spilled.
  asm volatile("" : "+r"(share));
  const int owners = blockDim.x / share;
  partial += static_cast<long long>(OWNER == CLUSTER ? seat.row : blockIdx.x) * n;
  const auto write = [&](float* to) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      if (OWNER == GROUP) {  // the groups of a warp own the same columns
        for (int distance = seat.lanes; distance < WARP_SIZE; distance *= 2) {
#pragma unroll
          for (float& sum : sums[i]) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        }
        if (threadIdx.x % WARP_SIZE >= seat.lanes) continue;
      }
      if (column >= n) continue;
#pragma unroll
      for (int j = 0; j < VEC; j += WIDE) {
        float part[WIDE];
#pragma unroll
        for (int k = 0; k < WIDE; ++k) part[k] = sums[i][j + k];
        store<WIDE>(to + column + j, Pack<float, WIDE>::of(part));
      }
    }
  };
  if (owners == 1) {
    write(partial);
    return;
  }
  write(scratch + threadIdx.x / share * n);
  __syncthreads();
  for (int column = threadIdx.x; column < n; column += blockDim.x) {
    float total = 0.0f;
#pragma unroll 1
    for (int owner = 0; owner < owners; ++owner) total += scratch[owner * n + column];
    partial[column] = total;
  }
  __syncthreads();
}

// For a kernel that `follows` (nvrtc.bind): it is launched when the last block of the kernel before has
// ended, and waits here until all that those blocks wrote can be seen. That must not be read through a
// pointer which promises that nobody writes there (const __restrict__).
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// COLUMNS per block; the threads that share a column each add every SHARES-th partial in order, and
// a tree joins them. `partial` is [parameters][count][n]; blockIdx.y tells which of them.
template <class T, int COLUMNS>
__device__ __forceinline__ void sum_partials_of(
    T* out, const float* partial, unsigned count, int n) {
  constexpr int SHARES = 1024 / COLUMNS;
  __shared__ float tile[SHARES][COLUMNS + 1];
  const int x = threadIdx.x % COLUMNS, y = threadIdx.x / COLUMNS;
  const int column = blockIdx.x * COLUMNS + x;
  partial += static_cast<long long>(blockIdx.y) * count * n;
  wait_for_kernel_before();

  float total = 0.0f;
  if (column < n) {
#pragma unroll 4
    for (unsigned i = y; i < count; i += SHARES) {
      total += partial[static_cast<long long>(i) * n + column];
    }
  }
  tile[y][x] = total;
  __syncthreads();
  for (int half = SHARES / 2; half > 0; half /= 2) {
    if (y < half) tile[y][x] += tile[y + half][x];
    __syncthreads();
  }
  if (y == 0 && column < n) out[column] = from_float<T>(tile[0][x]);
}

}  // namespace tilewright
