// AVX-512 with AVX512-VNNI, which multiplies bytes.
#pragma once

#include "simd/avx512.h"

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE I dot_bytes(I a, I b, I c) { return (I)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b); }

}  // namespace raglane::RAGLANE_TARGET
