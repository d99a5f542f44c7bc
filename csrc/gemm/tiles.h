// Products of pairs of bfloat16 in AMX's tile registers: 16 rows x 16 sums, and 16 words of k at a time.
//
// Included by gemm.h. Tiles 0 to 3 hold the sums, 4 the rows, 5 to 7 the weights; of more than 16 rows, 2 and 3 hold
// the sums of the second half and 5 its rows. A sum takes the words of k in order, for any number of rows.
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
  // Set the registers for a number of rows, which clears them.
  static void shape(int rows) {
    if (rows == rows_) return;
    const bool halves = rows > most_tile_rows;
    const int first = halves ? first_half(rows) : rows, second = halves ? rows - first : rows;
    const int by_tile[] = {first, first, second, second, first, halves ? second : tile_words, tile_words, tile_words};
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      shapes.bytes[tile] = 4 * tile_words;
      shapes.rows[tile] = (uint8_t)by_tile[tile];
    }
    configure_tiles(shapes);
    rows_ = rows;
  }
  static int first_half(int rows) { return (rows + 1) / 2; }

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

}  // namespace raglane::RAGLANE_TARGET

#include "gemm/tile_products.h"

namespace raglane::RAGLANE_TARGET {

// Vectors [begin, begin + VECTORS) of a panel of `vectors`. HALVES: 2 for more rows than a tile register has, which are
// divided in two, so that the weights are read once for both.
template <int HALVES, int VECTORS>
void multiply_columns(int rows, int begin, int vectors, const Product<float>& product) {
  constexpr int first_weights = 4 + HALVES, weights = 8 - first_weights;
  const int64_t weights_stride = vectors * tile_words * 4;
  alignas(64) float gathered[VECTORS][HALVES * most_tile_rows][tile_words];
  TileRegisters::shape(rows);
  const int second = TileRegisters::first_half(rows);  // the first row of the second half
  int64_t row_stride = row_spacing(product.rows, rows), start_stride = row_spacing(product.start, rows);
  int64_t to_stride = row_spacing(product.to, rows);
#if defined(RAGLANE_EMULATE)
  if (row_stride < 0 || to_stride < 0) abort();
#endif
  if (start_stride < 0)
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++)
        store(gathered[v][r], load(product.start[r] + product.start_at[begin + v]));
  flush(gathered);
  each_tile<HALVES>([&]<int H>() RAGLANE_INLINE_LAMBDA {
    each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
      const int row = H * second;
      if (start_stride < 0) load_tile<2 * H + V>(gathered[V][row], 4 * tile_words);
      else load_tile<2 * H + V>(product.start[row] + product.start_at[begin + V], start_stride);
    });
  });
  const float *panel = product.panel + begin * tile_words, *first_row = product.rows[0];
  const float* second_row = product.rows[HALVES == 2 ? second : 0];
  // Of what the product fetches, the share of these columns.
  const unsigned char* ahead = product.ahead + product.ahead_bytes * product.depth * begin / vectors;
  const int64_t ahead_bytes = product.ahead_bytes * tile_words * VECTORS / vectors;
  for (int64_t k = 0; k < product.depth; k += tile_words, panel += vectors * tile_words * tile_words) {
    for (const unsigned char* end = ahead + ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
    load_tile<4>(first_row + k, row_stride);
    if constexpr (HALVES == 2) load_tile<5>(second_row + k, row_stride);
    each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
      load_tile<first_weights + V % weights>(panel + V * tile_words, weights_stride);
      each_tile<HALVES>([&]<int H>() RAGLANE_INLINE_LAMBDA {
        multiply_tiles<2 * H + V, 4 + H, first_weights + V % weights>();
      });
    });
  }
  each_tile<HALVES>([&]<int H>() RAGLANE_INLINE_LAMBDA {
    each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
      store_tile<2 * H + V>(product.to[H * second] + product.to_at[begin + V], to_stride);
    });
  });
}

// A product of int8: sums of integers, then their scales.
inline void multiply_bytes_in_tiles(int rows, int vectors, const Product<float>& product) {
  constexpr int width = Lanes<float>::width;
  alignas(64) float sums[tile_rows * panel_vectors * width];
  TileSums at;
  at.to_words = vectors * width;
  for (int v = 0; v < vectors; v++) at.to[1][v] = sums + v * width;
  const TileFactor factor = {product.rows[0], row_spacing(product.rows, rows) / 4, product.panel, product.depth};
  flush(sums);
  TileProducts<quantised, false>(rows, vectors, {}, factor, at).finish();
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) {
      F start = load(product.start[r] + product.start_at[v]);
      F scales = load(product.panel + (vectors + v) * width);
      store(product.to[r] + product.to_at[v],
            add_bytes(start, (I)load(sums + (r * vectors + v) * width), product.rows[r][product.depth], scales));
    }
}

template <class S> inline void multiply_in_tiles(int rows, int vectors, const Product<float>& product) {
  if constexpr (in_bytes<S>) return multiply_bytes_in_tiles(rows, vectors, product);
  if (rows > most_tile_rows) {
    for (int begin = 0; begin < vectors; begin += 2)
      (vectors - begin > 1 ? multiply_columns<2, 2> : multiply_columns<2, 1>)(rows, begin, vectors, product);
    return;
  }
  switch (vectors) {
    case 1: return multiply_columns<1, 1>(rows, 0, vectors, product);
    case 2: return multiply_columns<1, 2>(rows, 0, vectors, product);
    case 3: return multiply_columns<1, 3>(rows, 0, vectors, product);
    default: return multiply_columns<1, 4>(rows, 0, vectors, product);
  }
}

}  // namespace raglane::RAGLANE_TARGET
