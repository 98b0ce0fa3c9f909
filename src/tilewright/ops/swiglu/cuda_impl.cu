// SwiGLU, silu(gate) * up, and its backward, of two tensors or of the halves of one.
//
// A thread moves PACKS packs of each operand, 16 bytes each where alignment allows, and no more:
// there is nothing to keep, so many small blocks hide the memory's latency. Tensors that are all
// contiguous are one long row (FLAT); else `lanes` threads share a row, a block holds several short
// ones, and a long one takes several blocks.
//
// Bytes per element of T: forward 2 read, 1 written; backward 3 and 2. Operands are found through
// strides; gate and up start some way into their rows, in the gradients too. Arithmetic is float.

#include "tilewright/activation.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

// Mirrors Starts in cuda_impl.py: where gate and up begin in their rows, in elements.
struct Starts {
  long long gate;
  long long up;
};

// Which columns of which row a thread moves.
template <int VEC, int PACKS, bool FLAT> struct Place {
  unsigned row;
  long long column;  // of the first pack
  int stride;        // from pack to pack

  __device__ __forceinline__ Place(unsigned column_blocks, int lanes) {
    const unsigned block = FLAT ? blockIdx.x : blockIdx.x % column_blocks;
    const unsigned first_row = FLAT ? 0 : blockIdx.x / column_blocks * (blockDim.x / lanes);
    const unsigned lane = FLAT ? threadIdx.x : threadIdx.x & (lanes - 1);  // a power of two
    row = FLAT ? 0 : first_row + threadIdx.x / lanes;
    stride = (FLAT ? blockDim.x : lanes) * VEC;
    column = static_cast<long long>(block) * PACKS * stride + lane * VEC;
  }
};

template <class T, int VEC, int PACKS, bool FLAT, int THREADS>
__global__ void __launch_bounds__(THREADS) swiglu(
    T* __restrict__ out, const T* __restrict__ gate, const T* __restrict__ up, Rows gate_rows,
    Rows up_rows, Starts starts, unsigned rows, long long n, unsigned column_blocks, int lanes) {
  const Place<VEC, PACKS, FLAT> place(column_blocks, lanes);
  if (place.row >= rows) return;
  const auto inside = [&](int i) { return place.column + i * place.stride < n; };
  gate += (FLAT ? 0 : gate_rows.start(place.row)) + starts.gate + place.column;
  up += (FLAT ? 0 : up_rows.start(place.row)) + starts.up + place.column;
  out += place.row * n + place.column;

  Pack<T, VEC> x[PACKS], u[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (!inside(i)) continue;
    x[i] = load<VEC>(gate + i * place.stride);
    u[i] = load<VEC>(up + i * place.stride);
  }

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (!inside(i)) continue;
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = silu<T>(x[i][j]) * u[i][j];
    store<VEC>(out + i * place.stride, Pack<T, VEC>::of(y));
  }
}

// `step`: from row to row of the gradients of gate and up, which are the same tensor if packed.
template <class T, int VEC, int PACKS, bool FLAT, int THREADS>
__global__ void __launch_bounds__(THREADS) swiglu_backward(
    T* dgate, T* dup, const T* __restrict__ grad, const T* __restrict__ gate,
    const T* __restrict__ up, Rows grad_rows, Rows gate_rows, Rows up_rows, Starts starts,
    long long step, unsigned rows, long long n, unsigned column_blocks, int lanes) {
  const Place<VEC, PACKS, FLAT> place(column_blocks, lanes);
  if (place.row >= rows) return;
  const auto inside = [&](int i) { return place.column + i * place.stride < n; };
  grad += (FLAT ? 0 : grad_rows.start(place.row)) + place.column;
  gate += (FLAT ? 0 : gate_rows.start(place.row)) + starts.gate + place.column;
  up += (FLAT ? 0 : up_rows.start(place.row)) + starts.up + place.column;
  dgate += place.row * step + starts.gate + place.column;
  dup += place.row * step + starts.up + place.column;

  Pack<T, VEC> g[PACKS], x[PACKS], u[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (!inside(i)) continue;
    g[i] = load<VEC>(grad + i * place.stride);
    x[i] = load<VEC>(gate + i * place.stride);
    u[i] = load<VEC>(up + i * place.stride);
  }

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (!inside(i)) continue;
    float to_gate[VEC], to_up[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float sigma = sigmoid<T>(x[i][j]), passed = x[i][j] * sigma;
      to_up[j] = g[i][j] * passed;
      // from the inside out: the derivative is near 1 at most, and g * u alone might overflow
      to_gate[j] = g[i][j] * silu_slope(passed, sigma) * u[i][j];
    }
    store<VEC>(dgate + i * place.stride, Pack<T, VEC>::of(to_gate));
    store<VEC>(dup + i * place.stride, Pack<T, VEC>::of(to_up));
  }
}
