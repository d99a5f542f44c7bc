// AVX-512 with AMX: tile registers, which multiply pairs of bfloat16.
#pragma once

#include "simd/avx512bf16.h"

#define RAGLANE_ROUGH 1  // sigmoid and tanh are as exact as bfloat16 needs
#define RAGLANE_TILE_PRODUCT _tile_dpbf16ps
#include "simd/tiles.h"
