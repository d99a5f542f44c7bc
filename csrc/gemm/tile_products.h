// The products of a few rows of x and h with a panel each, in AMX's tile registers: step by step, so that a caller can
// compute something else between two steps, while tiles are loaded and multiplied.
//
// Included by tiles.h, whose division of the registers and order of sums this follows. In bfloat16 a sum stays in its
// register from its start over x to the end of h, except that the last gate of some cells has two sums. Sums of int8
// are integers, whose scales differ, so those of x and h are stored apart.
#pragma once

namespace raglane::RAGLANE_TARGET {

// Rows of an operand, evenly spaced in memory, and a panel of weights. `depth` is in words; 0 if there is no product.
struct TileFactor {
  const float* rows;
  int64_t row_words;
  const float* panel;
  int64_t depth;
  const float* next = nullptr;  // a panel like this one, some bytes of which are fetched during each step of k
  int64_t next_bytes = 0;
};

// Where the sums of each vector of columns begin and end, for the first row, and the words from one row to the next.
struct TileSums {
  const float* start[2][panel_vectors];  // of x and h; in int8 panels have them
  int64_t start_words;
  float* to[2][panel_vectors];
  int64_t to_words;
};

// S is the operands' storage type. SPLIT: the last gate has two sums.
template <class S, bool SPLIT> class TileProducts {
  static constexpr bool apart = in_bytes<S>;

 public:
  TileProducts(int rows, int vectors, const TileFactor& x, const TileFactor& h, const TileSums& sums)
      : factors_{x, h}, sums_(sums), vectors_(vectors), halves_(rows > most_tile_rows ? 2 : 1),
        second_(halves_ == 2 ? TileRegisters::first_half(rows) : 0),
        ahead_{(const unsigned char*)x.next, (const unsigned char*)h.next} {
    TileRegisters::shape(rows);
  }
  // The passes over a panel, each of some columns.
  static int64_t passes(bool halves, int vectors) { return halves ? (vectors + 1) / 2 : 1; }
  // Steps of k, of all columns.
  int64_t steps() const {
    return passes(halves_ == 2, vectors_) * (factors_[0].depth + factors_[1].depth) / tile_words;
  }

  // Make one step of k; false if there is none, and all sums are stored.
  RAGLANE_INLINE bool advance() {
    if (left_ == 0 && !next()) return false;
    left_--;
    step_(*this);
    return true;
  }
  void finish() {
    while (advance()) {
    }
  }

 private:
  const TileFactor factors_[2];
  const TileSums sums_;
  const int vectors_, halves_, second_;  // second_: the first row of the second half
  int begin_ = 0, columns_ = 0;          // the vectors of this pass
  int operand_ = 1;                      // 0 for x and 1 for h
  int64_t left_ = 0;                     // steps of k
  const unsigned char* ahead_[2] = {};
  const float *row_ = nullptr, *second_row_ = nullptr, *panel_ = nullptr;
  int64_t row_bytes_ = 0, panel_bytes_ = 0, panel_words_ = 0;
  void (*step_)(TileProducts&) = nullptr;

  // Go on to the next operand, or the next columns.
  [[gnu::noinline]] bool next() {
    do {
      if (columns_ > 0 && (apart ? factors_[operand_].depth > 0 : operand_ == 1)) on_sums<false>();
      if (operand_ == 1) {
        begin_ += columns_;
        columns_ = halves_ == 1 ? vectors_ : vectors_ - begin_ < 2 ? vectors_ - begin_ : 2;
        if (begin_ == vectors_) {
          columns_ = 0;
          return false;
        }
      }
      operand_ = 1 - operand_;
      const TileFactor& factor = factors_[operand_];
      row_ = factor.rows, second_row_ = factor.rows + second_ * factor.row_words, row_bytes_ = 4 * factor.row_words;
      panel_ = factor.panel + begin_ * tile_words + (apart ? heading_rows * vectors_ * tile_words : 0);
      panel_bytes_ = 4 * vectors_ * tile_words, panel_words_ = vectors_ * tile_words * tile_words;
      left_ = factor.depth / tile_words;
      if (left_ == 0 && apart) continue;
      if (apart || operand_ == 0) on_sums<true>();
      step_ = factor.next ? step<true>() : step<false>();
    } while (left_ == 0);
    return true;
  }

  bool splits() const { return SPLIT && !apart && begin_ + columns_ == vectors_; }

  // The register of a sum.
  template <int HALVES, int VECTORS, int H, int V, bool SPLITS> static constexpr int sum_tile() {
    return (HALVES == 2 ? 2 * H : 0) + V + (SPLITS && V == VECTORS - 1 ? 1 : 0);
  }

  template <int HALVES, int VECTORS, bool SPLITS, bool FETCHES> static void multiply_step(TileProducts& p) {
    constexpr int first_weights = 4 + HALVES, weights = 8 - first_weights;
    if constexpr (FETCHES) {
      const unsigned char *line = p.ahead_[p.operand_], *end = line + p.factors_[p.operand_].next_bytes;
      for (; line < end; line += 64) __builtin_prefetch(line, 0, 2);
      p.ahead_[p.operand_] = end;
    }
    load_tile<4>(p.row_, p.row_bytes_);
    if constexpr (HALVES == 2) load_tile<5>(p.second_row_, p.row_bytes_);
    each_tile<VECTORS>([&]<int V>() RAGLANE_INLINE_LAMBDA {
      load_tile<first_weights + V % weights>(p.panel_ + V * tile_words, p.panel_bytes_);
      each_tile<HALVES>([&]<int H>() RAGLANE_INLINE_LAMBDA {
        multiply_tiles<sum_tile<HALVES, VECTORS, H, V, SPLITS>(), 4 + H, first_weights + V % weights>();
      });
    });
    p.row_ += tile_words, p.second_row_ += tile_words, p.panel_ += p.panel_words_;
  }
  template <bool FETCHES> auto step() const {
    const bool second_sum = splits() && operand_ == 1;
    if constexpr (SPLIT && !apart) {
      if (second_sum && halves_ == 2) return columns_ == 1 ? multiply_step<2, 1, true, FETCHES> : nullptr;
      if (second_sum) return multiply_step<1, 3, true, FETCHES>;
    }
    if (halves_ == 2) return columns_ == 1 ? multiply_step<2, 1, false, FETCHES> : multiply_step<2, 2, false, FETCHES>;
    switch (columns_) {
      case 1: return multiply_step<1, 1, false, FETCHES>;
      case 2: return multiply_step<1, 2, false, FETCHES>;
      case 3: return multiply_step<1, 3, false, FETCHES>;
      default: return multiply_step<1, 4, false, FETCHES>;
    }
  }

  // Load or store the sum of vector V of these columns, for an operand, in register V of each half.
  template <bool LOAD, int TILE> void on_sum(int operand, int vector, int half) {
    if constexpr (LOAD && apart) {
      load_tile<TILE>(factors_[operand].panel + (begin_ + vector) * tile_words, 0);
    } else if constexpr (LOAD) {
      const int64_t offset = half ? second_ * sums_.start_words : 0;
      load_tile<TILE>(sums_.start[operand][begin_ + vector] + offset, 4 * sums_.start_words);
    } else {
      const int64_t offset = half ? second_ * sums_.to_words : 0;
      store_tile<TILE>(sums_.to[operand][begin_ + vector] + offset, 4 * sums_.to_words);
    }
  }
  template <bool LOAD> void on_sums() {
    // A register holds the sum of x alone if the gate has another for h, or in int8.
    const int operand = apart ? operand_ : 1;
    const int last = columns_ - 1;
    const auto whose = [&](int v) { return splits() && v == last ? 0 : operand; };
    if (halves_ == 1) {
      on_sum<LOAD, 0>(whose(0), 0, 0);
      if (columns_ > 1) on_sum<LOAD, 1>(whose(1), 1, 0);
      if (columns_ > 2) on_sum<LOAD, 2>(whose(2), 2, 0);
      if (columns_ > 3) on_sum<LOAD, 3>(whose(3), 3, 0);
      if (splits()) on_sum<LOAD, 3>(1, last, 0);
      return;
    }
    on_sum<LOAD, 0>(whose(0), 0, 0), on_sum<LOAD, 2>(whose(0), 0, 1);
    if (columns_ > 1) on_sum<LOAD, 1>(whose(1), 1, 0), on_sum<LOAD, 3>(whose(1), 1, 1);
    if (splits()) on_sum<LOAD, 1>(1, last, 0), on_sum<LOAD, 3>(1, last, 1);
  }
};

}  // namespace raglane::RAGLANE_TARGET
