// Vectors of 16 bytes: ARM's NEON, baseline SSE2 of x86, or the compiler's own implementation.
#pragma once

#include <stdint.h>

#if defined(__aarch64__)
#define RAGLANE_REGISTERS 32
#else
#define RAGLANE_REGISTERS 16
#endif
namespace raglane::RAGLANE_TARGET {
inline constexpr int vector_bytes = 16;
}

#include "simd/vectors.h"

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE F splat_at(const float* a) { return F{*a, *a, *a, *a}; }
RAGLANE_INLINE D splat_at(const double* a) { return D{*a, *a}; }
RAGLANE_INLINE void finish_streams() {}

}  // namespace raglane::RAGLANE_TARGET

#if defined(__aarch64__)
#include "simd/neon.h"
#elif defined(__SSE2__)
#include <emmintrin.h>
namespace raglane::RAGLANE_TARGET {
RAGLANE_INLINE I dot_halves(I a, I b) { return (I)_mm_madd_epi16((__m128i)a, (__m128i)b); }
}
#endif
