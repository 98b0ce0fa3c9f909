// LayerNorm, quantised to fp8 before it leaves the registers.
//
// layer_norm_fp8_rows   persistent groups of lanes, blocks or clusters walk down the rows. The next
//                       rows travel through a ring; a row leaves it once, as floats, and stays in
//                       registers until it is fp8. Weight and bias stay in shared memory.
// layer_norm_fp8_again  the second pass of one scale for the whole tensor: the first one has stored
//                       each row's statistics and the largest magnitude; this one quantises.
//
// Arithmetic is as long as the traffic, so it is counted: mean and variance come out of one
// reduction, of moments around the mean of a few first elements. Only where that is far from the
// row's own mean, so that the difference of the moments would cost digits, and for floats, the
// squares are summed once more, around the mean. Bytes per element of T: 1 read (2 with one scale
// for the tensor); one byte written.

#include "tilewright/fp8.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

constexpr float FAR = 1.0f;  // squared deviations between the mean and that of some elements

struct Statistics {
  float near;   // the mean of a few of the row's first elements
  float shift;  // from the mean to it, in deviations
  float rstd;
};

struct RowMoments {
  float mean;
  float variance;
};

// total / n, rounded as a division is.
__device__ __forceinline__ float mean_of(float total, int n, float inverse) {
  const float mean = total * inverse;
  return fmaf(fmaf(-mean, static_cast<float>(n), total), inverse, mean);
}

template <class T, int VEC> __device__ __forceinline__ float mean_of(const Pack<T, VEC>& pack) {
  float total = pack[0];
#pragma unroll
  for (int j = 1; j < VEC; ++j) total += pack[j];
  return total * (1.0f / VEC);
}

// The first elements of a row, or zeros for a row that is none.
template <int VEC, class T>
__device__ __forceinline__ Pack<T, VEC> first_of(
    const T* input, const Rows& input_rows, unsigned row, unsigned rows) {
  return row < rows ? load<VEC>(input + input_rows.start(row)) : Pack<T, VEC>{};
}

// Both passes compute this, from the same numbers: the same bits. `d` is x - near.
__device__ __forceinline__ float normalised(float d, float w, float b, const Statistics& row) {
  return fmaf(fmaf(d, row.rstd, row.shift), w, b);
}

template <class T, int VEC, int PACKS, Owner OWNER, int STAGES, int THREADS, int BLOCKS,
          class FORMAT, Scaling SCALING>
__global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_fp8_rows(
    unsigned char* __restrict__ q, float* __restrict__ scales, float* __restrict__ statistics,
    unsigned* __restrict__ amax, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n, int group, float eps) {
  extern __shared__ Line memory[];
  __shared__ Exchange<2> exchange;
  open<OWNER>(exchange);
  const Seat<OWNER, VEC> seat(group, PACKS);
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

  // beyond the row both are 0, so that y is 0 there, and never the largest
  T* held = reinterpret_cast<T*>(ring.end());
  const Parameter<T, VEC, PACKS> weights(held, weight, 1.0f, seat, n);
  const Parameter<T, VEC, PACKS> biases(held + weights.size(seat.lanes), bias, 0.0f, seat, n);
  const float inverse = 1.0f / n;
  const int groups = (n + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
  // A row's first elements: a group asks the lane that has them, others ask for them a row ahead.
  Pack<T, VEC / 2> following = {};
  if (OWNER != GROUP) following = first_of<VEC / 2>(input, input_rows, seat.row, rows);
  float largest = 0.0f;
  __syncthreads();
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; seat.leader(row, 1) < rows; row += seat.step) {
    const bool real = seat.ENDS_ALONE || row < rows;  // groups of a warp end together
    ring.arrive();
    Statistics found{mean_of(following), 0.0f, 0.0f};
    if (OWNER == GROUP) {
      found.near = __shfl_sync(FULL_WARP, mean_of(ring.take(stage, 0, 0)), 0, seat.lanes);
    }

    float y[PACKS][VEC];  // x - near at first
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T, VEC> x = ring.take(stage, 0, i);
      const float near = seat.column(i) < n ? found.near : 0.0f;  // zeros beyond the row stay zero
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[i][j] = x[j] - near;
    }
    ask(row + STAGES * seat.step, stage);  // its slot is free
    if (OWNER != GROUP) following = first_of<VEC / 2>(input, input_rows, row + seat.step, rows);

    const auto moments = [&](float centre) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const float from = seat.column(i) < n ? centre : 0.0f;
        float sum = y[i][0] - from, squares = sum * sum;  // a short chain loses fewer digits
#pragma unroll
        for (int j = 1; j < VEC; ++j) {
          const float d = y[i][j] - from;
          sum += d;
          squares = fmaf(d, d, squares);
        }
        sums[0] += sum;
        sums[1] += squares;
      }
      row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
      const float mean = mean_of(sums[0], n, inverse);
      return RowMoments{mean, mean_of(sums[1], n, inverse) - mean * mean};
    };
    auto [mean, variance] = moments(0.0f);
    const bool far = sizeof(T) == 4 || !(mean * mean <= FAR * variance);  // overflow is far
    if (OWNER == GROUP ? __any_sync(FULL_WARP, far) : far) {
      const RowMoments again = moments(mean);
      if (far) mean += again.mean, variance = again.variance;  // not for the neighbours' sake
    }
    found.rstd = rsqrtf(variance + eps);
    found.shift = -mean * found.rstd;

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      one_at_a_time();
      const Pack<T, VEC> w = weights.get(i), b = biases.get(i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[i][j] = normalised(y[i][j], w[j], b[j], found);
    }
    if constexpr (SCALING == PER_TENSOR) {
      // with eps = 0 a row past the end would bring NaN
      if (real) largest = Max::join(largest, largest_of(y));
      if (real && seat.first == 0) {
        float* to = statistics + static_cast<long long>(row) * 3;
        to[0] = found.near, to[1] = found.shift, to[2] = found.rstd;
      }
    } else {
      const long long to = row, scales_of_row = SCALING == PER_GROUP ? groups : 1;
      turn = quantise_row<FORMAT, SCALING>(
          q + to * n, scales + to * scales_of_row, y, seat, real ? n : 0, exchange, turn);
    }
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
  if (SCALING == PER_TENSOR) raise(amax, largest);
}

template <class T, int VEC, int ROWS, int THREADS, class FORMAT>
__global__ void __launch_bounds__(THREADS) layer_norm_fp8_again(
    unsigned char* __restrict__ q, float* __restrict__ scale, const float* __restrict__ statistics,
    const unsigned* __restrict__ amax, const T* __restrict__ input, const T* __restrict__ weight,
    const T* __restrict__ bias, Rows input_rows, unsigned rows, int n) {
  const Chunk<VEC, ROWS> chunk(rows, n);
  Pack<T, VEC> x[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const unsigned row = chunk.row + i;
    if (row < rows) x[i] = load<VEC>(input + input_rows.start(row) + chunk.column);
  }
  const Pack<T, VEC> w = weight ? load<VEC>(weight + chunk.column) : filled<T, VEC>(1.0f);
  const Pack<T, VEC> b = bias ? load<VEC>(bias + chunk.column) : Pack<T, VEC>{};
  const float of_all = scale_of<FORMAT>(*amax);
  const Divisor by = Divisor::of(of_all);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;

#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const unsigned row = chunk.row + i;
    if (row >= rows) return;
    const float* from = statistics + static_cast<long long>(row) * 3;
    const Statistics found{from[0], from[1], from[2]};
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = normalised(x[i][j] - found.near, w[j], b[j], found);
    store_fp8<FORMAT>(q + static_cast<long long>(row) * n + chunk.column, y, by, true);
  }
}
