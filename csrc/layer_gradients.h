// Gradients that need the whole of a layer that was walked back: of its values, weights and biases.
//
// Each is a plain product of the gates' gradients, or their sum over the elements. They are made of some elements at a
// time, whose rows the caches hold meanwhile.
//
// NOTE (order of sums): over the elements as over the gates, a sum takes its terms one by one in the order of memory,
// see gemm.h. Threads divide the results among themselves and never a sum, so its bits do not depend on them.
#pragma once

#include "cells/table.h"
#include "scan.h"

#if RAGLANE_LEVEL >= 4
// Its sums over the elements have no pairs to multiply.
namespace raglane::avx512 {
int32_t walk_and_gradients(const Call& call, int32_t (*walk)(const Call&));
}
namespace raglane::RAGLANE_TARGET {
using avx512::walk_and_gradients;
}
#else

namespace raglane::RAGLANE_TARGET {

template <class S> class LayerGradients {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;
  static constexpr int unit_rows = tuning::unit_tiles * tile_rows;  // rows of a result that are one piece of work
  static constexpr int64_t part_depth = tuning::part_depth;  // of elements or gates
  static constexpr bool widens = sizeof(S) != sizeof(A);

 public:
  explicit LayerGradients(const Call& call)
      : l_(*call.layer), N_(l_.elements), D_(l_.input_size), H_(l_.hidden_size),
        P_(l_.projection_size ? l_.projection_size : H_),
        gates_(cell_table[l_.cell].gates), slots_(cell_table[l_.cell].slots),
        shared_(slots_ > gates_ ? (gates_ - 1) * H_ : gates_ * H_),
        gate_stride_(widens ? row_stride<A>(slots_ * H_) : l_.gate_stride),
        most_(N_ < tuning::gradient_rows ? N_ : tuning::gradient_rows) {}

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    int64_t size = 0;
    auto room = [&](int64_t reals) { return size += reals, size - reals; };
    auto panels = [&](Panels<S>& to, bool wanted, int64_t columns, int64_t depth) {
      to = {nullptr, wanted ? columns : 0, depth, 1, panel_vectors};
      return room(to.size());
    };
    int64_t of_weights[2], of_previous[2], of_unprojected[2], of_sums[2], of_wide[2], of_results[2][3];
    bool wants_input = false;
    for (int d = 0; d < l_.directions; d++) {
      const raglane_weight_gradients& wanted = l_.grad_weights[d];
      wants_input = wants_input || wanted.input;
      of_weights[d] = panels(weights_[d], l_.grad_values, D_, gates_ * H_);
      of_previous[d] = panels(previous_[d], wanted.hidden, P_, most_);
      of_unprojected[d] = panels(unprojected_[d], wanted.projection, H_, most_);
      of_sums[d] = room(slots_ * H_ + panel_vectors * width);
      of_wide[d] = room(widens ? most_ * (gate_stride_ + P_) : 0);
      of_results[d][0] = room(widens && wanted.input ? gates_ * H_ * D_ : 0);
      of_results[d][1] = room(widens && wanted.hidden ? gates_ * H_ * P_ : 0);
      of_results[d][2] = room(widens && wanted.projection ? P_ * H_ : 0);
    }
    int64_t of_values = panels(values_, wants_input, D_, most_);
    if (!memory_.reserve(size, poison) || !barrier_.reserve(1, false)) return false;
    *barrier_.get() = Barrier{};
    A* memory = memory_.get();
    values_.data = memory + of_values;
    for (int d = 0; d < l_.directions; d++) {
      const raglane_weight_gradients& wanted = l_.grad_weights[d];
      weights_[d].data = memory + of_weights[d], previous_[d].data = memory + of_previous[d];
      unprojected_[d].data = memory + of_unprojected[d];
      sums_[d] = memory + of_sums[d], wide_[d] = memory + of_wide[d];
      void* results[3] = {wanted.input, wanted.hidden, wanted.projection};
      for (int i = 0; i < 3; i++) results_[d][i] = widens && results[i] ? memory + of_results[d][i] : (A*)results[i];
    }
    return true;
  }

  void work(int thread, int threads) {
    int64_t unit = 0;
    // Work is dealt out piece by piece, so that each thread gets its part of every matrix.
    auto mine = [&] { return unit++ % threads == thread; };
    auto pack = [&](Panels<S> panels, const S* from) {
      for (int64_t panel = 0; panel < panels.count(); panel++)
        if (mine()) panels.pack_straight(from, panel);
    };
    for (int d = 0; d < l_.directions; d++) pack(weights_[d], (const S*)l_.weights[d].input);
    int64_t begin = 0;
    do {
      // Some elements at a time, whose rows the caches hold for all that is made of them.
      Block block = block_at(begin);
      pack(block.values, (const S*)l_.values + begin * D_);
      for (int d = 0; d < l_.directions; d++) {
        pack(block.previous[d], of_direction(l_.previous_h, d, P_, begin));
        pack(block.unprojected[d], of_direction(l_.unprojected, d, H_, begin));
        if constexpr (widens)
          for (int64_t n = begin; n < block.end; n++)
            if (mine()) widen(d, n, begin);
      }
      barrier_.get()->wait(threads);
      each_task(block, [&](const auto& task) {
        for (int64_t panel = 0; panel < task.right[0].count(); panel++)
          for (int64_t row = 0; row < task.rows; row += unit_rows)
            if (mine()) multiply_rows(task, panel, row, row + unit_rows < task.rows ? row + unit_rows : task.rows);
      });
      for (int d = 0; d < l_.directions; d++)
        for (int64_t column = 0; column < slots_ * H_; column += panel_vectors * width)
          if (mine()) sum_columns(d, column, block);
      barrier_.get()->wait(threads);
      begin = block.end;
    } while (begin < N_);
    if constexpr (widens)
      for (int d = 0; d < l_.directions; d++) {
        const raglane_weight_gradients& wanted = l_.grad_weights[d];
        auto narrow = [&](void* to, const A* from, int64_t rows, int64_t columns) {
          for (int64_t row = 0; to && row < rows; row++)
            if (mine()) copy_columns((S*)to + row * columns, from + row * columns, 0, columns);
        };
        narrow(wanted.input, results_[d][0], gates_ * H_, D_);
        narrow(wanted.hidden, results_[d][1], gates_ * H_, P_);
        narrow(wanted.projection, results_[d][2], P_, H_);
      }
  }

 private:
  const raglane_layer& l_;
  // Of the gates' rows the first `shared_` belong to input and hidden products alike. A GRU's candidate has gradients of
  // its own for the hidden one, which stand after all others.
  const int64_t N_, D_, H_, P_, gates_, slots_, shared_, gate_stride_, most_;
  // What is read vector by vector. A matrix that nobody needs has no columns.
  Panels<S> values_, weights_[2], previous_[2], unprojected_[2];
  A *sums_[2] = {}, *wide_[2] = {};  // of biases; of bfloat16, the gates' gradients and those of h of a block
  A* results_[2][3] = {};            // gradients of input, hidden and projection while they are summed
  Scratch<A> memory_;
  Scratch<Barrier> barrier_;

  // Elements [begin, end), packed.
  struct Block {
    int64_t begin, end;
    Panels<S> values, previous[2], unprojected[2];
  };
  Block block_at(int64_t begin) const {
    int64_t end = begin + most_ < N_ ? begin + most_ : N_;
    Block block = {begin, end, values_, {previous_[0], previous_[1]}, {unprojected_[0], unprojected_[1]}};
    block.values.depth = end - begin;
    for (int d = 0; d < 2; d++) block.previous[d].depth = block.unprojected[d].depth = end - begin;
    return block;
  }

  // A result (rows, columns) of one term or, where both directions reach it, two: the sum over k of
  // left[row * row_step + k * step] times row k of what is packed in `right`, added to what is there or to nothing.
  template <class To> struct Task {
    To* to;
    int64_t rows, row_step, step;
    int terms;
    bool adds;
    const A* left[2];
    Panels<S> right[2];
  };

  const S* of_direction(const void* rows, int d, int64_t columns, int64_t begin) const {
    return rows ? (const S*)rows + (d * N_ + begin) * columns : nullptr;
  }

  template <class Each> void each_task(const Block& block, Each&& each) const {
    const int64_t count = block.end - block.begin;
    const int last = (int)l_.directions - 1;
    if (l_.grad_values)
      each(Task<S>{(S*)l_.grad_values + block.begin * D_, count, gate_stride_, 1, last + 1, false,
                   {gates(0, block), gates(last, block)}, {weights_[0], weights_[last]}});
    for (int d = 0; d <= last; d++) {
      auto outer = [&](A* to, const A* left, int64_t stride, int64_t rows, const Panels<S>& right) {
        if (to) each(Task<A>{to, rows, 1, stride, 1, block.begin > 0, {left, nullptr}, {right, right}});
      };
      A* const* results = results_[d];
      outer(results[0], gates(d, block), gate_stride_, gates_ * H_, block.values);
      outer(results[1], gates(d, block), gate_stride_, shared_, block.previous[d]);
      if (results[1] && slots_ > gates_)
        outer(results[1] + shared_ * P_, gates(d, block) + gates_ * H_, gate_stride_, H_, block.previous[d]);
      if (results[2]) outer(results[2], grad_h(d, block), P_, P_, block.unprojected[d]);
    }
  }

  // One direction's gradients of the gates' arguments from a block's first element on, in the type that is computed
  // with; and those of h.
  const A* gates(int d, const Block& block) const {
    if constexpr (widens) return wide_[d];
    else return (const A*)l_.grad_gates + (d * N_ + block.begin) * gate_stride_;
  }
  const A* grad_h(int d, const Block& block) const {
    if constexpr (widens) return wide_[d] + most_ * gate_stride_;
    else return (const A*)l_.grad_h + (d * N_ + block.begin) * P_;
  }
  void widen(int d, int64_t n, int64_t begin) {
    int64_t row = d * N_ + n;
    copy_columns(wide_[d] + (n - begin) * gate_stride_, (const S*)l_.grad_gates + row * l_.gate_stride, 0, slots_ * H_);
    if (l_.grad_weights[d].projection)
      copy_columns(wide_[d] + most_ * gate_stride_ + (n - begin) * P_, (const S*)l_.grad_h + row * P_, 0, P_);
  }

  // One panel of the columns of rows [begin, end), at most unit_rows. The sums rest in memory between two parts of k, so
  // that the parts of both factors stay in the nearest cache for all rows.
  template <class To> void multiply_rows(const Task<To>& task, int64_t panel, int64_t begin, int64_t end) const {
    alignas(64) A memory[unit_rows][panel_vectors * width] = {};
    static constexpr int64_t places[panel_vectors] = {0, width, 2 * width, 3 * width};
    const int vectors = task.right[0].units_in(panel), count = (int)(end - begin);
    const int64_t columns = task.right[0].columns, first = panel * task.right[0].panel_columns();
    auto each_vector = [&](auto&& use) {
      for (int r = 0; r < count; r++)
        for (int64_t column = first; column < columns && column < first + vectors * width; column += width)
          use(memory[r] + column - first, task.to + (begin + r) * columns + column,
              (int)(columns - column < width ? columns - column : width));
    };
    if (task.adds) each_vector([](A* sum, const To* there, int n) { store(sum, load(there, n)); });
    const A* rows[unit_rows];
    A* to[unit_rows];
    for (int r = 0; r < count; r++) to[r] = memory[r];
    for (int term = 0; term < task.terms; term++) {
      const Panels<S>& right = task.right[term];
      for (int64_t k = 0; k < right.depth; k += part_depth) {
        int64_t depth = right.depth - k < part_depth ? right.depth - k : part_depth;
        for (int r = 0; r < count; r++) rows[r] = task.left[term] + (begin + r) * task.row_step + k * task.step;
        for (int r = 0, size; r < count; r += size) {
          size = next_tile(count - r);
          multiply<A>(size, vectors, {rows + r, right.at(panel) + k * vectors * width, depth, to + r, places, to + r,
                                      places, task.step});
        }
      }
    }
    each_vector([](const A* sum, To* there, int n) { store(there, load(sum), n); });
  }

  // The gradients of biases, for a panel's columns of the gates from `first` on.
  void sum_columns(int d, int64_t first, const Block& block) const {
    const raglane_weight_gradients& wanted = l_.grad_weights[d];
    if (!wanted.input_bias && !wanted.hidden_bias) return;
    A* sums = sums_[d] + first;
    const int64_t columns = slots_ * H_, next = first + panel_vectors * width, end = next < columns ? next : columns;
    for (int64_t column = first; column < end; column += width) {
      V sum = block.begin > 0 ? load((const A*)sums + column - first) : V{};
      int count = (int)(end - column < width ? end - column : width);
      for (int64_t n = 0; n < block.end - block.begin; n++)
        sum += load(gates(d, block) + n * gate_stride_ + column, count);
      store(sums + column - first, sum);
    }
    if (block.end < N_) return;
    auto give = [&](void* to, int64_t from, int64_t begin, int64_t until) {
      begin = begin > first ? begin : first, until = until < end ? until : end;
      if (to && begin < until) copy_columns((S*)to + begin - from, (const A*)sums + begin - first, 0, until - begin);
    };
    give(wanted.input_bias, 0, 0, gates_ * H_);
    give(wanted.hidden_bias, 0, 0, shared_);
    give(wanted.hidden_bias, gates_ * H_ - shared_, gates_ * H_, columns);
  }
};

template <class S> int32_t walk_and_gradients_of(const Call& call, int32_t (*walk)(const Call&)) {
  LayerGradients<S> gradients(call);
  if (!gradients.reserve()) return RAGLANE_OUT_OF_MEMORY;
  int32_t status = walk(call);
  if (status == RAGLANE_OK) start(gradients, call);
  return status;
}

// Walk the layer back, and make the gradients that the call asks for, if it does for any. Their scratch is reserved
// first: the walk may replace the saved gates, and a call that fails must leave them as they were.
int32_t walk_and_gradients(const Call& call, int32_t (*walk)(const Call&)) {
  bool wanted = call.layer->grad_values;
  for (const raglane_weight_gradients& w : call.layer->grad_weights)
    wanted = wanted || w.input || w.hidden || w.input_bias || w.hidden_bias || w.projection;
  if (!wanted) return walk(call);
  switch (call.layer->dtype) {
    case RAGLANE_FLOAT32: return walk_and_gradients_of<float>(call, walk);
    case RAGLANE_FLOAT64: return walk_and_gradients_of<double>(call, walk);
    case RAGLANE_BFLOAT16: return walk_and_gradients_of<bfloat16>(call, walk);
  }
  return RAGLANE_BAD_ARGUMENT;
}

}  // namespace raglane::RAGLANE_TARGET
#endif
