// The text of matmul's kernel for Hopper, launched on a CPU. INSTANCES names (number, parameters).
#include "cuda_impl.cu"

namespace {

using namespace tilewright;

struct Call {
  void* c;
  Tensor a, b;
  Sizes sizes;
  unsigned grid, seed;
};

template <
    class T, class Out, int WORKERS, int COLUMNS, int STAGES, bool A_BY_ROWS, bool B_BY_ROWS, int TALL,
    int DEEP>
std::string run(const Call& call, int* shared) {
  using P = Plan<T, Out, WORKERS, COLUMNS, STAGES, A_BY_ROWS, B_BY_ROWS, TALL, DEEP>;
  TensorMap a{{reinterpret_cast<std::uintptr_t>(&call.a)}};
  TensorMap b{{reinterpret_cast<std::uintptr_t>(&call.b)}};
  *shared = P::SHARED;
  return launch(
      [&] {
        matmul_tiles<T, Out, WORKERS, COLUMNS, STAGES, A_BY_ROWS, B_BY_ROWS, TALL, DEEP>(
            static_cast<Out*>(call.c), a, b, call.sizes);
      },
      call.grid, P::BLOCKS, P::THREADS, *shared, call.seed,
      [&](unsigned rank) {  // boxes of b in the first two steps: of a block's part, and its share
        if (call.sizes.pieces > call.grid / P::BLOCKS) return 0;  // there are several tiles
        const int steps = call.sizes.steps, boxes = B_BY_ROWS ? (COLUMNS + 63) / 64 : TALL;
        const int part = (rank + 1) * steps / DEEP - rank * steps / DEEP;
        const int share = TALL == 1 ? boxes : (boxes + TALL - 1 - rank) / TALL;
        return min(DEEP == 1 ? steps : part, 2) * share;
      });
}

}  // namespace

// What went wrong, or an empty text; and the kernel's own count of its shared memory.
extern "C" const char* launch_matmul(int instance, const Call* call, int* shared) {
  static std::string error;
  switch (instance) {
#define INSTANCE(NUMBER, ...) case NUMBER: error = run<__VA_ARGS__>(*call, shared); break;
    INSTANCES
    default: error = "there is no such instance";
  }
  return error.c_str();
}
