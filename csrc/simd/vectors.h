// The vector types of vector_bytes, and loads and stores of whole vectors.
//
// Included by the file of each instruction set, which defines the vector's length and the operations.
#pragma once

#include <stdint.h>
#include <string.h>

#define RAGLANE_INLINE inline __attribute__((always_inline))
#define RAGLANE_INLINE_LAMBDA __attribute__((always_inline))

// The same for N vectors.
#define RAGLANE_EACH _Pragma("GCC unroll 16") for (int i = 0; i < N; i++)

namespace raglane::RAGLANE_TARGET {

inline constexpr int registers = RAGLANE_REGISTERS;

struct bfloat16 {
  uint16_t bits;
};
// A float whose products with weights use int8; see gemm/bytes.h.
struct quantised {
  float number;
};

// The type of computation of a storage type.
template <class S> struct Arithmetic { using type = S; };
template <> struct Arithmetic<bfloat16> { using type = float; };
template <> struct Arithmetic<quantised> { using type = float; };

template <class A> struct Lanes;
template <> struct Lanes<float> {
  static constexpr int width = vector_bytes / 4;
  typedef float real __attribute__((vector_size(vector_bytes)));
  typedef int32_t integer __attribute__((vector_size(vector_bytes)));
  typedef uint32_t word __attribute__((vector_size(vector_bytes)));
  typedef uint16_t half __attribute__((vector_size(vector_bytes / 2)));
  typedef uint8_t byte __attribute__((vector_size(vector_bytes / 4)));
};
template <> struct Lanes<double> {
  static constexpr int width = vector_bytes / 8;
  typedef double real __attribute__((vector_size(vector_bytes)));
  typedef int64_t integer __attribute__((vector_size(vector_bytes)));
};
template <class A> using Vec = typename Lanes<A>::real;
using F = Vec<float>;
using I = Lanes<float>::integer;
using D = Vec<double>;

template <class A> RAGLANE_INLINE Vec<A> load(const A* from) {
  Vec<A> v;
  memcpy(&v, from, sizeof v);
  return v;
}
RAGLANE_INLINE F load(const bfloat16* from) {
  Lanes<float>::half bits;
  memcpy(&bits, from, sizeof bits);
  return (F)(__builtin_convertvector(bits, Lanes<float>::word) << 16);
}
RAGLANE_INLINE F load(const quantised* from) { return load((const float*)from); }
template <class A> RAGLANE_INLINE void store(A* to, Vec<A> v) { memcpy(to, &v, sizeof v); }
RAGLANE_INLINE void store(quantised* to, F v) { store((float*)to, v); }
RAGLANE_INLINE Lanes<float>::half narrow(F v) {
  using Word = Lanes<float>::word;
  Word bits = (Word)v;
  Word rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  rounded = (Word)(v != v) ? (bits >> 16) | 0x40u : rounded;     // a NaN stays one
  return __builtin_convertvector(rounded, Lanes<float>::half);
}
RAGLANE_INLINE void store(bfloat16* to, F v) {
  auto half = narrow(v);
  memcpy(to, &half, sizeof half);
}

template <class V, class A> RAGLANE_INLINE V splat(A a) { return V{} + a; }

}  // namespace raglane::RAGLANE_TARGET
