// Products of pairs of bfloat16 in AMX's tile registers: 16 rows x 16 sums, and 16 words of k at a time.
//
// Included by gemm.h. Tiles 0 to 3 hold the sums, 4 the rows, 5 to 7 the weights. A sum takes the words of k in order,
// for any number of rows.
#pragma once

#include <stdlib.h>

namespace raglane::RAGLANE_TARGET {

// Configures the tile registers while a thread works on a call; other code in the process may configure them too.
class TileRegisters {
 public:
  TileRegisters() { rows_ = 0; }
  ~TileRegisters() {
    if (rows_) release_tiles();
  }
    // Set the number of rows of the tiles, which clears them.
  static void shape(int rows) {
    if (rows == rows_) return;
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      shapes.bytes[tile] = 4 * tile_words;
      shapes.rows[tile] = (uint8_t)(tile < 5 ? rows : tile_words);
    }
    configure_tiles(shapes);
    rows_ = rows;
  }

 private:
  static inline thread_local int rows_ = 0;
};

// Bytes from one row to the next, or -1 if the rows are not evenly spaced.
template <class P> RAGLANE_INLINE int64_t row_spacing(const P* rows, int count) {
  if (count == 1) return 0;
  int64_t spacing = (const char*)rows[1] - (const char*)rows[0];
  for (int r = 2; r < count; r++)
    if ((const char*)rows[r] - (const char*)rows[r - 1] != spacing) return -1;
  return spacing;
}

// Call with<0>(), ... with<VECTORS - 1>().
template <int VECTORS, class With> RAGLANE_INLINE void each_tile(With&& with) {
  with.template operator()<0>();
  if constexpr (VECTORS > 1) with.template operator()<1>();
  if constexpr (VECTORS > 2) with.template operator()<2>();
  if constexpr (VECTORS > 3) with.template operator()<3>();
}

template <int VECTORS> void multiply_vectors(int rows, const Product<float>& product) {
  constexpr int64_t weights_stride = VECTORS * tile_words * 4;
  alignas(64) float gathered[VECTORS][tile_rows][tile_words];
  TileRegisters::shape(rows);
  int64_t row_stride = row_spacing(product.rows, rows), start_stride = row_spacing(product.start, rows);
  int64_t to_stride = row_spacing(product.to, rows);
#if defined(RAGLANE_EMULATE)
  if (row_stride < 0 || to_stride < 0) abort();
#endif
  if (start_stride < 0)
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) store(gathered[v][r], load(product.start[r] + product.start_at[v]));
  flush(gathered);
  each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
    if (start_stride < 0) load_tile<V>(gathered[V], 4 * tile_words);
    else load_tile<V>(product.start[0] + product.start_at[V], start_stride);
  });
  const float* panel = product.panel;
  for (int64_t k = 0; k < product.depth; k += tile_words, panel += VECTORS * tile_words * tile_words) {
    load_tile<4>(product.rows[0] + k, row_stride);
    each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
      load_tile<5 + V % 3>(panel + V * tile_words, weights_stride);
      multiply_tiles<V, 5 + V % 3>();
    });
  }
  each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
    store_tile<V>(product.to[0] + product.to_at[V], to_stride);
  });
}

inline void multiply_in_tiles(int rows, int vectors, const Product<float>& product) {
  switch (vectors) {
    case 1: return multiply_vectors<1>(rows, product);
    case 2: return multiply_vectors<2>(rows, product);
    case 3: return multiply_vectors<3>(rows, product);
    default: return multiply_vectors<4>(rows, product);
  }
}

}  // namespace raglane::RAGLANE_TARGET
