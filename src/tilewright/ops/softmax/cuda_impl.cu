// Softmax over contiguous rows, twice: once to read, once to run.
//
// softmax_v1  one block per row, three passes over global memory (maximum, sum, result) and a tree
//             in shared memory after the first two. 3 reads, 1 write per element; any row length.
// softmax_v2  a group of lanes or a block holds its row in registers: 1 read, 1 write per element,
//             loops unrolled by template, maxima and sums by warp shuffles. Up to 32 elements a
//             thread.
//
// Both compute exp(x - max) as exp2((x - max) * log2(e)): subtracting first keeps the error in
// proportion to x - max, where a fused x * log2(e) - max * log2(e) would carry that of max itself.
// NaN reaches its whole row through the maximum; a row of -inf, or one with +inf, becomes NaN.

#include "tilewright/reduce.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

constexpr int GROUP_THREADS = 128;
constexpr int MAX_THREADS = 1024;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp_below(float x, float max) {
  return exp2f((x - max) * LOG2_E);
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

template <class Out, class In, int VEC, int PACKS, bool GROUP>
__global__ void __launch_bounds__(GROUP ? GROUP_THREADS : MAX_THREADS, 1) softmax_v2(
    Out* __restrict__ output, const In* __restrict__ input, Rows input_rows, unsigned rows, int n,
    int threads_of_row) {
  // Single elements take 32 loads; with a constant distance these need no 32 addresses.
  const int lanes = !GROUP && VEC == 1 ? MAX_THREADS : threads_of_row;
  const int lane = GROUP ? threadIdx.x % lanes : threadIdx.x;
  const unsigned row =
      GROUP ? blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes : blockIdx.x;
  const int width = row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  input += input_rows.start(row);
  output += static_cast<long long>(row) * n;

  float x[PACKS][VEC];
  float max = Max::identity();
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    const bool inside = column < width;
    const Pack<In, VEC> pack = inside ? load<VEC>(input + column) : Pack<In, VEC>{};
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[i][j] = inside ? pack[j] : Max::identity();
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) max = Max::join(max, x[i][j]);
  }
  max = row_reduce<Max, GROUP>(max, lanes);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[i][j] = exp_below(x[i][j], max);
      sum += x[i][j];
    }
  }
  const float scale = 1.0f / row_reduce<Sum, GROUP>(sum, lanes);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = (i * lanes + lane) * VEC;
    if (column >= width) continue;
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = x[i][j] * scale;
    store<VEC>(output + column, Pack<Out, VEC>::of(y));
  }
}
