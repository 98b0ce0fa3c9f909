// What a matrix kernel of SM 90 says in PTX: barriers that count bytes, tiles that travel by TMA to
// one block of a cluster or to several, products of four warps, and registers that change hands.
//
// A tile in shared memory is made of chunks: lines of 128 bytes, whose 16-byte parts TMA swaps so
// that eight lines of one column lie in different banks (its 128-byte swizzle). wgmma reads them so.
#pragma once

#include "tilewright/cluster.cuh"
#include "tilewright/copy.cuh"
#include "tilewright/reduce.cuh"
#include "tilewright/vector.cuh"

namespace tilewright {

struct alignas(64) TensorMap { unsigned long long words[16]; };  // the driver's CUtensorMap

constexpr int WORKER = 128;  // threads that multiply together
constexpr int LINE = 128;    // bytes
constexpr int ATOM = 8 * LINE;  // bytes of eight lines, after which the swaps repeat

#if __CUDA_ARCH__ >= 900

// The dynamic shared memory, from the first multiple of ALIGNMENT on.
template <int ALIGNMENT> __device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ Line memory[];
  const unsigned off = (ALIGNMENT - shared_address(memory) % ALIGNMENT) % ALIGNMENT;
  return reinterpret_cast<unsigned char*>(memory) + off;
}

// --- barriers ------------------------------------------------------------------------------------

// One thread makes a barrier of so many arrivals; `barriers_ready` ends a row of them.
__device__ __forceinline__ void make_barrier(Signal& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// All threads of a cluster, once its barriers are ready: from here on blocks write to each other.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  cluster_wait();
}

// What has this name in block `rank` of the cluster.
template <class T> __device__ __forceinline__ T* in_block(T* here, int rank) {
  unsigned long long there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// Arrives at the barrier of this name in block `rank` of the cluster. What was read before it was read
// by the tensor cores, whose end was waited for: wider semantics would cost a fence of the whole GPU.
__device__ __forceinline__ void arrive_at(Signal& barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(&barrier)), "r"(rank) : "memory");
}

// Waits for phase number `phase` (modulo 2). Only TMA wrote what is there now.
__device__ __forceinline__ void await(Signal& barrier, unsigned phase) {
  asm volatile(
      "{\n"
      ".reg .pred here;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 here, [%0], %1;\n"
      "@!here bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)), "r"(phase) : "memory");
}

// --- tiles on their way --------------------------------------------------------------------------

__device__ __forceinline__ void look_ahead(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One box of a tensor, as below, to L2.
__device__ __forceinline__ void look_ahead(const TensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z) : "memory");
}

// One box of a tensor of three dims, the innermost first, to `to` in every one of the BLOCKS of a
// cluster, or in this block if there is but one; each one's barrier, of the same name, counts the
// bytes.
template <int BLOCKS>
__device__ __forceinline__ void travel(
    void* to, const TensorMap& map, Signal& barrier, int x, int y, int z) {
  if constexpr (BLOCKS == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)), "l"(&map),
        "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z) : "memory");
  } else {
    constexpr unsigned short ALL = (1 << BLOCKS) - 1;
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "h"(ALL) : "memory");
  }
}

// --- kernels in a row ----------------------------------------------------------------------------

// For a kernel that `follows` (nvrtc.bind): what the kernel before it wrote can be seen from here on,
// and what that one reads may be written.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A kernel behind this one that follows may come as soon as all blocks are here and SMs have room.
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- registers -----------------------------------------------------------------------------------

template <int COUNT> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- products ------------------------------------------------------------------------------------

// How wgmma finds an operand: where it starts, and the strides of its atoms. Along K its lines
// follow each other, 8 to an atom; across K an atom is 64 columns of 8 lines, one for each k, and
// `beyond` bytes lead to the next 64 columns.
__device__ __forceinline__ unsigned long long operand(const void* tile, int beyond) {
  const unsigned long long start = (shared_address(tile) & 0x3ffff) >> 4;
  return start | static_cast<unsigned long long>(beyond >> 4) << 16 |
         static_cast<unsigned long long>(ATOM >> 4) << 32 | 1ull << 62;
}

// Sums that are under way are nobody's: the compiler may neither move nor look at them.
template <int COUNT> __device__ __forceinline__ void hands_off(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int UNDER_WAY> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
}

// 64 rows by COLUMNS, 16 halves along K: `sums` plus the product, or the product alone.
template <class T, int COLUMNS, bool A_BY_COLUMNS, bool B_BY_ROWS> struct Products;

#define TILEWRIGHT_8(I)                                                                            \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]),      \
      "+f"(d[I + 6]), "+f"(d[I + 7])

#define TILEWRIGHT_WGMMA(COLUMNS, HALF, REGISTERS, A, B, ADD, TURN_A, TURN_B, ...)                 \
  template <class T, bool A_BY_COLUMNS, bool B_BY_ROWS>                                            \
  struct Products<T, COLUMNS, A_BY_COLUMNS, B_BY_ROWS> {                                           \
    static __device__ __forceinline__ void add(                                                    \
        float (&d)[HALF], unsigned long long a, unsigned long long b, int is_added) {              \
      if constexpr (is_bf16<T>) {                                                                  \
        TILEWRIGHT_WGMMA_OF("bf16", COLUMNS, REGISTERS, A, B, ADD, TURN_A, TURN_B, __VA_ARGS__);   \
      } else {                                                                                     \
        TILEWRIGHT_WGMMA_OF("f16", COLUMNS, REGISTERS, A, B, ADD, TURN_A, TURN_B, __VA_ARGS__);    \
      }                                                                                            \
    }                                                                                              \
  }

#define TILEWRIGHT_WGMMA_OF(TYPE, COLUMNS, REGISTERS, A, B, ADD, TURN_A, TURN_B, ...)              \
  asm volatile("{\n"                                                                               \
               ".reg .pred added;\n"                                                               \
               "setp.ne.b32 added, " ADD ", 0;\n"                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE               \
               " {" REGISTERS "}, " A ", " B ", added, 1, 1, " TURN_A ", " TURN_B ";\n"            \
               "}\n"                                                                               \
               : __VA_ARGS__                                                                       \
               : "l"(a), "l"(b), "r"(is_added), "n"(static_cast<int>(A_BY_COLUMNS)),               \
                 "n"(static_cast<int>(B_BY_ROWS)))

// Names of the registers, eight to a line, and the sums that they hold.
#define TILEWRIGHT_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TILEWRIGHT_R16 TILEWRIGHT_R8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define TILEWRIGHT_R20 TILEWRIGHT_R16 ", " "%16, %17, %18, %19"
#define TILEWRIGHT_R24 TILEWRIGHT_R16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define TILEWRIGHT_R32 TILEWRIGHT_R24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define TILEWRIGHT_R40 TILEWRIGHT_R32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define TILEWRIGHT_R48 TILEWRIGHT_R40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define TILEWRIGHT_R56 TILEWRIGHT_R48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define TILEWRIGHT_R64 TILEWRIGHT_R56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define TILEWRIGHT_R72 TILEWRIGHT_R64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define TILEWRIGHT_R80 TILEWRIGHT_R72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define TILEWRIGHT_R88 TILEWRIGHT_R80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define TILEWRIGHT_R96 TILEWRIGHT_R88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define TILEWRIGHT_R104 TILEWRIGHT_R96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define TILEWRIGHT_R112 TILEWRIGHT_R104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define TILEWRIGHT_R120 TILEWRIGHT_R112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define TILEWRIGHT_R128 TILEWRIGHT_R120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define TILEWRIGHT_D8 TILEWRIGHT_8(0)
#define TILEWRIGHT_D16 TILEWRIGHT_D8, TILEWRIGHT_8(8)
#define TILEWRIGHT_D20 \
  TILEWRIGHT_D16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define TILEWRIGHT_D24 TILEWRIGHT_D16, TILEWRIGHT_8(16)
#define TILEWRIGHT_D32 TILEWRIGHT_D24, TILEWRIGHT_8(24)
#define TILEWRIGHT_D40 TILEWRIGHT_D32, TILEWRIGHT_8(32)
#define TILEWRIGHT_D48 TILEWRIGHT_D40, TILEWRIGHT_8(40)
#define TILEWRIGHT_D56 TILEWRIGHT_D48, TILEWRIGHT_8(48)
#define TILEWRIGHT_D64 TILEWRIGHT_D56, TILEWRIGHT_8(56)
#define TILEWRIGHT_D72 TILEWRIGHT_D64, TILEWRIGHT_8(64)
#define TILEWRIGHT_D80 TILEWRIGHT_D72, TILEWRIGHT_8(72)
#define TILEWRIGHT_D88 TILEWRIGHT_D80, TILEWRIGHT_8(80)
#define TILEWRIGHT_D96 TILEWRIGHT_D88, TILEWRIGHT_8(88)
#define TILEWRIGHT_D104 TILEWRIGHT_D96, TILEWRIGHT_8(96)
#define TILEWRIGHT_D112 TILEWRIGHT_D104, TILEWRIGHT_8(104)
#define TILEWRIGHT_D120 TILEWRIGHT_D112, TILEWRIGHT_8(112)
#define TILEWRIGHT_D128 TILEWRIGHT_D120, TILEWRIGHT_8(120)

TILEWRIGHT_WGMMA(40, 20, TILEWRIGHT_R20, "%20", "%21", "%22", "%23", "%24", TILEWRIGHT_D20);
TILEWRIGHT_WGMMA(48, 24, TILEWRIGHT_R24, "%24", "%25", "%26", "%27", "%28", TILEWRIGHT_D24);
TILEWRIGHT_WGMMA(64, 32, TILEWRIGHT_R32, "%32", "%33", "%34", "%35", "%36", TILEWRIGHT_D32);
TILEWRIGHT_WGMMA(80, 40, TILEWRIGHT_R40, "%40", "%41", "%42", "%43", "%44", TILEWRIGHT_D40);
TILEWRIGHT_WGMMA(112, 56, TILEWRIGHT_R56, "%56", "%57", "%58", "%59", "%60", TILEWRIGHT_D56);
TILEWRIGHT_WGMMA(128, 64, TILEWRIGHT_R64, "%64", "%65", "%66", "%67", "%68", TILEWRIGHT_D64);
TILEWRIGHT_WGMMA(144, 72, TILEWRIGHT_R72, "%72", "%73", "%74", "%75", "%76", TILEWRIGHT_D72);
TILEWRIGHT_WGMMA(160, 80, TILEWRIGHT_R80, "%80", "%81", "%82", "%83", "%84", TILEWRIGHT_D80);
TILEWRIGHT_WGMMA(192, 96, TILEWRIGHT_R96, "%96", "%97", "%98", "%99", "%100", TILEWRIGHT_D96);
TILEWRIGHT_WGMMA(224, 112, TILEWRIGHT_R112, "%112", "%113", "%114", "%115", "%116", TILEWRIGHT_D112);
TILEWRIGHT_WGMMA(256, 128, TILEWRIGHT_R128, "%128", "%129", "%130", "%131", "%132", TILEWRIGHT_D128);

#undef TILEWRIGHT_WGMMA
#undef TILEWRIGHT_WGMMA_OF

#endif

}  // namespace tilewright
