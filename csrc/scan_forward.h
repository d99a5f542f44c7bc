// The forward time loop: one for all cells and dtypes.
#pragma once

#include "activations.h"
#include "prepared.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class ForwardScan {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using X = typename Operand<S>::type;  // what products read
  static constexpr int width = Lanes<A>::width;
  static constexpr int finished_rows = tile_rows < 6 ? tile_rows : 6;  // whose arithmetic is done together

 public:
  explicit ForwardScan(const Call& call)
      : call_(call), l_(*call.layer), H_(l_.hidden_size), P_(l_.projection_size ? l_.projection_size : H_),
        h_stride_(row_stride<A>(P_)), c_stride_(row_stride<A>(H_)),
        operand_stride_(in_pairs<S> ? row_stride<A>(words<S>(P_)) : h_stride_),
        state_size_(2 * h_stride_ + (Cell::has_c ? c_stride_ : 0) + (l_.projection_size ? c_stride_ : 0)),
        operand_size_(in_pairs<S> ? 2 * operand_stride_ + (l_.projection_size ? c_stride_ : 0) : 0),
        input_(l_.values, H_, l_.input_size), prepared_(l_, input_) {}

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    int64_t panel_bytes = 0;
    for (int d = 0; d < l_.directions; d++) {
      hidden_[d] = {nullptr, H_, P_, Cell::gates, Cell::unit_vectors};
      projection_[d] = {nullptr, P_, H_, 1, panel_vectors};
      panel_bytes = (input_.panels(d).size() + hidden_[d].size()) * (int64_t)sizeof(A);
    }
    decide(panel_bytes);
    int64_t projected = l_.projection_size ? projection_[0].size() : 0;
    int64_t weights = input_.size() + hidden_[0].size() + projected;
    if (!weights_.reserve(l_.directions * weights, poison)) return false;
    for (int d = 0; d < l_.directions; d++) {
      hidden_[d].data = weights_.get() + d * weights;
      projection_[d].data = hidden_[d].data + hidden_[d].size();
      input_.place(d, projection_[d].data + projected);
    }
    int64_t rows = l_.threads * capacity_;
    if (!states_.reserve(rows * state_size_, poison) || !operands_.reserve(rows * operand_size_, false)) return false;
    memset((void*)operands_.get(), 0, rows * operand_size_ * sizeof(A));  // what numbers do not fill stays zero
    if (!barriers_.reserve(l_.threads + 1, false)) return false;
    for (int64_t i = 0; i <= l_.threads; i++) barriers_.get()[i] = Barrier{};
    return input_.reserve(l_.threads, poison) && prepared_.reserve(poison);
  }

  void work(int thread, int threads) {
    Division division(threads, (int)l_.directions, members_);
    pack(thread, threads);
    if (thread == threads - 1) keep_empty();
    barriers_.get()[l_.threads].wait(threads);
    if (prepared_.wanted()) {
      for (int d = 0; d < l_.directions; d++) prepared_.make(d, thread, threads);
      barriers_.get()[l_.threads].wait(threads);
    }
    if (division.idle(thread)) return;
    int home = thread % (int)l_.directions;
    scan(home, thread, division);
    if (division.members == 1)
      for (int other = 1; other < l_.directions; other++) scan((home + other) % (int)l_.directions, thread, division);
  }

 private:
  const Call& call_;
  const raglane_layer& l_;
  const int64_t H_, P_, h_stride_, c_stride_, operand_stride_;
  const int64_t state_size_, operand_size_;  // a lane's scratch
  InputProducts<Cell, S> input_;
  PreparedProducts<Cell, S> prepared_;
  Panels<S> hidden_[2], projection_[2];
  bool streams_ = false;  // whether saved gates go past the caches, which would not hold them until they are read
  int members_ = 1, capacity_ = 1;
  Scratch<A> weights_, states_, operands_;
  Scratch<Barrier> barriers_;
  Queue queues_[2];

  // The pointers of one team's step, one a lane.
  struct Step {
    const A* x[most_lanes];
    const A* prepared[most_lanes];       // null where input products are folded in
    const A* next_prepared[most_lanes];  // of the element that the lane will probably compute next
    const A* before[most_lanes];
    A* after[most_lanes];
    const A* operand[most_lanes];  // h before, as products read it
    A* next_operand[most_lanes];   // what is `after`, as products will read it
    A* c[most_lanes];
    S* output[most_lanes];
    S* gates[most_lanes];
    S* cells[most_lanes];
  };

  // ---- before the loop -------------------------------------------------------------------------------------------

  void decide(int64_t panel_bytes) {
    int64_t hidden_bytes = hidden_[0].size() * (int64_t)sizeof(A);
    members_ = wanted_members(call_, hidden_bytes, hidden_[0].count());
    Division division((int)l_.threads, (int)l_.directions, members_);
    int teams = division.teams(0) > 0 ? division.teams(0) : 1;
    prepared_.decide(average_rows(call_, teams), panel_bytes, call_.cache);
    if constexpr (Cell::saved > 0) {
      int64_t row = l_.gate_stride * (int64_t)sizeof(S);
      bool aligned = (uintptr_t)l_.gates % 64 == 0 && row % 64 == 0;
      streams_ = l_.gates && !prepared_.wanted() && aligned && l_.elements * row > tuning::streamed_caches * call_.cache;
    }
    capacity_ = lane_capacity(call_, teams, (2 * h_stride_ + c_stride_) * (int64_t)sizeof(A));
  }

  void pack(int thread, int threads) {
    for (int d = 0; d < l_.directions; d++) {
      const raglane_weights& w = l_.weights[d];
      const S *of_input[Cell::gates], *of_hidden[Cell::gates], *projection = (const S*)w.projection;
      for (int gate = 0; gate < Cell::gates; gate++) {
        of_input[gate] = (const S*)w.input + gate * H_ * l_.input_size;
        of_hidden[gate] = (const S*)w.hidden + gate * H_ * P_;
      }
      for (int64_t panel = thread; panel < hidden_[d].count(); panel += threads) {
        input_.pack(d, panel, of_input);
        hidden_[d].pack_transposed(of_hidden, panel);
        for (int gate = 0; gate < Cell::gates; gate++) {
          if (w.input_bias) input_.add_bias(d, panel, gate, (const S*)w.input_bias + gate * H_);
          if (w.hidden_bias) input_.add_bias(d, panel, Cell::hidden_slot(gate), (const S*)w.hidden_bias + gate * H_);
        }
      }
      if (l_.projection_size)
        for (int64_t panel = thread; panel < projection_[d].count(); panel += threads)
          projection_[d].pack_transposed(&projection, panel);
    }
  }

  // An empty sequence's final state is its initial one.
  void keep_empty() {
    for (int64_t b = 0; b < l_.sequences; b++) {
      if (l_.offsets[b] != l_.offsets[b + 1]) continue;
      for (int d = 0; d < l_.directions; d++) {
        int64_t row = d * l_.sequences + b;
        copy_columns((S*)l_.final_h + row * P_, (const S*)l_.initial_h + row * P_, 0, P_);
        if (Cell::has_c) copy_columns((S*)l_.final_c + row * H_, (const S*)l_.initial_c + row * H_, 0, H_);
      }
    }
  }

  int count_at(int64_t column) const { return (int)(H_ - column < width ? H_ - column : width); }

  // The gates' arguments of a tile while they are summed: for each row, for each slot, the units of one panel. Prepared
  // and saved rows have the same layout, panel after panel.
  struct Sums : PanelPlace<Cell, A> {
    using Place = PanelPlace<Cell, A>;
    alignas(64) A memory[tile_rows * Cell::slots * Place::slot_size];
    A* row[tile_rows];
    const A* biases[tile_rows];
    int64_t of_hidden[panel_vectors];

    explicit Sums(const Place& place) : Place(place) {
      for (int r = 0; r < tile_rows; r++) row[r] = memory + r * Cell::slots * Place::slot_size, biases[r] = place.bias;
      for (int v = 0; v < Cell::gates * place.units; v++)
        of_hidden[v] = Cell::hidden_slot(v / place.units) * Place::slot_size + v % place.units * width;
    }
  };

  // ---- the loop ---------------------------------------------------------------------------------------------------

  void scan(int d, int thread, const Division& division) {
    Team team = division.team(thread, d, barriers_.get());
    bool ascending = d == 0;
    // A team's scratch: h twice, c, and what a projection reads; in pairs, h twice and what a projection reads again.
    A* before = states_.get() + division.slot(thread) * capacity_ * state_size_;
    A* after = before + capacity_ * h_stride_;
    A* c = after + capacity_ * h_stride_;
    A* unprojected = c + (Cell::has_c ? capacity_ * c_stride_ : 0);
    A* operand = in_pairs<S> ? operands_.get() + division.slot(thread) * capacity_ * operand_size_ : before;
    A* next_operand = in_pairs<S> ? operand + capacity_ * operand_stride_ : after;
    A* projected = in_pairs<S> ? next_operand + capacity_ * operand_stride_ : unprojected;
    // This member's share of the panels, and their columns.
    int64_t first_panel = hidden_[d].count() * team.member / team.members;
    int64_t end_panel = hidden_[d].count() * (team.member + 1) / team.members;
    int64_t begin = first_panel * hidden_[d].panel_columns(), end = end_panel * hidden_[d].panel_columns();
    end = end < H_ ? end : H_;
    int64_t h_begin = team.members > 1 ? begin : 0, h_end = team.members > 1 ? end : P_;

    LaneSet lanes(call_, team, &queues_[d], capacity_, ascending);
    auto start = [&](int lane) {
      int64_t row = d * l_.sequences + lanes.sequence[lane];
      copy_columns(before + lane * h_stride_, (const S*)l_.initial_h + row * P_, h_begin, h_end);
      if (in_pairs<S>) copy_columns(in_row(operand, lane), (const S*)l_.initial_h + row * P_, h_begin, h_end);
      if (Cell::has_c) copy_columns(c + lane * c_stride_, (const S*)l_.initial_c + row * H_, begin, end);
    };
    auto finish = [&](int lane) {
      int64_t row = d * l_.sequences + lanes.sequence[lane];
      copy_columns((S*)l_.final_h + row * P_, before + lane * h_stride_, h_begin, h_end);
      if (Cell::has_c) copy_columns((S*)l_.final_c + row * H_, c + lane * c_stride_, begin, end);
    };
    auto move = [&](int from, int to) {
      copy_columns(before + to * h_stride_, before + from * h_stride_, h_begin, h_end);
      if (in_pairs<S>) copy_columns(in_row(operand, to), (const X*)in_row(operand, from), h_begin, h_end);
      if (Cell::has_c) copy_columns(c + to * c_stride_, c + from * c_stride_, begin, end);
    };

    lanes.fill(start);
    team.barrier->wait(team.members);
    Step step;
    for (bool backwards = false; lanes.active > 0; backwards = !backwards) {
      bool projects = l_.projection_size > 0;
      point(step, lanes, d, thread,
            {before, projects ? unprojected : after, operand, projects ? projected : next_operand, c});
      // Back and forth over the panels: what was read last is still in the cache when it is read next.
      for (int64_t i = first_panel; i < end_panel; i++)
        for (int first = 0, size; first < lanes.active; first += size) {
          size = next_tile(lanes.active - first);
          tile(step, first, size, d, backwards ? first_panel + end_panel - 1 - i : i);
        }
      if (projects) project(step, lanes.active, d, after, next_operand);
      A* swap = before;
      before = after, after = swap;
      swap = operand;
      operand = next_operand, next_operand = swap;
      lanes.advance(finish, start, move);
      team.barrier->wait(team.members);
    }
    finish_streams();
  }

  // A lane's row of h as products read it.
  X* in_row(A* operand, int lane) const { return (X*)(operand + lane * operand_stride_); }

  // Where the first lane's rows begin.
  struct Rows {
    A *before, *after, *operand, *next_operand, *c;
  };

  void point(Step& step, const LaneSet& lanes, int d, int thread, const Rows& rows) {
    bool projects = l_.projection_size > 0;
    for (int lane = 0; lane < lanes.active; lane++) {
      int64_t element = lanes.element[lane], row = d * l_.elements + element;
      step.prepared[lane] = step.next_prepared[lane] = nullptr;
      if (prepared_.wanted()) {
        step.prepared[lane] = prepared_.at(d, element);
        int64_t next = lanes.left[lane] <= 1 ? 0 : d == 0 ? prepared_.stride() : -prepared_.stride();
        step.next_prepared[lane] = step.prepared[lane] + next;
      } else step.x[lane] = input_.row(element, thread, lane);
      step.before[lane] = rows.before + lane * h_stride_;
      step.after[lane] = rows.after + lane * (projects ? c_stride_ : h_stride_);
      step.operand[lane] = rows.operand + lane * operand_stride_;
      step.next_operand[lane] = rows.next_operand + lane * (projects ? c_stride_ : operand_stride_);
      step.c[lane] = rows.c + lane * c_stride_;
      step.output[lane] = l_.output ? (S*)l_.output + element * l_.directions * P_ + d * P_ : nullptr;
      step.gates[lane] = Cell::saved && l_.gates ? (S*)l_.gates + row * l_.gate_stride : nullptr;
      step.cells[lane] = Cell::has_c && l_.cells ? (S*)l_.cells + row * H_ : nullptr;
    }
  }

  // Some rows, the units of one panel: from the products to the new state while all of it is in the nearest cache.
  void tile(const Step& step, int first, int size, int d, int64_t panel) {
    Sums sums(input_.at(d, panel));
    int vectors = Cell::gates * sums.units;
    const A* prepared[tile_rows];  // what the hidden product starts from
    for (int r = 0; r < size; r++) {
      fetch(step, first + r, sums);
      prepared[r] = sums.row[r];
      if (!prepared_.wanted()) {
        sums.start(sums.row[r], Cell::gates);
      } else if constexpr (Cell::saved > 0) {
        prepared[r] = step.prepared[first + r] + sums.chunk;
      } else {
        for (int u = 0; u < sums.units; u++) {
          int64_t column = sums.unit + u * width;
          store(sums.row[r] + u * width, load(step.prepared[first + r] + column, count_at(column)));
        }
      }
    }
    if (!prepared_.wanted())
      multiply<X>(size, vectors, {step.x + first, input_.panels(d).at(panel), input_.panels(d).steps(), sums.biases,
                                  sums.of_bias, sums.row, sums.of_input});
    multiply<X>(size, vectors, {step.operand + first, hidden_[d].at(panel), hidden_[d].steps(), prepared,
                                sums.of_hidden, sums.row, sums.of_hidden});
    for (int begin = 0; begin < size; begin += finished_rows)
      for (int u = 0; u < sums.units; u++)
        finish(step, first + begin, size - begin < finished_rows ? size - begin : finished_rows, u, sums,
               sums.row + begin, prepared + begin);
  }

  // Bring what the tile will write into the cache while it is multiplied, and what the next panel's tile starts from:
  // pieces of some lines here and there, which the processor does not see coming.
  RAGLANE_INLINE void fetch(const Step& step, int lane, const Sums& sums) {
    if (step.output[lane] && l_.projection_size == 0) __builtin_prefetch(step.output[lane] + sums.unit, 1);
    if constexpr (Cell::saved > 0)
      if (step.gates[lane]) {
        if (!step.prepared[lane] && !streams_)
          for (int s = 0; s < Cell::saved; s++)
            __builtin_prefetch(step.gates[lane] + sums.chunk + s * sums.slot_size, 1);
      }
    if constexpr (Cell::has_c)
      if (step.cells[lane]) __builtin_prefetch(step.cells[lane] + sums.unit, 1);
    if constexpr (Cell::saved > 0)
      if (step.prepared[lane])
        for (int s = 0; s < Cell::slots; s++)
          __builtin_prefetch(step.next_prepared[lane] + sums.chunk + s * sums.slot_size, 1);
  }

  // The cell's arithmetic for one vector of units. Its parts take several rows side by side, because for one row each is
  // a long chain of operations: first up to the tanh in which every cell ends, then all tanh, then the rest.
  RAGLANE_INLINE void finish(const Step& step, int first, int size, int u, const Sums& sums, const A* const* summed,
                             const A* const* prepared) {
    int64_t unit = sums.unit + u * width;
    int count = count_at(unit);
    V last[finished_rows] = {}, save[finished_rows][Cell::saved + 1], c[finished_rows];
    constexpr int together = registers == 32 ? 2 : 1;
    int r = 0;
    for (; r + together <= size; r += together)
      open<together>(step, first + r, u, sums, summed + r, prepared + r, c + r, save + r, last + r);
    for (; r < size; r++)
      open<1>(step, first + r, u, sums, summed + r, prepared + r, c + r, save + r, last + r);
    if constexpr (Cell::ends_in_tanh) squash<A, 0, finished_rows>(last);
    for (r = 0; r < size; r++) {
      int lane = first + r;
      V h = Cell::close(last[r], load(step.before[lane] + unit), save[r]);
      // Scratch rows and saved rows have room for whole vectors; the caller's memory does not.
      store(step.after[lane] + unit, h);
      if constexpr (in_pairs<S>) store((X*)step.next_operand[lane] + unit, h, count);
      if constexpr (Cell::has_c) store(step.c[lane] + unit, c[r]);
      if (step.output[lane] && l_.projection_size == 0) store(step.output[lane] + unit, h, count);
      if constexpr (Cell::saved > 0)
        if (step.gates[lane]) {
#pragma GCC unroll 8
          for (int s = 0; s < Cell::saved; s++) {
            S* to = step.gates[lane] + sums.chunk + s * sums.slot_size + u * width;
            streams_ ? stream(to, save[r][s]) : store(to, save[r][s]);
          }
        }
      if constexpr (Cell::has_c)
        if (step.cells[lane]) store(step.cells[lane] + unit, c[r], count);
    }
  }

  template <int ROWS>
  RAGLANE_INLINE void open(const Step& step, int first, int u, const Sums& sums, const A* const* summed,
                           const A* const* prepared, V* c, V (*save)[Cell::saved + 1], V* last) {
    V arguments[ROWS][Cell::slots];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
      for (int slot = 0; slot < Cell::slots; slot++) {
        // A slot that the hidden product does not reach stands where it was prepared.
        const A* from = Cell::only_input(slot) ? prepared[i] : summed[i];
        arguments[i][slot] = load(from + slot * sums.slot_size + u * width);
      }
      if constexpr (Cell::has_c) c[i] = load(step.c[first + i] + sums.unit + u * width);
    }
    Cell::template open<ROWS>(arguments, c, save, last);
  }

  // h = W_hr m, for all lanes.
  void project(Step& step, int active, int d, A* after, A* next_operand) {
    A* to[most_lanes];
    for (int lane = 0; lane < active; lane++) {
      to[lane] = after + lane * h_stride_;
      memset((void*)to[lane], 0, h_stride_ * sizeof(A));
    }
    for (int64_t panel = 0; panel < projection_[d].count(); panel++)
      multiply_panel(projection_[d], panel, active, in_pairs<S> ? step.next_operand : step.after, to);
    for (int lane = 0; lane < active; lane++) {
      if (in_pairs<S>) copy_columns(in_row(next_operand, lane), (const A*)to[lane], 0, P_);
      if (l_.output) copy_columns(step.output[lane], (const A*)to[lane], 0, P_);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
