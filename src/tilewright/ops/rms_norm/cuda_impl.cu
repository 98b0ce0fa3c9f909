// RMSNorm and RMSNorm of a residual sum.
//
// *_rows  a group of lanes or a block holds a row in registers, as loaded: it is read once and
//         written once, and the weight is on its way while the squares are summed.
// *_wide  a persistent block, or a cluster of blocks, holds a row in shared memory while the next
//         ones travel there; the weight stays in registers from row to row.
//
// Bytes per element of T: 1 read, 1 written; with a residual 2 and 2. Rows are found through
// strides; results are contiguous. Arithmetic is float.

#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

// Mirrors Options in cuda_impl.py.
struct Options {
  float eps;
  float offset;  // added to the weight: 1 for Gemma; 0 without a weight
  int llama;     // round the normalised value before it meets the weight
};

template <class T, int VEC>
__device__ __forceinline__ float squares(const Pack<T, VEC>& x) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) total += x[j] * x[j];
  return total;
}

template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> sum_of(const Pack<T, VEC>& a, const Pack<T, VEC>& b) {
  float total[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) total[j] = a[j] + b[j];
  return Pack<T, VEC>::of(total);
}

// `weight` holds ones where there is none.
template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> scaled(
    const Pack<T, VEC>& x, const Pack<T, VEC>& weight, float rstd, Options options) {
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) y[j] = x[j] * rstd;
  if (options.llama) {
    const Pack<T, VEC> rounded = Pack<T, VEC>::of(y);
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = rounded[j];
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) y[j] *= weight[j] + options.offset;
  return Pack<T, VEC>::of(y);
}

template <class T, int VEC, int PACKS, Owner OWNER, bool ADD>
__device__ __forceinline__ void normalise_rows(
    T* out, T* sum, const T* input, const T* residual, const T* weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, int group, Options options) {
  __shared__ Exchange exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  const long long to = static_cast<long long>(seat.row) * n;
  input += input_rows.start(seat.row);
  if (ADD) residual += residual_rows.start(seat.row);

  Pack<T, VEC> x[PACKS], r[PACKS], w[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    x[i] = column < width ? load<VEC>(input + column) : Pack<T, VEC>{};
    if (ADD) r[i] = column < width ? load<VEC>(residual + column) : Pack<T, VEC>{};
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    w[i] = weight && column < width ? load<VEC>(weight + column) : filled<T, VEC>(1.0f);
  }

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (ADD) {
      x[i] = sum_of(x[i], r[i]);  // rounded before it is normed: later layers read it
      if (seat.column(i) < width) store<VEC>(sum + to + seat.column(i), x[i]);
    }
    total += squares(x[i]);
  }
  const float rstd =
      rsqrtf(row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0) / n + options.eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    if (column >= width) continue;
    keep_packed(x[i]);
    keep_packed(w[i]);
    store<VEC>(out + to + column, scaled(x[i], w[i], rstd, options));
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, bool ADD>
__device__ __forceinline__ void normalise_wide(
    T* out, T* sum, const T* input, const T* residual, const T* weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, Options options) {
  extern __shared__ Line memory[];
  __shared__ Exchange exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, ADD ? 2 : 1};

  const auto ask = [&](unsigned row, int stage) {
    const T* x_row = input + input_rows.start(row);
    const T* r_row = ADD ? residual + residual_rows.start(row) : nullptr;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      const bool inside = row < rows && column < n;
      ring.ask(stage, 0, i, x_row + column, inside);
      if (ADD) ring.ask(stage, 1, i, r_row + column, inside);
    }
    ring.sent();
  };
  const auto held = [&](int stage, int i) {
    const Pack<T, VEC> x = ring.take(stage, 0, i);
    return ADD ? sum_of(x, ring.take(stage, 1, i)) : x;  // rounded before it is normed
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  Pack<T, VEC> w[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    w[i] = weight && column < n ? load<VEC>(weight + column) : filled<T, VEC>(1.0f);
  }
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; row < rows; row += seat.step) {
    const long long to = static_cast<long long>(row) * n;
    ring.arrive();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T, VEC> x = held(stage, i);
      if (ADD && seat.column(i) < n) store<VEC>(sum + to + seat.column(i), x);
      total += squares(x);
    }
    const float rstd =
        rsqrtf(row_reduce<Sum, OWNER>(total, seat.lanes, exchange, turn++) / n + options.eps);

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      keep_packed(w[i]);
      const Pack<T, VEC> y = scaled(held(stage, i), w[i], rstd, options);
      if (column < n) store<VEC>(out + to + column, y);
    }
    ask(row + STAGES * seat.step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) rms_norm_rows(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, unsigned rows, int n, int group, Options options) {
  normalise_rows<T, VEC, PACKS, OWNER, false>(
      out, nullptr, input, nullptr, weight, input_rows, Rows{}, rows, n, group, options);
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_wide(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, unsigned rows, int n, Options options) {
  normalise_wide<T, VEC, PACKS, OWNER, STAGES, false>(
      out, nullptr, input, nullptr, weight, input_rows, Rows{}, rows, n, options);
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) add_rms_norm_rows(
    T* __restrict__ out, T* __restrict__ sum, const T* __restrict__ input,
    const T* __restrict__ residual, const T* __restrict__ weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, int group, Options options) {
  normalise_rows<T, VEC, PACKS, OWNER, true>(
      out, sum, input, residual, weight, input_rows, residual_rows, rows, n, group, options);
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) add_rms_norm_wide(
    T* __restrict__ out, T* __restrict__ sum, const T* __restrict__ input,
    const T* __restrict__ residual, const T* __restrict__ weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, Options options) {
  normalise_wide<T, VEC, PACKS, OWNER, STAGES, true>(
      out, sum, input, residual, weight, input_rows, residual_rows, rows, n, options);
}
