// Gradients that need the whole of a layer that was walked back: of its values, weights and biases.
//
// Each is a plain product of the gates' gradients, or their sum over the elements. The caller may also make them with a
// library, which is faster where there is much to do; here a small layer is spared the cost of its calls.
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
        gate_stride_(widens ? row_stride<A>(slots_ * H_) : l_.gate_stride) {}

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON, wants_input = false;
    for (int d = 0; d < l_.directions; d++) {
      const raglane_weight_gradients& wanted = l_.grad_weights[d];
      wants_input = wants_input || wanted.input;
      if (l_.grad_values) weights_[d] = {nullptr, D_, gates_ * H_, 1, panel_vectors};
      if (wanted.hidden) previous_[d] = {nullptr, P_, N_, 1, panel_vectors};
      if (wanted.projection) unprojected_[d] = {nullptr, H_, N_, 1, panel_vectors};
    }
    if (wants_input) values_ = {nullptr, D_, N_, 1, panel_vectors};
    int64_t size = 0;
    each_matrix([&](Panels<S>& panels, const void*) { size += panels.size(); });
    if (!packed_.reserve(size, poison) || !barrier_.reserve(1, false)) return false;
    *barrier_.get() = Barrier{};
    A* place = packed_.get();
    each_matrix([&](Panels<S>& panels, const void*) { panels.data = place, place += panels.size(); });
    return !widens || wide_.reserve(l_.directions * N_ * (gate_stride_ + (l_.projection_size ? P_ : 0)), poison);
  }

  void work(int thread, int threads) {
    int64_t unit = 0;
    // Work is dealt out piece by piece, so that each thread gets its part of every matrix.
    auto mine = [&] { return unit++ % threads == thread; };
    each_matrix([&](Panels<S>& panels, const void* from) {
      for (int64_t panel = 0; panel < panels.count(); panel++)
        if (mine()) panels.pack_straight((const S*)from, panel);
    });
    if constexpr (widens)
      for (int d = 0; d < l_.directions; d++)
        for (int64_t n = 0; n < N_; n++)
          if (mine()) widen(d, n);
    barrier_.get()->wait(threads);
    each_task([&](const Task& task) {
      for (int64_t panel = 0; panel < task.right[0]->count(); panel++)
        for (int64_t row = 0; row < task.rows; row += unit_rows)
          if (mine()) multiply_rows(task, panel, row, row + unit_rows < task.rows ? row + unit_rows : task.rows);
    });
    for (int d = 0; d < l_.directions; d++)
      for (int64_t column = 0; column < slots_ * H_; column += panel_vectors * width)
        if (mine()) sum_columns(d, column);
  }

 private:
  const raglane_layer& l_;
  // Of the gates' rows the first `shared_` belong to input and hidden products alike. A GRU's candidate has gradients of
  // its own for the hidden one, which stand after all others.
  const int64_t N_, D_, H_, P_, gates_, slots_, shared_, gate_stride_;
  Panels<S> values_, weights_[2], previous_[2], unprojected_[2];
  Scratch<A> packed_, wide_;
  Scratch<Barrier> barrier_;

  // A result (rows, columns) of one term or, where both directions reach it, two: the sum over k of
  // left[row * row_step + k * step] times row k of what is packed in `right`.
  struct Task {
    S* to;
    int64_t rows, row_step, step;
    int terms;
    const A* left[2];
    const Panels<S>* right[2];
  };

  // What is read vector by vector, and where it comes from. A matrix that nobody needs has no columns.
  template <class Each> void each_matrix(Each&& each) {
    each(values_, l_.values);
    for (int d = 0; d < l_.directions; d++) {
      each(weights_[d], l_.weights[d].input);
      each(previous_[d], of_direction(l_.previous_h, d, P_));
      each(unprojected_[d], of_direction(l_.unprojected, d, H_));
    }
  }
  const S* of_direction(const void* rows, int d, int64_t columns) const {
    return rows ? (const S*)rows + d * N_ * columns : nullptr;
  }

  template <class Each> void each_task(Each&& each) const {
    if (l_.grad_values)
      each(Task{(S*)l_.grad_values, N_, gate_stride_, 1, (int)l_.directions, {gates(0), gates((int)l_.directions - 1)},
                   {&weights_[0], &weights_[1]}});
    for (int d = 0; d < l_.directions; d++) {
      const raglane_weight_gradients& wanted = l_.grad_weights[d];
      auto outer = [&](void* to, const A* left, int64_t stride, int64_t rows, const Panels<S>& right) {
        if (to) each(Task{(S*)to, rows, 1, stride, 1, {left, nullptr}, {&right, nullptr}});
      };
      outer(wanted.input, gates(d), gate_stride_, gates_ * H_, values_);
      outer(wanted.hidden, gates(d), gate_stride_, shared_, previous_[d]);
      if (wanted.hidden && slots_ > gates_)
        outer((S*)wanted.hidden + shared_ * P_, gates(d) + gates_ * H_, gate_stride_, H_, previous_[d]);
      if (wanted.projection) outer(wanted.projection, grad_h(d), P_, P_, unprojected_[d]);
    }
  }

  // One direction's gradients of the gates' arguments, in the type that is computed with; and those of h.
  const A* gates(int d) const {
    if constexpr (widens) return wide_.get() + d * N_ * gate_stride_;
    else return (const A*)l_.grad_gates + d * N_ * gate_stride_;
  }
  const A* grad_h(int d) const {
    if constexpr (widens) return wide_.get() + l_.directions * N_ * gate_stride_ + d * N_ * P_;
    else return (const A*)l_.grad_h + d * N_ * P_;
  }
  void widen(int d, int64_t n) {
    int64_t row = d * N_ + n;
    copy_columns((A*)gates(d) + n * gate_stride_, (const S*)l_.grad_gates + row * l_.gate_stride, 0, slots_ * H_);
    if (l_.grad_weights[d].projection) copy_columns((A*)grad_h(d) + n * P_, (const S*)l_.grad_h + row * P_, 0, P_);
  }

  // One panel of the columns of rows [begin, end), at most unit_rows. The sums rest in memory between two parts of k, so
  // that the parts of both factors stay in the nearest cache for all rows.
  void multiply_rows(const Task& task, int64_t panel, int64_t begin, int64_t end) const {
    alignas(64) A memory[unit_rows][panel_vectors * width] = {};
    static constexpr int64_t places[panel_vectors] = {0, width, 2 * width, 3 * width};
    const int vectors = task.right[0]->units_in(panel), count = (int)(end - begin);
    const A* rows[unit_rows];
    A* to[unit_rows];
    for (int r = 0; r < count; r++) to[r] = memory[r];
    for (int term = 0; term < task.terms; term++) {
      const Panels<S>& right = *task.right[term];
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
    const int64_t columns = task.right[0]->columns, first = panel * task.right[0]->panel_columns();
    for (int r = 0; r < count; r++)
      for (int64_t column = first; column < columns && column < first + vectors * width; column += width)
        store(task.to + (begin + r) * columns + column, load((const A*)memory[r] + column - first),
              (int)(columns - column < width ? columns - column : width));
  }

  // The gradients of biases, for a panel's columns of the gates from `first` on.
  void sum_columns(int d, int64_t first) const {
    const raglane_weight_gradients& wanted = l_.grad_weights[d];
    if (!wanted.input_bias && !wanted.hidden_bias) return;
    alignas(64) A sums[panel_vectors * width];
    const int64_t columns = slots_ * H_, next = first + panel_vectors * width, end = next < columns ? next : columns;
    for (int64_t column = first; column < end; column += width) {
      V sum = {};
      int count = (int)(end - column < width ? end - column : width);
      for (int64_t n = 0; n < N_; n++) sum += load(gates(d) + n * gate_stride_ + column, count);
      store(sums + column - first, sum);
    }
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
