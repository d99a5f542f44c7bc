// AVX-512: its parts F, BW, DQ and VL.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define RAGLANE_REGISTERS 32
namespace raglane::RAGLANE_TARGET {
inline constexpr int vector_bytes = 64;
}

#include "simd/vectors.h"

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE F load(const float* from, int count) {
  return count == 16 ? load(from) : (F)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
RAGLANE_INLINE D load(const double* from, int count) {
  return count == 8 ? load(from) : (D)_mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), from);
}
RAGLANE_INLINE void store(float* to, F v, int count) {
  if (count == 16) return store(to, v);
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
}
RAGLANE_INLINE void store(double* to, D v, int count) {
  if (count == 8) return store(to, v);
  _mm512_mask_storeu_pd(to, (__mmask8)((1u << count) - 1), (__m512d)v);
}
RAGLANE_INLINE void stream(float* to, F v) { _mm512_stream_ps(to, (__m512)v); }
RAGLANE_INLINE void stream(double* to, D v) { _mm512_stream_pd(to, (__m512d)v); }
RAGLANE_INLINE void stream(bfloat16* to, F v) { _mm256_stream_si256((__m256i*)to, (__m256i)narrow(v)); }
RAGLANE_INLINE void finish_streams() { _mm_sfence(); }

RAGLANE_INLINE F splat_at(const float* a) { return (F)_mm512_set1_ps(*a); }
RAGLANE_INLINE D splat_at(const double* a) { return (D)_mm512_set1_pd(*a); }
RAGLANE_INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
RAGLANE_INLINE F fnma(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
RAGLANE_INLINE D fnma(D a, D b, D c) { return (D)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
RAGLANE_INLINE F at_least(float bound, F x) { return (F)_mm512_max_ps(_mm512_set1_ps(bound), (__m512)x); }
RAGLANE_INLINE D at_least(double bound, D x) { return (D)_mm512_max_pd(_mm512_set1_pd(bound), (__m512d)x); }
RAGLANE_INLINE F at_most(float bound, F x) { return (F)_mm512_min_ps(_mm512_set1_ps(bound), (__m512)x); }
RAGLANE_INLINE D at_most(double bound, D x) { return (D)_mm512_min_pd(_mm512_set1_pd(bound), (__m512d)x); }
RAGLANE_INLINE F square_root(F x) { return (F)_mm512_sqrt_ps((__m512)x); }
RAGLANE_INLINE D square_root(D x) { return (D)_mm512_sqrt_pd((__m512d)x); }
RAGLANE_INLINE F within_one(F x) { return (F)_mm512_range_ps((__m512)x, _mm512_set1_ps(1), 0x02); }
RAGLANE_INLINE F times_power_of_two(F x, F n, I) { return (F)_mm512_scalef_ps((__m512)x, (__m512)n); }

RAGLANE_INLINE float sum_of(F v) { return _mm512_reduce_add_ps((__m512)v); }
RAGLANE_INLINE double sum_of(D v) { return _mm512_reduce_add_pd((__m512d)v); }

// One Newton step on a 14-bit reciprocal, then one on the quotient: a third of a division's time.
template <int N> RAGLANE_INLINE void quotient(F* numerator, const F* denominator) {
  F r[N], q[N];
  RAGLANE_EACH r[i] = (F)_mm512_rcp14_ps((__m512)denominator[i]);
  RAGLANE_EACH q[i] = fnma(denominator[i], r[i], splat<F>(1.0f));
  RAGLANE_EACH r[i] = fma(r[i], q[i], r[i]);
  RAGLANE_EACH q[i] = numerator[i] * r[i];
  RAGLANE_EACH numerator[i] = fnma(denominator[i], q[i], numerator[i]);
  RAGLANE_EACH numerator[i] = fma(r[i], numerator[i], q[i]);
}

RAGLANE_INLINE I dot_halves(I a, I b) { return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
RAGLANE_INLINE Lanes<float>::byte lowest_bytes(F v) { return (Lanes<float>::byte)_mm512_cvtepi32_epi8((__m512i)v); }

}  // namespace raglane::RAGLANE_TARGET
