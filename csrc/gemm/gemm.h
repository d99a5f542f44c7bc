// Products of a few rows with packed weights.
//
// A panel holds the weights of up to four vectors of output columns, adjacent for each k: the micro-kernel reads
// one stream, and keeps rows x vectors sums in registers.
//
// NOTE (order of sums): a sum starts from its first value and adds k = 0, 1, 2 ... one fused multiply-add at a time,
// for any number of rows, whether it stays in a register or is stored in memory between two parts of k. So the bits of
// a row depend only on that row and the weights. All divisions of work rely on this.
//
// NOTE (words): some processors multiply pairs of bfloat16 and add both products to a float. Operands therefore
// consist of words of the size of a sum. A word holds one number, or two that follow each other in k. An operand of
// pairs is filled up with zeros to a whole word, or a whole tile.
#pragma once

#include "runtime/tuning.h"
#include "simd/simd.h"

namespace raglane::RAGLANE_TARGET {

// Maximum rows of a tile of any panel, and of one of `panel_vectors` in registers: sums, weights and one broadcast value
// must fit the registers, or the tile registers, of which two may hold a tile's rows, `register_rows` each. The words of
// an operand of pairs are a multiple of `whole_words`.
#if defined(RAGLANE_TILES)
inline constexpr int tile_rows = 2 * most_tile_rows, register_rows = most_tile_rows, whole_words = tile_words;
#else
inline constexpr int tile_rows = 6, register_rows = registers == 32 ? 6 : 3, whole_words = 1;
#endif
inline constexpr int panel_vectors = 4;

// Maximum rows of a tile of so many vectors: 16 registers hold 12 sums.
constexpr int most_rows(int vectors) {
  if (register_rows != 3 || vectors < 3) return tile_rows;
  return 12 / vectors;
}

// Products of a storage type use pairs; the storage type of their operands.
#if defined(RAGLANE_PAIRS)
template <class S> inline constexpr bool in_pairs = sizeof(S) == 2;
#else
template <class S> inline constexpr bool in_pairs = false;
#endif
template <class S, bool PAIRS = in_pairs<S>> struct Operand { using type = typename Arithmetic<S>::type; };
template <class S> struct Operand<S, true> { using type = S; };

// Products of a storage type use int8. Then a word of an operand holds four numbers, and the row's scale is the
// word after its last: see bytes.h.
template <class S> inline constexpr bool in_bytes = false;
template <> inline constexpr bool in_bytes<quantised> = true;
template <> struct Operand<quantised, false> { using type = quantised; };

// Numbers of a storage type are operands without conversion.
template <class S> inline constexpr bool is_operand = sizeof(S) == sizeof(typename Arithmetic<S>::type) && !in_bytes<S>;

// Words of a number of an operand's numbers.
template <class S> inline int64_t words(int64_t numbers) {
  if (!in_pairs<S> && !in_bytes<S>) return numbers;
  const int64_t in_whole = (in_bytes<S> ? 4 : 2) * whole_words;
  return (numbers + in_whole - 1) / in_whole * whole_words;
}

// Words of a whole operand.
template <class S> inline int64_t operand_words(int64_t numbers) { return words<S>(numbers) + (in_bytes<S> ? 1 : 0); }

// A product of a few rows: to[r][to_at[v] ...] = start[r][start_at[v] ...] + the sum over k < depth of rows[r][k *
// step] * panel[k][v], all in words; `depth` is at least 1. `start` may be `to`: the sums are read before the first k
// and written after the last. For AMX's tiles the rows of operands and of `to` are evenly spaced in memory, and `step`
// is 1.
//
// NOTE (ahead): the first tile of a panel that no cache of the core holds waits for the third cache, the others do not.
// So each tile fetches its share of the next panel into the second cache: `ahead_bytes` from `ahead` on for each k, at
// most two lines.
template <class A> struct Product {
  const A* const* rows;
  const A* panel;
  int64_t depth;
  const A* const* start;
  const int64_t* start_at;
  A* const* to;
  const int64_t* to_at;
  int64_t step = 1;
  const unsigned char* ahead = nullptr;
  int64_t ahead_bytes = 0;

  // Let rows [first, first + size) of `rows` fetch their share of a panel like this one; `next` may be null.
  Product& fetch(const A* next, int first, int size, int rows, int vectors) {
    const int64_t line = (int64_t)vectors * vector_bytes;
    if (!next || registers != 32 || size == rows) return *this;
    ahead = (const unsigned char*)next + depth * line * first / rows, ahead_bytes = line * size / rows;
    return *this;
  }
};

// What a tile of some rows fetches for each k; a tile of few rows waits for its own weights.
template <int ROWS> class Ahead {
 public:
  template <class A> explicit Ahead(const Product<A>& product) : next_(product.ahead), bytes_(product.ahead_bytes) {}
  RAGLANE_INLINE void fetch() {
    if constexpr (registers == 32 && ROWS > 2)
      if (next_) {
        __builtin_prefetch(next_, 0, 2);
        __builtin_prefetch(next_ + 64, 0, 2);
        next_ += bytes_;
      }
  }

 private:
  const unsigned char* next_;
  const int64_t bytes_;
};

}  // namespace raglane::RAGLANE_TARGET

#include "gemm/bytes.h"
#if defined(RAGLANE_TILES)
#include "gemm/tiles.h"
#endif

namespace raglane::RAGLANE_TARGET {

template <class S, class V> RAGLANE_INLINE V multiply_add(V a, V b, V c) {
#if defined(RAGLANE_PAIRS)
  if constexpr (in_pairs<S>) return dot(a, b, c);
#endif
  return fma(a, b, c);
}

// STRIDED: the rows' numbers are not contiguous, so they are prefetched here.
template <int ROWS, int VECTORS, class S, bool STRIDED>
void multiply_tile(const Product<typename Arithmetic<S>::type>& product) {
  if constexpr (in_bytes<S>) return multiply_bytes<ROWS, VECTORS>(product);
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  constexpr int distance = tuning::fetch_ahead;  // as much as a core's second cache needs
  const A* row[ROWS];
  V sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    row[r] = product.rows[r];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(product.start[r] + product.start_at[v]);
  }
  const A* panel = product.panel;
  const int64_t depth = product.depth, step = product.step;
  Ahead<ROWS> ahead(product);
  int64_t k = 0;
  do {  // depth is at least 1: for a loop that may be empty, the compiler would also store all sums before it
    if constexpr (STRIDED) __builtin_prefetch(row[ROWS - 1] + (k + tuning::rows_ahead) * step);
    ahead.fetch();
    if constexpr (registers == 32 || ROWS > VECTORS) {
      V weight[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        weight[v] = load(panel + v * width);
        if (registers == 32 && v * vector_bytes % 64 == 0)
          __builtin_prefetch(panel + (distance * VECTORS + v) * width);  // once per line
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        V x = splat_at(row[r] + k * step);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add<S>(x, weight[v], sums[r][v]);
      }
    } else {  // few registers: keep the rows' values, and one weight at a time
      V x[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) x[r] = splat_at(row[r] + k * step);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        V weight = load(panel + v * width);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][v] = fma(x[r], weight, sums[r][v]);
      }
    }
    panel += VECTORS * width;
  } while (++k < depth);
  // Copies, because the compiler must assume that the stores change `product`.
  A* const* const to = product.to;
  int64_t at[VECTORS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) at[v] = product.to_at[v];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    A* const row_to = to[r];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(row_to + at[v], sums[r][v]);
  }
}

// One row's products with two panels of the same depth side by side: one panel alone has fewer sums than hide the latency
// of their multiply-adds.
template <int VECTORS, class S>
void multiply_two(const Product<typename Arithmetic<S>::type>& first, const Product<typename Arithmetic<S>::type>& second) {
  if constexpr (in_bytes<S>) return multiply_bytes<1, VECTORS>(first), multiply_bytes<1, VECTORS>(second);
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  constexpr int ahead = tuning::fetch_ahead;
  const Product<A>* const products[2] = {&first, &second};
  V sums[2][VECTORS];
#pragma GCC unroll 2
  for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[p][v] = load(products[p]->start[0] + products[p]->start_at[v]);
  const A *row = first.rows[0], *panels[2] = {first.panel, second.panel};
  const int64_t depth = first.depth;
  int64_t k = 0;
  do {
    V x = splat_at(row + k);
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        if (registers == 32 && v * vector_bytes % 64 == 0)
          __builtin_prefetch(panels[p] + (ahead * VECTORS + v) * width);  // once per line
        sums[p][v] = multiply_add<S>(x, load(panels[p] + v * width), sums[p][v]);
      }
      panels[p] += VECTORS * width;
    }
  } while (++k < depth);
#pragma GCC unroll 2
  for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(products[p]->to[0] + products[p]->to_at[v], sums[p][v]);
}

#if defined(RAGLANE_TILES)
template <class S> inline void multiply_row(int vectors, const Product<typename Arithmetic<S>::type>& product) {
  switch (vectors) {
    case 1: return multiply_tile<1, 1, S, false>(product);
    case 2: return multiply_tile<1, 2, S, false>(product);
    case 3: return multiply_tile<1, 3, S, false>(product);
    default: return multiply_tile<1, 4, S, false>(product);
  }
}
#endif

// The same for 1 to panel_vectors vectors and 1 to most_rows(vectors) rows, known at run time; S is the operands' storage
// type.
template <class S, bool STRIDED = false>
inline void multiply(int rows, int vectors, const Product<typename Arithmetic<S>::type>& product) {
#if defined(RAGLANE_TILES)
  // A row of bytes has no use for tiles. Its sums are the same integers.
  constexpr int most = in_bytes<S> ? tuning::alone_rows_in_bytes : 0;
  if (rows > most) return multiply_in_tiles<S>(rows, vectors, product);
  if constexpr (in_bytes<S>) multiply_row<S>(vectors, product);
#else
  using Kernel = void (*)(const Product<typename Arithmetic<S>::type>&);
  static constexpr Kernel kernels[tile_rows][panel_vectors] = {
#define RAGLANE_TILE(n, v) n > most_rows(v) ? nullptr : multiply_tile<(n > most_rows(v) ? 1 : n), v, S, STRIDED>
#define RAGLANE_ROW(n) { RAGLANE_TILE(n, 1), RAGLANE_TILE(n, 2), RAGLANE_TILE(n, 3), RAGLANE_TILE(n, 4) }
      RAGLANE_ROW(1), RAGLANE_ROW(2), RAGLANE_ROW(3), RAGLANE_ROW(4), RAGLANE_ROW(5), RAGLANE_ROW(6),
#undef RAGLANE_ROW
#undef RAGLANE_TILE
  };
  kernels[rows - 1][vectors - 1](product);
#endif
}

// 0, 1, ... N - 1 as a type.
template <int... I> struct Integers {};
template <int N, int... I> struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I> struct UpTo<0, I...> {
  using type = Integers<I...>;
};

// The number of rows of the next tile with a panel, so that all tiles of `rows` rows have nearly equal sizes.
inline int next_tile(int rows, int vectors) {
  int most = most_rows(vectors), tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

// One stage of a transposition: blocks of HALF x HALF are swapped in pairs of rows that are HALF apart.
template <int HALF, class A, int... I> RAGLANE_INLINE void exchange(Vec<A>* rows, Integers<I...>) {
  constexpr int width = Lanes<A>::width;
#pragma GCC unroll 16
  for (int i = 0; i < width; i++) {
    if (i & HALF) continue;
    Vec<A> a = rows[i], b = rows[i + HALF];
    rows[i] = __builtin_shufflevector(a, b, (I & HALF ? width + I - HALF : I)...);
    rows[i + HALF] = __builtin_shufflevector(a, b, (I & HALF ? width + I : I + HALF)...);
  }
}

// Transpose a square of `width` vectors.
template <class A> RAGLANE_INLINE void transpose(Vec<A>* rows) {
  using All = typename UpTo<Lanes<A>::width>::type;
  exchange<1, A>(rows, All{});
  if constexpr (Lanes<A>::width > 2) exchange<2, A>(rows, All{});
  if constexpr (Lanes<A>::width > 4) exchange<4, A>(rows, All{});
  if constexpr (Lanes<A>::width > 8) exchange<8, A>(rows, All{});
}

// Load words from memory for a number of numbers, followed by zeros.
template <class S> RAGLANE_INLINE Vec<typename Arithmetic<S>::type> load_words(const S* from, int64_t numbers) {
  constexpr int width = Lanes<typename Arithmetic<S>::type>::width;
  if constexpr (!in_pairs<S>) return load(from, (int)(numbers < width ? numbers : width));
  else {
    F v = {};
    memcpy(&v, from, numbers < 2 * width ? numbers * sizeof(S) : sizeof v);
    return v;
  }
}

// A matrix in panels of up to `units` vectors of columns, each with all gates of those columns; S is the storage type
// of the matrix, and a panel consists of words. In int8 two rows precede them, see bytes.h.
template <class S> struct Panels {
  using A = typename Arithmetic<S>::type;
  A* data = nullptr;
  int64_t columns = 0, depth = 0;
  int gates = 1, units = panel_vectors;
  bool in_turn = false;  // `data` is room for one panel, which the next one replaces

  static constexpr int width = Lanes<A>::width;
  static constexpr int in_word = in_pairs<S> ? 2 : 1, heading = in_bytes<S> ? heading_rows : 0;
  int64_t panel_columns() const { return (int64_t)units * width; }
  int64_t count() const { return (columns + panel_columns() - 1) / panel_columns(); }
  int64_t padded_columns() const { return (columns + width - 1) / width * width; }
  int64_t steps() const { return words<S>(depth); }
  int64_t size() const { return padded_columns() * gates * (heading + steps()); }
  int64_t panel_size() const { return panel_columns() * gates * (heading + steps()); }
  const A* at(int64_t panel) const { return data + (in_turn ? 0 : panel) * panel_size(); }
  // Vectors of columns in a panel; the last may have fewer.
  int units_in(int64_t panel) const {
    int64_t rest = padded_columns() - panel * panel_columns();
    return (int)(rest < panel_columns() ? rest / width : units);
  }

  // Pack one panel from weights (columns, depth), one matrix per gate: columns of the product are their rows,
  // `row_stride` numbers apart.
  void pack_transposed(const S* const* matrices, int64_t panel) { pack_transposed(matrices, panel, depth); }
  [[gnu::noinline]] void pack_transposed(const S* const* matrices, int64_t panel, int64_t row_stride) {
    int in_panel = units_in(panel);
    int64_t stride = (int64_t)gates * in_panel * width;
    A* to = (A*)at(panel);
    for (int gate = 0; gate < gates; gate++)
      for (int unit = 0; unit < in_panel; unit++) {
        int64_t first = panel * panel_columns() + unit * width;
        int real = (int)(columns - first < width ? columns - first : width);
        const S* from = matrices[gate] + first * row_stride;
        A* column = to + (gate * in_panel + unit) * width;
        if constexpr (in_bytes<S>) {
          pack_bytes((const float*)from, real, depth, row_stride, column, stride);
          continue;
        }
        const int64_t whole = real == width ? depth / (width * in_word) * width : 0;
        pack_squares(from, row_stride, whole, column, stride);
        column += whole * stride;
        for (int64_t k = whole; k < steps(); k += width) {
          int count = (int)(steps() - k < width ? steps() - k : width);
          int64_t begin = k * in_word, numbers = depth > begin ? depth - begin : 0;
          Vec<A> square[width] = {};
          for (int lane = 0; lane < real; lane++) square[lane] = load_words(from + lane * row_stride + begin, numbers);
          transpose<A>(square);
          for (int i = 0; i < count; i++, column += stride) store(column, square[i]);
        }
      }
  }

  // Pack panels [first, end) from a matrix (depth, columns), for one gate.
  void pack_straight(const S* matrix, int64_t first, int64_t end) const { pack_straight(matrix, first, end, columns); }
  void pack_straight(const S* matrix, int64_t first, int64_t end, int64_t row_stride) const {
    pack_rows([=](int64_t row) { return matrix + row * row_stride; }, first, end);
  }
  // The same for rows at any addresses, row(k), k < depth: some rows at a time for all panels, since a row's part for
  // one panel is short.
  template <class Row> void pack_rows(Row&& at_row, int64_t first, int64_t end) const {
    constexpr int64_t at_once = 16;
    for (int64_t begin = 0; begin < steps(); begin += at_once)
      for (int64_t panel = first; panel < end; panel++)
        pack_part(at_row, panel, begin, begin + at_once < steps() ? begin + at_once : steps());
  }

  // Whole squares of words: without masks, and unrolled.
  static RAGLANE_INLINE void pack_squares(const S* from, int64_t row_stride, int64_t words, A* to, int64_t stride) {
    for (int64_t k = 0; k < words; k += width, to += width * stride) {
      Vec<A> square[width];
#pragma GCC unroll 16
      for (int lane = 0; lane < width; lane++)
        square[lane] = load_words(from + lane * row_stride + k * in_word, width * in_word);
      transpose<A>(square);
#pragma GCC unroll 16
      for (int i = 0; i < width; i++) store(to + i * stride, square[i]);
    }
  }

 private:
  template <class Row> void pack_part(Row&& at_row, int64_t panel, int64_t begin, int64_t end) const {
    int in_panel = units_in(panel);
    A* to = (A*)at(panel) + begin * in_panel * width;
    for (int64_t k = begin; k < end; k++)
      for (int unit = 0; unit < in_panel; unit++, to += width) {
        int64_t column = panel * panel_columns() + unit * width;
        int count = (int)(columns - column < width ? columns - column : width);
        Vec<A> row[in_word];
#pragma GCC unroll 2
        for (int i = 0; i < in_word; i++) {
          int64_t number = k * in_word + i;
          row[i] = number < depth ? load(at_row(number) + column, count) : Vec<A>{};
        }
        if constexpr (in_word == 2) {  // the upper half of the wider number is the narrow one
          using Word = Lanes<float>::word;
          row[0] = (F)((Word)row[1] | (Word)row[0] >> 16);
        }
        store(to, row[0]);
      }
  }
};

// to[row] += rows[row] x one panel of a plain product. Rows of `to` have room for whole vectors. With `fetches` some k are
// read for all rows before the next, which are fetched meanwhile; `next` is the panel that follows, or -1.
template <class S, class A>
void multiply_panel(const Panels<S>& panels, int64_t panel, int rows, A* const* from, A* const* to, bool fetches = false,
                    int64_t next = -1) {
  const int vectors = panels.units_in(panel);
  const int64_t steps = panels.steps(), row = vectors * Lanes<A>::width;
  const int64_t part = fetches && registers == 32 ? tuning::fetched_depth : steps;
  int64_t offsets[panel_vectors];
  for (int v = 0; v < panel_vectors; v++) offsets[v] = panel * panels.panel_columns() + v * Lanes<A>::width;
  for (int64_t begin = 0; begin < steps; begin += part) {
    const int64_t depth = steps - begin < part ? steps - begin : part;
    const A *weights = panels.at(panel) + begin * row, *following = fetches && next >= 0 ? panels.at(next) : nullptr;
    if (begin + part < steps) following = weights + part * row;
    for (int first = 0, size; first < rows; first += size) {
      size = next_tile(rows - first, vectors);
      const A* operands[tile_rows];
      for (int r = 0; r < size; r++) operands[r] = from[first + r] + begin;
      Product<A> product = {operands, weights, depth, (const A* const*)to + first, offsets, to + first, offsets};
      multiply<typename Operand<S>::type>(size, vectors, product.fetch(following, first, size, rows, vectors));
    }
  }
}

}  // namespace raglane::RAGLANE_TARGET
