// RMSNorm and RMSNorm of a residual sum.
//
// *_rows  a group of lanes or a block holds a row in registers, as loaded: it is read once and
//         written once, and the weight is on its way while the squares are summed.
// *_wide  a block holds a longer row in shared memory; of the longest a cluster of blocks does, which
//         walks down some of them: it takes one into registers while the next ones travel. The
//         weight stays in registers from row to row.
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
  float total = x[0] * x[0];
#pragma unroll
  for (int j = 1; j < VEC; ++j) total += x[j] * x[j];
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
  __shared__ Exchange<1> exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  const auto inside = [&](int i) { return seat.column(i) < width; };
  const long long to = static_cast<long long>(seat.row) * n + seat.first;
  input += input_rows.start(seat.row) + seat.first;
  if (ADD) residual += residual_rows.start(seat.row) + seat.first;

  Pack<T, VEC> x[PACKS], r[PACKS], w[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = i * seat.stride();
    x[i] = inside(i) ? load<VEC>(input + at) : Pack<T, VEC>{};
    if (ADD) r[i] = inside(i) ? load<VEC>(residual + at) : Pack<T, VEC>{};
  }
  load_parameter(w, weight, 1.0f, seat, width);

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (ADD) {
      x[i] = sum_of(x[i], r[i]);  // rounded before it is normed: later layers read it
      if (inside(i)) store<VEC>(sum + to + i * seat.stride(), x[i]);
    }
    total += squares(x[i]);
  }
  const float rstd =
      rsqrtf(row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0) / n + options.eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(x[i]);
    keep_packed(w[i]);
    const Pack<T, VEC> y = scaled(x[i], w[i], rstd, options);
    if (inside(i)) store<VEC>(out + to + i * seat.stride(), y);
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, bool ADD>
__device__ __forceinline__ void normalise_wide(
    T* out, T* sum, const T* input, const T* residual, const T* weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, Options options) {
  constexpr bool ONCE = OWNER == BLOCK;  // it has one row
  constexpr bool TWICE = ONCE && !ADD;   // which it reads again: registers for another block
  extern __shared__ Line memory[];
  __shared__ Exchange<1> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, ADD ? 2 : 1};
  const auto inside = [&](int i) { return seat.column(i) < n; };

  const auto ask = [&](unsigned row, int stage) {
    const T* x = input + input_rows.start(row) + seat.first;
    const T* past = ADD ? residual + residual_rows.start(row) + seat.first : nullptr;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      ring.ask(stage, 0, i, x + i * seat.stride(), row < rows && inside(i));
      if (ADD) ring.ask(stage, 1, i, past + i * seat.stride(), row < rows && inside(i));
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  Pack<T, VEC> w[PACKS];
  load_parameter(w, weight, 1.0f, seat, n);
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; row < rows; row += seat.step) {
    const long long to = static_cast<long long>(row) * n + seat.first;
    ring.arrive();
    Pack<T, VEC> x[PACKS];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      x[i] = ring.take(stage, 0, i);
      if (ADD) {
        x[i] = sum_of(x[i], ring.take(stage, 1, i));  // rounded before it is normed
        if (inside(i)) store<VEC>(sum + to + i * seat.stride(), x[i]);
      }
      total += squares(x[i]);
    }
    total = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, turn++);
    if (!ONCE) ask(row + STAGES * seat.step, stage);  // what was there is in registers now

    const float rstd = rsqrtf(total / n + options.eps);
    const auto write = [&](bool llama) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        if (TWICE) x[i] = ring.take(stage, 0, i); else keep_packed(x[i]);
        keep_packed(w[i]);
        const Pack<T, VEC> y = scaled(x[i], w[i], rstd, {options.eps, options.offset, llama});
        if (inside(i)) store<VEC>(out + to + i * seat.stride(), y);
      }
    };
    if (options.llama) write(true); else write(false);
    if (ONCE) return;
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_rows(
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

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) add_rms_norm_rows(
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
