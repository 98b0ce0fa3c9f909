// RMSNorm, RMSNorm of a residual sum, and the backward of both.
//
// *_rows   a group of lanes or a whole block owns a row and keeps it in registers as loaded: it is
//          read once and written once, and the weight is on its way while the squares are summed.
// *_long   the row is too long for registers: a block reads it twice, the second time mostly from
//          L2.
// backward persistent blocks walk down the rows; each thread owns the same columns of every row, so
//          the weight's gradient stays in its registers until the end. Partials go to memory and
//          sum_partials adds them in a fixed order: no atomics, the same bits on every run.
//
// Bytes per element of T: forward 1 read, 1 written; add 2 and 2; backward 2 (3 with a residual's
// gradient) and 1. Rows are found through strides; results are contiguous. Arithmetic is float.

#include "tilewright/reduce.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

constexpr int GROUP_THREADS = 128;
constexpr int FORWARD_THREADS = 1024;  // 64 registers a thread
constexpr int BACKWARD_THREADS = 512;  // 128: two operands, the weight and its gradient

// Threads of a row. Where a block loads single elements it is always full: a constant distance
// spares each load its own 64-bit address, without which the longest unrolled loops spill.
template <int VEC, bool GROUP> __device__ __forceinline__ int lanes_of_row(int lanes, int full) {
  return !GROUP && VEC == 1 ? full : lanes;
}

// Packs a thread of a *_long kernel adds up before the running total sees them. Two short chains
// instead of one long one keep the rounding error of a sum of 262,144 squares small.
template <int VEC> constexpr int CHUNK = VEC == 1 ? 16 : 4;

struct Options {
  float eps;
  float offset;  // added to the weight: 1 for Gemma
  int llama;     // round the normalised value before it meets the weight
};

template <class T, int VEC>
__device__ __forceinline__ float squares(const Pack<T, VEC>& x) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) total += x[j] * x[j];
  return total;
}

// x becomes the rounded sum, which is also written out: later layers read it.
template <class T, int VEC>
__device__ __forceinline__ void add(Pack<T, VEC>& x, const T* residual, T* sum) {
  const Pack<T, VEC> other = load<VEC>(residual);
  float total[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) total[j] = x[j] + other[j];
  x = Pack<T, VEC>::of(total);
  store<VEC>(sum, x);
}

template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> scaled(
    const Pack<T, VEC>& x, const Pack<T, VEC>& weight, bool weighted, float rstd, Options options) {
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float value = x[j] * rstd;
    if (weighted) {
      if (options.llama) value = to_float(from_float<T>(value));
      value *= weight[j] + options.offset;
    }
    y[j] = value;
  }
  return Pack<T, VEC>::of(y);
}

template <class T, int VEC, int PACKS, bool GROUP, bool ADD>
__device__ __forceinline__ void normalise_rows(
    T* out, T* sum, const T* input, const T* residual, const T* weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, int threads_of_row, Options options) {
  const int lanes = lanes_of_row<VEC, GROUP>(threads_of_row, FORWARD_THREADS);
  const int lane = GROUP ? threadIdx.x % lanes : threadIdx.x;
  const unsigned row =
      GROUP ? blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes : blockIdx.x;
  const int width = row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  const long long to = static_cast<long long>(row) * n;
  input += input_rows.start(row);
  if (ADD) residual += residual_rows.start(row);
  constexpr bool EARLY = VEC > 1;  // single elements take a register each: no room for the weight

  Pack<T, VEC> x[PACKS], w[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    x[i] = column < width ? load<VEC>(input + column) : Pack<T, VEC>{};
    if (EARLY) w[i] = weight && column < width ? load<VEC>(weight + column) : Pack<T, VEC>{};
  }

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    if (ADD && column < width) add<T, VEC>(x[i], residual + column, sum + to + column);
    total += squares(x[i]);
  }
  const float rstd = rsqrtf(row_reduce<Sum, GROUP>(total, lanes) / n + options.eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    if (column >= width) continue;
    if (!EARLY) w[i] = weight ? load<VEC>(weight + column) : Pack<T, VEC>{};
    keep_packed(x[i]);
    keep_packed(w[i]);
    store<VEC>(out + to + column, scaled(x[i], w[i], weight != nullptr, rstd, options));
  }
}

template <class T, int VEC, bool ADD>
__device__ __forceinline__ void normalise_long(
    T* out, T* sum, const T* input, const T* residual, const T* weight, Rows input_rows,
    Rows residual_rows, int n, Options options) {
  const int step = blockDim.x * VEC;
  out += static_cast<long long>(blockIdx.x) * n;
  input += input_rows.start(blockIdx.x);
  if (ADD) residual += residual_rows.start(blockIdx.x);
  if (ADD) sum += static_cast<long long>(blockIdx.x) * n;

  float total = 0.0f;
  for (int base = threadIdx.x * VEC; base < n; base += CHUNK<VEC> * step) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK<VEC>; ++i) {
      const int column = base + i * step;
      if (column >= n) continue;
      Pack<T, VEC> x = load<VEC>(input + column);
      if (ADD) add<T, VEC>(x, residual + column, sum + column);
      part += squares(x);
    }
    total += part;
  }
  const float rstd = rsqrtf(block_reduce<Sum>(total) / n + options.eps);

  // With ADD a thread reads back what it wrote itself, so program order is all it needs.
  const T* again = ADD ? sum : input;
#pragma unroll 4
  for (int column = threadIdx.x * VEC; column < n; column += step) {
    const Pack<T, VEC> x = load<VEC>(again + column);
    const Pack<T, VEC> w = weight ? load<VEC>(weight + column) : Pack<T, VEC>{};
    store<VEC>(out + column, scaled(x, w, weight != nullptr, rstd, options));
  }
}

template <class T, int VEC, int PACKS, bool GROUP>
__global__ void __launch_bounds__(GROUP ? GROUP_THREADS : FORWARD_THREADS, 1) rms_norm_rows(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, unsigned rows, int n, int lanes, Options options) {
  normalise_rows<T, VEC, PACKS, GROUP, false>(
      out, nullptr, input, nullptr, weight, input_rows, Rows{}, rows, n, lanes, options);
}

template <class T, int VEC>
__global__ void __launch_bounds__(FORWARD_THREADS) rms_norm_long(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    Rows input_rows, int n, Options options) {
  normalise_long<T, VEC, false>(
      out, nullptr, input, nullptr, weight, input_rows, Rows{}, n, options);
}

template <class T, int VEC, int PACKS, bool GROUP>
__global__ void __launch_bounds__(GROUP ? GROUP_THREADS : FORWARD_THREADS, 1) add_rms_norm_rows(
    T* __restrict__ out, T* __restrict__ sum, const T* __restrict__ input,
    const T* __restrict__ residual, const T* __restrict__ weight, Rows input_rows,
    Rows residual_rows, unsigned rows, int n, int lanes, Options options) {
  normalise_rows<T, VEC, PACKS, GROUP, true>(
      out, sum, input, residual, weight, input_rows, residual_rows, rows, n, lanes, options);
}

template <class T, int VEC>
__global__ void __launch_bounds__(FORWARD_THREADS) add_rms_norm_long(
    T* __restrict__ out, T* __restrict__ sum, const T* __restrict__ input,
    const T* __restrict__ residual, const T* __restrict__ weight, Rows input_rows,
    Rows residual_rows, int n, Options options) {
  normalise_long<T, VEC, true>(
      out, sum, input, residual, weight, input_rows, residual_rows, n, options);
}

// --- backward ------------------------------------------------------------------------------------
//
// With g = grad * (weight + offset) and xhat = x * rstd:  dx = rstd * (g - xhat * mean(g * xhat)),
// and the weight's gradient is the sum over rows of grad * xhat.

struct Statistics {
  float rstd;
  float mean;  // of g * xhat
};

__device__ __forceinline__ Statistics statistics(float xx, float gx, int n, float eps) {
  const float rstd = rsqrtf(xx / n + eps);
  return {rstd, rstd * (gx / n)};
}

template <class T, int VEC>
__device__ __forceinline__ float factor(
    const Pack<T, VEC>& weight, int j, bool weighted, float offset) {
  return weighted ? weight[j] + offset : 1.0f;
}

template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> input_gradient(
    const Pack<T, VEC>& x, const Pack<T, VEC>& g, const Pack<T, VEC>& w, const T* grad_residual,
    bool weighted, float offset, Statistics row) {
  Pack<T, VEC> past = {};
  if (grad_residual) past = load<VEC>(grad_residual);
  float dx[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float gw = g[j] * factor(w, j, weighted, offset);
    dx[j] = row.rstd * (gw - x[j] * row.rstd * row.mean) + past[j];
  }
  return Pack<T, VEC>::of(dx);
}

// One row of partials per warp if groups own rows, else one per block.
template <int VEC, int PACKS, bool GROUP>
__device__ __forceinline__ void write_partial(
    float* partial, const float (&dw)[PACKS][VEC], int n, int lanes) {
  const int lane = GROUP ? threadIdx.x % lanes : threadIdx.x;
  const unsigned warps = blockDim.x / WARP_SIZE;
  const unsigned slot = GROUP ? blockIdx.x * warps + threadIdx.x / WARP_SIZE : blockIdx.x;
  const bool writes = !GROUP || threadIdx.x % WARP_SIZE < lanes;
  partial += static_cast<long long>(slot) * n;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float total = dw[i][j];
      if (GROUP) {  // the groups of a warp own the same columns
        for (int distance = lanes; distance < WARP_SIZE; distance *= 2) {
          total += __shfl_xor_sync(FULL_WARP, total, distance);
        }
      }
      if (writes && column < n) partial[column + j] = total;
    }
  }
}

template <class T, int VEC, int PACKS, bool GROUP>
__global__ void __launch_bounds__(GROUP ? GROUP_THREADS : BACKWARD_THREADS, 1)
rms_norm_backward_rows(
    T* __restrict__ dx, float* __restrict__ partial, const T* __restrict__ grad,
    const T* __restrict__ grad_residual, const T* __restrict__ input, const T* __restrict__ weight,
    Rows grad_rows, Rows residual_rows, Rows input_rows, unsigned rows, int n, int threads_of_row,
    Options options) {
  const int lanes = lanes_of_row<VEC, GROUP>(threads_of_row, BACKWARD_THREADS);
  const int lane = GROUP ? threadIdx.x % lanes : threadIdx.x;
  const unsigned rows_per_block = GROUP ? blockDim.x / lanes : 1;
  const bool weighted = weight != nullptr;

  Pack<T, VEC> w[PACKS];
  float dw[PACKS][VEC];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    w[i] = weighted && column < n ? load<VEC>(weight + column) : Pack<T, VEC>{};
#pragma unroll
    for (int j = 0; j < VEC; ++j) dw[i][j] = 0.0f;
  }

  // `first` is the same in all threads, so all of them take part in every reduction.
  for (unsigned first = blockIdx.x * rows_per_block; first < rows;
       first += gridDim.x * rows_per_block) {
    const unsigned row = GROUP ? first + threadIdx.x / lanes : first;
    const int width = row < rows ? n : 0;
    const long long to = static_cast<long long>(row) * n;
    const T* x_row = input + input_rows.start(row);
    const T* g_row = grad + grad_rows.start(row);
    const T* past_row = grad_residual ? grad_residual + residual_rows.start(row) : nullptr;

    Pack<T, VEC> x[PACKS], g[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = (i * lanes + lane) * VEC;
      x[i] = column < width ? load<VEC>(x_row + column) : Pack<T, VEC>{};
      g[i] = column < width ? load<VEC>(g_row + column) : Pack<T, VEC>{};
    }

    float xx = 0.0f, gx = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      xx += squares(x[i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float gw = g[i][j] * factor(w[i], j, weighted, options.offset);
        gx += gw * x[i][j];
      }
    }
    xx = row_reduce<Sum, GROUP>(xx, lanes);
    gx = row_reduce<Sum, GROUP>(gx, lanes);
    const Statistics row_statistics = statistics(xx, gx, n, options.eps);

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = (i * lanes + lane) * VEC;
      if (column >= width) continue;  // also where rstd is that of a row past the end
      keep_packed(x[i]);
      keep_packed(g[i]);
      keep_packed(w[i]);
      const T* past = past_row ? past_row + column : nullptr;
      store<VEC>(dx + to + column, input_gradient(
          x[i], g[i], w[i], past, weighted, options.offset, row_statistics));
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        dw[i][j] += g[i][j] * (x[i][j] * row_statistics.rstd);
      }
    }
  }

  if (partial) write_partial<VEC, PACKS, GROUP>(partial, dw, n, lanes);
}

template <class T, int VEC>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1) rms_norm_backward_long(
    T* __restrict__ dx, float* __restrict__ partial, const T* __restrict__ grad,
    const T* __restrict__ grad_residual, const T* __restrict__ input, const T* __restrict__ weight,
    Rows grad_rows, Rows residual_rows, Rows input_rows, unsigned rows, int n, Options options) {
  const bool weighted = weight != nullptr;
  const int step = blockDim.x * VEC;
  if (partial) partial += static_cast<long long>(blockIdx.x) * n;

  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long to = static_cast<long long>(row) * n;
    const T* x_row = input + input_rows.start(row);
    const T* g_row = grad + grad_rows.start(row);
    const T* past_row = grad_residual ? grad_residual + residual_rows.start(row) : nullptr;

    float xx = 0.0f, gx = 0.0f;
    for (int base = threadIdx.x * VEC; base < n; base += CHUNK<VEC> * step) {
      float xx_part = 0.0f, gx_part = 0.0f;
#pragma unroll
      for (int i = 0; i < CHUNK<VEC>; ++i) {
        const int column = base + i * step;
        if (column >= n) continue;
        const Pack<T, VEC> x = load<VEC>(x_row + column);
        const Pack<T, VEC> g = load<VEC>(g_row + column);
        const Pack<T, VEC> w = weighted ? load<VEC>(weight + column) : Pack<T, VEC>{};
        xx_part += squares(x);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float gw = g[j] * factor(w, j, weighted, options.offset);
          gx_part += gw * x[j];
        }
      }
      xx += xx_part;
      gx += gx_part;
    }
    xx = block_reduce<Sum>(xx);
    gx = block_reduce<Sum>(gx);
    const Statistics row_statistics = statistics(xx, gx, n, options.eps);

    for (int column = threadIdx.x * VEC; column < n; column += step) {
      const Pack<T, VEC> x = load<VEC>(x_row + column);
      const Pack<T, VEC> g = load<VEC>(g_row + column);
      const Pack<T, VEC> w = weighted ? load<VEC>(weight + column) : Pack<T, VEC>{};
      const T* past = past_row ? past_row + column : nullptr;
      store<VEC>(dx + to + column, input_gradient(
          x, g, w, past, weighted, options.offset, row_statistics));
      if (!partial) continue;
      // The gradient of a long row's weight does not fit in registers: it grows in this block's own
      // partial row, each element always in the same thread's hands.
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float dw = g[j] * (x[j] * row_statistics.rstd);
        partial[column + j] = row == blockIdx.x ? dw : partial[column + j] + dw;
      }
    }
  }
}

// 32 columns per block; 32 threads share a column, each adding every 32nd partial in order, and a
// tree joins the 32: the order never depends on timing.
template <class T>
__global__ void __launch_bounds__(1024) sum_partials(
    T* __restrict__ out, const float* __restrict__ partial, unsigned count, int n) {
  __shared__ float tile[32][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + x;

  float total = 0.0f;
  if (column < n) {
#pragma unroll 4
    for (unsigned i = y; i < count; i += 32) {
      total += partial[static_cast<long long>(i) * n + column];
    }
  }
  tile[y][x] = total;
  __syncthreads();
  for (int half = 16; half > 0; half /= 2) {
    if (y < half) tile[y][x] += tile[y + half][x];
    __syncthreads();
  }
  if (y == 0 && column < n) out[column] = from_float<T>(tile[0][x]);
}
