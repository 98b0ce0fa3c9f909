// The backward of RMSNorm, also after a residual add.
//
// Persistent owners (groups of lanes, teams of warps, clusters) walk down the rows. The next rows
// travel through a ring while one is reduced; each thread owns the same columns of every row, so
// the weight's gradient stays in its registers until the end. Bytes per element of T: 2 read (3 with
// a residual's gradient), 1 written, and once per block or cluster a row of float partials.
//
// With g = grad * (weight + offset) and xhat = x * rstd:  dx = rstd * (g - xhat * mean(g * xhat)),
// and the weight's gradient is the sum over rows of grad * xhat.

#include "tilewright/partials.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_backward(
    T* __restrict__ dx, float* __restrict__ partial, const T* __restrict__ grad,
    const T* __restrict__ grad_residual, const T* __restrict__ input, const T* __restrict__ weight,
    Rows grad_rows, Rows residual_rows, Rows input_rows, unsigned rows, int n, int group,
    float eps, float offset) {
  extern __shared__ Line memory[];
  __shared__ Exchange exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, grad_residual ? 3 : 2};

  const auto ask = [&](unsigned row, int stage) {
    const T* x = input + input_rows.start(row);
    const T* g = grad + grad_rows.start(row);
    const T* past = grad_residual ? grad_residual + residual_rows.start(row) : nullptr;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      const bool inside = row < rows && column < n;
      ring.ask(stage, 0, i, x + column, inside);
      ring.ask(stage, 1, i, g + column, inside);
      if (past) ring.ask(stage, 2, i, past + column, inside);
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  Pack<T, VEC> w[PACKS];
  float dw[PACKS][VEC];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    w[i] = weight && column < n ? load<VEC>(weight + column) : filled<T, VEC>(1.0f);
#pragma unroll
    for (int j = 0; j < VEC; ++j) dw[i][j] = 0.0f;
  }
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; seat.first_of_warp(row) < rows; row += seat.step) {
    const bool real = OWNER != GROUP || row < rows;  // groups of a warp end together
    const int width = real ? n : 0;
    const T* x_row = input + input_rows.start(row);
    const T* g_row = grad + grad_rows.start(row);
    const T* past_row = grad_residual ? grad_residual + residual_rows.start(row) : nullptr;
    ring.arrive();

    float sums[2] = {0.0f, 0.0f};  // of x * x, of g * x
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      const Pack<T, VEC> x = ring.take(stage, 0, i, x_row + column, column < width);
      const Pack<T, VEC> g = ring.take(stage, 1, i, g_row + column, column < width);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        sums[0] += x[j] * x[j];
        sums[1] += g[j] * (w[i][j] + offset) * x[j];
      }
    }
    row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
    // with eps = 0 a row past the end would bring 0 * inf = NaN into dw
    const float rstd = real ? rsqrtf(sums[0] / n + eps) : 0.0f;
    const float along = rstd * rstd * (sums[1] / n);  // rstd * mean(g * xhat)

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      keep_packed(w[i]);
      const Pack<T, VEC> x = ring.take(stage, 0, i, x_row + column, column < width);
      const Pack<T, VEC> g = ring.take(stage, 1, i, g_row + column, column < width);
      Pack<T, VEC> past = {};
      if (past_row) past = ring.take(stage, 2, i, past_row + column, column < width);
      float d[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float xhat = x[j] * rstd;
        d[j] = rstd * (g[j] * (w[i][j] + offset)) - xhat * along + past[j];
        dw[i][j] += g[j] * xhat;
      }
      if (column < width) {
        store<VEC>(dx + static_cast<long long>(row) * n + column, Pack<T, VEC>::of(d));
      }
    }
    ask(row + STAGES * seat.step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  if (!partial) return;
  wait_batches<0>();
  __syncthreads();  // the ring of every owner is over
  write_partial<VEC, PACKS>(partial, dw, seat, n, reinterpret_cast<float*>(memory));
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(1024) sum_partials(
    T* __restrict__ dw, const float* __restrict__ partial, unsigned count, int n) {
  sum_partials_of<T, COLUMNS>(dw, partial, count, n);
}
