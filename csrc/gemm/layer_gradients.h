// The gradients of values, weights and biases, computed after the backward time loop of a layer.
//
// Each is a product with the gates' gradients, or their sum over the elements. They are computed for blocks of
// elements whose rows stay in the caches.
//
// NOTE (order of sums): a sum over elements or gates adds its terms one by one in the order of memory,
// see gemm.h. Threads divide the results, never a sum, so bits do not depend on the number of threads.
#pragma once

#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

// The gradients of one direction of a layer of either kind.
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
  Rows factors[3];  // the values; h before each element; the input of a projection. No columns if not needed
  Outer outers[4];
  Term terms[2];
  const S* passed;  // the gradient that reaches the values without a product, (N, D), or null
  S *input_bias, *hidden_bias;
  int64_t biased, shared;  // the rows of a bias; the first `shared` have the same gradient in both biases
};

template <class S> class LayerGradients {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using Direction = DirectionGradients<S>;
  static constexpr int width = Lanes<A>::width;
  static constexpr int unit_rows = tuning::unit_rows;  // of a result in one piece of work
  static constexpr int64_t part_depth = registers == 32 ? tuning::part_depth : tuning::part_depth_narrow;
  static constexpr bool widens = sizeof(S) != sizeof(A);
  static constexpr int most_outers = 4, most_terms = 2, most_factors = 3;

 public:
  LayerGradients(const Direction* directions, int count, int64_t elements, int64_t input_size, S* grad_values)
      : of_(directions), count_(count), D_(input_size), grad_values_(grad_values),
        most_(elements < tuning::gradient_rows ? elements : tuning::gradient_rows) {
    part_.elements = elements;
  }

  // Arguments of work(), if it is called for several parts of the elements.
  struct Part {
    int64_t elements = 0;                // at most the number passed to the constructor
    const int64_t* place = nullptr;      // their indexes in the values; null for 0, 1, 2 ...
    const S* const* previous = nullptr;  // h before each, if `place` is not null
    bool first = true, last = true;      // of all parts
    bool adds_values = false;            // add to existing gradients of the values
  };
  void take(const Part& part) { part_ = part; }

  bool reserve(bool poison) {
    int64_t size = 0;
    // The first pass counts, the second assigns memory.
    for (A* memory = nullptr;; memory = memory_.get()) {
      size = 0;
      auto room = [&](int64_t reals) {
        A* at = memory ? memory + size : nullptr;
        size += (reals + 15) / 16 * 16;  // aligned for vectors
        return at;
      };
      auto panels = [&](Panels<S>& to, int64_t columns, int64_t depth) {
        to = {nullptr, columns, depth, 1, panel_vectors};
        to.data = room(to.size());
      };
      for (int d = 0; d < count_; d++) {
        const Direction& of = of_[d];
        for (int i = 0; i < most_terms; i++) panels(terms_[d][i], grad_values_ ? D_ : 0, of.terms[i].depth);
        // Both directions have the same values.
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
    // Work is assigned piece by piece, so that each thread gets a part of every matrix.
    auto mine = [&] { return unit++ % threads == thread; };
    auto pack = [&](const Panels<S>& panels, auto&& at_row) {
      const int64_t part = (thread + unit++) % threads;
      panels.pack_rows(at_row, panels.count() * part / threads, panels.count() * (part + 1) / threads);
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
      // Each thread computes adjacent rows, so that it reads few of the other factor.
      double all = 0, before = 0;
      each_task(block, [&](const auto& task) { all += row_cost(task) * (double)task.rows; });
      each_task(block, [&](const auto& task) {
        auto first = [&](int member) {
          const double row = (all * member / threads - before) / row_cost(task);
          if (member == threads || !(row < (double)task.rows)) return task.rows;
          return row > 0 ? (int64_t)row / tile_rows * tile_rows : 0;
        };
        multiply_rows(task, first(thread), first(thread + 1));
        before += row_cost(task) * (double)task.rows;
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
  // Packed operands: weights, and the second factor of outer products, of a block of elements.
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
  // Sums continue from those of the previous elements.
  bool continues(const Block& block) const { return block.begin > 0 || !part_.first; }

  // A result (rows, columns) of a range of terms: the sum over k of left[row * row_step + k * step] times row k of
  // the packed `right`, added to the present result, to `passed`, or to zeros.
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

  template <class To> static double row_cost(const Task<To>& task) {
    int64_t depth = 1;
    for (int term = 0; term < task.terms; term++) depth += task.right[term].depth;
    return (double)(depth * task.right[0].padded_columns());
  }

  static int64_t size_of(const Direction& of, const typename Direction::Outer& outer) {
    return outer.rows * of.factors[outer.right].columns;
  }
  static int64_t wide_stride(const typename Direction::Rows& rows) {
    return rows.columns ? row_stride<A>(rows.columns) : 0;
  }
  // Rows of a direction from a block's first element, in the type of the computation.
  const A* rows(int d, int i, const Block& block) const {
    if constexpr (widens) return wide_[d][i];
    else return of_[d].rows[i].data + block.begin * of_[d].rows[i].stride;
  }
  int64_t stride(int d, int i) const { return widens ? wide_stride(of_[d].rows[i]) : of_[d].rows[i].stride; }
  void widen(int d, int i, int64_t n, int64_t begin) {
    const auto& rows = of_[d].rows[i];
    copy_columns(wide_[d][i] + (n - begin) * wide_stride(rows), rows.data + n * rows.stride, 0, rows.columns);
  }

  // Sums of up to unit_rows rows of a result from `begin` on, panel by panel. Between two parts of k they are stored: in
  // the result itself if it has room for whole vectors and nothing else is added, and in `memory` if not.
  template <class To> struct Sums {
    const Task<To>& task;
    const int64_t begin;
    const int count;
    alignas(64) A memory[unit_rows][panel_vectors * width];

    Sums(const Task<To>& of, int64_t first, int rows) : task(of), begin(first), count(rows) {}

    To* row(int r) const {
      return task.to + (task.place ? task.place[begin + r] : begin + r) * task.right[0].columns;
    }
    bool is_in_place(int64_t panel) const {
      const Panels<S>& right = task.right[0];
      return sizeof(To) == sizeof(A) && task.terms > 0 && right.depth > 0 && !task.passed[0] && !task.passed[1] &&
             panel * right.panel_columns() + right.units_in(panel) * width <= right.columns;
    }
    template <class Use> void each_vector(int64_t panel, Use&& use) {
      const int64_t columns = task.right[0].columns, first = panel * task.right[0].panel_columns();
      for (int r = 0; r < count; r++)
        for (int64_t column = first; column < columns && column < first + panel_vectors * width; column += width)
          use(memory[r] + column - first, row(r) + column, (int)(columns - column < width ? columns - column : width));
    }
    void start(int64_t panel) {
      if (is_in_place(panel)) return;
      memset((void*)memory, 0, count * sizeof memory[0]);
      if (task.adds) each_vector(panel, [](A* sum, const To* there, int n) { store(sum, load(there, n)); });
      for (const S* passed : task.passed)
        if (passed)
          each_vector(panel, [&](A* sum, const To* there, int n) {
            store(sum, load((const A*)sum) + load(passed + (there - task.to), n));
          });
    }
    void add(int64_t panel, const Panels<S>& right, int64_t k, const A* const* rows, int64_t step, bool is_first) {
      static constexpr int64_t places[panel_vectors] = {0, width, 2 * width, 3 * width}, at_zero[panel_vectors] = {};
      static constexpr A zeros[width] = {};
      const bool in_place = is_in_place(panel), from_zero = is_first && in_place && !task.adds;
      const int vectors = right.units_in(panel);
      const int64_t depth = right.depth - k < part_depth ? right.depth - k : part_depth;
      const A* start[tile_rows];
      A* to[unit_rows];
      for (int r = 0; r < count; r++) to[r] = in_place ? (A*)row(r) + panel * right.panel_columns() : memory[r];
      for (int r = 0; r < tile_rows; r++) start[r] = zeros;
      for (int r = 0, size; r < count; r += size) {
        size = next_tile(count - r, vectors);
        auto tile = registers == 16 && step > 1 ? multiply<A, true> : multiply<A, false>;
        tile(size, vectors, {rows + r, right.at(panel) + k * vectors * width, depth, from_zero ? start : to + r,
                             from_zero ? at_zero : places, to + r, places, step});
      }
    }
    void finish(int64_t panel) {
      if (!is_in_place(panel)) each_vector(panel, [](const A* sum, To* there, int n) { store(there, load(sum), n); });
    }
  };

  // Rows [begin, end) of a result: some rows at a time for a panel, whose parts of k stay in the nearest cache.
  template <class To> void multiply_rows(const Task<To>& task, int64_t begin, int64_t end) const {
    const int64_t panels = task.right[0].count();
    auto each_unit = [&](auto&& use) {
      for (int64_t row = begin; row < end; row += unit_rows) use(row, (int)(end - row < unit_rows ? end - row : unit_rows));
    };
    if (registers == 32 && task.step > 1 && panels > 1 && task.right[0].depth > 0)
      return each_unit([&](int64_t row, int count) { multiply_columns(task, row, count); });
    for (int64_t panel = 0; panel < panels; panel++)
      each_unit([&](int64_t row, int count) {
        Sums<To> sums(task, row, count);
        const A* rows[unit_rows];
        sums.start(panel);
        for (int term = 0; term < task.terms; term++)
          for (int64_t k = 0; k < task.right[term].depth; k += part_depth) {
            for (int r = 0; r < count; r++) rows[r] = task.left[term] + (row + r) * task.row_step + k * task.step;
            sums.add(panel, task.right[term], k, rows, task.step, term + k == 0);
          }
        sums.finish(panel);
      });
  }

  // The same for rows that are columns of the left factor, all panels at a time. Their numbers are in as many pages as
  // there are elements, at least one, and no processor fetches them ahead, so a part of them is copied for all panels.
  // With 16 registers they are prefetched in place, which was faster on AVX2 (Zen 3).
  template <class To> void multiply_columns(const Task<To>& task, int64_t begin, int count) const {
    alignas(64) A part[part_depth][unit_rows];
    const A* rows[unit_rows];
    const Panels<S>& right = task.right[0];
    Sums<To> sums(task, begin, count);
    for (int r = 0; r < count; r++) rows[r] = part[0] + r;
    sums.start(right.count() - 1);  // the only one that may have no room for whole vectors
    for (int64_t k = 0; k < right.depth; k += part_depth) {
      const A* from = task.left[0] + begin + k * task.step;
      for (int64_t i = 0; i < part_depth && i < right.depth - k; i++, from += task.step)
        if (count == unit_rows) memcpy(part[i], from, sizeof part[i]);  // of a known size, in a few vectors
        else memcpy(part[i], from, count * sizeof(A));
      for (int64_t panel = 0; panel < right.count(); panel++) sums.add(panel, right, k, rows, unit_rows, k == 0);
    }
    sums.finish(right.count() - 1);
  }

  // The gradients of biases, for the panel's columns of the gates from `first`.
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

}  // namespace raglane::RAGLANE_TARGET
