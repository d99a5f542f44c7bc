// The backward time loop of all element-wise cells and dtypes.
//
// It computes the gradients of input products and initial states, and sums those of biases and
// recurrent factors. The caller computes the large products that follow.
//
// NOTE (order of sums): the gradients of a unit are summed row after row within a chunk, chunk after chunk within a
// group, and then group after group. Chunks and groups depend only on the lengths, so the sums are bit-identical for
// any number of threads; and three stages accumulate fewer rounding errors than one.
#pragma once

#include "elementwise/walk.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class ElementwiseBackward {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;
  static constexpr int sums = Cell::biases + Cell::recurrent;

 public:
  explicit ElementwiseBackward(const ElementwiseCall& call)
      : call_(call), l_(*call.layer), H_(l_.hidden_size), padded_((H_ + width - 1) / width * width),
        stride_(row_stride<A>(padded_)), shares_(call, padded_ / width, is_lopsided(call) ? l_.threads : 1) {
    int64_t row = H_ * (int64_t)sizeof(S);
    bool aligned = ((uintptr_t)l_.grad_gates | (uintptr_t)l_.grad_skip | (uintptr_t)row) % 64 == 0;
    bool large = l_.elements * l_.directions * Cell::gates * row > tuning::streamed_caches * call.cache;
    streams_ = aligned && large && l_.grad_gates != l_.gates;
    streams_skip_ = aligned && large;
  }

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    return rows_.reserve(l_.threads * (1 + sums) * stride_, poison) &&
           totals_.reserve(l_.directions * (call_.groups + 1) * sums * stride_, poison) &&
           recurrent_.reserve(l_.directions * Cell::recurrent * stride_, poison);
  }

  void work(int thread, int threads) {
    if (thread == 0) widen_recurrent();
    if (thread == threads - 1) pass_empty();
    barrier_.wait(threads);
    for (Share share; shares_.next(share);) walk(share, thread);
    finish_streams();
    barrier_.wait(threads);
    for (int64_t i = thread; i < l_.directions * sums; i += threads) sum_groups(i / sums, i % sums);
  }

 private:
  const ElementwiseCall& call_;
  const raglane_layer& l_;
  const int64_t H_, padded_, stride_;
  Shares shares_;
  bool streams_, streams_skip_;
  Scratch<A> rows_, totals_, recurrent_;
  Barrier barrier_;

  void widen_recurrent() {
    for (int d = 0; d < l_.directions; d++)
      for (int i = 0; i < Cell::recurrent; i++)
        copy_columns(recurrent_.get() + (d * Cell::recurrent + i) * stride_,
                     (const S*)l_.weights[d].hidden + i * H_, 0, H_);
  }

  // The gradient of an empty sequence's final state is that of its initial one. In other sequences of cells with c,
  // the initial h is not used.
  void pass_empty() {
    for (int64_t b = 0; b < l_.sequences; b++) {
      bool empty = l_.offsets[b] == l_.offsets[b + 1];
      for (int d = 0; d < l_.directions; d++) {
        int64_t at = (d * l_.sequences + b) * H_;
        if (empty || Cell::has_c) pass((S*)l_.grad_initial_h, empty ? (const S*)l_.grad_final_h : nullptr, at);
        if (empty && Cell::has_c) pass((S*)l_.grad_initial_c, (const S*)l_.grad_final_c, at);
      }
    }
  }
  void pass(S* to, const S* from, int64_t at) const {
    if (from) copy_columns(to + at, from + at, 0, H_);
    else memset((void*)(to + at), 0, H_ * sizeof(S));
  }

  A* total(int d, int64_t group, int sum) const {
    return totals_.get() + ((d * (call_.groups + 1) + group) * sums + sum) * stride_;
  }

  void sum_groups(int d, int sum) const {
    bool is_bias = sum < Cell::biases;
    S* to = (S*)(is_bias ? l_.grad_weights[d].input_bias : l_.grad_weights[d].hidden);
    if (!to) return;
    A* all = total(d, call_.groups, sum);
    memset((void*)all, 0, padded_ * sizeof(A));
    for (int64_t group = 0; group < call_.groups; group++)
      for (int64_t unit = 0; unit < padded_; unit += width)
        store(all + unit, load((const A*)all + unit) + load((const A*)total(d, group, sum) + unit));
    copy_columns(to + (is_bias ? sum : sum - Cell::biases) * H_, (const A*)all, 0, H_);
  }

  void walk(const Share& share, int thread) {
    int d = share.direction;
    A* room = rows_.get() + thread * (1 + sums) * stride_;  // the state's gradient, then the sums of a chunk
    int64_t begin = share.begin, end = share.end;
    auto sum_of = [&](int sum) { return room + (1 + sum) * stride_; };
    auto clear = [&](A* row) { memset((void*)(row + begin * width), 0, (end - begin) * width * sizeof(A)); };
    for (int sum = 0; sum < sums; sum++) clear(total(d, share.group->place, sum));
    GroupWalk rows(l_.offsets, *share.group, d != 0);
    for (Chunk chunk; rows.next(chunk);) {
      for (int sum = 0; sum < sums; sum++) clear(sum_of(sum));
      for (int i = 0; i < chunk.count; i++) piece(chunk.pieces[i], d, begin, end, room);
      for (int sum = 0; sum < sums; sum++) {
        A *of_chunk = sum_of(sum), *all = total(d, share.group->place, sum);
        for (int64_t unit = begin * width; unit < end * width; unit += width)
          store(all + unit, load((const A*)all + unit) + load((const A*)of_chunk + unit));
      }
    }
  }

  // The pointers of one row.
  struct Row {
    const S *gates, *skip, *output, *before, *after, *grad_output, *grad_c_states, *grad_final_h;
    const A* recurrent;
    A *d, *sums;
    S *grad_gates, *grad_skip;
  };

  // A range of units in the rows of one sequence.
  void piece(const Piece& piece, int d, int64_t begin, int64_t end, A* room) {
    int64_t first = begin * width, last = end * width < H_ ? end * width : H_;
    int64_t at = (d * l_.sequences + piece.sequence) * H_, K = l_.directions, back = (d == 0 ? -1 : 1) * K * H_;
    const S* grad_final = (const S*)(Cell::has_c ? l_.grad_final_c : l_.grad_final_h);
    const S* states = (const S*)(Cell::has_c ? l_.c_states : l_.output);
    if (piece.starts) {
      if (grad_final) copy_columns(room, grad_final + at, first, last);
      else memset((void*)(room + first), 0, (last - first) * sizeof(A));
    }
    for (int i = 0; i < piece.count; i++) {
      int64_t element = piece.first + (d == 0 ? -i : i), at_output = (element * K + d) * H_;
      int64_t at_gates = (d * l_.elements + element) * Cell::gates * H_;
      bool is_first = piece.ends && i + 1 == piece.count;  // rows run backward
      Row row;
      row.d = room, row.sums = room + stride_;
      row.recurrent = recurrent_.get() + d * Cell::recurrent * stride_;
      row.gates = Cell::saved ? (const S*)l_.gates + at_gates : nullptr;
      row.skip = Cell::skips ? (const S*)l_.values + element * l_.input_size : nullptr;
      row.output = Cell::has_c ? nullptr : (const S*)l_.output + at_output;
      row.after = states + at_output;
      row.before = is_first ? (const S*)(Cell::has_c ? l_.initial_c : l_.initial_h) + at : row.after + back;
      row.grad_output = l_.grad_output ? (const S*)l_.grad_output + at_output : nullptr;
      row.grad_c_states = Cell::has_c && l_.grad_c_states ? (const S*)l_.grad_c_states + at_output : nullptr;
      bool adds_final = Cell::has_c && piece.starts && i == 0 && l_.grad_final_h;
      row.grad_final_h = adds_final ? (const S*)l_.grad_final_h + at : nullptr;
      row.grad_gates = (S*)l_.grad_gates + at_gates;
      row.grad_skip = Cell::skips ? (S*)l_.grad_skip + (d * l_.elements + element) * H_ : nullptr;
      each_vector<Cell, A>(begin, end, H_, [&](auto n, int64_t vector, int count) RAGLANE_INLINE_LAMBDA {
        step<decltype(n)::value>(row, vector * width, count);
      });
    }
    if (piece.ends)
      copy_columns((S*)(Cell::has_c ? l_.grad_initial_c : l_.grad_initial_h) + at, (const A*)room, first, last);
  }

  template <int N> RAGLANE_INLINE void step(const Row& row, int64_t unit, int count) {
    V a[Cell::gates * N], u[Cell::recurrent * N + 1], du[Cell::recurrent * N + 1], d[N];
    V x[N], y[N], before[N], after[N], dy[N], dx[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      int64_t at = unit + i * width;
#pragma GCC unroll 8
      for (int g = 0; g < Cell::saved; g++) a[g * N + i] = load(row.gates + g * H_ + at, count);
#pragma GCC unroll 8
      for (int g = 0; g < Cell::recurrent; g++) u[g * N + i] = load(row.recurrent + g * stride_ + at);
      d[i] = load((const A*)row.d + at);
      before[i] = load(row.before + at, count);
      dy[i] = row.grad_output ? load(row.grad_output + at, count) : V{};
      if constexpr (Cell::saved == 0) y[i] = load(row.output + at, count);
      if constexpr (Cell::skips) x[i] = load(row.skip + at, count);
      if constexpr (Cell::has_c) after[i] = load(row.after + at, count);
    }
    if constexpr (Cell::has_c) {
      if (row.grad_c_states) RAGLANE_EACH d[i] += load(row.grad_c_states + unit + i * width, count);
      if (row.grad_final_h) RAGLANE_EACH dy[i] += load(row.grad_final_h + unit + i * width, count);
    } else {
      RAGLANE_EACH d[i] += dy[i];
    }
    Cell::template backward<N>(Walked<V>{u, x, y, before, after, dy, dx}, a, d, du);
#pragma GCC unroll 8
    for (int g = 0; g < Cell::gates; g++) {
      S* to = row.grad_gates + g * H_ + unit;
      if (streams_) RAGLANE_EACH stream(to + i * width, a[g * N + i]);
      else RAGLANE_EACH store(to + i * width, a[g * N + i], count);
    }
    if constexpr (Cell::skips) {
      if (streams_skip_) RAGLANE_EACH stream(row.grad_skip + unit + i * width, dx[i]);
      else RAGLANE_EACH store(row.grad_skip + unit + i * width, dx[i], count);
    }
    RAGLANE_EACH store(row.d + unit + i * width, d[i]);
#pragma GCC unroll 8
    for (int sum = 0; sum < sums; sum++) {
      A* to = row.sums + sum * stride_ + unit;
      const V* term = sum < Cell::biases ? a + (Cell::first_bias + sum) * N : du + (sum - Cell::biases) * N;
      RAGLANE_EACH store(to + i * width, load((const A*)to + i * width) + term[i]);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
