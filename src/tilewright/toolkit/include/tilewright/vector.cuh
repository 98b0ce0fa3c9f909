// Element types and vector loads: what a row kernel needs to move data, without any CUDA header.
//
// f16 and bf16 are storage only; arithmetic is in float. Pack<T, VEC> is VEC neighbouring elements
// that travel as one load or store of sizeof(T) * VEC bytes (16 wherever alignment allows). It
// keeps the words it was loaded as and converts on use: halves wait in half the registers.
#pragma once

namespace tilewright {

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(f16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}

// from_float rounds to nearest, ties to even, as torch does; overflow becomes infinity.
template <class T> __device__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
}

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 narrow;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
#else
  // sm_75 has no bf16 instruction; the carry of the addition is the rounding.
  const unsigned bits = __float_as_uint(x);
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  narrow.bits = x != x ? 0x7fff : static_cast<unsigned short>(rounded >> 16);
#endif
  return narrow;
}

// Two neighbouring halves in one instruction: the first element is the low half of the word.
template <class T> __device__ __forceinline__ unsigned two_from_float(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  if constexpr (is_bf16<T>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
#else
  const unsigned low = from_float<T>(first).bits, high = from_float<T>(second).bits;
  return low | high << 16;
#endif
}

template <class T, int VEC> struct Pack {  // 16-bit elements, two to a word
  static_assert(sizeof(T) == 2 && VEC % 2 == 0);
  unsigned words[VEC / 2];

  __device__ __forceinline__ float operator[](int j) const {
    const unsigned word = words[j / 2];
    return to_float(T{static_cast<unsigned short>(j % 2 ? word >> 16 : word & 0xffffu)});
  }
  static __device__ __forceinline__ Pack of(const float (&values)[VEC]) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < VEC; j += 2) {
      pack.words[j / 2] = two_from_float<T>(values[j], values[j + 1]);
    }
    return pack;
  }
};

template <int VEC> struct Pack<float, VEC> {
  float words[VEC];

  __device__ __forceinline__ float operator[](int j) const { return words[j]; }
  static __device__ __forceinline__ Pack of(const float (&values)[VEC]) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < VEC; ++j) pack.words[j] = values[j];
    return pack;
  }
};

template <class T> struct Pack<T, 1> {
  T words[1];

  __device__ __forceinline__ float operator[](int) const { return to_float(words[0]); }
  static __device__ __forceinline__ Pack of(const float (&values)[1]) {
    return {{from_float<T>(values[0])}};
  }
};

template <> struct Pack<float, 1> {
  float words[1];

  __device__ __forceinline__ float operator[](int) const { return words[0]; }
  static __device__ __forceinline__ Pack of(const float (&values)[1]) { return {{values[0]}}; }
};

template <int BYTES> struct Word { using type = uint4; };  // the type that one load or store moves
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };

template <int VEC, class T> __device__ __forceinline__ Pack<T, VEC> load(const T* from) {
  using W = typename Word<sizeof(T) * VEC>::type;
  const W word = *reinterpret_cast<const W*>(from);
  Pack<T, VEC> pack;
  memcpy(&pack, &word, sizeof(W));
  return pack;
}

// A pack beyond 16 bytes (floats of what was loaded as halves) takes several stores.
template <int VEC, class T> __device__ __forceinline__ void store(T* to, const Pack<T, VEC>& pack) {
  using W = typename Word<sizeof(T) * VEC>::type;
  constexpr int WORDS = sizeof(T) * VEC / sizeof(W);
  W words[WORDS];
  memcpy(words, &pack, sizeof(words));
#pragma unroll
  for (int i = 0; i < WORDS; ++i) reinterpret_cast<W*>(to)[i] = words[i];
}

// VEC copies of one value: what stands beyond the end of a row.
template <class T, int VEC> __device__ __forceinline__ Pack<T, VEC> filled(float value) {
  float values[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) values[j] = value;
  return Pack<T, VEC>::of(values);
}

// Hides where a pack came from. Without it the compiler keeps the converted floats of a row alive
// over a reduction, twice the registers of the packs they came from, and spills.
template <class T, int VEC> __device__ __forceinline__ void keep_packed(Pack<T, VEC>& pack) {
  if constexpr (sizeof(T) == 2 && VEC > 1) {
#pragma unroll
    for (unsigned& word : pack.words) asm volatile("" : "+r"(word));
  }
}

// Keeps loads of the next pack behind this point. Where registers are scarce the compiler would
// rather load all packs of an unrolled loop at once, and spill.
__device__ __forceinline__ void one_at_a_time() { asm volatile("" ::: "memory"); }

}  // namespace tilewright
