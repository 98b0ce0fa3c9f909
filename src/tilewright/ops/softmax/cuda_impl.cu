// Softmax over contiguous rows, twice: once to read, once to run; and its backward.
//
// softmax_v1        one block per row, three passes over global memory (maximum, sum, result) and a
//                   tree in shared memory after the first two. 3 reads, 1 write per element; any
//                   row length.
// softmax_v2        a group of lanes or a block holds a row in registers: 1 read, 1 write per
//                   element, loops unrolled by template, maxima and sums by warp shuffles.
// softmax_v2_wide   a block or a cluster of blocks holds a row in shared memory: 1 read, 1 write per
//                   element.
// softmax_backward  as v2 and v2_wide, for the gradient and the output: 2 reads, 1 write per
//                   element.
//
// All compute exp(x - max) as exp2((x - max) * log2(e)): subtracting first keeps the error in
// proportion to x - max, where a fused x * log2(e) - max * log2(e) would carry that of max itself.
// NaN reaches its whole row through the maximum; a row of -inf, or one with +inf, becomes NaN.

#include "tilewright/held.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

constexpr int MAX_THREADS = 1024;
constexpr float LOG2_E = 1.4426950408889634f;

// Results below the smallest normal float become zero, which spares three instructions in four.
__device__ __forceinline__ float exp_below(float x, float max) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"((x - max) * LOG2_E));
  return y;
}

// --- v1: the version to read ---------------------------------------------------------------------

// Halve the number of values until one is left; the number of threads is a power of two.
template <class Op> __device__ float tree_reduce(float value, float* tree) {
  tree[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      tree[threadIdx.x] = Op::join(tree[threadIdx.x], tree[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const float result = tree[0];
  __syncthreads();  // the next reduction writes tree[0]
  return result;
}

template <class Out, class In, int VEC>
__global__ void __launch_bounds__(MAX_THREADS) softmax_v1(
    Out* __restrict__ output, const In* __restrict__ input, Rows input_rows, int n) {
  __shared__ float tree[MAX_THREADS];
  const int first = threadIdx.x * VEC, step = blockDim.x * VEC;
  input += input_rows.start(blockIdx.x);
  output += static_cast<long long>(blockIdx.x) * n;

  float max = Max::identity();
  for (int column = first; column < n; column += step) {
    const Pack<In, VEC> x = load<VEC>(input + column);
#pragma unroll
    for (int j = 0; j < VEC; ++j) max = Max::join(max, x[j]);
  }
  max = tree_reduce<Max>(max, tree);

  float sum = 0.0f;
  for (int column = first; column < n; column += step) {
    const Pack<In, VEC> x = load<VEC>(input + column);
    float part = 0.0f;  // a chain per pack, then one over packs: less rounding than one long chain
#pragma unroll
    for (int j = 0; j < VEC; ++j) part += exp_below(x[j], max);
    sum += part;
  }
  const float scale = 1.0f / tree_reduce<Sum>(sum, tree);

  for (int column = first; column < n; column += step) {
    const Pack<In, VEC> x = load<VEC>(input + column);
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = exp_below(x[j], max) * scale;
    store<VEC>(output + column, Pack<Out, VEC>::of(y));
  }
}

// --- v2: the version to run ----------------------------------------------------------------------

template <class Out, class In, int VEC, int PACKS, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) softmax_v2(
    Out* __restrict__ output, const In* __restrict__ input, Rows input_rows, unsigned rows, int n,
    int group) {
  __shared__ Exchange<1> exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  input += input_rows.start(seat.row);
  output += static_cast<long long>(seat.row) * n;

  Pack<In, VEC> packs[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    packs[i] = column < width ? load<VEC>(input + column) : filled<In, VEC>(Max::identity());
  }

  float x[PACKS][VEC];
  float max = Max::identity();
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) max = Max::join(max, x[i][j] = packs[i][j]);
  }
  max = row_reduce<Max, OWNER>(max, seat.lanes, exchange, 0);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum += x[i][j] = exp_below(x[i][j], max);
  }
  const float scale = 1.0f / row_reduce<Sum, OWNER>(sum, seat.lanes, exchange, 1);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    if (column >= width) continue;
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = x[i][j] * scale;
    store<VEC>(output + column, Pack<Out, VEC>::of(y));
  }
}

template <class Out, class In, int VEC, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) softmax_v2_wide(
    Out* __restrict__ output, const In* __restrict__ input, Rows input_rows, int n, int packs) {
  extern __shared__ Line memory[];
  __shared__ Exchange<1> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, packs);
  const Held<In, VEC> held{memory->words, packs};
  input += input_rows.start(seat.row);
  output += static_cast<long long>(seat.row) * n;

#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    held.ask(0, i, input + seat.column(i), seat.column(i) < n);
  }
  end_batch();
  wait_batches<0>();

  float max = Max::identity();
#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    if (seat.column(i) >= n) break;
    const Pack<In, VEC> x = held.get(0, i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) max = Max::join(max, x[j]);
  }
  if (OWNER == CLUSTER) cluster_wait();
  max = row_reduce<Max, OWNER>(max, seat.lanes, exchange, 0);

  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    if (seat.column(i) >= n) break;
    const Pack<In, VEC> x = held.get(0, i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum += exp_below(x[j], max);
  }
  const float scale = 1.0f / row_reduce<Sum, OWNER>(sum, seat.lanes, exchange, 1);

#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    const int column = seat.column(i);
    if (column >= n) break;
    const Pack<In, VEC> x = held.get(0, i);
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = exp_below(x[j], max) * scale;
    store<VEC>(output + column, Pack<Out, VEC>::of(y));
  }
}

// --- backward: dx = y * (g - sum(g * y)) ---------------------------------------------------------

template <class Out, int VEC>
__device__ __forceinline__ float dot(const Pack<Out, VEC>& g, const Pack<Out, VEC>& y) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) total += g[j] * y[j];
  return total;
}

template <class In, class Out, int VEC>
__device__ __forceinline__ Pack<In, VEC> input_gradient(
    const Pack<Out, VEC>& g, const Pack<Out, VEC>& y, float total) {
  float dx[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) dx[j] = y[j] * (g[j] - total);
  return Pack<In, VEC>::of(dx);
}

template <class In, class Out, int VEC, int PACKS, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) softmax_backward_rows(
    In* __restrict__ dx, const Out* __restrict__ grad, const Out* __restrict__ output,
    Rows grad_rows, Rows output_rows, unsigned rows, int n, int group) {
  __shared__ Exchange<1> exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;
  grad += grad_rows.start(seat.row);
  output += output_rows.start(seat.row);
  dx += static_cast<long long>(seat.row) * n;

  Pack<Out, VEC> g[PACKS], y[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    g[i] = column < width ? load<VEC>(grad + column) : Pack<Out, VEC>{};
    y[i] = column < width ? load<VEC>(output + column) : Pack<Out, VEC>{};
  }

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) total += dot(g[i], y[i]);
  total = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = seat.column(i);
    if (column >= width) continue;
    keep_packed(g[i]);
    keep_packed(y[i]);
    store<VEC>(dx + column, input_gradient<In, Out, VEC>(g[i], y[i], total));
  }
}

template <class In, class Out, int VEC, Owner OWNER, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) softmax_backward_wide(
    In* __restrict__ dx, const Out* __restrict__ grad, const Out* __restrict__ output,
    Rows grad_rows, Rows output_rows, int n, int packs) {
  extern __shared__ Line memory[];
  __shared__ Exchange<1> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, packs);
  const Held<Out, VEC> held{memory->words, packs};  // the gradient, then the output
  grad += grad_rows.start(seat.row);
  output += output_rows.start(seat.row);
  dx += static_cast<long long>(seat.row) * n;

#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    const int column = seat.column(i);
    held.ask(0, i, grad + column, column < n);
    held.ask(1, i, output + column, column < n);
  }
  end_batch();
  wait_batches<0>();

  float total = 0.0f;
#pragma unroll 4
  for (int i = 0; i < packs; ++i) total += dot(held.get(0, i), held.get(1, i));
  if (OWNER == CLUSTER) cluster_wait();
  total = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0);

#pragma unroll 4
  for (int i = 0; i < packs; ++i) {
    const int column = seat.column(i);
    if (column >= n) break;
    store<VEC>(dx + column,
               input_gradient<In, Out, VEC>(held.get(0, i), held.get(1, i), total));
  }
}
