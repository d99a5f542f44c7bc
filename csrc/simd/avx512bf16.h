// AVX-512 with AVX512-BF16, which multiplies pairs of bfloat16.
#pragma once

#include "simd/avx512.h"

#define RAGLANE_PAIRS 1           // products of bfloat16 use pairs
#define RAGLANE_FAMILY avx512  // the set whose loops run everything but products of pairs

namespace raglane::RAGLANE_TARGET {

// c plus the products of two pairs of bfloat16, in each entry: the later number of a pair first, rounded twice.
RAGLANE_INLINE F dot(F a, F b, F c) {
#if defined(RAGLANE_EMULATE)  // for processors without the instruction, which flushes denormal numbers to 0
  using Word = Lanes<float>::word;
  c = fma((F)((Word)a & 0xffff0000u), (F)((Word)b & 0xffff0000u), c);
  return fma((F)((Word)a << 16), (F)((Word)b << 16), c);
#else
  return (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
}

}  // namespace raglane::RAGLANE_TARGET
