// NEON's additions to the portable vectors.
#pragma once

#include <arm_neon.h>

namespace raglane::RAGLANE_TARGET {

RAGLANE_INLINE F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
RAGLANE_INLINE D fma(D a, D b, D c) { return (D)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }

}  // namespace raglane::RAGLANE_TARGET
