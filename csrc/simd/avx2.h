// AVX2 with FMA.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define RAGLANE_REGISTERS 16
namespace raglane::RAGLANE_TARGET {
inline constexpr int vector_bytes = 32;
}

#include "simd/vectors.h"

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE void stream(float* to, F v) { _mm256_stream_ps(to, (__m256)v); }
RAGLANE_INLINE void stream(double* to, D v) { _mm256_stream_pd(to, (__m256d)v); }
RAGLANE_INLINE void stream(bfloat16* to, F v) { _mm_stream_si128((__m128i*)to, (__m128i)narrow(v)); }
RAGLANE_INLINE void finish_streams() { _mm_sfence(); }

RAGLANE_INLINE F splat_at(const float* a) { return (F)_mm256_broadcast_ss(a); }
RAGLANE_INLINE D splat_at(const double* a) { return (D)_mm256_broadcast_sd(a); }
RAGLANE_INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
RAGLANE_INLINE F fnma(F a, F b, F c) { return (F)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
RAGLANE_INLINE D fnma(D a, D b, D c) { return (D)_mm256_fnmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
RAGLANE_INLINE F at_least(float bound, F x) { return (F)_mm256_max_ps(_mm256_set1_ps(bound), (__m256)x); }
RAGLANE_INLINE D at_least(double bound, D x) { return (D)_mm256_max_pd(_mm256_set1_pd(bound), (__m256d)x); }
RAGLANE_INLINE F at_most(float bound, F x) { return (F)_mm256_min_ps(_mm256_set1_ps(bound), (__m256)x); }
RAGLANE_INLINE D at_most(double bound, D x) { return (D)_mm256_min_pd(_mm256_set1_pd(bound), (__m256d)x); }
RAGLANE_INLINE F square_root(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
RAGLANE_INLINE D square_root(D x) { return (D)_mm256_sqrt_pd((__m256d)x); }

RAGLANE_INLINE I dot_halves(I a, I b) { return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
RAGLANE_INLINE Lanes<float>::byte lowest_bytes(F v) {
  const __m256i lowest = _mm256_set1_epi64x(0x000000000c080400);
  __m256i halves = _mm256_shuffle_epi8((__m256i)v, lowest);
  int64_t bits = _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  Lanes<float>::byte bytes;
  memcpy(&bytes, &bits, sizeof bytes);
  return bytes;
}

}  // namespace raglane::RAGLANE_TARGET
