// The backward pass of a layer without saved gates, which are recomputed round after round.
//
// A round covers a limited number of steps of some sequences, from the end of the previous round. The outputs and c are
// saved for every element, so all gates of a round are computed in parallel by products as large as the round, without
// a sequential loop. Then the backward time loop of the round runs, and its gradients are added, before the next round
// reuses its memory. Directions run one after the other.
//
// NOTE (bits): gates are summed in the forward loop's order, so they have the same bits if states are stored in the
// type in which they are computed. The same holds for gradients of values and initial states. Sums over the elements
// add round after round, and within a round in the order of its rows.
#pragma once

#include "gemm/call_gradients.h"
#include "gemm/packed.h"
#include "scan/backward.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class BackwardRounds {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;
  static_assert(!in_pairs<S> && !in_bytes<S>, "products of single numbers");

 public:
  explicit BackwardRounds(const Call& call)
      : l_(*call.layer), rounds_(*call.rounds), mine_(l_), now_(call, &mine_, &round_), H_(l_.hidden_size),
        P_(l_.projection_size ? l_.projection_size : H_), copy_stride_(row_stride<A>(P_)), weights_(mine_), scan_(now_),
        gradients_{{of_, 1, rounds_.most_elements, l_.input_size, (S*)l_.grad_values},
                   {of_ + 1, 1, rounds_.most_elements, l_.input_size, (S*)l_.grad_values}} {
    mine_.packed = nullptr;
  }

  bool reserve() {
    const bool poison = l_.flags & RAGLANE_POISON;
    const int64_t rows = rounds_.most_elements;
    if (!numbers_.reserve(4 * l_.sequences + rows, false)) return false;
    begins_ = numbers_.get(), ends_ = begins_ + l_.sequences, row_ = ends_ + l_.sequences, left_ = row_ + l_.sequences;
    element_ = left_ + l_.sequences;
    if (!h_before_.reserve(rows, false) || !c_before_.reserve(Cell::has_c ? rows : 0, false)) return false;
    now_.begins = begins_, now_.ends = ends_, round_.row = row_;
    int64_t of_projection = l_.projection_size ? P_ + H_ : 0;
    if (!rows_.reserve(rows * (l_.gate_stride + of_projection), poison)) return false;
    mine_.gates = mine_.grad_gates = rows_.get();
    S* memory = rows_.get() + rows * l_.gate_stride;
    if (l_.projection_size) mine_.grad_h = memory, mine_.unprojected = memory + rows * P_;
    raglane_layer alone = mine_;
    alone.elements = 0;  // the rows of both directions begin at the same address
    for (int d = 0; d < l_.directions; d++) {
      describe_matrix(alone, d, of_[d]);
      if (!gradients_[d].reserve(poison)) return false;
    }
    if (Cell::saved > 0 && !(weights_.reserve(poison) && weights_.input.reserve(l_.threads, poison))) return false;
    if (!is_operand<S> && !copies_.reserve(l_.threads * block_rows * copy_stride_, poison)) return false;
    return scan_.reserve();
  }

  void work(int thread, int threads) {
    if (Cell::saved > 0) weights_.pack(thread, threads);
    scan_.prepare(thread, threads);
    for (int64_t d = 0; d < l_.directions; d++)
      for (int64_t round = 0; round < rounds_.count; round++) {
        barrier_.wait(threads);
        if (thread == 0) begin(d, round);
        barrier_.wait(threads);
        if constexpr (Cell::saved > 0) {
          compute_gates(thread, threads);
          barrier_.wait(threads);
        }
        scan_.walk(thread, threads);
        barrier_.wait(threads);
        if (wants_any(l_)) gradients_[d].work(thread, threads);
      }
  }

 private:
  const raglane_layer& l_;
  const Rounds& rounds_;
  raglane_layer mine_;  // the layer, with memory of a round in place of saved tensors
  Round round_ = {};
  struct Now : Call {
    Now(const Call& call, const raglane_layer* part, const Round* of) : Call(call) { layer = part, round = of; }
  } now_;  // the call for the round
  const int64_t H_, P_, copy_stride_;
  MatrixWeights<Cell, S> weights_;
  BackwardScan<Cell, S> scan_;
  DirectionGradients<S> of_[2];
  LayerGradients<S> gradients_[2];
  Scratch<int64_t> numbers_;
  // Of each sequence the steps of the round, the begin of its rows, and the number of steps after the round.
  int64_t *begins_, *ends_, *row_, *left_;
  int64_t* element_;  // of each row
  Scratch<const S*> h_before_, c_before_;  // the previous states, by pointer
  Scratch<S> rows_;
  Scratch<A> copies_;  // of h, if products cannot read the stored type
  Barrier barrier_;

  // Set up a round.
  void begin(int64_t d, int64_t round) {
    round_.direction = d;
    // The next round continues from the gradients that a round stores there.
    mine_.grad_final_h = mine_.grad_initial_h, mine_.grad_final_c = mine_.grad_initial_c;
    if (round == 0)
      for (int64_t b = 0; b < l_.sequences; b++) left_[b] = l_.offsets[b + 1] - l_.offsets[b];
    now_.order = rounds_.sequence + rounds_.first[round];
    now_.ordered = rounds_.first[round + 1] - rounds_.first[round];
    int64_t rows = 0;
    for (int64_t i = 0; i < now_.ordered; i++) {
      const int64_t b = now_.order[i], size = left_[b] < rounds_.steps ? left_[b] : rounds_.steps;
      const int64_t begin = l_.offsets[b], end = l_.offsets[b + 1];
      if (i == 0) now_.longest = size;
      begins_[b] = d == 0 ? begin + left_[b] - size : end - left_[b];
      ends_[b] = begins_[b] + size, row_[b] = rows, left_[b] -= size;
      for (int64_t element = begins_[b]; element < ends_[b]; element++, rows++) {
        const bool is_first = element == (d == 0 ? begin : end - 1);
        const int64_t sequence = d * l_.sequences + b, before = d == 0 ? element - 1 : element + 1;
        element_[rows] = element;
        h_before_.get()[rows] = is_first ? (const S*)l_.initial_h + sequence * P_
                                         : (const S*)l_.output + (before * l_.directions + d) * P_;
        if constexpr (Cell::has_c)
          c_before_.get()[rows] = is_first ? (const S*)l_.initial_c + sequence * H_
                                           : (const S*)l_.c_states + (d * l_.elements + before) * H_;
      }
    }
    now_.elements = rows;
    scan_.begin();
    gradients_[d].take({rows, element_, h_before_.get(), round == 0, round + 1 == rounds_.count, d > 0});
  }

  // ---- the gates ------------------------------------------------------------------------------------------------

  // The part of one thread, in blocks of rows.
  void compute_gates(int thread, int threads) {
    const int64_t total = now_.elements;
    int64_t blocks = (total + block_rows - 1) / block_rows;
    blocks = (blocks + threads - 1) / threads * threads;
    for (int64_t block = thread; block < blocks; block += threads) {
      const int64_t begin = total * block / blocks, end = total * (block + 1) / blocks;
      const A *x[block_rows], *h[block_rows];
      for (int64_t i = begin; i < end; i++) {
        x[i - begin] = weights_.input.row(element_[i], thread, (int)(i - begin));
        h[i - begin] = operand(h_before_.get()[i], thread, i - begin);
      }
      for (int64_t panel = 0; panel < weights_.hidden[round_.direction].count(); panel++)
        for (int64_t i = begin, size; i < end; i += size) {
          size = next_tile((int)(end - i), Cell::gates);
          compute_tile(panel, i, (int)size, x + (i - begin), h + (i - begin));
        }
    }
  }

  // Rows [first, first + size), the units of one panel, in the same way as in the forward loop.
  void compute_tile(int64_t panel, int64_t first, int size, const A* const* x, const A* const* h) {
    constexpr int together = registers == 32 ? 2 : 1;
    const int d = (int)round_.direction;
    const auto place = weights_.input.at(d, panel);
    constexpr int64_t stride = Cell::slots * width;
    constexpr int most = most_rows(Cell::gates);
    alignas(64) A sums[most * stride];
    A* row[most];
    int64_t of_hidden[Cell::gates];
    for (int r = 0; r < size; r++) row[r] = sums + r * stride;
    for (int gate = 0; gate < Cell::gates; gate++) of_hidden[gate] = Cell::hidden_slot(gate) * width;
    weights_.input.multiply(d, panel, size, x, sums, stride, panel);
    const Panels<S>& hidden = weights_.hidden[d];
    multiply<A>(size, Cell::gates, {h, hidden.at(panel), hidden.steps(), row, of_hidden, row, of_hidden});
    V last[most] = {}, save[most][Cell::saved + 1];
    int r = 0;
    for (; r + together <= size; r += together) open<together>(first + r, place.unit, row + r, save + r, last + r);
    for (; r < size; r++) open<1>(first + r, place.unit, row + r, save + r, last + r);
    if constexpr (Cell::ends_in_tanh) squash<A, 0, most>(last);
    for (r = 0; r < size; r++) {
      Cell::close(last[r], V{}, save[r]);
      S* to = (S*)mine_.gates + (first + r) * l_.gate_stride + place.chunk;
#pragma GCC unroll 8
      for (int s = 0; s < Cell::saved; s++) store(to + s * width, save[r][s]);
    }
  }

  template <int ROWS>
  RAGLANE_INLINE void open(int64_t first, int64_t unit, A* const* row, V (*save)[Cell::saved + 1], V* last) const {
    V arguments[ROWS][Cell::slots], c[ROWS] = {};
    const int count = (int)(H_ - unit < width ? H_ - unit : width);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
      for (int slot = 0; slot < Cell::slots; slot++) arguments[i][slot] = load((const A*)row[i] + slot * width);
      if constexpr (Cell::has_c) c[i] = load(c_before_.get()[first + i] + unit, count);
    }
    Cell::template open<ROWS>(arguments, c, save, last);
  }

  // A row of h as an operand: the stored row, or a copy in row `place` of the thread's room.
  const A* operand(const S* h, int thread, int64_t place) const {
    if constexpr (is_operand<S>) return h;
    else {
      A* room = copies_.get() + (thread * block_rows + place) * copy_stride_;
      copy_columns(room, h, 0, P_);
      return room;
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
