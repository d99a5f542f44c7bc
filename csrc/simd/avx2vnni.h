// AVX2 with AVX-VNNI, which multiplies bytes.
#pragma once

#include "simd/avx2.h"

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE I dot_bytes(I a, I b, I c) { return (I)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b); }

}  // namespace raglane::RAGLANE_TARGET
