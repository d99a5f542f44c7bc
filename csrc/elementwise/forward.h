// The forward time loop of all element-wise cells and dtypes.
//
// The input products of some units are computed for some rows at a time, in scratch that fits the nearest caches,
// followed by the cell's arithmetic. So products never reach main memory; saved gates are written with the outputs.
// Threads take groups of sequences. If one long sequence is most of the work, all threads share its rows: they divide
// the rows for the products, and after a barrier the units for the arithmetic.
#pragma once

#include "cells/table.h"
#include "elementwise/walk.h"
#include "gemm/packed.h"
#include "scan/states.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class ElementwiseForward {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;

 public:
  explicit ElementwiseForward(const ElementwiseCall& call)
      : call_(call), l_(*call.layer), H_(l_.hidden_size), weights_(l_), input_(weights_.input),
        padded_(weights_.padded), panels_(input_.panels(0).count()), shares_(call, panels_, 1),
        together_(is_lopsided(call)) {
    // As many panels' products as fit the nearest caches together with weights and rows.
    int64_t bytes = block_rows * Cell::slots * input_.panels(0).panel_columns() * (int64_t)sizeof(A);
    int64_t most = call.cache / tuning::chunk_of_cache / bytes;
    int64_t strips = together_ ? 1 : most < 1 ? panels_ : (panels_ + most - 1) / most;
    strip_ = (panels_ + strips - 1) / strips;
    stride_ = row_stride<A>(Cell::slots * strip_ * input_.panels(0).panel_columns());
    // Results that the caches could not hold until they are read bypass them.
    int64_t row = H_ * (int64_t)sizeof(S);
    bool aligned = ((uintptr_t)l_.output | (uintptr_t)l_.gates | (uintptr_t)l_.c_states | (uintptr_t)row) % 64 == 0;
    int64_t written = l_.elements * l_.directions * row * (l_.gates ? 1 + Cell::saved : 1);
    streams_ = aligned && written > tuning::streamed_caches * call.cache;
  }

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    return weights_.reserve(poison) &&
           products_.reserve((together_ ? 2 : 1) * l_.threads * block_rows * stride_, poison) &&
           states_.reserve(l_.threads * row_stride<A>(padded_), poison) && input_.reserve(l_.threads, poison);
  }

  void work(int thread, int threads) {
    weights_.pack(thread, threads);
    if (thread == threads - 1) keep_empty();
    barrier_.wait(threads);
    if (together_) {
      for (int d = 0; d < l_.directions; d++) walk_together(d, thread, threads);
    } else {
      for (Share share; shares_.next(share);) walk(share, thread);
    }
    finish_streams();
  }

 private:
  const ElementwiseCall& call_;
  const raglane_layer& l_;
  const int64_t H_;
  ElementwiseWeights<Cell, S> weights_;
  InputProducts<Cell, S>& input_;
  const int64_t padded_, panels_;
  Shares shares_;
  const bool together_;
  int64_t strip_, stride_;  // panels whose products are computed together; row length of these products
  bool streams_;
  Scratch<A> products_, states_;
  Barrier barrier_;

  // An empty sequence's final state is its initial one.
  void keep_empty() {
    for (int64_t b = 0; b < l_.sequences && !l_.slots; b++) {
      if (l_.offsets[b] != l_.offsets[b + 1]) continue;
      for (int d = 0; d < l_.directions; d++) {
        int64_t at = (d * l_.sequences + b) * H_;
        copy_columns((S*)l_.final_h + at, (const S*)l_.initial_h + at, 0, H_);
        if (Cell::has_c) copy_columns((S*)l_.final_c + at, (const S*)l_.initial_c + at, 0, H_);
      }
    }
  }

  // A group of sequences, by one thread.
  void walk(const Share& share, int thread) {
    A* products = products_.get() + thread * block_rows * stride_;
    A* state = states_.get() + thread * row_stride<A>(padded_);
    GroupWalk rows(l_.offsets, *share.group, share.direction == 0);
    for (Chunk chunk; rows.next(chunk);) {
      const A* inputs[block_rows];
      int count = (int)(chunk.end - chunk.begin);
      for (int i = 0; i < count; i++) inputs[i] = input_.row(chunk.begin + i, thread, i);
      for (int64_t panel = 0; panel < panels_; panel += strip_) {
        int64_t end = panel + strip_ < panels_ ? panel + strip_ : panels_;
        multiply(share.direction, panel, end, count, inputs, products);
        walk(chunk, share.direction, {panel * Cell::unit_vectors, end * Cell::unit_vectors, panel, products}, state);
      }
    }
  }

  // All sequences, by all threads: each computes the products of some rows, and then some units of all of them.
  // Products alternate between two buffers, so that one barrier per chunk is enough.
  void walk_together(int d, int thread, int threads) {
    int64_t vectors = padded_ / width, room = l_.threads * block_rows * stride_;
    GroupWalk rows(l_.offsets, {0, l_.sequences, 0}, d == 0);
    A* products = products_.get();
    for (Chunk chunk; rows.next(chunk, threads * block_rows);) {
      const A* inputs[block_rows];
      int64_t count = chunk.end - chunk.begin, first = count * thread / threads, end = count * (thread + 1) / threads;
      for (int64_t i = first; i < end; i++) inputs[i - first] = input_.row(chunk.begin + i, thread, (int)(i - first));
      multiply(d, 0, panels_, (int)(end - first), inputs, products + first * stride_);
      barrier_.wait(threads);
      walk(chunk, d, {vectors * thread / threads, vectors * (thread + 1) / threads, 0, products}, states_.get());
      products = products == products_.get() ? products + room : products_.get();
    }
    barrier_.wait(threads);  // the next direction uses the same state row
  }

  void multiply(int d, int64_t panel, int64_t end, int rows, const A* const* inputs, A* to) const {
    for (int64_t i = panel; i < end; i++) input_.multiply(d, i, rows, inputs, to, stride_, panel);
  }

  // Vectors of units, and the products of a chunk's rows, whose first panel is `panel`.
  struct Strip {
    int64_t begin, end, panel;
    const A* products;
  };

  void walk(const Chunk& chunk, int d, const Strip& strip, A* state) {
    for (int i = 0; i < chunk.count; i++) piece(chunk.pieces[i], chunk.begin, d, strip, state);
  }

  // The pointers of one row.
  struct Row {
    const A *products, *recurrent;
    const S* skip;
    A *state, *pool_h;
    S *output, *final_h, *gates, *c_states;
  };

  // The rows of one sequence.
  void piece(const Piece& piece, int64_t first_row, int d, const Strip& strip, A* state) {
    int64_t begin = strip.begin, end = strip.end < padded_ / width ? strip.end : padded_ / width;
    int64_t first = begin * width, last = end * width < H_ ? end * width : H_;
    const StateRow<S> own(l_, d, piece.sequence, H_);
    if (piece.starts) own.read(Cell::has_c ? l_.initial_c : l_.initial_h, state, first, last);
    for (int i = 0; i < piece.count; i++) {
      int64_t element = piece.first + (d == 0 ? i : -i), K = l_.directions, at_output = (element * K + d) * H_;
      Row row;
      row.products = strip.products + (element - first_row) * stride_;
      row.recurrent = weights_.recurrent[d];
      row.state = state;
      row.skip = Cell::skips ? (const S*)l_.values + element * l_.input_size : nullptr;
      row.output = l_.output ? (S*)l_.output + at_output : nullptr;
      bool ends = piece.ends && i + 1 == piece.count;
      row.final_h = ends && !own.in_pool() ? (S*)l_.final_h + own.at() : nullptr;
      row.pool_h = ends && own.in_pool() ? (A*)l_.final_h + own.at() : nullptr;
      row.gates = Cell::saved && l_.gates ? (S*)l_.gates + (d * l_.elements + element) * Cell::saved * H_ : nullptr;
      row.c_states = Cell::has_c && l_.c_states ? (S*)l_.c_states + at_output : nullptr;
      each_vector<Cell, A>(begin, end, H_, [&](auto n, int64_t vector, int count) RAGLANE_INLINE_LAMBDA {
        step<decltype(n)::value>(row, vector, vector - strip.panel * Cell::unit_vectors, count);
      });
    }
    if (Cell::has_c && piece.ends) own.write(l_.final_c, state, first, last);
  }

  // `place`: the index of the vector among those with products.
  template <int N> RAGLANE_INLINE void step(const Row& row, int64_t vector, int64_t place, int count) {
    int64_t unit = vector * width;
    V a[Cell::gates * N], u[Cell::recurrent * N + 1], x[N], state[N], y[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      const A* from = row.products + prepared_at<Cell, A>(place + i);
#pragma GCC unroll 8
      for (int g = 0; g < Cell::gates; g++) a[g * N + i] = load(from + g * Cell::unit_vectors * width);
#pragma GCC unroll 8
      for (int g = 0; g < Cell::recurrent; g++)
        u[g * N + i] = load((const A*)row.recurrent + g * padded_ + unit + i * width);
      if constexpr (Cell::skips) x[i] = load(row.skip + unit + i * width, count);
      state[i] = load((const A*)row.state + unit + i * width);
    }
    Cell::template forward<N>(a, u, x, state, y);
    RAGLANE_EACH store(row.state + unit + i * width, state[i]);
    if (row.output) give<N>(row.output + unit, y, count);
    if (row.final_h) RAGLANE_EACH store(row.final_h + unit + i * width, y[i], count);
    if (row.pool_h) RAGLANE_EACH store(row.pool_h + unit + i * width, y[i], count);
    if constexpr (Cell::saved > 0)
      if (row.gates) {
#pragma GCC unroll 8
        for (int g = 0; g < Cell::saved; g++) give<N>(row.gates + g * H_ + unit, a + g * N, count);
      }
    if constexpr (Cell::has_c)
      if (row.c_states) give<N>(row.c_states + unit, state, count);
  }

  template <int N> RAGLANE_INLINE void give(S* to, const V* v, int count) {
    if (streams_) RAGLANE_EACH stream(to + i * width, v[i]);
    else RAGLANE_EACH store(to + i * width, v[i], count);
  }
};

}  // namespace raglane::RAGLANE_TARGET
