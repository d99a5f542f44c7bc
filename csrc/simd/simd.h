// The vector type, for the instruction set that this translation unit is compiled for.
//
// One source serves all: arithmetic is written with the vector extensions of GCC and Clang; the few operations
// that these lack are chosen below. RAGLANE_TARGET names the instruction set and the namespace, so that the same
// template compiled twice never meets itself in the linker. For that reason, too, nothing of std:: that a compiler
// may emit out of line is used in what is compiled more than once.
#pragma once

#include <stdint.h>
#include <string.h>

#define RAGLANE_TARGET_amx 5
#define RAGLANE_TARGET_avx512bf16 4
#define RAGLANE_TARGET_avx512 3
#define RAGLANE_TARGET_avx512vnni 3
#define RAGLANE_TARGET_avx2 2
#define RAGLANE_TARGET_avx2vnni 2
#define RAGLANE_TARGET_portable 1
#define RAGLANE_JOIN_(a, b) a##b
#define RAGLANE_JOIN(a, b) RAGLANE_JOIN_(a, b)
#define RAGLANE_LEVEL RAGLANE_JOIN(RAGLANE_TARGET_, RAGLANE_TARGET)

#if RAGLANE_LEVEL >= 2
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define RAGLANE_INLINE inline __attribute__((always_inline))
#define RAGLANE_INLINE_LAMBDA __attribute__((always_inline))

// The same for N vectors side by side.
#define RAGLANE_EACH _Pragma("GCC unroll 16") for (int i = 0; i < N; i++)

namespace raglane::RAGLANE_TARGET {

#if RAGLANE_LEVEL >= 3
#define RAGLANE_REGISTERS 32
inline constexpr int vector_bytes = 64;
#elif RAGLANE_LEVEL == 2
#define RAGLANE_REGISTERS 16
inline constexpr int vector_bytes = 32;
#elif defined(__aarch64__)
#define RAGLANE_REGISTERS 32
inline constexpr int vector_bytes = 16;
#else
#define RAGLANE_REGISTERS 16
inline constexpr int vector_bytes = 16;
#endif
inline constexpr int registers = RAGLANE_REGISTERS;

struct bfloat16 {
  uint16_t bits;
};
// A float whose products with weights are of int8; see bytes.h.
struct quantised {
  float number;
};

// What a storage type is computed with.
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

// ---- memory ----------------------------------------------------------------------------------------------------

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

// A store that goes past the caches where the processor has one; `to` is aligned to the vector as stored.
template <class S> RAGLANE_INLINE void stream(S* to, Vec<typename Arithmetic<S>::type> v) {
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(S) == 4) return _mm512_stream_ps((float*)to, (__m512)v);
  if constexpr (sizeof(S) == 8) return _mm512_stream_pd((double*)to, (__m512d)v);
  if constexpr (sizeof(S) == 2) return _mm256_stream_si256((__m256i*)to, (__m256i)narrow(v));
#elif RAGLANE_LEVEL == 2
  if constexpr (sizeof(S) == 4) return _mm256_stream_ps((float*)to, (__m256)v);
  if constexpr (sizeof(S) == 8) return _mm256_stream_pd((double*)to, (__m256d)v);
  if constexpr (sizeof(S) == 2) return _mm_stream_si128((__m128i*)to, (__m128i)narrow(v));
#endif
  store(to, v);
}
// To be called before another thread reads what stream() stored.
RAGLANE_INLINE void finish_streams() {
#if RAGLANE_LEVEL >= 2
  _mm_sfence();
#endif
}

// The first `count` entries, with zeros after them; nothing past them is touched.
template <class S> RAGLANE_INLINE Vec<typename Arithmetic<S>::type> load(const S* from, int count) {
  using A = typename Arithmetic<S>::type;
  if (count == Lanes<A>::width) return load(from);
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(S) == 4) return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
  if constexpr (sizeof(S) == 8) return (D)_mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), from);
#endif
  S part[Lanes<A>::width] = {};
  for (int i = 0; i < count; i++) part[i] = from[i];
  return load(part);
}
template <class S> RAGLANE_INLINE void store(S* to, Vec<typename Arithmetic<S>::type> v, int count) {
  using A = typename Arithmetic<S>::type;
  if (count == Lanes<A>::width) return store(to, v);
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(S) == 4) return _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
  if constexpr (sizeof(S) == 8) return _mm512_mask_storeu_pd(to, (__mmask8)((1u << count) - 1), (__m512d)v);
#endif
  S part[Lanes<A>::width];
  store(part, v);
  memcpy(to, part, count * sizeof(S));
}

// ---- arithmetic -------------------------------------------------------------------------------------------------

template <class V, class A> RAGLANE_INLINE V splat(A a) { return V{} + a; }

#if RAGLANE_LEVEL >= 3
RAGLANE_INLINE F splat_at(const float* a) { return (F)_mm512_set1_ps(*a); }
RAGLANE_INLINE D splat_at(const double* a) { return (D)_mm512_set1_pd(*a); }
// a * b + c, rounded once where the processor can; c - a * b.
RAGLANE_INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
RAGLANE_INLINE F fnma(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
RAGLANE_INLINE D fnma(D a, D b, D c) { return (D)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#elif RAGLANE_LEVEL == 2
RAGLANE_INLINE F splat_at(const float* a) { return (F)_mm256_broadcast_ss(a); }
RAGLANE_INLINE D splat_at(const double* a) { return (D)_mm256_broadcast_sd(a); }
RAGLANE_INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
RAGLANE_INLINE F fnma(F a, F b, F c) { return (F)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
RAGLANE_INLINE D fnma(D a, D b, D c) { return (D)_mm256_fnmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#else
RAGLANE_INLINE F splat_at(const float* a) { return F{*a, *a, *a, *a}; }
RAGLANE_INLINE D splat_at(const double* a) { return D{*a, *a}; }
#if defined(__aarch64__)
RAGLANE_INLINE F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
#else
RAGLANE_INLINE F fma(F a, F b, F c) { return a * b + c; }
RAGLANE_INLINE D fma(D a, D b, D c) { return a * b + c; }
#endif
RAGLANE_INLINE F fnma(F a, F b, F c) { return fma(-a, b, c); }
RAGLANE_INLINE D fnma(D a, D b, D c) { return fma(-a, b, c); }
#endif

#if RAGLANE_LEVEL >= 4
// c plus the products of two pairs of bfloat16, in each entry: the later number of a pair first, rounded twice.
RAGLANE_INLINE F dot(F a, F b, F c) {
#if defined(RAGLANE_EMULATE)  // where no processor has the instruction; it takes denormal numbers for 0
  using Word = Lanes<float>::word;
  c = fma((F)((Word)a & 0xffff0000u), (F)((Word)b & 0xffff0000u), c);
  return fma((F)((Word)a << 16), (F)((Word)b << 16), c);
#else
  return (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
}
#endif

#if defined(__SSE2__)
// The products of two numbers of 16 bits of a and two of b, in each entry.
RAGLANE_INLINE I dot_halves(I a, I b) {
#if RAGLANE_LEVEL >= 3
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif RAGLANE_LEVEL == 2
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

// c plus the products of four unsigned bytes of a and four signed ones of b, in each entry. Exact, so that all ways give
// the same.
RAGLANE_INLINE I dot_bytes(I a, I b, I c) {
#if defined(__AVX512VNNI__) && RAGLANE_LEVEL >= 3
  return (I)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && RAGLANE_LEVEL == 2
  return (I)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  // The first and third byte, then the others, as numbers of 16 bits: the instruction for bytes would saturate.
  typedef int16_t Half __attribute__((vector_size(vector_bytes)));
  Half signs = (Half)b, even = signs << 8 >> 8, odd = signs >> 8;
  return c + dot_halves(a & 0x00ff00ff, (I)even) + dot_halves((a >> 8) & 0x00ff00ff, (I)odd);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) c += ((a >> 8 * i) & 0xff) * (b << (24 - 8 * i) >> 24);
  return c;
#endif
}

// The lowest byte of each entry; what GCC 12 makes of its own conversion takes ten times as long.
RAGLANE_INLINE Lanes<float>::byte lowest_bytes(F v) {
#if RAGLANE_LEVEL >= 3
  return (Lanes<float>::byte)_mm512_cvtepi32_epi8((__m512i)v);
#elif RAGLANE_LEVEL == 2
  const __m256i lowest = _mm256_set1_epi64x(0x000000000c080400);
  __m256i halves = _mm256_shuffle_epi8((__m256i)v, lowest);
  int64_t bits = _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  Lanes<float>::byte bytes;
  memcpy(&bytes, &bits, sizeof bytes);
  return bytes;
#else
  return __builtin_convertvector((Lanes<float>::word)v, Lanes<float>::byte);
#endif
}

// The larger of a bound and x, the smaller; a NaN in x stays.
template <class A> RAGLANE_INLINE Vec<A> at_least(A bound, Vec<A> x) {
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm512_max_ps(_mm512_set1_ps(bound), (__m512)x);
  else return (Vec<A>)_mm512_max_pd(_mm512_set1_pd(bound), (__m512d)x);
#elif RAGLANE_LEVEL == 2
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm256_max_ps(_mm256_set1_ps(bound), (__m256)x);
  else return (Vec<A>)_mm256_max_pd(_mm256_set1_pd(bound), (__m256d)x);
#else
  return x < bound ? splat<Vec<A>>(bound) : x;
#endif
}
template <class A> RAGLANE_INLINE Vec<A> at_most(A bound, Vec<A> x) {
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm512_min_ps(_mm512_set1_ps(bound), (__m512)x);
  else return (Vec<A>)_mm512_min_pd(_mm512_set1_pd(bound), (__m512d)x);
#elif RAGLANE_LEVEL == 2
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm256_min_ps(_mm256_set1_ps(bound), (__m256)x);
  else return (Vec<A>)_mm256_min_pd(_mm256_set1_pd(bound), (__m256d)x);
#else
  return x > bound ? splat<Vec<A>>(bound) : x;
#endif
}

// numerator = numerator / denominator, N vectors side by side, for denominators in [1, 4].
template <class V, int N> RAGLANE_INLINE void quotient(V* numerator, const V* denominator) {
#if RAGLANE_LEVEL >= 3
  if constexpr (sizeof(numerator[0][0]) == 4) {
    // One Newton step on a 14-bit reciprocal, then one on the quotient: a third of a division's time.
    V r[N], q[N];
    RAGLANE_EACH r[i] = (V)_mm512_rcp14_ps((__m512)denominator[i]);
    RAGLANE_EACH q[i] = fnma(denominator[i], r[i], splat<V>(1.0f));
    RAGLANE_EACH r[i] = fma(r[i], q[i], r[i]);
    RAGLANE_EACH q[i] = numerator[i] * r[i];
    RAGLANE_EACH numerator[i] = fnma(denominator[i], q[i], numerator[i]);
    RAGLANE_EACH numerator[i] = fma(r[i], numerator[i], q[i]);
    return;
  }
#endif
  RAGLANE_EACH numerator[i] = numerator[i] / denominator[i];
}

}  // namespace raglane::RAGLANE_TARGET
