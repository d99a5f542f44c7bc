// AMX's tile registers of 16 rows x 16 words, for any product of words.
//
// Included by the file of each instruction set with tiles, which defines RAGLANE_TILE_PRODUCT, the instruction that adds
// products of the words of two tiles to a third.
#pragma once

#define RAGLANE_TILES 1  // products use tile registers

namespace raglane::RAGLANE_TARGET {

inline constexpr int tile_words = 16, most_tile_rows = 16;

// The operand of LDTILECFG.
struct alignas(64) TileShapes {
  uint8_t palette, first_row, unused[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// GCC's intrinsics do not declare the memory that they read, so all of it, e.g. `from`, must be written before.
RAGLANE_INLINE void flush(const void* from) { asm volatile("" ::"r"(from) : "memory"); }

#if defined(RAGLANE_EMULATE)
// An emulation for processors without the instructions, which, unlike it, flush denormal numbers to 0.
struct EmulatedTile {
  int rows;
  float words[most_tile_rows][tile_words];
};
inline thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles(const TileShapes& shapes) {
  for (int t = 0; t < 8; t++) {
    emulated_tiles[t].rows = shapes.rows[t];
    memset(emulated_tiles[t].words, 0, sizeof emulated_tiles[t].words);
  }
}
inline void release_tiles() { memset(emulated_tiles, 0xff, sizeof emulated_tiles); }
template <int TILE> void load_tile(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tiles[TILE];
  for (int r = 0; r < tile.rows; r++) memcpy(tile.words[r], (const char*)from + r * stride, sizeof tile.words[r]);
}
template <int TILE> void store_tile(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tiles[TILE];
  for (int r = 0; r < tile.rows; r++) memcpy((char*)to + r * stride, tile.words[r], sizeof tile.words[r]);
}
template <int SUMS, int ROWS, int WEIGHTS> void multiply_tiles() {
  using Word = Lanes<float>::word;
  EmulatedTile& sums = emulated_tiles[SUMS];
  for (int r = 0; r < sums.rows; r++) {
    F even = {}, odd = {};
    for (int k = 0; k < tile_words; k++) {
      Word x = (Word)splat_at(&emulated_tiles[ROWS].words[r][k]), weight = (Word)load(emulated_tiles[WEIGHTS].words[k]);
      even = fma((F)(x << 16), (F)(weight << 16), even);
      odd = fma((F)(x & 0xffff0000u), (F)(weight & 0xffff0000u), odd);
    }
    store(sums.words[r], load((const float*)sums.words[r]) + (even + odd));
  }
}
#else
RAGLANE_INLINE void configure_tiles(const TileShapes& shapes) {
  flush(&shapes);
  _tile_loadconfig(&shapes);
}
RAGLANE_INLINE void release_tiles() { _tile_release(); }
// The intrinsics require the tile's number as a literal.
#define RAGLANE_ALL_TILES(WITH) WITH(0) WITH(1) WITH(2) WITH(3) WITH(4) WITH(5) WITH(6) WITH(7)
template <int TILE> RAGLANE_INLINE void load_tile(const void* from, int64_t stride) {
#define RAGLANE_WITH(tile) \
  if constexpr (TILE == tile) _tile_loadd(tile, from, stride);
  RAGLANE_ALL_TILES(RAGLANE_WITH)
#undef RAGLANE_WITH
}
template <int TILE> RAGLANE_INLINE void store_tile(void* to, int64_t stride) {
#define RAGLANE_WITH(tile) \
  if constexpr (TILE == tile) _tile_stored(tile, to, stride);
  RAGLANE_ALL_TILES(RAGLANE_WITH)
#undef RAGLANE_WITH
}
#undef RAGLANE_ALL_TILES
template <int SUMS, int ROWS, int WEIGHTS> RAGLANE_INLINE void multiply_tiles() {
#define RAGLANE_WITH(sums, rows, weights) \
  if constexpr (SUMS == sums && ROWS == rows && WEIGHTS == weights) RAGLANE_TILE_PRODUCT(sums, rows, weights);
  RAGLANE_WITH(0, 4, 5) RAGLANE_WITH(1, 4, 6) RAGLANE_WITH(2, 4, 7) RAGLANE_WITH(3, 4, 5)
  RAGLANE_WITH(0, 4, 6) RAGLANE_WITH(1, 4, 7) RAGLANE_WITH(2, 5, 6) RAGLANE_WITH(3, 5, 7)
  RAGLANE_WITH(3, 4, 7) RAGLANE_WITH(3, 5, 6)
#undef RAGLANE_WITH
}
#endif

}  // namespace raglane::RAGLANE_TARGET
