// The vectors of the instruction set that this translation unit is compiled for, and their operations.
//
// One source serves all sets: arithmetic is written with the vector extensions of GCC and Clang. Other operations
// are in the file of each set, with defaults below: overload resolution prefers a function of a set's own types to
// a template. RAGLANE_TARGET is the instruction set, its file and the namespace, so that the linker does not merge
// templates that are compiled for several sets. For the same reason, code that is compiled several times uses nothing
// of std:: that a compiler may emit out of line.
#pragma once

#define RAGLANE_TEXT_(text) #text
#define RAGLANE_TEXT(text) RAGLANE_TEXT_(text)
#include RAGLANE_TEXT(simd/RAGLANE_TARGET.h)

namespace raglane::RAGLANE_TARGET {

// A store that bypasses the caches if the processor supports it; `to` is aligned to the vector as stored. Before
// another thread reads the data, finish_streams() must be called.
template <class S> RAGLANE_INLINE void stream(S* to, Vec<typename Arithmetic<S>::type> v) { store(to, v); }

// The first `count` entries, followed by zeros; memory after them is not read.
template <class S> RAGLANE_INLINE Vec<typename Arithmetic<S>::type> load(const S* from, int count) {
  constexpr int width = Lanes<typename Arithmetic<S>::type>::width;
  if (count == width) return load(from);
  S part[width] = {};
  for (int i = 0; i < count; i++) part[i] = from[i];
  return load(part);
}
template <class S> RAGLANE_INLINE void store(S* to, Vec<typename Arithmetic<S>::type> v, int count) {
  constexpr int width = Lanes<typename Arithmetic<S>::type>::width;
  if (count == width) return store(to, v);
  S part[width];
  store(part, v);
  memcpy(to, part, count * sizeof(S));
}

RAGLANE_INLINE F load(const quantised* from, int count) { return load((const float*)from, count); }
RAGLANE_INLINE void store(quantised* to, F v, int count) { store((float*)to, v, count); }
RAGLANE_INLINE void stream(quantised* to, F v) { stream((float*)to, v); }

// a * b + c, rounded once where the processor can; c - a * b.
template <class V> RAGLANE_INLINE V fma(V a, V b, V c) { return a * b + c; }
template <class V> RAGLANE_INLINE V fnma(V a, V b, V c) { return fma(-a, b, c); }

// c plus the products of four unsigned bytes of a and four signed ones of b, in each entry, exactly, so that all
// implementations agree. dot_halves() adds the products of two numbers of 16 bits.
template <class V> RAGLANE_INLINE V dot_bytes(V a, V b, V c) {
#if defined(__SSE2__)
  // The first and third byte, then the others, as numbers of 16 bits: the instruction for bytes would saturate.
  typedef int16_t Half __attribute__((vector_size(vector_bytes)));
  Half signs = (Half)b, even = signs << 8 >> 8, odd = signs >> 8;
  return c + dot_halves(a & 0x00ff00ff, (V)even) + dot_halves((a >> 8) & 0x00ff00ff, (V)odd);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) c += ((a >> 8 * i) & 0xff) * (b << (24 - 8 * i) >> 24);
  return c;
#endif
}

// The lowest byte of each entry; GCC 12's own conversion takes ten times as long.
template <class V> RAGLANE_INLINE Lanes<float>::byte lowest_bytes(V v) {
  return __builtin_convertvector((Lanes<float>::word)v, Lanes<float>::byte);
}

// The larger of a bound and x, the smaller; NaN if x is NaN.
template <class A> RAGLANE_INLINE Vec<A> at_least(A bound, Vec<A> x) { return x < bound ? splat<Vec<A>>(bound) : x; }
template <class A> RAGLANE_INLINE Vec<A> at_most(A bound, Vec<A> x) { return x > bound ? splat<Vec<A>>(bound) : x; }

// x, or a number between -1 and 1 if it is not; NaN may be any of them.
template <class V> RAGLANE_INLINE V within_one(V x) { return at_most(1.0f, at_least(-1.0f, x)); }

template <class V> RAGLANE_INLINE V square_root(V x) {
  for (size_t i = 0; i < sizeof x / sizeof x[0]; i++)
    x[i] = sizeof x[0] == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return x;
}

// The sum of the entries of a vector: of its halves, their halves, and so on.
template <class V> RAGLANE_INLINE auto sum_of(V v) {
  constexpr int width = sizeof v / sizeof v[0];
  decltype(v[0] + v[0]) part[width];
  memcpy(part, &v, sizeof v);
#pragma GCC unroll 8
  for (int half = width / 2; half > 0; half /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}

// numerator = numerator / denominator, N vectors interleaved, for denominators in [1, 4].
template <int N, class V> RAGLANE_INLINE void quotient(V* numerator, const V* denominator) {
  RAGLANE_EACH numerator[i] = numerator[i] / denominator[i];
}

}  // namespace raglane::RAGLANE_TARGET
