// What include/tilewright/hopper.cuh says in PTX, in C++ for a CPU: every thread of a cluster is a
// fiber of one thread of the host, and whoever waits lets another run, drawn by chance.
//
// What the hardware does later is done late here, too: a box that travels arrives when somebody is
// drawn to bring it, and products are computed when their end is waited for. So a stage that is
// released too early is seen to change. If nobody can go on, the program says so and ends.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Index { unsigned x, y, z; };
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }

namespace tilewright {

constexpr unsigned FULL_WARP = 0xffffffff;
constexpr int WARP_SIZE = 32, WORKER = 128, LINE = 128, ATOM = 8 * LINE;
constexpr unsigned BASE = 1040;  // where dynamic shared memory begins: not where an atom does
using Signal = unsigned long long;
struct alignas(64) TensorMap { unsigned long long words[16]; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// --- who runs ------------------------------------------------------------------------------------

struct Barrier { int arrivals = 0, left = 0, bytes = 0; unsigned phase = 0; };
struct Meeting { int here = 0; unsigned round = 0; };

using Box = std::tuple<unsigned long long, int, int, int>;  // a tensor, and where its part begins

struct Block {
  std::vector<unsigned char> memory;
  std::map<unsigned, Barrier> barriers;
  std::vector<Box> told, fetched;  // boxes, to L2 and to itself
  Meeting all;
  std::vector<Meeting> warps;
  int threads = 0;  // that have not ended
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  std::function<bool()> ready;  // empty: it can run
  std::deque<std::vector<std::function<void()>>> products;  // batches, the last one still open
  Index thread, block;
  unsigned rank;
  bool is_done = false;
  bool may_read = false;  // what the kernel before wrote
};

struct World {
  ucontext_t home;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::vector<std::function<void()>> under_way;  // boxes
  Meeting cluster;
  std::mt19937 chance;
  Fiber* now = nullptr;
  bool is_home = true;
  std::string error;
  Index grid;
};

inline World* world;

#define threadIdx (tilewright::world->now->thread)
#define blockIdx (tilewright::world->now->block)
#define gridDim (tilewright::world->grid)

inline Block& here() { return world->blocks[world->now->rank]; }

// Ends the launch, out of whichever fiber it is.
inline void fail(const char* why) {
  if (world->error.empty()) {
    world->error = "thread " + std::to_string(threadIdx.x) + " of block " +
                   std::to_string(blockIdx.x) + ": " + why;
  }
  if (world->is_home) return;
  for (;;) swapcontext(&world->now->context, &world->home);
}

inline void until(std::function<bool()> ready) {
  if (ready()) return;
  world->now->ready = std::move(ready);
  swapcontext(&world->now->context, &world->home);
}

// Everybody of `size` comes before anybody goes.
inline void meet(Meeting& meeting, int size) {
  const unsigned round = meeting.round;
  if (++meeting.here == size) {
    meeting.here = 0;
    ++meeting.round;
  }
  until([&meeting, round] { return meeting.round != round; });
}

inline void __syncthreads() { meet(here().all, here().warps.size() * WARP_SIZE); }
inline void __syncwarp() { meet(here().warps[threadIdx.x / WARP_SIZE], WARP_SIZE); }

inline int __shfl_sync(unsigned, int value, int) { return value; }  // that all lanes have

inline unsigned cluster_rank() { return world->now->rank; }
inline void meet_cluster() { meet(world->cluster, world->fibers.size()); }
inline void cluster_arrive() {}
inline void cluster_wait() { meet_cluster(); }

// --- shared memory and barriers ------------------------------------------------------------------

inline unsigned shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - here().memory.data();
  if (offset < 0 || offset >= static_cast<long>(here().memory.size())) fail("not its memory");
  return offset;
}

template <int ALIGNMENT> unsigned char* shared_memory() {
  return here().memory.data() + (BASE + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

template <class T> T* in_block(T* pointer, int rank) {
  if (!world->blocks[rank].threads) fail("a block that has ended is written to");
  return reinterpret_cast<T*>(world->blocks[rank].memory.data() + shared_address(pointer));
}

inline void make_barrier(Signal& barrier, int arrivals) {
  here().barriers[shared_address(&barrier)] = {arrivals, arrivals, 0, 0};
}
inline void barriers_ready() {}

inline void turn(Barrier& barrier) {
  if (barrier.left < 0) fail("more arrivals than a phase has");
  if (barrier.left == 0 && barrier.bytes == 0) {
    barrier.left = barrier.arrivals;
    ++barrier.phase;
  }
}

inline Barrier& barrier_at(unsigned address, unsigned rank) {
  if (rank >= world->blocks.size()) fail("no such block is in the cluster");
  if (!world->blocks[rank].threads) fail("a block that has ended is written to");
  auto& known = world->blocks[rank].barriers;
  if (!known.count(address)) fail("no barrier is there");
  return known[address];
}

inline void arrive_at(Signal& signal, unsigned rank) {
  Barrier& barrier = barrier_at(shared_address(&signal), rank);
  --barrier.left;
  turn(barrier);
}
inline void expect(Signal& signal, int bytes) {
  Barrier& barrier = barrier_at(shared_address(&signal), world->now->rank);
  barrier.bytes += bytes;
  --barrier.left;
  turn(barrier);
}
inline void await(Signal& signal, unsigned phase) {
  Barrier& barrier = barrier_at(shared_address(&signal), world->now->rank);
  until([&barrier, phase] { return (barrier.phase & 1) != phase; });
}

// --- tiles on their way --------------------------------------------------------------------------

// A tensor of three dims of halves, the innermost first.
struct Tensor {
  const unsigned char* start;
  long long sizes[3], strides[3];  // strides in bytes
  int box[2];
};

inline unsigned swapped(unsigned address) { return address ^ (address >> 7 & 7) << 4; }
inline void look_ahead(const TensorMap&) {}

inline void look_ahead(const TensorMap& map, int x, int y, int z) {
  if (world->now->may_read) fail("too late for a look ahead");
  here().told.push_back({map.words[0], x, y, z});
}

template <int BLOCKS>
void travel(void* to, const TensorMap& map, Signal& signal, int x, int y, int z) {
  const Tensor* tensor = reinterpret_cast<const Tensor*>(map.words[0]);
  const unsigned at = shared_address(to), told = shared_address(&signal);
  if (at % ATOM) fail("a box that does not begin where an atom does");
  if (tensor->box[0] * 2 != LINE) fail("a box whose rows are no lines");
  if (!world->now->may_read) fail("a box that the kernel before may still write");
  here().fetched.push_back({map.words[0], x, y, z});
  for (unsigned rank = 0; rank < world->blocks.size(); ++rank) {
    if (BLOCKS == 1 ? rank != world->now->rank : rank >= BLOCKS) continue;
    world->under_way.push_back([=] {
      Block& block = world->blocks[rank];
      for (int row = 0; row < tensor->box[1]; ++row) {
        for (int column = 0; column < tensor->box[0]; ++column) {
          const long long place[] = {x + column, y + row, z};
          const unsigned char* from = tensor->start;
          bool inside = true;
          for (int dim = 0; dim < 3; ++dim) {
            inside &= place[dim] >= 0 && place[dim] < tensor->sizes[dim];
            from += place[dim] * tensor->strides[dim];
          }
          const unsigned address = swapped(at + row * LINE + column * 2);
          if (inside) std::memcpy(&block.memory[address], from, 2);
          else std::memset(&block.memory[address], 0, 2);
        }
      }
      Barrier& barrier = barrier_at(told, rank);
      barrier.bytes -= tensor->box[1] * LINE;
      turn(barrier);
    });
  }
}

// --- kernels in a row ----------------------------------------------------------------------------

inline void wait_for_kernel_before() { world->now->may_read = true; }
inline void let_next_kernel_begin() {}

// --- products ------------------------------------------------------------------------------------

template <int COUNT> void take_registers() {}
template <int COUNT> void give_registers() {}
template <int COUNT> void hands_off(float (&)[COUNT]) {}

inline unsigned long long operand(const void* tile, int beyond) {
  return shared_address(tile) >> 4 | static_cast<unsigned long long>(beyond >> 4) << 16 |
         static_cast<unsigned long long>(ATOM >> 4) << 32 | 1ull << 62;
}

inline float half(unsigned short bits, bf16) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
inline float half(unsigned short bits, f16) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}

// Element `i` across K and `k` along it, as wgmma finds it.
template <class T> float element(const Block& block, unsigned long long operand, bool turned, int i, int k) {
  const unsigned start = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4;
  const unsigned stride = (operand >> 32 & 0x3fff) << 4;
  const unsigned at = turned ? start + i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * LINE
                             : start + i / 8 * stride + i % 8 * LINE + k * 2;
  if (at + 2 > block.memory.size()) fail("an operand that ends outside of shared memory");
  unsigned short bits;
  std::memcpy(&bits, &block.memory[swapped(at)], 2);
  return half(bits, T{});
}

template <class T, int COLUMNS, bool A_BY_COLUMNS, bool B_BY_ROWS> struct Products {
  static void add(
      float (&sums)[COLUMNS / 2], unsigned long long a, unsigned long long b, int is_added) {
    float* d = sums;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x % WORKER / WARP_SIZE;
    const Block& block = here();
    world->now->products.back().push_back([=, &block] {
      for (int i = 0; i < COLUMNS / 2; ++i) {
        const int row = warp * 16 + lane / 4 + (i % 4 / 2) * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = is_added ? d[i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
          sum += element<T>(block, a, A_BY_COLUMNS, row, k) *
                 element<T>(block, b, B_BY_ROWS, column, k);
        }
        d[i] = sum;
      }
    });
  }
};

inline void begin_products() {
  if (!world->now->may_read) fail("results that the kernel before may still read or write");
  world->now->products.emplace_back();
}
inline void end_products() {}
template <int UNDER_WAY> void wait_for_products() {
  auto& batches = world->now->products;
  for (; batches.size() > UNDER_WAY; batches.pop_front()) {
    for (auto& product : batches.front()) product();
  }
  __syncwarp();  // lanes wait together, and for the products of all
}

template <class T> unsigned short rounded(float x) {
  if constexpr (std::is_same_v<T, f16>) {
    const _Float16 narrow = x;
    unsigned short bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
  } else {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}
template <class T> unsigned two_from_float(float first, float second) {
  return rounded<T>(first) | static_cast<unsigned>(rounded<T>(second)) << 16;
}

// --- a launch ------------------------------------------------------------------------------------

inline std::function<void()> entry;

inline void begin() {
  entry();
  world->now->is_done = true;
  --here().threads;
  swapcontext(&world->now->context, &world->home);
}

// Whether L2 was told of as many boxes of a tensor as there should be: the first that are fetched.
inline bool told_rightly(const Block& block, unsigned count) {
  if (block.told.size() != count) return false;
  auto told = block.told.begin();
  for (const Box& box : block.fetched) {
    if (told == block.told.end()) break;
    if (std::get<0>(box) == std::get<0>(*told) && box != *told++) return false;
  }
  return told == block.told.end();
}

// Cluster after cluster; the blocks of one run together. `early` tells of how many boxes a block of a
// cluster should tell L2. Returns what went wrong, or nothing.
inline std::string launch(
    std::function<void()> kernel, unsigned grid, unsigned cluster, unsigned threads, unsigned shared,
    unsigned seed, std::function<unsigned(unsigned)> early) {
  entry = std::move(kernel);
  std::vector<unsigned> order;
  for (unsigned first = 0; first < grid; first += cluster) order.push_back(first);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (unsigned first : order) {
    World made;
    world = &made;
    made.chance.seed(seed + first);
    made.grid = {grid, 1, 1};
    made.blocks.resize(cluster);
    for (Block& block : made.blocks) {
      block.memory.assign(BASE + shared, 0xff);  // NaN
      block.warps.resize(threads / WARP_SIZE);
      block.threads = threads;
    }
    made.fibers.resize(cluster * threads);
    made.now = &made.fibers[0];
    for (unsigned i = 0; i < made.fibers.size(); ++i) {
      constexpr unsigned STACK = 1 << 16;
      Fiber& fiber = made.fibers[i];
      fiber.rank = i / threads;
      fiber.block = {first + fiber.rank, 0, 0};
      fiber.thread = {i % threads, 0, 0};
      fiber.stack = std::make_unique<unsigned char[]>(STACK);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = STACK;
      makecontext(&fiber.context, begin, 0);
    }
    for (unsigned round = 0, ahead = 0;; ++round) {
      std::vector<Fiber*> able, others;
      bool is_over = true;
      if (round % 64 == 0) ahead = made.chance() % (2 * cluster);  // a block, or none
      for (Fiber& fiber : made.fibers) {
        is_over &= fiber.is_done;
        if (fiber.is_done || (fiber.ready && !fiber.ready())) continue;
        (fiber.rank == ahead || ahead >= cluster ? able : others).push_back(&fiber);
      }
      if (able.empty()) able = std::move(others);
      if (is_over) break;
      // a box arrives now and then, and whenever nobody can go on
      if (!made.under_way.empty() && (able.empty() || made.chance() % 4 == 0)) {
        const unsigned drawn = made.chance() % made.under_way.size();
        made.under_way[drawn]();
        made.under_way.erase(made.under_way.begin() + drawn);
        if (!made.error.empty()) return made.error;
        continue;
      }
      if (able.empty()) {
        return std::string("nobody can go on");
      }
      std::shuffle(able.begin(), able.end(), made.chance);
      if (made.chance() % 2) able.resize((able.size() + 1) / 2);
      for (Fiber* fiber : able) {
        made.now = fiber;
        fiber->ready = nullptr;
        made.is_home = false;
        swapcontext(&made.home, &fiber->context);
        made.is_home = true;
        if (!made.error.empty()) return made.error;
      }
    }
    for (unsigned rank = 0; rank < cluster; ++rank) {
      if (!told_rightly(made.blocks[rank], early(rank))) return std::string("L2 is told otherwise");
    }
    if (!made.under_way.empty()) {
      return std::string("blocks ended before all that they had asked for was there");
    }
  }
  return std::string();
}

}  // namespace tilewright
