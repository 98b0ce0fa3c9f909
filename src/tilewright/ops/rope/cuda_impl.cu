// Rotary position embedding of q and k, in one launch.
//
// A thread holds one unit of a token's tables, VEC pairs, and turns that unit in HEADS heads: all of
// their packs are on their way before the first is turned. A unit is two packs, from which the elements
// of a pair are taken in registers, for free. Each element of q and k is read once and written once;
// the tables are read once from memory, and for other heads from L2.
//
// What is not rotated is copied by units of its own, two packs each.

#include "tilewright/vector.cuh"

using namespace tilewright;

// Mirror the structures in cuda_impl.py. Strides are in elements.
struct Strides {
  long long batch, token, head;
};

struct Side {  // q or k
  Strides to, from;
  int heads;
};

struct Sizes {
  unsigned token_count;  // of all sequences
  unsigned tokens;       // of each
  unsigned table_rows;
  int q_groups, groups;     // blocks that share a set of tokens: those of q, and all
  int units, copied_units;  // of a head: turned, and copied
  int head_dim, rotary_dim;
  int back;  // the transposed rotation
  long long table_batch, table_row, position_batch, position_token;
};

template <int N, class C> __device__ __forceinline__ void widen(float* to, const C* from) {
  constexpr int WIDTH = sizeof(C) * N > 16 ? 16 / sizeof(C) : N;
#pragma unroll
  for (int i = 0; i < N; i += WIDTH) {
    const Pack<C, WIDTH> pack = load<WIDTH>(from + i);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) to[i + j] = pack[j];
  }
}

// Packs of a unit lie half of what is rotated apart. Each holds one element of every pair ("halves"), or
// half of the pairs whole ("pairs"), and a warp's packs are neighbours: its stores fill whole sectors.
// Only where a pair is more than a pack, or parts on its way ("to_halves"), they lie side by side.
template <int VEC, bool SIDE_BY_SIDE> __device__ __forceinline__ int first_pack(int unit) {
  return unit * (SIDE_BY_SIDE ? 2 * VEC : VEC);
}
template <int VEC, bool SIDE_BY_SIDE> __device__ __forceinline__ int pack_distance(int half) {
  return SIDE_BY_SIDE ? VEC : half;
}

// The first and the second elements of a unit's pairs, from its packs and back.
template <bool PAIRS, class P, int VEC>
__device__ __forceinline__ void take_apart(float (&a)[VEC], float (&b)[VEC], const P& x, const P& y) {
  const auto element = [&](int j) { return j < VEC ? x[j] : y[j - VEC]; };
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    a[j] = element(PAIRS ? 2 * j : j);
    b[j] = element(PAIRS ? 2 * j + 1 : VEC + j);
  }
}

template <bool PAIRS, class T, int VEC>
__device__ __forceinline__ void put_together(
    Pack<T, VEC>& x, Pack<T, VEC>& y, const float (&a)[VEC], const float (&b)[VEC]) {
  float both[2][VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int first = PAIRS ? 2 * j : j, second = PAIRS ? 2 * j + 1 : VEC + j;
    both[first / VEC][first % VEC] = a[j];
    both[second / VEC][second % VEC] = b[j];
  }
  x = Pack<T, VEC>::of(both[0]);
  y = Pack<T, VEC>::of(both[1]);
}

// A token's unit of a table: an entry for each element of the forward's result, or for each pair.
template <int VEC, bool PAIRS, bool FULL, class C>
__device__ __forceinline__ void load_table(
    float (&a)[VEC], float (&b)[VEC], const C* row, int unit, int half) {
  constexpr bool SIDE_BY_SIDE = PAIRS && VEC == 1;
  if constexpr (FULL) {
    row += first_pack<VEC, SIDE_BY_SIDE>(unit);
    float entries[2 * VEC];
    widen<VEC>(entries, row);
    widen<VEC>(entries + VEC, row + pack_distance<VEC, SIDE_BY_SIDE>(half));
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      a[j] = entries[PAIRS ? 2 * j : j];
      b[j] = entries[PAIRS ? 2 * j + 1 : VEC + j];
    }
  } else {
    if constexpr (PAIRS && VEC > 1) {  // half of the pairs are in each pack
      widen<VEC / 2>(a, row + unit * VEC / 2);
      widen<VEC / 2>(a + VEC / 2, row + (half + unit * VEC) / 2);
    } else {
      widen<VEC>(a, row + unit * VEC);
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) b[j] = a[j];
  }
}

template <class T, class C, int VEC, bool READS_PAIRS, bool WRITES_PAIRS, bool FULL, int HEADS>
__global__ void __launch_bounds__(256) rope(
    T* q_out, T* k_out, const T* q, const T* k, const C* __restrict__ cos,
    const C* __restrict__ sin, const long long* __restrict__ positions,
    const int* __restrict__ short_positions, Side q_side, Side k_side, Sizes sizes) {
  // where am I: a token, one of its units, and some heads of q or of k
  const int group = blockIdx.x % sizes.groups;
  const int units = sizes.units + sizes.copied_units;
  const int unit = threadIdx.x % units, slot = threadIdx.x / units, slots = blockDim.x / units;
  const unsigned number = blockIdx.x / sizes.groups * slots + slot;
  if (slot >= slots || number >= sizes.token_count) return;
  const long long batch = number / sizes.tokens, token = number % sizes.tokens;

  const bool of_q = group < sizes.q_groups;
  const Side side = of_q ? q_side : k_side;
  const T* from = (of_q ? q : k) + batch * side.from.batch + token * side.from.token;
  T* to = (of_q ? q_out : k_out) + batch * side.to.batch + token * side.to.token;
  const int first_head = (of_q ? group : group - sizes.q_groups) * HEADS;
  const auto head = [&](int i) { return first_head + i; };
  const int half = sizes.rotary_dim / 2;

  constexpr bool PAIRS = READS_PAIRS && WRITES_PAIRS;
  constexpr bool READS_SIDE_BY_SIDE = READS_PAIRS && (VEC == 1 || !WRITES_PAIRS);
  constexpr bool WRITES_SIDE_BY_SIDE = WRITES_PAIRS && (VEC == 1 || !READS_PAIRS);
  const bool copies = unit >= sizes.units;
  const int copied = sizes.rotary_dim + (unit - sizes.units) * 2 * VEC;
  const bool two = !copies || copied + VEC < sizes.head_dim;  // the last unit may be one pack
  const int read = copies ? copied : first_pack<VEC, READS_SIDE_BY_SIDE>(unit);
  const int written = copies ? copied : first_pack<VEC, WRITES_SIDE_BY_SIDE>(unit);
  const int read_next = copies ? VEC : pack_distance<VEC, READS_SIDE_BY_SIDE>(half);
  const int write_next = copies ? VEC : pack_distance<VEC, WRITES_SIDE_BY_SIDE>(half);

  Pack<T, VEC> x[HEADS] = {}, y[HEADS] = {};
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    const T* packs = from + head(i) * side.from.head + read;
    if (head(i) < side.heads) x[i] = load<VEC>(packs);
    if (head(i) < side.heads && two) y[i] = load<VEC>(packs + read_next);
  }

  float cos_a[VEC], cos_b[VEC], sin_a[VEC], sin_b[VEC];
  if (!copies) {
    long long position = token;
    const long long at = batch * sizes.position_batch + token * sizes.position_token;
    if (positions) position = positions[at];
    if (short_positions) position = short_positions[at];
    if (static_cast<unsigned long long>(position) < sizes.table_rows) {
      const long long row = batch * sizes.table_batch + position * sizes.table_row;
      load_table<VEC, PAIRS, FULL>(cos_a, cos_b, cos + row, unit, half);
      load_table<VEC, PAIRS, FULL>(sin_a, sin_b, sin + row, unit, half);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {  // nothing is read outside the table
        cos_a[j] = cos_b[j] = sin_a[j] = sin_b[j] = __int_as_float(0x7fc00000);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    if (!copies) {
      float a[VEC], b[VEC], turned_a[VEC], turned_b[VEC];
      take_apart<READS_PAIRS>(a, b, x[i], y[i]);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float sine_a = sizes.back ? -sin_b[j] : sin_a[j];
        const float sine_b = sizes.back ? -sin_a[j] : sin_b[j];
        // which product is fused is said here: left to the compiler, widths may differ in bits
        turned_a[j] = __fmaf_rn(-b[j], sine_a, __fmul_rn(a[j], cos_a[j]));
        turned_b[j] = __fmaf_rn(a[j], sine_b, __fmul_rn(b[j], cos_b[j]));
      }
      put_together<WRITES_PAIRS>(x[i], y[i], turned_a, turned_b);
    }
    T* packs = to + head(i) * side.to.head + written;
    if (head(i) < side.heads) store<VEC>(packs, x[i]);
    if (head(i) < side.heads && two) store<VEC>(packs + write_next, y[i]);
  }
}
