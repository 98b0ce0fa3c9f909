// The backward of LayerNorm.
//
// Persistent owners (groups of lanes, teams of warps, clusters) walk down the rows, AT_ONCE at a
// time. The next rows travel through a ring while these are reduced, and rows that are reduced
// together share barriers and shuffles; each thread owns the same columns of every row, so the
// gradients of weight and bias stay in its registers until the end (the bias' in shared memory where
// there is no room). Moments come out of one pass, and of a second one around the mean where that is
// far from zero (moments.cuh). Bytes per element of T: 2 read, 1 written, and once per block or
// cluster two rows of float partials.
//
// With g = grad * weight and xhat = (x - mean) * rstd:
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); the weight's gradient is the sum over rows of
// grad * xhat, the bias' that of grad.

#include "tilewright/held.cuh"
#include "tilewright/moments.cuh"
#include "tilewright/partials.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

template <class T, int VEC, int PACKS, Owner OWNER, int AT_ONCE, int STAGES, int THREADS,
          int BLOCKS, bool BIAS_ASIDE = false>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_backward(
    T* __restrict__ dx, float* __restrict__ partial, const T* __restrict__ grad,
    const T* __restrict__ input, const T* __restrict__ weight, Rows grad_rows, Rows input_rows,
    unsigned rows, int n, int group, float eps) {
  static_assert(!BIAS_ASIDE || OWNER == CLUSTER, "the scratch of partials would lie over it");
  constexpr int G = AT_ONCE;  // operands of the ring, after the rows of x
  extern __shared__ Line memory[];
  __shared__ Exchange<4 * AT_ONCE> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 2 * AT_ONCE};

  const auto ask = [&](unsigned first, int stage) {
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      const T* x = input + input_rows.start(first + r) + seat.first;
      const T* g = grad + grad_rows.start(first + r) + seat.first;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int at = i * seat.stride();
        const bool inside = first + r < rows && seat.column(i) < n;
        ring.ask(stage, r, i, x + at, inside);
        ring.ask(stage, G + r, i, g + at, inside);
      }
    }
    ring.sent();
  };
  const unsigned step = seat.step * AT_ONCE;
  unsigned first = seat.row * AT_ONCE;
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(first + s * step, s);

  // Registers are full of gradients: each thread keeps its part of the weight behind the ring.
  const Held<T, VEC> kept{ring.end(), PACKS};
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const bool there = weight && seat.column(i) < n;
    kept.put(0, i, there ? load<VEC>(weight + seat.column(i)) : filled<T, VEC>(1.0f));
  }
  float dw[PACKS][VEC] = {}, db[PACKS][VEC] = {};
  const Aside<VEC, PACKS> aside(kept.end(1));
  if constexpr (BIAS_ASIDE) aside.clear();
  const float inverse = 1.0f / n;
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0, rounds = 0;
  for (; seat.leader(first, AT_ONCE) < rows; first += step, ++rounds) {
    constexpr bool ALWAYS = Seat<OWNER, VEC>::ENDS_ALONE && AT_ONCE == 1;
    const auto real = [&](int r) { return ALWAYS || first + r < rows; };
    const auto take = [&](int operand, int r, int i, const T* from, const Rows& at) {
      from += at.start(first + r) + seat.column(i);  // read only where loads are no wider than T
      return ring.take(stage, operand + r, i, from, real(r) && seat.column(i) < n);
    };
    ring.arrive();

    float centre[AT_ONCE] = {};
    float sums[4 * AT_ONCE];  // of d = x - centre, of d * d, of g, of g * d
    const auto moments = [&](int r) { return Moments(centre[r], sums + 4 * r, n, inverse); };
    const auto sum_up = [&](bool centred) {
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const bool inside = seat.column(i) < n;  // zeros beyond the end are not centred
        const Pack<T, VEC> w = kept.get(0, i);
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
          one_at_a_time();
          const Pack<T, VEC> x = take(0, r, i, input, input_rows);
          const Pack<T, VEC> g = take(G, r, i, grad, grad_rows);
          const float from = inside ? centre[r] : 0.0f;
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            const float d = centred ? x[j] - from : x[j], gw = g[j] * w[j];
            sums[4 * r] += d;
            sums[4 * r + 1] += d * d;
            sums[4 * r + 2] += gw;
            sums[4 * r + 3] += gw * d;
          }
        }
      }
      row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
    };
    sum_up(false);
    bool far = false;
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      if (!moments(r).template far<T>()) continue;  // whoever is not keeps its bits
      far = true;
      centre[r] = moments(r).rest;
    }
    if (OWNER == GROUP) far = __any_sync(FULL_WARP, far);  // shuffles want the whole warp
    if (far) sum_up(true);
    float shift[AT_ONCE], rstd[AT_ONCE], g_mean[AT_ONCE], along[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      const Moments found = moments(r);
      // with eps = 0 a row past the end would bring 0 * inf = NaN into dw
      rstd[r] = real(r) ? rsqrtf(found.variance + eps) : 0.0f;
      shift[r] = found.rest * rstd[r];
      g_mean[r] = rstd[r] * sums[4 * r + 2] * inverse;  // rstd * mean(g)
      // rstd * mean(g * xhat)
      along[r] = rstd[r] * rstd[r] * (sums[4 * r + 3] - found.rest * sums[4 * r + 2]) * inverse;
    }

    T* to = dx + static_cast<long long>(first) * n + seat.first;
    const auto write = [&](bool centred) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const Pack<T, VEC> w = kept.get(0, i);
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
          one_at_a_time();
          const Pack<T, VEC> x = take(0, r, i, input, input_rows);
          const Pack<T, VEC> g = take(G, r, i, grad, grad_rows);
          float d[VEC];
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            const float left = centred ? x[j] - centre[r] : x[j];
            const float xhat = left * rstd[r] - shift[r];
            d[j] = rstd[r] * (g[j] * w[j]) - g_mean[r] - xhat * along[r];
            dw[i][j] += g[j] * xhat;
            if constexpr (!BIAS_ASIDE) db[i][j] += g[j];
          }
          if constexpr (BIAS_ASIDE) aside.add(i, g);
          if (real(r) && seat.column(i) < n) {
            store<VEC>(to + r * n + i * seat.stride(), Pack<T, VEC>::of(d));
          }
        }
      }
    };
    if (far) write(true); else write(false);
    ask(first + STAGES * step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  if (!partial) return;
  wait_batches<0>();
  // The ring of every owner is over. Teams may have met a different number of times; racecheck, which
  // orders accesses by that number, would call the exchange below a race.
  if (__syncthreads_or(OWNER == TEAM && turn != rounds)) {
    for (; turn < 2 * rounds; ++turn) barrier<OWNER != TEAM>(seat.lanes);
  }
  float* scratch = reinterpret_cast<float*>(memory);
  const long long owners = OWNER == CLUSTER ? gridDim.x / cluster_size() : gridDim.x;
  write_partial<VEC, PACKS>(partial, dw, seat, n, scratch);
  if constexpr (BIAS_ASIDE) aside.read(db);
  write_partial<VEC, PACKS>(partial + owners * n, db, seat, n, scratch);
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(1024) sum_partials(
    T* __restrict__ dw, T* __restrict__ db, const float* partial, unsigned count,
    int n) {
  sum_partials_of<T, COLUMNS>(blockIdx.y ? db : dw, partial, count, n);
}
