// LayerNorm.
//
// layer_norm_rows  a group of lanes or a block holds a row in registers, as loaded: it is read once
//                  and written once, weight and bias are on their way meanwhile.
// layer_norm_wide  a block, or a cluster of blocks, walks down some rows: it holds one in shared
//                  memory while the next ones travel there. Weight and bias stay in registers from
//                  row to row.
//
// Moments are taken around the first element, and again around the mean where that would cost
// digits (moments.cuh). Bytes per element of T: 1 read, 1 written. Rows are found through strides;
// results are contiguous. Arithmetic is float.

#include "tilewright/moments.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

// Adds x - centre and its square: a chain for each pack, for chains that wait for nobody are faster.
template <class T, int VEC>
__device__ __forceinline__ void add_moments(
    float (&sums)[2], const Pack<T, VEC>& x, float centre) {
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

struct Statistics {
  float centre, rstd;
  float shift;  // from the centre to the mean, in deviations

  __device__ __forceinline__ Statistics(const Moments& found, float eps)
      : centre(found.centre), rstd(rsqrtf(found.variance + eps)), shift(found.rest * rstd) {}
};

template <class T, int VEC>
__device__ __forceinline__ Pack<T, VEC> normalised(
    const Pack<T, VEC>& x, const Statistics& row, const Pack<T, VEC>& w, const Pack<T, VEC>& b) {
  float y[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    y[j] = ((x[j] - row.centre) * row.rstd - row.shift) * w[j] + b[j];
  }
  return Pack<T, VEC>::of(y);
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

  Pack<T, VEC> x[PACKS], w[PACKS], b[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    x[i] = inside(i) ? load<VEC>(from + i * seat.stride()) : Pack<T, VEC>{};
  }
  load_parameter(w, weight, 1.0f, seat, width);
  load_parameter(b, bias, 0.0f, seat, width);

  float centre = first_of(input, input_rows, seat.row, rows);
  Moments found(centre, 0.0f, 0.0f, n);
  bool again = true;
#pragma unroll 1
  for (int turn = 0; turn < 2 && again; ++turn) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(x[i]);
      if (inside(i)) add_moments(sums, x[i], centre);  // not the zeros beyond the end
    }
    row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn);
    found = Moments(centre, sums[0], sums[1], n);
    again = found.far<T>();
    if (again) centre += found.rest;  // others of the warp keep theirs, and their bits
    if (OWNER == GROUP) again = __any_sync(FULL_WARP, again);  // shuffles want the whole warp
  }
  const Statistics row(found, eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(x[i]);
    keep_packed(w[i]);
    keep_packed(b[i]);
    const Pack<T, VEC> y = normalised(x[i], row, w[i], b[i]);
    if (inside(i)) store<VEC>(out + i * seat.stride(), y);
  }
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
  float centre = first_of(input, input_rows, seat.row, rows);
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; row < rows; row += seat.step) {
    ring.arrive();
    float sums[2];
    bool again = true;
#pragma unroll 1
    for (int pass = 0; pass < 2 && again; ++pass) {
      sums[0] = sums[1] = 0.0f;
#pragma unroll 4
      for (int i = 0; i < PACKS; ++i) {
        const Pack<T, VEC> x = ring.take(stage, 0, i);
        if (seat.column(i) < n) add_moments(sums, x, centre);  // not the zeros beyond the end
      }
      row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
      again = pass == 0 && Moments(centre, sums[0], sums[1], n).template far<T>();
      if (again) centre += sums[0] / n;
    }
    const Statistics statistics(Moments(centre, sums[0], sums[1], n), eps);
    centre = first_of(input, input_rows, row + seat.step, rows);  // of the next row, in good time

    T* to = out + static_cast<long long>(row) * n + seat.first;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(w[i]);
      keep_packed(b[i]);
      const Pack<T, VEC> y = normalised(ring.take(stage, 0, i), statistics, w[i], b[i]);
      if (seat.column(i) < n) store<VEC>(to + i * seat.stride(), y);
    }
    ask(row + STAGES * seat.step, stage);
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}
