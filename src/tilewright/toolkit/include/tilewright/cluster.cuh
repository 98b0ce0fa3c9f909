// Blocks of a cluster (SM 90 and newer): who they are, how they meet, how they tell each other.
//
// A block may write into another's shared memory only once that other runs and has its signals
// ready. So every kernel with clusters begins with cluster_arrive() and waits before its first word
// to the others; loads go between the two. From then on words travel with st.async, which tells the
// receiver of its arrival by itself: a barrier of the cluster would first wait for every store that
// the block has under way.
#pragma once

namespace tilewright {

constexpr int MAX_CLUSTER = 16;

using Signal = unsigned long long;  // an mbarrier

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// One thread makes a signal ready, before the cluster first meets.
__device__ __forceinline__ void make_ready(Signal& signal) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&signal)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread says how many bytes the others will send.
__device__ __forceinline__ void expect(Signal& signal, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(&signal)), "r"(bytes) : "memory");
}

// Writes `value` to `slot`, and tells `signal`, in block `rank`; both are named as in this block.
__device__ __forceinline__ void send(float* slot, float value, Signal& signal, unsigned rank) {
  unsigned to, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(slot)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(shared_address(&signal)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(told) : "memory");
}

// Waits until all bytes of use number `phase` (modulo 2) are here.
__device__ __forceinline__ void receive(Signal& signal, unsigned phase) {
  asm volatile(
      "{\n"
      ".reg .pred here;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 here, [%0], %1;\n"
      "@!here bra again;\n"
      "}\n" ::"r"(shared_address(&signal)), "r"(phase) : "memory");
}

#else  // a block alone; kernels with clusters are compiled for SM 90 and newer only

__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void make_ready(Signal&) {}
__device__ __forceinline__ void expect(Signal&, int) {}
__device__ __forceinline__ void send(float*, float, Signal&, unsigned) {}
__device__ __forceinline__ void receive(Signal&, unsigned) {}

#endif

}  // namespace tilewright
