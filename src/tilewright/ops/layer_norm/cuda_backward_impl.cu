// The backward of LayerNorm.
//
// Persistent owners (groups of lanes, teams of warps, clusters) walk down the rows. The next rows
// travel through a ring while one is reduced; each thread owns the same columns of every row, so
// the gradients of weight and bias stay in its registers until the end. The mean is taken
// out before the squares are summed, and once more what its own rounding left behind, so a mean far
// above the deviation costs no digits. Bytes per element of T: 2 read, 1 written, and once per block
// or cluster two rows of float partials.
//
// With g = grad * weight and xhat = (x - mean) * rstd:
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); the weight's gradient is the sum over rows of
// grad * xhat, the bias' that of grad.

#include "tilewright/partials.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_backward(
    T* __restrict__ dx, float* __restrict__ partial, const T* __restrict__ grad,
    const T* __restrict__ input, const T* __restrict__ weight, Rows grad_rows, Rows input_rows,
    unsigned rows, int n, int group, float eps) {
  extern __shared__ Line memory[];
  __shared__ Exchange exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 2};

  const auto ask = [&](unsigned row, int stage) {
    const T* x = input + input_rows.start(row);
    const T* g = grad + grad_rows.start(row);
#pragma unroll 2
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      const bool inside = row < rows && column < n;
      ring.ask(stage, 0, i, x + column, inside);
      ring.ask(stage, 1, i, g + column, inside);
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  // Registers are full of gradients: each thread keeps its part of the weight behind the ring.
  T* weights = reinterpret_cast<T*>(ring.end()) + threadIdx.x * VEC;
  const auto weight_of = [&](int i) { return weights + i * blockDim.x * VEC; };
  float dw[PACKS][VEC], db[PACKS][VEC];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    store<VEC>(weight_of(i), weight && column < n ? load<VEC>(weight + column)
                                                  : filled<T, VEC>(1.0f));
#pragma unroll
    for (int j = 0; j < VEC; ++j) dw[i][j] = db[i][j] = 0.0f;
  }
  const float inverse = 1.0f / n;
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; seat.first_of_warp(row) < rows; row += seat.step) {
    const bool real = OWNER != GROUP || row < rows;  // groups of a warp end together
    const int width = real ? n : 0;
    const T* x_row = input + input_rows.start(row);
    const T* g_row = grad + grad_rows.start(row);
    ring.arrive();

    float total = 0.0f;
#pragma unroll 2
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      const Pack<T, VEC> x = ring.take(stage, 0, i, x_row + column, column < width);
#pragma unroll
      for (int j = 0; j < VEC; ++j) total += x[j];
    }
    const float mean = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, turn++) / n;

    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of d = x - mean, of d * d, of g, of g * d
#pragma unroll 2
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      one_at_a_time();
      const Pack<T, VEC> x = ring.take(stage, 0, i, x_row + column, column < width);
      const Pack<T, VEC> g = ring.take(stage, 1, i, g_row + column, column < width);
      const Pack<T, VEC> w = load<VEC>(weight_of(i));
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        // zeros beyond the end are not centred
        const float d = column < width ? x[j] - mean : 0.0f, gw = g[j] * w[j];
        sums[0] += d;
        sums[1] += d * d;
        sums[2] += gw;
        sums[3] += gw * d;
      }
    }
    row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
    const float rest = sums[0] * inverse;  // of the mean, beyond its rounding
    // with eps = 0 a row past the end would bring 0 * inf = NaN into dw
    const float rstd = real ? rsqrtf(sums[1] / n - rest * rest + eps) : 0.0f;
    const float g_mean = rstd * sums[2] * inverse;                              // rstd * mean(g)
    const float along = rstd * rstd * (sums[3] - rest * sums[2]) * inverse;  // rstd * mean(g * xhat)

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = seat.column(i);
      one_at_a_time();
      const Pack<T, VEC> x = ring.take(stage, 0, i, x_row + column, column < width);
      const Pack<T, VEC> g = ring.take(stage, 1, i, g_row + column, column < width);
      const Pack<T, VEC> w = load<VEC>(weight_of(i));
      float d[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float xhat = (x[j] - mean - rest) * rstd;
        d[j] = rstd * (g[j] * w[j]) - g_mean - xhat * along;
        dw[i][j] += g[j] * xhat;
        db[i][j] += g[j];
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
  float* scratch = reinterpret_cast<float*>(memory);
  const long long owners = OWNER == CLUSTER ? gridDim.x / cluster_size() : gridDim.x;
  write_partial<VEC, PACKS>(partial, dw, seat, n, scratch);
  write_partial<VEC, PACKS>(partial + owners * n, db, seat, n, scratch);
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(1024) sum_partials(
    T* __restrict__ dw, T* __restrict__ db, const float* __restrict__ partial, unsigned count,
    int n) {
  sum_partials_of<T, COLUMNS>(blockIdx.y ? db : dw, partial, count, n);
}
