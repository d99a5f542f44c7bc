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

namespace raglane::RAGLANE_TARGET {

// What is to be made of one direction, whatever the kind of its layer.
template <class S> struct DirectionGradients {
  // Gradients of products: `columns` of a row of (N, stride).
  struct Rows {
    const S* data;
    int64_t stride, columns;
  };
  // A result (rows, columns of `right`): the sum over the elements of the outer products of columns [from, from + rows)
  // of `left` and a row of `right`.
  struct Outer {
    S* to;
    int left;  // of `rows`
    int64_t from, rows;
    int right;  // of `factors`
  };
  // A term of the gradient of the values: columns [from, from + depth) of the gates' gradients x weights (depth, D).
  struct Term {
    const S* weights;
    int64_t from, depth;
  };
  Rows rows[2];     // of the gates' arguments; of a projection's result
  Rows factors[3];  // the values; h before each element; what a projection reads. No columns where nobody needs it
  Outer outers[4];
  Term terms[2];
  const S* passed;  // what reaches the values past all products, (N, D), or null
  S *input_bias, *hidden_bias;
  int64_t biased, shared;  // the rows of a bias; the first of them have the same gradient in both
};

template <class S> class LayerGradients {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using Direction = DirectionGradients<S>;
  static constexpr int width = Lanes<A>::width;
  static constexpr int unit_rows = tuning::unit_tiles * tile_rows;  // rows of a result that are one piece of work
  static constexpr int64_t part_depth = tuning::part_depth;  // of elements or gates
  static constexpr bool widens = sizeof(S) != sizeof(A);
  static constexpr int most_outers = 4, most_terms = 2, most_factors = 3;

 public:
  LayerGradients(const Direction* directions, int count, int64_t elements, int64_t input_size, S* grad_values)
      : of_(directions), count_(count), D_(input_size), grad_values_(grad_values),
        most_(elements < tuning::gradient_rows ? elements : tuning::gradient_rows) {
    part_.elements = elements;
  }

  // What work() takes, where it is called for one part of the elements after the other.
  struct Part {
    int64_t elements = 0;                // at most as many as the constructor was told
    const int64_t* place = nullptr;      // which elements they are in the values; null for 0, 1, 2 ...
    const S* const* previous = nullptr;  // h before each, where `place` is
    bool first = true, last = true;      // of all parts
    bool adds_values = false;            // whether there are gradients of the values that are to be added to
  };
  void take(const Part& part) { part_ = part; }

  bool reserve(bool poison) {
    int64_t size = 0;
    // The first pass counts, the second gives out.
    for (A* memory = nullptr;; memory = memory_.get()) {
      size = 0;
      auto room = [&](int64_t reals) {
        A* at = memory ? memory + size : nullptr;
        size += (reals + 15) / 16 * 16;  // so that all begin where vectors want it
        return at;
      };
      auto panels = [&](Panels<S>& to, int64_t columns, int64_t depth) {
        to = {nullptr, columns, depth, 1, panel_vectors};
        to.data = room(to.size());
      };
      for (int d = 0; d < count_; d++) {
        const Direction& of = of_[d];
        for (int i = 0; i < most_terms; i++) panels(terms_[d][i], grad_values_ ? D_ : 0, of.terms[i].depth);
        // The values are the same in both directions.
        for (int i = 0; i < most_factors; i++)
          if (d == 0 || i > 0) panels(factors_[d][i], of.factors[i].columns, most_);
          else factors_[d][i] = factors_[0][i];
        sums_[d] = room(of.input_bias || of.hidden_bias ? of.rows[0].columns + panel_vectors * width : 0);
        for (int i = 0; i < 2; i++) wide_[d][i] = room(widens ? most_ * wide_stride(of.rows[i]) : 0);
        for (int i = 0; i < most_outers; i++)
          results_[d][i] = !widens ? (A*)of.outers[i].to : room(of.outers[i].to ? size_of(of, of.outers[i]) : 0);
      }
      if (memory) break;
      if (!memory_.reserve(size, poison)) return false;
    }
    return true;
  }

  void work(int thread, int threads) {
    int64_t unit = 0;
    // Work is dealt out piece by piece, so that each thread gets its part of every matrix.
    auto mine = [&] { return unit++ % threads == thread; };
    auto pack = [&](const Panels<S>& panels, auto&& at_row) {
      for (int64_t panel = 0; panel < panels.count(); panel++)
        if (mine()) Panels<S>(panels).pack_rows(at_row, panel);
    };
    for (int d = 0; d < count_ && part_.first; d++)
      for (int i = 0; i < most_terms; i++)
        pack(terms_[d][i], [=, this](int64_t n) { return of_[d].terms[i].weights + n * D_; });
    int64_t begin = 0;
    do {
      Block block = block_at(begin);
      for (int d = 0; d < count_; d++) {
        for (int i = d > 0; i < most_factors; i++) {
          const S* data = of_[d].factors[i].data;
          const int64_t stride = of_[d].factors[i].stride;
          const Part& part = part_;
          if (part.place && i == 0)
            pack(block.factors[d][i], [&](int64_t n) { return data + part.place[begin + n] * stride; });
          else if (part.place && i == 1)
            pack(block.factors[d][i], [&](int64_t n) { return part.previous[begin + n]; });
          else
            pack(block.factors[d][i], [=](int64_t n) { return data + (begin + n) * stride; });
        }
        if constexpr (widens)
          for (int i = 0; i < 2; i++)
            for (int64_t n = begin; of_[d].rows[i].columns && n < block.end; n++)
              if (mine()) widen(d, i, n, begin);
      }
      barrier_.wait(threads);
      each_task(block, [&](const auto& task) {
        for (int64_t panel = 0; panel < task.right[0].count(); panel++)
          for (int64_t row = 0; row < task.rows; row += unit_rows)
            if (mine()) multiply_rows(task, panel, row, row + unit_rows < task.rows ? row + unit_rows : task.rows);
      });
      for (int d = 0; d < count_; d++)
        if (of_[d].input_bias || of_[d].hidden_bias)
          for (int64_t column = 0; column < of_[d].rows[0].columns; column += panel_vectors * width)
            if (mine()) sum_columns(d, column, block);
      barrier_.wait(threads);
      begin = block.end;
    } while (begin < part_.elements);
    if constexpr (widens)
      for (int d = 0; d < count_ && part_.last; d++)
        for (int i = 0; i < most_outers; i++) {
          const auto& outer = of_[d].outers[i];
          if (!outer.to) continue;
          const int64_t columns = of_[d].factors[outer.right].columns;
          for (int64_t row = 0; row < outer.rows; row++)
            if (mine()) copy_columns(outer.to + row * columns, (const A*)results_[d][i] + row * columns, 0, columns);
        }
  }

 private:
  const Direction* of_;
  const int count_;
  const int64_t D_;
  S* grad_values_;
  const int64_t most_;
  Part part_;
  // What is read vector by vector, packed: weights, and the other factor of outer products, of a block of elements.
  Panels<S> terms_[2][most_terms], factors_[2][most_factors];
  A* sums_[2] = {};         // of biases
  A* wide_[2][2] = {};      // of bfloat16, the rows of a block
  A* results_[2][most_outers] = {};  // of outer products, while they are summed
  Scratch<A> memory_;
  Barrier barrier_;

  // Elements [begin, end), packed.
  struct Block {
    int64_t begin, end;
    Panels<S> factors[2][most_factors];
  };
  Block block_at(int64_t begin) const {
    Block block = {begin, begin + most_ < part_.elements ? begin + most_ : part_.elements, {}};
    for (int d = 0; d < count_; d++)
      for (int i = 0; i < most_factors; i++)
        block.factors[d][i] = factors_[d][i], block.factors[d][i].depth = block.end - begin;
    return block;
  }
  // Whether sums go on from those of the elements before.
  bool continues(const Block& block) const { return block.begin > 0 || !part_.first; }

  // A result (rows, columns) of some terms: the sum over k of left[row * row_step + k * step] times row k of what is
  // packed in `right`, added to what is there, to what is `passed`, or to nothing.
  template <class To> struct Task {
    To* to;
    const int64_t* place;  // of a row in `to`; null for 0, 1, 2 ...
    int64_t rows, row_step, step;
    int terms;
    bool adds;
    const A* left[2 * most_terms];
    Panels<S> right[2 * most_terms];
    const S* passed[2];
  };

  template <class Each> void each_task(const Block& block, Each&& each) const {
    if (grad_values_) {
      const int64_t first = part_.place ? 0 : block.begin * D_;
      Task<S> task = {grad_values_ + first, part_.place ? part_.place + block.begin : nullptr, block.end - block.begin,
                      stride(0, 0), 1, 0, part_.adds_values, {}, {}, {}};
      for (int d = 0; d < count_; d++) {
        for (int i = 0; i < most_terms; i++)
          if (of_[d].terms[i].depth) {
            task.left[task.terms] = rows(d, 0, block) + of_[d].terms[i].from;
            task.right[task.terms++] = terms_[d][i];
          }
        if (of_[d].passed) task.passed[d] = of_[d].passed + first;
      }
      each(task);
    }
    for (int d = 0; d < count_; d++)
      for (int i = 0; i < most_outers; i++) {
        const auto& outer = of_[d].outers[i];
        if (outer.to)
          each(Task<A>{results_[d][i], nullptr, outer.rows, 1, stride(d, outer.left), 1, continues(block),
                       {rows(d, outer.left, block) + outer.from}, {block.factors[d][outer.right]}, {}});
      }
  }

  static int64_t size_of(const Direction& of, const typename Direction::Outer& outer) {
    return outer.rows * of.factors[outer.right].columns;
  }
  static int64_t wide_stride(const typename Direction::Rows& rows) {
    return rows.columns ? row_stride<A>(rows.columns) : 0;
  }
  // Rows of a direction from a block's first element on, in the type that is computed with.
  const A* rows(int d, int i, const Block& block) const {
    if constexpr (widens) return wide_[d][i];
    else return of_[d].rows[i].data + block.begin * of_[d].rows[i].stride;
  }
  int64_t stride(int d, int i) const { return widens ? wide_stride(of_[d].rows[i]) : of_[d].rows[i].stride; }
  void widen(int d, int i, int64_t n, int64_t begin) {
    const auto& rows = of_[d].rows[i];
    copy_columns(wide_[d][i] + (n - begin) * wide_stride(rows), rows.data + n * rows.stride, 0, rows.columns);
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
          use(memory[r] + column - first, task.to + (task.place ? task.place[begin + r] : begin + r) * columns + column,
              (int)(columns - column < width ? columns - column : width));
    };
    if (task.adds) each_vector([](A* sum, const To* there, int n) { store(sum, load(there, n)); });
    for (const S* passed : task.passed)
      if (passed)
        each_vector([&](A* sum, const To* there, int n) {
          store(sum, load((const A*)sum) + load(passed + (there - task.to), n));
        });
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
    const Direction& of = of_[d];
    A* sums = sums_[d] + first;
    const A* gates = rows(d, 0, block);
    const int64_t columns = of.rows[0].columns, next = first + panel_vectors * width, end = next < columns ? next : columns;
    for (int64_t column = first; column < end; column += width) {
      V sum = continues(block) ? load((const A*)sums + column - first) : V{};
      int count = (int)(end - column < width ? end - column : width);
      for (int64_t n = 0; n < block.end - block.begin; n++) sum += load(gates + n * stride(d, 0) + column, count);
      store(sums + column - first, sum);
    }
    if (block.end < part_.elements || !part_.last) return;
    auto give = [&](S* to, int64_t from, int64_t begin, int64_t until) {
      begin = begin > first ? begin : first, until = until < end ? until : end;
      if (to && begin < until) copy_columns(to + begin - from, (const A*)sums + begin - first, 0, until - begin);
    };
    give(of.input_bias, 0, 0, of.biased);
    give(of.hidden_bias, 0, 0, of.shared);
    give(of.hidden_bias, of.biased - of.shared, of.biased, columns);
  }
};

template <class S> void describe(const raglane_layer& l, int d, DirectionGradients<S>& of) {
  const raglane_cell_facts& cell = cell_table[l.cell];
  const raglane_weight_gradients& wanted = l.grad_weights[d];
  const int64_t N = l.elements, H = l.hidden_size, P = l.projection_size ? l.projection_size : H, D = l.input_size;
  const int64_t gates = cell.gates * H;
  auto rows = [&](const void* data, int64_t columns) { return data ? (const S*)data + d * N * columns : nullptr; };
  of = {};
  of.rows[0] = {rows(l.grad_gates, l.gate_stride), l.gate_stride, cell.slots * H};
  if (wanted.projection) of.rows[1] = {rows(l.grad_h, P), P, P};
  of.factors[0] = {(const S*)l.values, D, l.grad_weights[0].input || l.grad_weights[1].input ? D : 0};
  of.factors[1] = {rows(l.previous_h, P), P, wanted.hidden ? P : 0};
  of.factors[2] = {rows(l.unprojected, H), H, wanted.projection ? H : 0};
  if (l.grad_values) of.terms[0] = {(const S*)l.weights[d].input, 0, gates};
  // Of the gates' rows the first belong to input and hidden products alike. A GRU's candidate has gradients of its own
  // for the hidden one, which stand after all others.
  of.biased = gates, of.shared = cell.slots > cell.gates ? gates - H : gates;
  of.outers[0] = {(S*)wanted.input, 0, 0, gates, 0};
  of.outers[1] = {(S*)wanted.hidden, 0, 0, of.shared, 1};
  if (wanted.hidden && of.shared < gates) of.outers[2] = {(S*)wanted.hidden + of.shared * P, 0, gates, H, 1};
  of.outers[3] = {(S*)wanted.projection, 1, 0, P, 2};
  of.input_bias = (S*)wanted.input_bias, of.hidden_bias = (S*)wanted.hidden_bias;
}

// Its sums over the elements are made by the walk itself.
template <class S> void describe(const raglane_elementwise& l, int d, DirectionGradients<S>& of) {
  const raglane_elementwise_gradients& wanted = l.grad_weights[d];
  const int64_t N = l.elements, H = l.hidden_size, D = l.input_size, gates = cell_table[l.cell].gates * H;
  const int64_t columns = gates + (l.weights[d].skip ? H : 0);
  of = {};
  of.rows[0] = {(const S*)l.grad_gates + d * N * columns, columns, columns};
  bool reads = false;
  for (const raglane_elementwise_gradients& w : l.grad_weights) reads = reads || w.input || w.skip;
  of.factors[0] = {(const S*)l.values, D, reads ? D : 0};
  if (l.grad_values) {
    of.terms[0] = {(const S*)l.weights[d].input, 0, gates};
    if (l.weights[d].skip) of.terms[1] = {(const S*)l.weights[d].skip, gates, H};
    if (l.grad_skip) of.passed = (const S*)l.grad_skip + d * N * D;
  }
  of.outers[0] = {(S*)wanted.input, 0, 0, gates, 0};
  of.outers[1] = {(S*)wanted.skip, 0, gates, H, 0};
}

inline bool wants_any(const raglane_layer& l) {
  bool wanted = l.grad_values;
  for (const raglane_weight_gradients& w : l.grad_weights)
    wanted = wanted || w.input || w.hidden || w.input_bias || w.hidden_bias || w.projection;
  return wanted;
}
inline bool wants_any(const raglane_elementwise& l) {
  bool wanted = l.grad_values;
  for (const raglane_elementwise_gradients& w : l.grad_weights) wanted = wanted || w.input || w.skip;
  return wanted;
}

template <class S, class C> int32_t walk_and_gradients_of(const C& call, int32_t (*walk)(const C&)) {
  const auto& l = *call.layer;
  DirectionGradients<S> of[2];
  for (int d = 0; d < l.directions; d++) describe(l, d, of[d]);
  LayerGradients<S> gradients(of, (int)l.directions, l.elements, l.input_size, (S*)l.grad_values);
  if (!gradients.reserve(l.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
  int32_t status = walk(call);
  if (status == RAGLANE_OK) start(gradients, call);
  return status;
}

// Walk the layer back, and make the gradients that the call asks for, if it does for any. Their scratch is reserved
// first: the walk may replace the saved gates, and a call that fails must leave them as they were.
template <class C> int32_t with_gradients(const C& call, int32_t (*walk)(const C&)) {
  if (!wants_any(*call.layer)) return walk(call);
  switch (call.layer->dtype) {
    case RAGLANE_FLOAT32: return walk_and_gradients_of<float>(call, walk);
    case RAGLANE_FLOAT64: return walk_and_gradients_of<double>(call, walk);
    case RAGLANE_BFLOAT16: return walk_and_gradients_of<bfloat16>(call, walk);
  }
  return RAGLANE_BAD_ARGUMENT;
}

#if RAGLANE_LEVEL <= 3  // what follows adds to AVX-512 has no pairs to multiply here
// Outer products and sums alone, group by group.
template <class S> int32_t outer_products_of(const raglane_outer& o) {
  for (int64_t g = 0; g < o.groups; g++) {
    DirectionGradients<S> of = {};
    of.rows[0] = {(const S*)o.left + g * o.left_columns, o.left_stride, o.left_columns};
    of.factors[0] = {(const S*)o.right + g * o.right_columns, o.right_stride, o.to ? o.right_columns : 0};
    if (o.to) of.outers[0] = {(S*)o.to + g * o.left_columns * o.right_columns, 0, 0, o.left_columns, 0};
    if (o.sums) of.input_bias = (S*)o.sums + g * o.left_columns;
    of.biased = of.shared = o.left_columns;
    LayerGradients<S> gradients(&of, 1, o.elements, o.right_columns, nullptr);
    if (!gradients.reserve(o.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    on_threads((int)o.threads, [&](int thread, int threads) { gradients.work(thread, threads); });
  }
  return RAGLANE_OK;
}

inline int32_t outer_products(const raglane_outer& o) {
  switch (o.dtype) {
    case RAGLANE_FLOAT32: return outer_products_of<float>(o);
    case RAGLANE_FLOAT64: return outer_products_of<double>(o);
    case RAGLANE_BFLOAT16: return outer_products_of<bfloat16>(o);
  }
  return RAGLANE_BAD_ARGUMENT;
}
#endif

}  // namespace raglane::RAGLANE_TARGET
