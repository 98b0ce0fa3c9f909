// Quantising to fp8: formats, scales, quotients, and the end that row kernels share.
//
// What it computes is fp8.quantise, by the arithmetic of triton_fp8.py. Magnitudes of a warp are
// compared as integers: the bits of |y| are ordered as the numbers are, with NaN above infinity,
// and one instruction compares a whole warp's. Kernels with it are for SM 89 and newer only.
#pragma once

#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

// What shares a scale.
enum Scaling { PER_ROW, PER_GROUP, PER_TENSOR };

constexpr int SCALE_COLUMNS = 128;  // of a row that share one PER_GROUP

// Two numbers to two bytes, the first to the low one: to nearest even, saturated; NaN stays NaN.
struct E4M3 {
  static constexpr float SEVENTHS = 64.0f;  // of its largest number, 448
  static __device__ __forceinline__ unsigned short two(float first, float second) {
    unsigned short bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
    return bytes;
  }
};
struct E5M2 {
  static constexpr float SEVENTHS = 8192.0f;  // of 57344
  static __device__ __forceinline__ unsigned short two(float first, float second) {
    unsigned short bytes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
    return bytes;
  }
};

// The largest magnitude, in bits, over the format's largest number; 1 where that is not normal. 1/7
// in two parts gives the bits of the IEEE quotient (see the notes of rms_norm_fp8).
template <class FORMAT> __device__ __forceinline__ float scale_of(unsigned amax) {
  const float largest = __uint_as_float(amax);
  const float rest = largest * (-0x1.b6db6ep-28f / FORMAT::SEVENTHS);
  const float scale = fmaf(largest, 0x1.24924ap-3f / FORMAT::SEVENTHS, rest);
  return amax < 0x7f800000u && scale >= 0x1p-126f ? scale : 1.0f;
}

// y / scale by two products with a reciprocal in two parts, which give the same fp8 numbers as a
// division. NaN for an infinite y: its scale is 1, and the rest 0.
struct Divisor {
  float inverse;
  float rest;

  static __device__ __forceinline__ Divisor of(float scale) {
    // The steps of an IEEE reciprocal, without its care for exponents that no scale has.
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    inverse = fmaf(inverse, fmaf(-scale, inverse, 1.0f), inverse);
    const float missing = fmaf(-scale, inverse, 1.0f);  // what its rounding took
    const float rest = inverse * missing;
    return {inverse, fmaf(rest, missing, rest)};
  }
  __device__ __forceinline__ float operator()(float y) const { return fmaf(y, inverse, y * rest); }
};

// One store of VEC bytes, if `inside`. Everybody computes: a branch around it would cost more.
template <class FORMAT, int VEC>
__device__ __forceinline__ void store_fp8(
    unsigned char* to, const float (&y)[VEC], Divisor by, bool inside) {
  using W = typename Word<VEC>::type;
  unsigned words[VEC / 4];
#pragma unroll
  for (int i = 0; i < VEC / 4; ++i) {
    const unsigned low = FORMAT::two(by(y[4 * i]), by(y[4 * i + 1]));
    const unsigned high = FORMAT::two(by(y[4 * i + 2]), by(y[4 * i + 3]));
    words[i] = low | high << 16;
    asm volatile("" : "+r"(words[i]));
  }
  W word;
  memcpy(&word, words, sizeof(W));
  if (inside) *reinterpret_cast<W*>(to) = word;
}

template <int VEC> __device__ __forceinline__ float largest_of(const float (&y)[VEC]) {
  float largest = fabsf(y[0]);
#pragma unroll
  for (int j = 1; j < VEC; ++j) largest = Max::join(largest, fabsf(y[j]));
  return largest;
}

template <int PACKS, int VEC>
__device__ __forceinline__ float largest_of(const float (&y)[PACKS][VEC]) {
  float largest = largest_of(y[0]);
#pragma unroll
  for (int i = 1; i < PACKS; ++i) largest = Max::join(largest, largest_of(y[i]));
  return largest;
}

__device__ __forceinline__ unsigned largest_of_warp(unsigned magnitude) {
  unsigned largest;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(magnitude));
  return largest;
}

// The largest magnitude of a row, in bits. As row_reduce: all threads of the owner call, in turn.
// Teams are at different turns: each writes where its own parts of VALUES values are.
template <Owner OWNER, int VALUES>
__device__ __forceinline__ unsigned largest_of_row(
    float largest, int lanes, Exchange<VALUES>& exchange, unsigned turn) {
  if constexpr (OWNER == GROUP) {
    if (lanes < WARP_SIZE) {
      return __float_as_uint(row_reduce<Max, OWNER>(largest, lanes, exchange, turn));
    }
    return largest_of_warp(__float_as_uint(largest));
  } else {
    const int lane = threadIdx.x % WARP_SIZE, count = lanes / WARP_SIZE;
    float* warps = exchange.warps[turn % 2];
    const unsigned of_warp = largest_of_warp(__float_as_uint(largest));
    if (lane == 0) warps[threadIdx.x / WARP_SIZE * VALUES] = __uint_as_float(of_warp);
    barrier<OWNER != TEAM>(lanes);
    if (OWNER == TEAM) warps += threadIdx.x / lanes * count * VALUES;
    const float other = lane < count ? warps[lane * VALUES] : 0.0f;
    const unsigned of_block = largest_of_warp(__float_as_uint(other));
    if constexpr (OWNER != CLUSTER) return of_block;
    return __float_as_uint(cluster_reduce<Max, 1>(__uint_as_float(of_block), exchange, turn));
  }
}

// Who makes the scale of a group of columns. 128 / VEC neighbours share one in each of their packs;
// SHARE of them make that of one pack, and the others ask them for its divisor.
template <int VEC, int PACKS> struct Sharing {
  static constexpr int LANES = SCALE_COLUMNS / VEC;
  static constexpr int IN_HAND = PACKS <= 2 ? PACKS : PACKS <= 4 ? 4 : 8;
  static constexpr int SHARE = LANES / IN_HAND;
  static_assert(SHARE > 0);

  static __device__ __forceinline__ Divisor ask(Divisor mine, int pack) {
    return {__shfl_sync(FULL_WARP, mine.inverse, pack * SHARE, LANES),
            __shfl_sync(FULL_WARP, mine.rest, pack * SHARE, LANES)};
  }
};

// Stores the scales of a thread's groups of columns; returns the divisor of the one that it made.
// Each step leaves a lane one half of the packs that it had in hand, until it has one.
template <class FORMAT, int VEC, int PACKS, Owner OWNER>
__device__ __forceinline__ Divisor scale_groups(
    float* scales, const float (&y)[PACKS][VEC], const Seat<OWNER, VEC>& seat, int width) {
  using Sharing = Sharing<VEC, PACKS>;
  constexpr int IN_HAND = Sharing::IN_HAND;
  float largest[IN_HAND];
#pragma unroll
  for (int i = 0; i < IN_HAND; ++i) largest[i] = i < PACKS ? largest_of(y[i % PACKS]) : 0.0f;
#pragma unroll
  for (int distance = Sharing::LANES / 2, half = IN_HAND / 2; distance > 0; distance /= 2) {
    const bool upper = threadIdx.x & distance;
    if (half == 0) {
      largest[0] = Max::join(largest[0], __shfl_xor_sync(FULL_WARP, largest[0], distance));
    }
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? largest[i + half] : largest[i];
      const float given = upper ? largest[i] : largest[i + half];
      largest[i] = Max::join(kept, __shfl_xor_sync(FULL_WARP, given, distance));
    }
    half /= 2;
  }

  const float scale = scale_of<FORMAT>(__float_as_uint(largest[0]));
  const unsigned pack = threadIdx.x % Sharing::LANES / Sharing::SHARE;
  const unsigned group = static_cast<unsigned>(seat.column(pack)) / SCALE_COLUMNS;
  const bool inside = pack < PACKS && group * SCALE_COLUMNS < width;
  if (threadIdx.x % Sharing::SHARE == 0 && inside) scales[group] = scale;
  return Divisor::of(scale);
}

// The end of a row: `y`, of which what lies beyond the row is zero, to `q`, and its scales. `width`
// is 0 for a row that is none. Returns the turn of the next reduction.
template <class FORMAT, Scaling SCALING, int VEC, int PACKS, Owner OWNER, int VALUES>
__device__ __forceinline__ unsigned quantise_row(
    unsigned char* q, float* scales, const float (&y)[PACKS][VEC], const Seat<OWNER, VEC>& seat,
    int width, Exchange<VALUES>& exchange, unsigned turn) {
  Divisor mine;
  if constexpr (SCALING == PER_GROUP) {
    mine = scale_groups<FORMAT>(scales, y, seat, width);
  } else {
    const unsigned amax = largest_of_row<OWNER>(largest_of(y), seat.lanes, exchange, turn++);
    const float scale = scale_of<FORMAT>(amax);
    if (seat.first == 0 && width > 0) *scales = scale;
    mine = Divisor::of(scale);
  }
  q += seat.first;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    one_at_a_time();
    const Divisor by = SCALING == PER_GROUP ? Sharing<VEC, PACKS>::ask(mine, i) : mine;
    store_fp8<FORMAT>(q + i * seat.stride(), y[i], by, seat.column(i) < width);
  }
  return turn;
}

// A parameter of the norm in shared memory, for all owners of a block: registers are full of y.
// Zeros beyond the row; `missing` where there is no such parameter. A barrier must follow.
template <class T, int VEC, int PACKS> struct Parameter {
  const T* mine;  // [warps of a row][PACKS][WARP_SIZE][VEC]

  template <Owner OWNER>
  __device__ __forceinline__ Parameter(
      T* memory, const T* parameter, float missing, const Seat<OWNER, VEC>& seat, int n) {
    const int threads = OWNER == GROUP ? WARP_SIZE : seat.lanes;
    const int start = OWNER == CLUSTER ? cluster_rank() * PACKS * seat.lanes : 0;
    for (int i = threadIdx.x; i < PACKS * threads; i += blockDim.x) {
      // groups of a warp share a row's columns, so they share its parameters
      const int place = OWNER == GROUP ? i / WARP_SIZE * seat.lanes + i % seat.lanes : start + i;
      const int column = place * VEC;
      Pack<T, VEC> values = filled<T, VEC>(column < n ? missing : 0.0f);
      if (parameter && column < n) values = load<VEC>(parameter + column);
      store<VEC>(memory + i * VEC, values);
    }
    const int warp = threadIdx.x % threads / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    mine = memory + (warp * PACKS * WARP_SIZE + lane) * VEC;
  }

  static __device__ __forceinline__ int size(int lanes) {
    return PACKS * VEC * max(lanes, WARP_SIZE);
  }
  __device__ __forceinline__ Pack<T, VEC> get(int pack) const {
    return load<VEC>(mine + pack * WARP_SIZE * VEC);
  }
};

// The end of a first pass: what a thread saw meets the largest of the whole tensor, in bits.
__device__ __forceinline__ void raise(unsigned* amax, float largest) {
  const unsigned of_warp = largest_of_warp(__float_as_uint(largest));
  if (threadIdx.x % WARP_SIZE == 0) atomicMax(amax, of_warp);
}

// What a thread of a second pass quantises: one pack in each of ROWS rows. The last rows come
// first: the first pass has just read them, and L2 still holds some.
template <int VEC, int ROWS> struct Chunk {
  unsigned row;  // the first; beyond the last of them if there is nothing to do
  int column;

  __device__ __forceinline__ Chunk(unsigned rows, int n) {
    const unsigned packs = n / VEC, chunks = (rows + ROWS - 1) / ROWS;
    const unsigned place = blockIdx.x * blockDim.x + threadIdx.x, chunk = place / packs;
    row = chunk < chunks ? (chunks - 1 - chunk) * ROWS : rows;
    column = place % packs * VEC;
  }
};

}  // namespace tilewright
