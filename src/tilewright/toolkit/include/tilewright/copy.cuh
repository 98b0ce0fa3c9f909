// 16 bytes from global to shared memory that no register waits for (cp.async, SM 80).
//
// Kernels declare their dynamic shared memory as `extern __shared__ Line memory[]`: a warp's 512
// bytes that straddle lines of 128 cost a tenth of the speed (H200, 2026-11).
#pragma once

namespace tilewright {

struct alignas(128) Line { uint4 words[8]; };

// Zeros if not inside; `from` is then not read. Older GPUs copy at once.
__device__ __forceinline__ void fetch(uint4* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = inside ? 16 : 0;  // what is missing of 16 is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
#else
  *to = inside ? *static_cast<const uint4*>(from) : uint4{};
#endif
}

// The fetches since the last call are one batch.
__device__ __forceinline__ void end_batch() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until this thread has at most PENDING batches on their way.
template <int PENDING> __device__ __forceinline__ void wait_batches() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

}  // namespace tilewright
