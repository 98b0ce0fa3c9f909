// The backward of RMSNorm gated by silu.
//
// Persistent owners (groups of lanes, blocks, clusters) walk down the rows, AT_ONCE at a
// time. The next rows of grad, x and gate travel through a ring while these are reduced, and rows
// that are reduced together share barriers and shuffles; each thread owns the same columns of every
// row, so the weight's gradient stays in its registers until the end. Both passes over a row take it
// from the ring and compute silu anew: two more instructions of the special-function unit, where a
// row of floats kept over the reduction would be VEC * PACKS registers. Bytes per element of T: 3
// read, 2 written, and once per block or cluster a row of float partials.
//
// With xhat = x * rstd, s = silu(gate) and h = grad * weight * s:
//   dx = rstd * (h - xhat * mean(h * xhat)),  dgate = grad * weight * xhat * silu'(gate),
// and the weight's gradient is the sum over rows of grad * s * xhat.

#include "tilewright/activation.cuh"
#include "tilewright/partials.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC, int PACKS, Owner OWNER, int AT_ONCE, int STAGES, int THREADS,
          int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_swiglu_backward(
    T* __restrict__ dx, T* __restrict__ dgate, float* __restrict__ partial,
    const T* __restrict__ grad, const T* __restrict__ input, const T* __restrict__ gate,
    const T* __restrict__ weight, Rows grad_rows, Rows input_rows, Rows gate_rows, unsigned rows,
    int n, int group, float eps) {
  constexpr int X = 0, GRAD = AT_ONCE, GATE = 2 * AT_ONCE;  // operands of the ring, from row 0 on
  extern __shared__ Line memory[];
  __shared__ Exchange<2 * AT_ONCE> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 3 * AT_ONCE};

  const auto ask = [&](unsigned first, int stage) {
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      const T* x = input + input_rows.start(first + r) + seat.first;
      const T* dy = grad + grad_rows.start(first + r) + seat.first;
      const T* g = gate + gate_rows.start(first + r) + seat.first;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int at = i * seat.stride();
        const bool inside = first + r < rows && seat.column(i) < n;
        ring.ask(stage, X + r, i, x + at, inside);
        ring.ask(stage, GRAD + r, i, dy + at, inside);
        ring.ask(stage, GATE + r, i, g + at, inside);
      }
    }
    ring.sent();
  };
  const unsigned step = seat.step * AT_ONCE;
  unsigned first = seat.row * AT_ONCE;
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(first + s * step, s);

  Pack<T, VEC> w[PACKS];
  load_parameter(w, weight, 1.0f, seat, n);
  float dw[PACKS][VEC] = {};
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (; seat.leader(first, AT_ONCE) < rows; first += step) {
    constexpr bool ALWAYS = Seat<OWNER, VEC>::ENDS_ALONE && AT_ONCE == 1;
    const auto real = [&](int r) { return ALWAYS || first + r < rows; };
    const auto take = [&](int operand, int r, int i, const T* from, const Rows& at) {
      from += at.start(first + r) + seat.column(i);  // read only where loads are no wider than T
      return ring.take(stage, operand + r, i, from, real(r) && seat.column(i) < n);
    };
    ring.arrive();

    float sums[2 * AT_ONCE] = {};  // of x * x, of h * x
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        const Pack<T, VEC> x = take(X, r, i, input, input_rows);
        const Pack<T, VEC> dy = take(GRAD, r, i, grad, grad_rows);
        const Pack<T, VEC> g = take(GATE, r, i, gate, gate_rows);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sums[2 * r] += x[j] * x[j];
          sums[2 * r + 1] += dy[j] * w[i][j] * silu<T>(g[j]) * x[j];
        }
      }
    }
    row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
    float rstd[AT_ONCE], along[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      // with eps = 0 a row past the end would bring 0 * inf = NaN into dw
      rstd[r] = real(r) ? rsqrtf(sums[2 * r] / n + eps) : 0.0f;
      along[r] = sums[2 * r + 1] / n * rstd[r] * rstd[r] * rstd[r];  // rstd^2 * mean(h * xhat)
    }

    const long long to = static_cast<long long>(first) * n + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(w[i]);
#pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        const Pack<T, VEC> x = take(X, r, i, input, input_rows);
        const Pack<T, VEC> dy = take(GRAD, r, i, grad, grad_rows);
        const Pack<T, VEC> g = take(GATE, r, i, gate, gate_rows);
        float of_x[VEC], of_gate[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float sigma = sigmoid<T>(g[j]), silu = g[j] * sigma;
          const float scaled = dy[j] * rstd[r];  // the products share it: the fewest instructions
          of_x[j] = scaled * silu * w[i][j] - x[j] * along[r];
          of_gate[j] = scaled * x[j] * w[i][j] * silu_slope(silu, sigma);
          dw[i][j] += scaled * silu * x[j];
        }
        if (real(r) && seat.column(i) < n) {
          const long long at = to + r * n + i * seat.stride();
          store<VEC>(dx + at, Pack<T, VEC>::of(of_x));
          store<VEC>(dgate + at, Pack<T, VEC>::of(of_gate));
        }
      }
    }
    ask(first + STAGES * step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  if (!partial) return;
  wait_batches<0>();
  __syncthreads();  // the ring of every owner is over
  write_partial<VEC, PACKS>(partial, dw, seat, n, reinterpret_cast<float*>(memory));
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(1024) sum_partials(
    T* __restrict__ dw, const float* partial, unsigned count, int n) {
  sum_partials_of<T, COLUMNS>(dw, partial, count, n);
}
