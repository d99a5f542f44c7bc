// AVX-512 with AMX's products of bytes: tile registers, which multiply four unsigned bytes by four signed ones.
#pragma once

#include "simd/avx512vnni.h"

#define RAGLANE_TILE_PRODUCT _tile_dpbusd
#include "simd/tiles.h"
