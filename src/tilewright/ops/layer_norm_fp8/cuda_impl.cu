// LayerNorm, quantised to fp8 before it leaves the registers.
//
// layer_norm_fp8_rows   persistent groups of lanes, blocks or clusters walk down the rows. The next
//                       rows travel through a ring; a row leaves it once, as floats, and stays in
//                       registers until it is fp8. Weight and bias stay in shared memory.
// layer_norm_fp8_again  the second pass of one scale for the whole tensor: the first one has stored
//                       each row's statistics and the largest magnitude; this one quantises.
//
// Arithmetic is as long as the traffic, so it is counted: mean and variance come out of one pass and
// one reduction, and of a second one around the mean where that is far from zero (moments.cuh).
// Bytes per element of T: 1 read (2 with one scale for the tensor); one byte written.

#include "tilewright/fp8.cuh"
#include "tilewright/moments.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/ring.cuh"
#include "tilewright/rows.cuh"
#include "tilewright/vector.cuh"

using namespace tilewright;

struct Statistics {
  float centre;  // what is taken from every element
  float shift;   // from the mean to it, in deviations
  float rstd;
};

// Both passes compute this, from the same numbers: the same bits. `left` is x - centre.
__device__ __forceinline__ float normalised(float left, float w, float b, const Statistics& row) {
  return fmaf(fmaf(left, row.rstd, row.shift), w, b);
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
  float largest = 0.0f;
  __syncthreads();
  if (OWNER == CLUSTER) cluster_wait();

  int stage = 0;
  unsigned turn = 0;
  for (unsigned row = seat.row; seat.leader(row, 1) < rows; row += seat.step) {
    const bool real = seat.ENDS_ALONE || row < rows;  // groups of a warp end together
    ring.arrive();
    float y[PACKS][VEC];  // x at first
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T, VEC> x = ring.take(stage, 0, i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[i][j] = x[j];
    }
    ask(row + STAGES * seat.step, stage);  // its slot is free

    const auto moments = [&](float centre) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        float sum = y[i][0], squares = sum * sum;  // a short chain loses fewer digits
#pragma unroll
        for (int j = 1; j < VEC; ++j) {
          sum += y[i][j];
          squares = fmaf(y[i][j], y[i][j], squares);
        }
        sums[0] += sum;
        sums[1] += squares;
      }
      row_reduce<Sum, OWNER>(sums, seat.lanes, exchange, turn++);
      return Moments(centre, sums, n, inverse);
    };
    Moments found = moments(0.0f);
    const bool far = found.template far<T>(1.0f);  // the scale is a float and shows every digit
    if (OWNER == GROUP ? __any_sync(FULL_WARP, far) : far) {
      const float centre = far ? found.rest : 0.0f;  // neighbours of a warp keep their bits
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const float taken = seat.column(i) < n ? centre : 0.0f;  // zeros beyond the row stay zero
#pragma unroll
        for (int j = 0; j < VEC; ++j) y[i][j] -= taken;
      }
      const Moments again = moments(centre);
      if (far) found = again;
    }
    const float rstd = rsqrtf(found.variance + eps);
    const Statistics of_row{found.centre, -found.rest * rstd, rstd};

#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      one_at_a_time();
      const Pack<T, VEC> w = weights.get(i), b = biases.get(i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) y[i][j] = normalised(y[i][j], w[j], b[j], of_row);
    }
    if constexpr (SCALING == PER_TENSOR) {
      // with eps = 0 a row past the end would bring NaN
      if (real) largest = Max::join(largest, largest_of(y));
      if (real && seat.first == 0) {
        float* to = statistics + static_cast<long long>(row) * 3;
        to[0] = of_row.centre, to[1] = of_row.shift, to[2] = of_row.rstd;
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
    for (int j = 0; j < VEC; ++j) y[j] = normalised(x[i][j] - found.centre, w[j], b[j], found);
    store_fp8<FORMAT>(q + static_cast<long long>(row) * n + chunk.column, y, by, true);
  }
}
