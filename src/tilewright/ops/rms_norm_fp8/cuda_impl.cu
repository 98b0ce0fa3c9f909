// RMSNorm, quantised to fp8 before it leaves the registers.
//
// rms_norm_fp8_rows   persistent groups of lanes, blocks or clusters walk down the rows. The next
//                     rows travel through a ring; a row leaves it once, as floats, and stays in
//                     registers until it is fp8. The weight stays in shared memory.
// rms_norm_fp8_again  the second pass of one scale for the whole tensor: the first one has stored
//                     each row's rstd and the largest magnitude; this one quantises.
//
// Bytes per element of T: 1 read (2 with one scale for the tensor); one byte written.

#include "tilewright/fp8.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

// Both passes compute this, from the same numbers: the same bits. The factor is weight + offset; an
// offset of -0 leaves a weight as it is, the sign of a zero too.
__device__ __forceinline__ float normalised(float x, float factor, float rstd) {
  return x * rstd * factor;
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS,
          class FORMAT, Scaling SCALING>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_fp8_rows(
    unsigned char* __restrict__ q, float* __restrict__ scales, float* __restrict__ rstds,
    unsigned* __restrict__ amax, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, unsigned rows, int n, int group, float eps, float offset) {
  extern __shared__ Line memory[];
  __shared__ Exchange<1> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 1};

  const auto ask = [&](unsigned row, int stage) {
    const T* from = input + input_rows.start(row) + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const bool inside = row < rows && seat.column(i) < n;
      ring.ask(stage, 0, i, from + i * seat.stride(), inside);
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  T* held = reinterpret_cast<T*>(ring.end());
  const Parameter<T, VEC, PACKS> weights(held, weight, 1.0f, seat, n);
  const int groups = (n + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
  float largest = 0.0f;
  __syncthreads();
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; seat.leader(row, 1) < rows; row += seat.step) {
    const bool real = seat.ENDS_ALONE || row < rows;  // groups of a warp end together
    ring.arrive();
    float y[PACKS][VEC], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T, VEC> x = ring.take(stage, 0, i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        y[i][j] = x[j];
        squares = fmaf(y[i][j], y[i][j], squares);
      }
    }
    ask(row + STAGES * seat.step, stage);  // its slot is free
    const float rstd =
        rsqrtf(row_reduce<Sum, OWNER>(squares, seat.lanes, exchange, turn++) / n + eps);

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T, VEC> w = weights.get(i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[i][j] = normalised(y[i][j], w[j] + offset, rstd);
    }
    if constexpr (SCALING == PER_TENSOR) {
      // with eps = 0 a row past the end would bring NaN
      if (real) largest = Max::join(largest, largest_of(y));
      if (real && seat.first == 0) rstds[row] = rstd;
    } else {
      const long long to = row, scales_of_row = SCALING == PER_GROUP ? groups : 1;
      turn = quantise_row<FORMAT, SCALING>(
          q + to * n, scales + to * scales_of_row, y, seat, real ? n : 0, exchange, turn);
    }
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
  if (SCALING == PER_TENSOR) raise(amax, largest);
}

template <class T, int VEC, int ROWS, int THREADS, class FORMAT>
__global__ void __launch_bounds__(THREADS) rms_norm_fp8_again(
    unsigned char* __restrict__ q, float* __restrict__ scale, const float* __restrict__ rstds,
    const unsigned* __restrict__ amax, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, unsigned rows, int n, float offset) {
  const Chunk<VEC, ROWS> chunk(rows, n);
  Pack<T, VEC> x[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const unsigned row = chunk.row + i;
    if (row < rows) x[i] = load<VEC>(input + input_rows.start(row) + chunk.column);
  }
  const Pack<T, VEC> w = weight ? load<VEC>(weight + chunk.column) : filled<T, VEC>(1.0f);
  const float of_all = scale_of<FORMAT>(*amax);
  const Divisor by = Divisor::of(of_all);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;

#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const unsigned row = chunk.row + i;
    if (row >= rows) return;
    const float rstd = rstds[row];
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = normalised(x[i][j], w[j] + offset, rstd);
    store_fp8<FORMAT>(q + static_cast<long long>(row) * n + chunk.column, y, by, true);
  }
}
