// RMSNorm gated by silu: x * rstd * weight * silu(gate).
//
// *_rows  a group of lanes or a block holds a row of x and of the gate in registers, as loaded: both
//         are read once, y is written once. silu is computed while the squares of x are summed:
//         after that, few rows would wait for it.
// *_wide  a block holds a longer row of both in shared memory; of the longest a cluster of blocks
//         does, which walks down some of them: it takes one into registers while the next one
//         travels. The weight stays in registers from row to row.
//
// Bytes per element of T: 2 read, 1 written. Rows are found through strides; the result is
// contiguous. Arithmetic is float.

#include "tilewright/activation.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC>
__device__ __forceinline__ float squares(const Pack<T, VEC>& x) {
  float total = x[0] * x[0];
#pragma unroll
  for (int j = 1; j < VEC; ++j) total += x[j] * x[j];
  return total;
}

template <class T, int VEC>
__device__ __forceinline__ void open_gate(float (&opened)[VEC], const Pack<T, VEC>& gate) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) opened[j] = silu<T>(gate[j]);
}

// `weight` holds ones where there is none. From left to right: a product of the last two might overflow.
template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> gated(
    const Pack<T, VEC>& x, float rstd, const Pack<T, VEC>& weight, const float (&opened)[VEC]) {
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) y[j] = x[j] * rstd * weight[j] * opened[j];
  return Pack<T, VEC>::of(y);
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_swiglu_rows(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ gate,
    const T* __restrict__ weight, Rows input_rows, Rows gate_rows, unsigned rows, int n, int group,
    float eps) {
  __shared__ Exchange<1> exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  const auto inside = [&](int i) { return seat.column(i) < width; };
  input += input_rows.start(seat.row) + seat.first;
  gate += gate_rows.start(seat.row) + seat.first;

  Pack<T, VEC> x[PACKS], g[PACKS], w[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    x[i] = inside(i) ? load<VEC>(input + i * seat.stride()) : Pack<T, VEC>{};
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    g[i] = inside(i) ? load<VEC>(gate + i * seat.stride()) : Pack<T, VEC>{};
  }
  load_parameter(w, weight, 1.0f, seat, width);

  float total = 0.0f, opened[PACKS][VEC];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) total += squares(x[i]);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) open_gate(opened[i], g[i]);  // fills the waits of the shuffles
  const float rstd = rsqrtf(row_reduce<Sum, OWNER>(total, seat.lanes, exchange, 0) / n + eps);

  out += static_cast<long long>(seat.row) * n + seat.first;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(x[i]);
    const Pack<T, VEC> y = gated(x[i], rstd, w[i], opened[i]);
    if (inside(i)) store<VEC>(out + i * seat.stride(), y);
  }
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_swiglu_wide(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ gate,
    const T* __restrict__ weight, Rows input_rows, Rows gate_rows, unsigned rows, int n,
    float eps) {
  constexpr bool ONCE = OWNER == BLOCK;  // it has one row, which it reads again: few registers
  constexpr int X = 0, GATE = 1;         // operands of the ring
  extern __shared__ Line memory[];
  __shared__ Exchange<1> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 2};
  const auto inside = [&](int i) { return seat.column(i) < n; };

  const auto ask = [&](unsigned row, int stage) {
    const T* x = input + input_rows.start(row) + seat.first;
    const T* g = gate + gate_rows.start(row) + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      ring.ask(stage, X, i, x + i * seat.stride(), row < rows && inside(i));
      ring.ask(stage, GATE, i, g + i * seat.stride(), row < rows && inside(i));
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
    ring.arrive();
    Pack<T, VEC> x[PACKS], g[PACKS];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      x[i] = ring.take(stage, X, i);
      if (!ONCE) g[i] = ring.take(stage, GATE, i);
      total += squares(x[i]);
    }
    total = row_reduce<Sum, OWNER>(total, seat.lanes, exchange, turn++);
    if (!ONCE) ask(row + STAGES * seat.step, stage);  // what was there is in registers now

    const float rstd = rsqrtf(total / n + eps);
    T* to = out + static_cast<long long>(row) * n + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (ONCE) {
        x[i] = ring.take(stage, X, i);
        g[i] = ring.take(stage, GATE, i);
      } else {
        keep_packed(x[i]);
      }
      keep_packed(w[i]);
      float opened[VEC];
      open_gate(opened, g[i]);
      const Pack<T, VEC> y = gated(x[i], rstd, w[i], opened);
      if (inside(i)) store<VEC>(to + i * seat.stride(), y);
    }
    if (ONCE) return;
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}
