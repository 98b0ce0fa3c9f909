// LayerNorm.
//
// layer_norm_rows  a group of lanes or a block holds a row in registers, as loaded: it is read once
//                  and written once, weight and bias are on their way meanwhile.
// layer_norm_wide  a block, or a cluster of blocks, walks down some rows: it holds one in shared
//                  memory while the next ones travel there. Weight and bias stay in registers from
//                  row to row. A block with one stage has one row, and leaves.
//
// Moments come out of one pass, and of a second one around the mean where that is far from zero
// (moments.cuh). Bytes per element of T: 1 read, 1 written. Rows are found through strides; results
// are contiguous. Arithmetic is float.

#include "tilewright/moments.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

// Adds x - centre and its square: a chain for each pack, for chains that wait for nobody are faster.
template <class T, int VEC>
__device__ __forceinline__ void add_moments(
    float (&sums)[2], const Pack<T, VEC>& x, float centre = 0.0f) {
  const float first = x[0] - centre;
  float sum = first, squares = first * first;
#pragma unroll
  for (int j = 1; j < VEC; ++j) {
    const float distance = x[j] - centre;
    sum += distance;
    squares += distance * distance;
  }
  sums[0] += sum;
  sums[1] += squares;
}

// Of a row whose packs x(i) gives: zeros beyond the row, where inside(i) is not true.
template <class T, int PACKS, int VEC, Owner OWNER, class X, class Inside>
__device__ __forceinline__ Moments moments_of(
    X x, Inside inside, const Seat<OWNER, VEC>& seat, Exchange<2>& exchange, unsigned& turn, int n,
    float inverse) {
  constexpr int TOGETHER = PACKS == 8 ? 4 : PACKS;  // eight would spill registers
  float sums[2] = {0.0f, 0.0f};
#pragma unroll TOGETHER
  for (int i = 0; i < PACKS; ++i) add_moments(sums, x(i));
  row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
  const Moments found(0.0f, sums, n, inverse);
  const bool far = found.far<T>();
  // shuffles of groups want the whole warp
  if (OWNER == GROUP ? !__any_sync(FULL_WARP, far) : !far) return found;

  sums[0] = sums[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (inside(i)) add_moments(sums, x(i), found.rest);
  }
  row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
  return far ? Moments(found.rest, sums, n, inverse) : found;  // the others keep their bits
}

struct Statistics {
  float centre, rstd;
  float shift;  // from the centre to the mean, in deviations

  __device__ __forceinline__ Statistics(const Moments& found, float eps)
      : centre(found.centre), rstd(rsqrtf(found.variance + eps)), shift(found.rest * rstd) {}
};

template <class T, int VEC, int PACKS, class X, class Inside>
__device__ __forceinline__ void write_row(
    T* to, int stride, X x, Inside inside, const Statistics& row, Pack<T, VEC> (&w)[PACKS],
    Pack<T, VEC> (&b)[PACKS]) {
  const auto write = [&](bool centred) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(w[i]);
      keep_packed(b[i]);
      const Pack<T, VEC> element = x(i);
      float y[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float left = centred ? element[j] - row.centre : element[j];
        y[j] = (left * row.rstd - row.shift) * w[i][j] + b[i][j];
      }
      if (inside(i)) store<VEC>(to + i * stride, Pack<T, VEC>::of(y));
    }
  };
  if (sizeof(T) == 4 || row.centre != 0.0f) write(true); else write(false);
}

template <class T, int VEC, int PACKS, Owner OWNER, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_rows(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n, int group, float eps) {
  __shared__ Exchange<2> exchange;
  const Seat<OWNER, VEC> seat(group, PACKS);
  const int width = seat.row < rows ? n : 0;  // nobody returns early: shuffles want the whole warp
  const auto inside = [&](int i) { return seat.column(i) < width; };
  const T* from = input + input_rows.start(seat.row) + seat.first;
  out += static_cast<long long>(seat.row) * n + seat.first;

  Pack<T, VEC> held[PACKS], w[PACKS], b[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    held[i] = inside(i) ? load<VEC>(from + i * seat.stride()) : Pack<T, VEC>{};
  }
  load_parameter(w, weight, 1.0f, seat, width);
  load_parameter(b, bias, 0.0f, seat, width);

  const auto x = [&](int i) {
    keep_packed(held[i]);
    return held[i];
  };
  unsigned turn = 0;
  const Moments found = moments_of<T, PACKS>(x, inside, seat, exchange, turn, n, 1.0f / n);
  write_row(out, seat.stride(), x, inside, Statistics(found, eps), w, b);
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_wide(
    T* __restrict__ out, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n, float eps) {
  extern __shared__ Line memory[];
  __shared__ Exchange<2> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(0, PACKS);
  const Ring<T, VEC, PACKS, STAGES> ring{memory->words, 1};

  const auto ask = [&](unsigned row, int stage) {
    const T* from = input + input_rows.start(row) + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const bool inside = row < rows && seat.column(i) < n;
      ring.ask(stage, 0, i, from + i * seat.stride(), inside);
    }
    ring.sent();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) ask(seat.row + s * seat.step, s);

  Pack<T, VEC> w[PACKS], b[PACKS];
  load_parameter(w, weight, 1.0f, seat, n);
  load_parameter(b, bias, 0.0f, seat, n);
  const float inverse = 1.0f / n;
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; row < rows; row += seat.step) {
    ring.arrive();
    const auto x = [&](int i) { return ring.take(stage, 0, i); };
    const auto inside = [&](int i) { return seat.column(i) < n; };
    const Moments found = moments_of<T, PACKS>(x, inside, seat, exchange, turn, n, inverse);
    T* to = out + static_cast<long long>(row) * n + seat.first;
    write_row(to, seat.stride(), x, inside, Statistics(found, eps), w, b);
    if (OWNER == BLOCK && STAGES == 1) return;
    ask(row + STAGES * seat.step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}
