// int8 products: rows of floats times weights that were rounded to int8 beforehand.
//
// Included by gemm.h. A number is q * scale, q from -127 to 127. Each row has one scale: its largest magnitude over
// 127. A row of the weights belongs to one column of the product. The sums of q * q are exact integers, the same in any
// order and on every instruction set. Then each number is rounded once: start + sum * (scale of the row * scale of the
// column).
//
// A row's words contain q + 128, because the instruction multiplies unsigned by signed bytes; its scale follows them. A
// panel has two rows before its words: the start of the sums, which subtracts the 128 again, and the scales.
#pragma once

namespace raglane::RAGLANE_TARGET {

inline constexpr int heading_rows = 2;

struct RowScale {
  float inverse, scale;  // 0 for a row of zeros or nearly zeros; NaN for a row with a non-finite number
};
inline RowScale row_scale(const float* row, int64_t count) {
  constexpr int width = Lanes<float>::width;
  I largest = {};  // magnitudes have the order of their bits, with infinity and NaN at the end
  for (int64_t i = 0; i < count; i += width) {
    I bits = (I)load(row + i, (int)(count - i < width ? count - i : width)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t most = 0;
  for (int i = 0; i < width; i++) most = largest[i] > most ? largest[i] : most;
  float magnitude;
  memcpy(&magnitude, &most, sizeof magnitude);
  if (most >= 0x7f800000) return {0.0f, __builtin_nanf("")};
  if (magnitude < 0x1p-100f) return {0.0f, 0.0f};
  return {127.0f / magnitude, magnitude / 127.0f};
}

// q + 128 of a vector of numbers. The bounds matter in rounding modes in which 127 over the largest is rounded up.
RAGLANE_INLINE Lanes<float>::byte rounded_bytes(F numbers, float inverse) {
  numbers = at_most(127.0f, at_least(-127.0f, numbers * inverse));
  // A number so large that the sum has no fraction: its lowest byte is the integer.
  return lowest_bytes(numbers + (0x1.8p23f + 128.0f));
}

// Write a row as an operand; `to` has room for operand_words(), and for whole vectors.
inline void to_bytes(const float* row, int64_t count, float* to) {
  constexpr int width = Lanes<float>::width;
  RowScale found = row_scale(row, count);
  for (int64_t i = 0; i < count; i += width) {
    auto bytes = rounded_bytes(load(row + i, (int)(count - i < width ? count - i : width)), found.inverse);
    memcpy((unsigned char*)to + i, &bytes, sizeof bytes);
  }
  to[words<quantised>(count)] = found.scale;
}

// Pack the rows of one vector of columns: `real` of them, `row_stride` numbers apart. `column` is
// the position of these columns in the panel's first row, `stride` the words from one row to the next.
inline void pack_bytes(const float* from, int real, int64_t depth, int64_t row_stride, float* column, int64_t stride) {
  constexpr int width = Lanes<float>::width;
  store(column, F{}), store(column + stride, F{});
  for (int64_t k = 0; k < words<quantised>(depth); k++) store(column + (heading_rows + k) * stride, F{});
  for (int lane = 0; lane < real; lane++) {
    const float* row = from + lane * row_stride;
    RowScale found = row_scale(row, depth);
    int32_t sum = 0;
    for (int64_t i = 0; i < depth; i += width) {
      auto bytes = rounded_bytes(load(row + i, (int)(depth - i < width ? depth - i : width)), found.inverse);
      for (int b = 0; b < width && i + b < depth; b++) {
        int8_t q = (int8_t)(bytes[b] - 128);
        memcpy((int8_t*)(column + (heading_rows + (i + b) / 4) * stride + lane) + (i + b) % 4, &q, 1);
        sum += q;
      }
    }
    sum *= -128;
    memcpy(column + lane, &sum, sizeof sum);
    column[stride + lane] = found.scale;
  }
}

// A float plus a sum of q * q with the scales of its row and its columns.
RAGLANE_INLINE F add_bytes(F start, I sums, float scale, F scales) {
  F sum = __builtin_convertvector(sums, F) * (scale * scales);
  return start + sum;
}

// multiply_tile() for int8; `product.depth` counts words, which the scales follow.
template <int ROWS, int VECTORS> RAGLANE_INLINE void multiply_bytes(const Product<float>& product) {
  constexpr int width = Lanes<float>::width;
  const float* row[ROWS];
  I sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    row[r] = product.rows[r];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = (I)load(product.panel + v * width);
  }
  const float* panel = product.panel + heading_rows * VECTORS * width;
  const int64_t depth = product.depth;
  Ahead<ROWS> ahead(product);
  for (int64_t k = 0; k < depth; k++, panel += VECTORS * width) {
    ahead.fetch();
    I x[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) x[r] = (I)splat_at(row[r] + k);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      I weight = (I)load(panel + v * width);
      __builtin_prefetch(panel + (tuning::fetch_ahead * VECTORS + v) * width);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sums[r][v] = dot_bytes(x[r], weight, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      F start = load(product.start[r] + product.start_at[v]), scales = load(product.panel + (VECTORS + v) * width);
      store(product.to[r] + product.to_at[v], add_bytes(start, sums[r][v], row[r][depth], scales));
    }
  }
}

}  // namespace raglane::RAGLANE_TARGET
