// Input products: rows of the values times one direction's packed weights, plus the biases.
//
// NOTE (prepared rows): a row of products is stored panel after panel, each panel slot after slot, and a slot holds the
// panel's units in whole vectors. So a tile of the time loop reads a few contiguous ranges, and needs no masks.
#pragma once

#include "gemm/gemm.h"
#include "runtime/scratch.h"
#include "runtime/tuning.h"

namespace raglane::RAGLANE_TARGET {

// to[i] = from[i] for i in [begin, end), between a storage type and its type of computation.
template <class To, class From> RAGLANE_INLINE void copy_columns(To* to, const From* from, int64_t begin, int64_t end) {
  using A = typename Arithmetic<From>::type;
  constexpr int width = Lanes<A>::width;
  for (int64_t i = begin; i < end; i += width) {
    int count = (int)(end - i < width ? end - i : width);
    store(to + i, load(from + i, count), count);
  }
}

// Write zeros to the unused numbers in the words of an operand.
template <class S> RAGLANE_INLINE void clear_rest(void* row, int64_t numbers) {
  if constexpr (in_pairs<S>) memset((S*)row + numbers, 0, (2 * words<S>(numbers) - numbers) * sizeof(S));
}

// A row length that keeps rows aligned, and rows of a power of two in different cache sets.
template <class A> int64_t row_stride(int64_t columns) {
  constexpr int width = Lanes<A>::width;
  return (columns + width - 1) / width * width + 64 / (int64_t)sizeof(A);
}

// The positions of the gates of one panel in a prepared row, and of their biases.
template <class Cell, class A> struct PanelPlace {
  static constexpr int width = Lanes<A>::width;
  static constexpr int slot_size = Cell::unit_vectors * width;
  int64_t unit;   // index of the panel's first unit
  int64_t chunk;  // begin of the panel's part of a row
  int units;      // number of vectors of units: a constant for most cells, so that tiles need no divisions
  const A* bias;
  int64_t bias_stride;
  int64_t of_input[panel_vectors], of_bias[panel_vectors];  // positions of each vector of the panel and of its bias

  template <class S> PanelPlace(const Panels<S>& panels, const A* biases, int64_t panel)
      : unit(panel * panels.panel_columns()), chunk(unit * Cell::slots),
        units(Cell::unit_vectors == 1 ? 1 : panels.units_in(panel)), bias(biases + unit),
        bias_stride(panels.padded_columns()) {
    for (int v = 0; v < Cell::gates * units; v++) {
      of_bias[v] = gate_of(v) * bias_stride + (v - gate_of(v) * units) * width;
      of_input[v] = gate_of(v) * slot_size + (v - gate_of(v) * units) * width;
    }
  }
  // The gate of a vector of the panel.
  RAGLANE_INLINE int gate_of(int v) const { return Cell::gates == 1 ? 0 : v / units; }
  // The slots without an input product.
  void start(A* to, int from_slot) const {
    for (int slot = from_slot; slot < Cell::slots; slot++)
      for (int u = 0; u < units; u++)
        store(to + slot * slot_size + u * width, load(bias + slot * bias_stride + u * width));
  }
};

using tuning::block_rows;

template <class Cell, class S> class InputProducts {
 public:
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using Place = PanelPlace<Cell, A>;
  static constexpr int width = Lanes<A>::width;

  InputProducts(const void* values, int64_t hidden_size, int64_t input_size)
      : values_((const S*)values), hidden_size_(hidden_size), input_size_(input_size),
        x_stride_(row_stride<A>(operand_words<S>(input_size))) {
    for (Panels<S>& panels : panels_) panels = {nullptr, hidden_size, input_size, Cell::gates, Cell::unit_vectors};
  }

  // Reals of a direction's biases and weights, and their memory, in which weights may be missing.
  int64_t bias_size() const { return Cell::slots * panels_[0].padded_columns(); }
  int64_t size() const { return panels_[0].size() + bias_size(); }
  void place(int d, A* memory, bool has_weights = true) {
    panels_[d].data = has_weights ? memory : nullptr;
    bias_[d] = memory + (has_weights ? panels_[d].size() : 0);
  }
  // Room for rows in words, if the values cannot be read directly.
  bool reserve(int64_t threads, bool poison) {
    return is_operand<S> || copies_.reserve(threads * block_rows * x_stride_, poison);
  }

  const Panels<S>& panels(int d) const { return panels_[d]; }
  const A* bias(int d) const { return bias_[d]; }
  Place at(int d, int64_t panel) const { return Place(panels_[d], bias_[d], panel); }
  // Reals of a prepared row.
  int64_t row_size() const { return row_stride<A>(Cell::slots * panels_[0].padded_columns()); }

  // Pack a panel of weights, (H, D) per gate.
  void pack(int d, int64_t panel, const S* const* gates) { panels_[d].pack_transposed(gates, panel); }
  // Set the biases of a panel to zero.
  void clear_bias(int d, int64_t panel) {
    V zero = {};
    Place place = at(d, panel);
    for (int slot = 0; slot < Cell::slots; slot++)
      for (int u = 0; u < place.units; u++) store(bias_[d] + slot * place.bias_stride + place.unit + u * width, zero);
  }
  // Add biases (H) to those of a panel in a slot.
  void add_bias(int d, int64_t panel, int slot, const S* bias) {
    Place place = at(d, panel);
    for (int u = 0; u < place.units; u++) {
      int64_t unit = place.unit + u * width;
      A* to = bias_[d] + slot * place.bias_stride + unit;
      store(to, load((const A*)to) + load(bias + unit, count_at(unit)));
    }
  }

  // Words from one row of the thread's room to the next.
  int64_t x_stride() const { return x_stride_; }

  // An element's input in words: the values themselves, or a copy in row `place` of the thread's room.
  const A* row(int64_t element, int thread, int place) const {
    const S* row = values_ + element * input_size_;
    if constexpr (is_operand<S>) return row;
    else {
      A* room = copies_.get() + (thread * block_rows + place) * x_stride_;
      if constexpr (in_bytes<S>) {
        to_bytes((const float*)row, input_size_, room);
      } else {
        copy_columns((typename Operand<S>::type*)room, row, 0, input_size_);
        clear_rest<S>(room, input_size_);
      }
      return room;
    }
  }

  // The products of several rows with one panel, into prepared rows that begin with panel `first_panel`.
  void multiply(int d, int64_t panel, int rows, const A* const* from, A* to, int64_t stride,
                int64_t first_panel = 0) const {
    multiply(d, panel, panels_[d], rows, from, to, stride, first_panel);
  }
  // The same with weights that are packed elsewhere.
  void multiply(int d, int64_t panel, const Panels<S>& weights, int rows, const A* const* from, A* to, int64_t stride,
                int64_t first_panel = 0) const {
    Place place = at(d, panel);
    place.chunk -= first_panel * panels_[d].panel_columns() * Cell::slots;
    for (int first = 0, size; first < rows; first += size) {
      size = next_tile(rows - first, Cell::gates * place.units);
      tile(panel, weights, place, size, from + first, to + first * stride, stride);
    }
  }

 private:
  const S* values_;
  const int64_t hidden_size_, input_size_, x_stride_;
  Panels<S> panels_[2];
  A* bias_[2] = {};
  Scratch<A> copies_;

  int count_at(int64_t unit) const { return (int)(hidden_size_ - unit < width ? hidden_size_ - unit : width); }

  void tile(int64_t panel, const Panels<S>& weights, const Place& place, int size, const A* const* from, A* to,
            int64_t stride) const {
    alignas(64) A memory[Cell::whole_rows ? 1 : tile_rows * Cell::slots * Place::slot_size];
    A* row[tile_rows];
    const A* biases[tile_rows];
    for (int r = 0; r < size; r++) {
      biases[r] = place.bias;
      row[r] = Cell::whole_rows ? to + r * stride + place.chunk : memory + r * Cell::slots * Place::slot_size;
      if constexpr (Cell::whole_rows) {
        for (int slot = 0; slot < Cell::slots; slot++) __builtin_prefetch(row[r] + slot * Place::slot_size, 1);
        place.start(row[r], Cell::gates);
      }
    }
    raglane::RAGLANE_TARGET::multiply<typename Operand<S>::type>(
        size, Cell::gates * place.units,
        {from, weights.at(panel), weights.steps(), biases, place.of_bias, row, place.of_input});
    if constexpr (!Cell::whole_rows)  // the caller's rows have no room for whole vectors
      for (int r = 0; r < size; r++)
        for (int u = 0; u < place.units; u++) {
          int64_t unit = place.unit + u * width;
          store(to + r * stride + unit, load((const A*)row[r] + u * width), count_at(unit));
        }
  }
};

}  // namespace raglane::RAGLANE_TARGET
