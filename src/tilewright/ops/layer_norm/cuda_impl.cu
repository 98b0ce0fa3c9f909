// LayerNorm.
//
// layer_norm_rows  a group of lanes or a block holds a row in registers, as loaded: it is read once
//                  and written once, weight and bias are on their way meanwhile.
// layer_norm_wide  a persistent block, or a cluster of blocks, holds a row in shared memory while
//                  the next ones travel there; weight and bias stay in registers from row to row.
//
// The mean is taken out before the squares are summed, and once more what its own rounding left
// behind, so a mean far above the deviation costs no digits. Bytes per element of T: 1 read, 1 written. Rows are found through strides; results are
// contiguous. Arithmetic is float.

#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC>
__device__ __forceinline__ float sum_of(const Pack<T, VEC>& x) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) total += x[j];
  return total;
}

// Adds the sums of x - mean and of its square.
template <class T, int VEC>
__device__ __forceinline__ void add_moments(float (&sums)[2], const Pack<T, VEC>& x, float mean) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float distance = x[j] - mean;
    sums[0] += distance;
    sums[1] += distance * distance;
  }
}

struct Statistics {
  float mean;
  float rest;  // of the mean, beyond its rounding
  float rstd;
};

__device__ __forceinline__ Statistics statistics(
    float mean, const float (&sums)[2], int n, float eps) {
  const float rest = sums[0] * (1.0f / n);
  return {mean, rest, rsqrtf(sums[1] / n - rest * rest + eps)};
}

// `w` and `b` hold 1 and 0 where there is no weight and no bias.
template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> scaled(
    const Pack<T, VEC>& x, const Pack<T, VEC>& w, const Pack<T, VEC>& b, Statistics row) {
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) y[j] = (x[j] - row.mean - row.rest) * row.rstd * w[j] + b[j];
  return Pack<T, VEC>::of(y);
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) layer_norm_rows(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n, int group, float eps) {
  __shared__ Exchange exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  input += input_rows.start(seat.row);
  out += static_cast<long long>(seat.row) * n;

  Pack<T, VEC> x[PACKS], w[PACKS], b[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    x[i] = column < width ? load<VEC>(input + column) : Pack<T, VEC>{};
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    w[i] = weight && column < width ? load<VEC>(weight + column) : filled<T, VEC>(1.0f);
    b[i] = bias && column < width ? load<VEC>(bias + column) : Pack<T, VEC>{};
  }

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) total += sum_of(x[i]);
  const float mean = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0) / n;

  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(x[i]);
    if (seat.column(i) < width) add_moments(sums, x[i], mean);  // not the zeros beyond the end
  }
  row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, 1);
  const Statistics row = statistics(mean, sums, n, eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    if (column >= width) continue;
    keep_packed(x[i]);
    keep_packed(w[i]);
    keep_packed(b[i]);
    store<VEC>(out + column, scaled(x[i], w[i], b[i], row));
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_wide(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n, float eps) {
  extern __shared__ Line memory[];
  __shared__ Exchange exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 1};

  const auto ask = [&](unsigned row, int stage) {
    const T* x_row = input + input_rows.start(row);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      ring.ask(stage, 0, i, x_row + column, row < rows && column < n);
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  Pack<T, VEC> w[PACKS], b[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    w[i] = weight && column < n ? load<VEC>(weight + column) : filled<T, VEC>(1.0f);
    b[i] = bias && column < n ? load<VEC>(bias + column) : Pack<T, VEC>{};
  }
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; row < rows; row += seat.step) {
    T* to = out + static_cast<long long>(row) * n;
    ring.arrive();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) total += sum_of(ring.take(stage, 0, i));
    const float mean = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, turn++) / n;

    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (seat.column(i) < n) add_moments(sums, ring.take(stage, 0, i), mean);
    }
    row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
    const Statistics statistics_of_row = statistics(mean, sums, n, eps);

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      keep_packed(w[i]);
      keep_packed(b[i]);
      const Pack<T, VEC> y = scaled(ring.take(stage, 0, i), w[i], b[i], statistics_of_row);
      if (column < n) store<VEC>(to + column, y);
    }
    ask(row + STAGES * seat.step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}
