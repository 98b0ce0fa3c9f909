// Matmul for Hopper: blocks that stay on their SMs, alone or in clusters of two kinds.
//
// A block computes tiles of 128 rows, or of 64 if there are no more, by COLUMNS, one after another:
//   producer   one thread: boxes of both operands to shared memory by TMA, STAGES steps ahead
//   consumers  two of four warps, or one, 64 rows each: products on the tensor cores, sums in registers
// COLUMNS is any multiple of 8 for which wgmma is declared, so that work can be dealt out to 132 SMs
// evenly. A warp stores its rows itself, 128 bytes at a time. Clusters are TALL: their blocks have
// tiles one below another, of the same columns of b, and each fetches its share of them for all, so
// that L2 is asked once. Or they are DEEP: their blocks have parts of one tile along K, and the sums
// meet in shared memory; such a block has one tile, for there are few of them.
// The kernel is launched as one that follows: while the kernel before it ends, it makes its barriers
// and, where a block has one tile, has the first boxes of b brought to L2. It reads and writes when
// that one has ended.
#include "tilewright/hopper.cuh"

namespace tilewright {

constexpr int SHARE = 64;  // rows of a consumer
constexpr int DEPTH = 64;  // elements along K of a step
constexpr int EARLY = 2;   // steps whose part of b comes to L2 while the kernel before ends
// Registers of a thread: three groups of 128 begin with 168 each, and one gives to two. A block that
// takes more than it began with waits for ever.
constexpr int OF_ALL = 168, OF_CONSUMERS = 224, OF_PRODUCER = 56;
static_assert(2 * OF_CONSUMERS + OF_PRODUCER <= 3 * OF_ALL, "what one gives the others take");
constexpr int MOST_PITCH = LINE + 32;
constexpr int WAITING = 16 * MOST_PITCH;  // bytes of a warp's rows that wait to be stored

struct Sizes {
  int m, n;
  int steps;             // along K
  int m_tiles, n_tiles;  // of a whole cluster
  int pieces;            // of all matrices
  int group;             // tiles of rows side by side, so that they meet in L2
  int bytes;             // that arrive in a step
  int a_stacked, b_stacked;
};

struct Place { int matrix, row, column; };

template <
    class T_, class Out_, int WORKERS_, int COLUMNS_, int STAGES_, bool A_ROWS, bool B_ROWS, int TALL_,
    int DEEP_>
struct Plan {
  using T = T_;
  using Out = Out_;
  static constexpr int WORKERS = WORKERS_, ROWS = WORKERS * SHARE;
  static constexpr int THREADS = (WORKERS + 1) * WORKER, WARPS = WORKERS * WORKER / WARP_SIZE;
  static constexpr int COLUMNS = COLUMNS_, STAGES = STAGES_;
  static constexpr int TALL = TALL_, DEEP = DEEP_, BLOCKS = TALL * DEEP;
  static constexpr bool A_BY_ROWS = A_ROWS, B_BY_ROWS = B_ROWS;
  // What lies along K is fetched in one box, of b in one for each block that shares it. What lies
  // across K comes 64 rows or columns at a time, as wide as a line is.
  static constexpr int A_BOXES = A_BY_ROWS ? 1 : WORKERS, A_ROWS_EACH = ROWS / A_BOXES;
  static constexpr int B_BOXES = B_BY_ROWS ? (COLUMNS + 63) / 64 : TALL;
  static constexpr int B_COLUMNS_EACH = B_BY_ROWS ? 64 : COLUMNS / TALL;
  static constexpr int A_BOX = (A_BY_ROWS ? A_ROWS_EACH : DEPTH) * LINE;
  static constexpr int B_BOX = (B_BY_ROWS ? DEPTH : B_COLUMNS_EACH) * LINE;
  static constexpr int A_BYTES = A_BOXES * A_BOX, STEP = A_BYTES + B_BOXES * B_BOX;
  // Dynamic shared memory, one atom for its alignment among them.
  static constexpr int SHARED = ATOM + STAGES * STEP + WARPS * WAITING + 2 * STAGES * sizeof(Signal);
  // Where blocks that are DEEP leave sums for one another, when the stages have been read.
  static constexpr int SUMS = WORKER * COLUMNS / 2;  // of a consumer
  static_assert((DEEP - 1) * SUMS * 4 <= STAGES * STEP, "sums have room");
  static_assert(TALL == 1 || DEEP == 1, "a cluster is tall or deep");
  static_assert(COLUMNS % (8 * TALL) == 0, "boxes are whole atoms");
};

// --- where am I ----------------------------------------------------------------------------------

template <class P> __device__ __forceinline__ int rank() {
  return P::BLOCKS == 1 ? 0 : cluster_rank();
}

// The first step along K of a block, and the one after its last.
template <class P> __device__ __forceinline__ int first_step(const Sizes& sizes) {
  return P::DEEP == 1 ? 0 : rank<P>() * sizes.steps / P::DEEP;
}
template <class P> __device__ __forceinline__ int end_step(const Sizes& sizes) {
  return P::DEEP == 1 ? sizes.steps : (rank<P>() + 1) * sizes.steps / P::DEEP;
}

// The last tiles end where the matrix does, and compute once more what their neighbours have: TMA takes
// long over rows that are not there (H200, 2026-11: 64 of 128 rows beyond the last, twice the time).
template <class P> __device__ __forceinline__ Place place(int piece, const Sizes& sizes) {
  const int of_matrix = sizes.m_tiles * sizes.n_tiles;
  const int matrix = piece / of_matrix, rest = piece % of_matrix;
  const int wide = sizes.group * sizes.n_tiles, above = rest / wide * sizes.group;
  const int size = min(sizes.m_tiles - above, sizes.group);
  const int row = above + rest % wide % size, column = rest % wide / size;
  const int below = P::TALL == 1 ? 0 : rank<P>();
  const int top = (row * P::TALL + below) * P::ROWS, left = column * P::COLUMNS;
  return {matrix, max(min(top, sizes.m - P::ROWS), 0), max(min(left, sizes.n - P::COLUMNS), 0)};
}

// The stages of the ring, and the barriers that say who may use them.
template <class P> struct Ring {
  unsigned char* stages;
  Signal *full, *empty;
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ unsigned char* a() const { return stages + stage * P::STEP; }
  __device__ __forceinline__ unsigned char* b() const { return a() + P::A_BYTES; }
  __device__ __forceinline__ int before() const { return (stage ? stage : P::STAGES) - 1; }
  __device__ __forceinline__ void next() {
    stage = stage + 1 < P::STAGES ? stage + 1 : 0;
    phase ^= stage == 0;
  }
};

// --- the producer --------------------------------------------------------------------------------

// The boxes of b that this block fetches in a step: their number, and where they begin.
template <class P, class Each>
__device__ __forceinline__ void boxes_of_b(
    const Place& at, int step, const Sizes& sizes, const Each& each) {
#pragma unroll
  for (int i = 0; i < P::B_BOXES; ++i) {
    if (P::TALL > 1 && i % P::TALL != rank<P>()) continue;
    const int column = at.column + i * P::B_COLUMNS_EACH, k = step * DEPTH;
    each(i, P::B_BY_ROWS ? column : k, P::B_BY_ROWS ? k : column, sizes.b_stacked ? at.matrix : 0);
  }
}

// Weights lie in memory, and the kernel before has mostly nothing to do with them. If it has, nothing
// is wrong: L2 is where it writes.
template <class P>
__device__ __forceinline__ void look_ahead_to_b(const TensorMap& b, const Sizes& sizes, int first) {
  const Place at = place<P>(first, sizes);
  const int end = min(first_step<P>(sizes) + EARLY, end_step<P>(sizes));
#pragma unroll 1
  for (int step = first_step<P>(sizes); step < end; ++step) {
    boxes_of_b<P>(at, step, sizes, [&](int, int x, int y, int z) { look_ahead(b, x, y, z); });
  }
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap& a, const TensorMap& b, Ring<P> ring, const Sizes& sizes, int first,
    int stride) {
  for (int piece = first; piece < sizes.pieces; piece += stride) {
    const Place at = place<P>(piece, sizes);
    const int of_a = sizes.a_stacked ? at.matrix : 0;
    for (int step = first_step<P>(sizes); step < end_step<P>(sizes); ++step, ring.next()) {
      Signal& full = ring.full[ring.stage];
      await(ring.empty[ring.stage], ring.phase ^ 1);  // at first all stages are empty
      expect(full, sizes.bytes);
      const int k = step * DEPTH;
#pragma unroll
      for (int i = 0; i < P::A_BOXES; ++i) {
        const int row = at.row + i * P::A_ROWS_EACH;
        travel<1>(ring.a() + i * P::A_BOX, a, full, P::A_BY_ROWS ? k : row,
                  P::A_BY_ROWS ? row : k, of_a);
      }
      boxes_of_b<P>(at, step, sizes, [&](int i, int x, int y, int z) {
        travel<P::TALL>(ring.b() + i * P::B_BOX, b, full, x, y, z);
      });
    }
  }
  // Others write to a block's barriers until all of its stages are free: it stays so long.
  for (int i = 0; i < P::STAGES; ++i, ring.next()) await(ring.empty[ring.stage], ring.phase ^ 1);
}

// --- a consumer ----------------------------------------------------------------------------------

// The products of a step: four, of 16 elements along K.
template <class P>
__device__ __forceinline__ void multiply(
    float (&sums)[P::COLUMNS / 2], const Ring<P>& ring, int worker, bool is_first) {
  constexpr int A_STEP = P::A_BY_ROWS ? 32 : 2 * ATOM, B_STEP = P::B_BY_ROWS ? 2 * ATOM : 32;
  const auto a = operand(ring.a() + worker * (SHARE * LINE), P::A_BOX);
  const auto b = operand(ring.b(), P::B_BOX);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Products<typename P::T, P::COLUMNS, !P::A_BY_ROWS, P::B_BY_ROWS>::add(
        sums, a + (i * A_STEP >> 4), b + (i * B_STEP >> 4), !is_first || i);
  }
}

// This warp has read a stage: whoever fetches something for this block may fill it again.
template <class P> __device__ __forceinline__ void release(const Ring<P>& ring, int stage, int lane) {
  if (lane < P::TALL) arrive_at(ring.empty[stage], P::TALL == 1 ? rank<P>() : lane);
  __syncwarp();
}

// The sums of a warp, 16 rows by COLUMNS, through shared memory in lines of 128 bytes. A lane holds
// two columns of every eight, of row lane / 4 and of the row eight below.
template <class P>
__device__ __forceinline__ void store(
    typename P::Out* c, const float (&sums)[P::COLUMNS / 2], unsigned char* waiting, const Place& at,
    int row, const Sizes& sizes, int lane) {
  using Out = typename P::Out;
  constexpr int EIGHTS = LINE / sizeof(Out) / 8, VEC = 16 / sizeof(Out);
  constexpr int PITCH = sizeof(Out) == 4 ? MOST_PITCH : LINE + 16;  // no two rows in the same banks
  c += (static_cast<long long>(at.matrix) * sizes.m + row) * sizes.n + at.column;
#pragma unroll
  for (int part = 0; part * EIGHTS < P::COLUMNS / 8; ++part) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const int eight = part * EIGHTS + i;
      if (eight >= P::COLUMNS / 8) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = sums[eight * 4 + half * 2], second = sums[eight * 4 + half * 2 + 1];
        unsigned char* to = waiting + (lane / 4 + half * 8) * PITCH;
        to += (i * 8 + lane % 4 * 2) * sizeof(Out);
        if constexpr (sizeof(Out) == 4) {
          *reinterpret_cast<float2*>(to) = {first, second};
        } else {
          *reinterpret_cast<unsigned*>(to) = two_from_float<Out>(first, second);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = i * 4 + lane / 8, column = part * EIGHTS * 8 + lane % 8 * VEC;
      const uint4 found = *reinterpret_cast<const uint4*>(waiting + line * PITCH + lane % 8 * 16);
      if (row + line < sizes.m && column < P::COLUMNS && at.column + column < sizes.n) {
        *reinterpret_cast<uint4*>(c + static_cast<long long>(line) * sizes.n + column) = found;
      }
    }
    __syncwarp();
  }
}

// Sums of a tile whose parts along K the blocks of a cluster have. Those of consumer `worker` meet in
// the block that many behind the first one, in the order of K; returns whether that is this one. A
// thread holds the same elements in every block.
template <class P>
__device__ __forceinline__ bool gather(
    float (&sums)[P::COLUMNS / 2], unsigned char* stages, int worker) {
  float* room = reinterpret_cast<float*>(stages);  // of one consumer: the other's is elsewhere
  const int lane = threadIdx.x % WORKER, home = worker % P::DEEP, here = rank<P>();
  cluster_arrive();  // all have read their stages
  cluster_wait();
  if (here != home) {
    float* left = in_block(room + (here - (here > home)) * P::SUMS, home);
#pragma unroll
    for (int i = 0; i < P::COLUMNS / 2; ++i) left[i * WORKER + lane] = sums[i];
  }
  cluster_arrive();  // and left their sums
  cluster_wait();
  if (here != home) return false;
#pragma unroll
  for (int i = 0; i < P::COLUMNS / 2; ++i) {
    float total = 0.0f;
#pragma unroll
    for (int part = 0; part < P::DEEP; ++part) {
      total += part == home ? sums[i] : room[(part - (part > home)) * P::SUMS + i * WORKER + lane];
    }
    sums[i] = total;
  }
  return true;
}

template <class P>
__device__ __forceinline__ void consume(
    typename P::Out* c, Ring<P> ring, unsigned char* waiting, const Sizes& sizes, int first,
    int stride) {
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int worker = __shfl_sync(FULL_WARP, warp / 4, 0);  // uniform, as the compiler should know
  const int first_one = first_step<P>(sizes), end = end_step<P>(sizes);
  for (int piece = first; piece < sizes.pieces; piece += stride) {
    const Place at = place<P>(piece, sizes);
    float sums[P::COLUMNS / 2];
    for (int step = first_one; step < end; ++step, ring.next()) {
      await(ring.full[ring.stage], ring.phase);
      hands_off(sums);
      begin_products();
      multiply<P>(sums, ring, worker, step == first_one);
      end_products();
      hands_off(sums);
      if (step > first_one) {  // the products of the step before have ended
        wait_for_products<1>();
        release<P>(ring, ring.before(), lane);
      }
    }
    wait_for_products<0>();
    hands_off(sums);
    release<P>(ring, ring.before(), lane);
    if constexpr (P::DEEP > 1) {
      if (!gather<P>(sums, ring.stages, worker)) continue;
    }
    store<P>(c, sums, waiting + warp * WAITING, at, at.row + warp * 16, sizes, lane);
  }
}

// --- the block -----------------------------------------------------------------------------------

template <
    class T, class Out, int WORKERS, int COLUMNS, int STAGES, bool A_BY_ROWS, bool B_BY_ROWS, int TALL,
    int DEEP>
__global__ void __launch_bounds__((WORKERS + 1) * WORKER, 1) matmul_tiles(
    Out* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, Sizes sizes) {
  using P = Plan<T, Out, WORKERS, COLUMNS, STAGES, A_BY_ROWS, B_BY_ROWS, TALL, DEEP>;
  // TMA swaps by address: stages begin where an atom does. Behind them wait rows, and the barriers.
  unsigned char* stages = shared_memory<ATOM>();
  unsigned char* waiting = stages + STAGES * P::STEP;
  Signal* full = reinterpret_cast<Signal*>(waiting + P::WARPS * WAITING);
  Signal* empty = full + STAGES;
  if (threadIdx.x == 0) {
    look_ahead(a);
    look_ahead(b);
    for (int i = 0; i < STAGES; ++i) {
      make_barrier(full[i], 1);
      make_barrier(empty[i], TALL * P::WARPS);
    }
    barriers_ready();
  }
  const int first = blockIdx.x / P::BLOCKS, stride = gridDim.x / P::BLOCKS;
  // H200, 2026-11: up to 2 % where a block has one tile, nothing or less where it has more.
  if (threadIdx.x == WORKERS * WORKER && sizes.pieces <= stride) {
    look_ahead_to_b<P>(b, sizes, first);
  }
  if constexpr (TALL == 1) __syncthreads(); else meet_cluster();
  wait_for_kernel_before();
  let_next_kernel_begin();

  Ring<P> ring{stages, full, empty};
  if (threadIdx.x >= WORKERS * WORKER) {
    if constexpr (WORKERS > 1) give_registers<OF_PRODUCER>();
    if (threadIdx.x == WORKERS * WORKER) produce<P>(a, b, ring, sizes, first, stride);
    __syncwarp();
    if constexpr (DEEP > 1) {  // a cluster meets with all of its threads
      for (int i = 0; i < 2; ++i) cluster_arrive(), cluster_wait();
    }
  } else {
    if constexpr (WORKERS > 1) take_registers<OF_CONSUMERS>();
    consume<P>(c, ring, waiting, sizes, first, stride);
  }
}

}  // namespace tilewright
