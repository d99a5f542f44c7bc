// The backward time loop: one for all cells and dtypes.
//
// A lane runs its sequence from the element that forward computed last. The sequential part is computed here: gradients
// of the gates' arguments and, through W_hh, of the previous state. The caller computes the rest.
#pragma once

#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class BackwardScan {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using X = typename Operand<S>::type;  // the type of the products' operands
  static constexpr int width = Lanes<A>::width;

 public:
  explicit BackwardScan(const Call& call)
      : call_(call), l_(*call.layer), H_(l_.hidden_size), P_(l_.projection_size ? l_.projection_size : H_),
        h_stride_(row_stride<A>(P_)), c_stride_(row_stride<A>(H_)),
        gate_stride_(row_stride<A>(words<S>(Cell::gates * H_) + (Cell::slots > Cell::gates ? words<S>(H_) : 0))) {}

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    for (int d = 0; d < l_.directions; d++) {
      hidden_[d] = {nullptr, P_, Cell::gates * H_, 1, panel_vectors};
      projection_[d] = {nullptr, H_, P_, 1, panel_vectors};
    }
    int64_t projected = l_.projection_size ? projection_[0].size() : 0;
    begin();
    int64_t lanes = capacity_;
    if (call_.rounds) lanes = call_.rounds->most_sequences < most_lanes ? call_.rounds->most_sequences : most_lanes;
    if (!weights_.reserve(l_.directions * (hidden_[0].size() + projected), poison)) return false;
    for (int d = 0; d < l_.directions; d++) {
      hidden_[d].data = weights_.get() + d * (hidden_[0].size() + projected);
      projection_[d].data = hidden_[d].data + hidden_[0].size();
    }
    if (!rows_.reserve(l_.threads * lanes * row_size(), poison)) return false;
    // Unused numbers of words stay zero.
    if (in_pairs<S>) memset((void*)rows_.get(), 0, l_.threads * lanes * row_size() * sizeof(A));
    if (!barriers_.reserve(l_.threads + 1, false)) return false;
    for (int64_t i = 0; i <= l_.threads; i++) barriers_.get()[i] = Barrier{};
    return true;
  }

  void work(int thread, int threads) {
    prepare(thread, threads);
    barriers_.get()[l_.threads].wait(threads);
    walk(thread, threads);
  }

  // The parts of work(), for a pass in rounds: once before all rounds,
  void prepare(int thread, int threads) {
    for (int d = 0; d < l_.directions; d++) {
      auto pack = [&](const Panels<S>& panels, const void* weights) {
        panels.pack_straight((const S*)weights, panels.count() * thread / threads, panels.count() * (thread + 1) / threads);
      };
      pack(hidden_[d], l_.weights[d].hidden);
      if (l_.projection_size) pack(projection_[d], l_.weights[d].projection);
    }
    if (thread == threads - 1) pass_empty();
  }
  // by one thread before each round,
  void begin() {
    members_ = wanted_members(call_, hidden_[0].size() * (int64_t)sizeof(A), hidden_[0].count());
    Division division((int)l_.threads, (int)call_.directions(), members_);
    int teams = division.teams(0) > 0 ? division.teams(0) : 1;
    capacity_ = lane_capacity(call_, teams, row_size() * (int64_t)sizeof(A));
    for (Queue& queue : queues_) queue = {};
  }
  // and the time loop of a round.
  void walk(int thread, int threads) {
    const int directions = (int)call_.directions();
    Division division(threads, directions, members_);
    if (division.idle(thread)) return;
    int home = thread % directions;
    scan(home, thread, division);
    if (division.members == 1)
      for (int other = 1; other < directions; other++) scan((home + other) % directions, thread, division);
  }

 private:
  const Call& call_;
  const raglane_layer& l_;
  const int64_t H_, P_, h_stride_, c_stride_, gate_stride_;
  Panels<S> hidden_[2], projection_[2];
  int members_ = 1, capacity_ = 1;
  Scratch<A> weights_, rows_;
  Scratch<Barrier> barriers_;
  Queue queues_[2];

  // A lane's scratch: dh, dc, the gates' gradients of this and the previous step (first those that depend on h), and
  // the output and input of a projection.
  int64_t row_size() const {
    int64_t projected = c_stride_ + (in_pairs<S> ? h_stride_ : 0);
    return h_stride_ + (Cell::has_c ? c_stride_ : 0) + 2 * gate_stride_ + (l_.projection_size ? projected : 0);
  }

  struct Step {
    A* dh[most_lanes];           // gradient of h, P wide
    A* dm[most_lanes];           // gradient of the cell's output, H wide; without a projection it is dh
    A* dc[most_lanes];
    A* da[most_lanes];           // gradients of the arguments that depend on h, as operands of products
    A* projected[most_lanes];    // dh as an operand of products, with a projection
    const S* grad_output[most_lanes];
    const S* grad_c_states[most_lanes];
    const S* output[most_lanes];
    const S* gates[most_lanes];
    const S* c_states[most_lanes];
    const S* h_before[most_lanes];
    const S* c_before[most_lanes];
    S* grad_gates[most_lanes];
    S* previous_h[most_lanes];   // null in a round, where gradients read h from the outputs
    S* grad_h[most_lanes];
    S* unprojected[most_lanes];
  };

  // The gradient of an empty sequence's final state is that of its initial one. In rounds every sequence's gradient
  // of the initial state holds the gradient of the state between two rounds.
  void pass_empty() {
    for (int64_t b = 0; b < l_.sequences; b++) {
      if (!call_.rounds && l_.offsets[b] != l_.offsets[b + 1]) continue;
      for (int d = 0; d < l_.directions; d++) {
        int64_t row = d * l_.sequences + b;
        pass((S*)l_.grad_initial_h + row * P_, (const S*)l_.grad_final_h, row * P_, P_);
        if (Cell::has_c) pass((S*)l_.grad_initial_c + row * H_, (const S*)l_.grad_final_c, row * H_, H_);
      }
    }
  }
  static void pass(S* to, const S* from, int64_t offset, int64_t count) {
    if (from) copy_columns(to, from + offset, 0, count);
    else memset((void*)to, 0, count * sizeof(S));
  }

  // `place`: the index of the direction among those of the pass.
  void scan(int place, int thread, const Division& division) {
    const int d = (int)call_.first_direction() + place;
    Team team = division.team(thread, place, barriers_.get());
    A* dh = rows_.get() + division.slot(thread) * capacity_ * row_size();
    A* dc = dh + capacity_ * h_stride_;
    A* da = dc + (Cell::has_c ? capacity_ * c_stride_ : 0);
    A* da_last = da + capacity_ * gate_stride_;
    A* dm = da_last + capacity_ * gate_stride_;
    int64_t first_panel = hidden_[d].count() * team.member / team.members;
    int64_t end_panel = hidden_[d].count() * (team.member + 1) / team.members;
    // Without a team, one member computes everything; with a team there is no projection, and P is H.
    int64_t begin = first_panel * hidden_[d].panel_columns(), end = end_panel * hidden_[d].panel_columns();
    end = team.member + 1 == team.members ? H_ : end;
    int64_t h_end = team.members > 1 ? end : P_;

    LaneSet lanes(call_, team, &queues_[d], capacity_, d != 0);
    auto start = [&](int lane) {
      int64_t row = d * l_.sequences + lanes.sequence[lane];
      begin_row(dh + lane * h_stride_, (const S*)l_.grad_final_h, row * P_, begin, h_end);
      if (Cell::has_c) begin_row(dc + lane * c_stride_, (const S*)l_.grad_final_c, row * H_, begin, end);
    };
    auto finish = [&](int lane) {
      int64_t row = d * l_.sequences + lanes.sequence[lane];
      copy_columns((S*)l_.grad_initial_h + row * P_, dh + lane * h_stride_, begin, h_end);
      if (Cell::has_c) copy_columns((S*)l_.grad_initial_c + row * H_, dc + lane * c_stride_, begin, end);
    };
    auto move = [&](int from, int to) {
      copy_columns(dh + to * h_stride_, dh + from * h_stride_, begin, h_end);
      if (Cell::has_c) copy_columns(dc + to * c_stride_, dc + from * c_stride_, begin, end);
    };

    lanes.fill(start);
    const bool fetches = hidden_[d].size() * (int64_t)sizeof(A) / team.members > call_.cache;
    Step step;
    for (bool backwards = false; lanes.active > 0; backwards = !backwards) {
      point(step, lanes, d, {dh, l_.projection_size ? dm : dh, dc, da, in_pairs<S> ? dm + capacity_ * c_stride_ : dh});
      if (l_.projection_size) unproject(step, lanes.active, d);
      for (int lane = 0; lane < lanes.active; lane++)
        gates(step, lane, lane + 1 < lanes.active ? lane + 1 : lane, begin, end);
      // Now all gate gradients of a row are needed: dh of the previous step is the gradient that did not pass the
      // products, plus the gates' gradients x W_hh. The next step writes other memory, so one barrier per step is
      // enough.
      team.barrier->wait(team.members);
      // After the barrier every thread has read the saved gates, which the gradients may overwrite.
      for (int lane = 0; lane < lanes.active; lane++) give_gates(step, lane, begin, end);
      for (int64_t i = first_panel; i < end_panel; i++) {
        const int64_t panel = backwards ? first_panel + end_panel - 1 - i : i;
        const int64_t next = i + 1 < end_panel ? panel + (backwards ? -1 : 1) : -1;
        multiply_panel(hidden_[d], panel, lanes.active, step.da, step.dh, fetches, next);
      }
      A* swap = da;
      da = da_last, da_last = swap;
      lanes.advance(finish, start, move);
    }
  }

  static void begin_row(A* to, const S* from, int64_t offset, int64_t begin, int64_t end) {
    if (from) copy_columns(to, from + offset, begin, end);
    else if (end > begin) memset((void*)(to + begin), 0, (end - begin) * sizeof(A));
  }

  // The begin of the first lane's rows.
  struct Rows {
    A *dh, *dm, *dc, *da, *projected;
  };

  void point(Step& step, const LaneSet& lanes, int d, const Rows& rows) {
    int64_t K = l_.directions, back = d == 0 ? -1 : 1;
    for (int lane = 0; lane < lanes.active; lane++) {
      int64_t element = lanes.element[lane], row = d * l_.elements + element;
      const int64_t b = lanes.sequence[lane], sequence = d * l_.sequences + b;
      bool is_first = element == (d == 0 ? l_.offsets[b] : l_.offsets[b + 1] - 1);
      const S* output = (const S*)l_.output + element * K * P_ + d * P_;
      step.dh[lane] = rows.dh + lane * h_stride_;
      step.dm[lane] = rows.dm + lane * (l_.projection_size ? c_stride_ : h_stride_);
      step.dc[lane] = rows.dc + lane * c_stride_;
      step.da[lane] = rows.da + lane * gate_stride_;
      step.projected[lane] = rows.projected + lane * h_stride_;
      step.grad_output[lane] = l_.grad_output ? (const S*)l_.grad_output + element * K * P_ + d * P_ : nullptr;
      step.output[lane] = output;
      step.h_before[lane] = is_first ? (const S*)l_.initial_h + sequence * P_ : output + back * K * P_;
      if constexpr (Cell::has_c) {
        step.c_states[lane] = (const S*)l_.c_states + row * H_;
        step.grad_c_states[lane] = l_.grad_c_states ? (const S*)l_.grad_c_states + row * H_ : nullptr;
        step.c_before[lane] = is_first ? (const S*)l_.initial_c + sequence * H_ : step.c_states[lane] + back * H_;
      }
      if (call_.round) row = call_.round->row[b] + element - call_.begins[b];
      step.gates[lane] = (const S*)l_.gates + row * l_.gate_stride;
      step.grad_gates[lane] = (S*)l_.grad_gates + row * l_.gate_stride;
      step.previous_h[lane] = call_.round ? nullptr : (S*)l_.previous_h + row * P_;
      if (l_.projection_size) {
        step.grad_h[lane] = (S*)l_.grad_h + row * P_;
        step.unprojected[lane] = (S*)l_.unprojected + row * H_;
      }
    }
  }

  // Prefetch a vector of units of the rows that a lane's step reads: rows of many lanes are far apart,
  // so the processor does not prefetch them itself.
  RAGLANE_INLINE void fetch(const Step& step, int lane, int64_t unit) const {
    for (int s = 0; s < Cell::saved; s++) __builtin_prefetch(step.gates[lane] + unit * Cell::saved + s * width);
    __builtin_prefetch(step.h_before[lane] + unit);
    if (step.grad_output[lane]) __builtin_prefetch(step.grad_output[lane] + unit);
    if constexpr (Cell::has_c) {
      __builtin_prefetch(step.c_states[lane] + unit);
      __builtin_prefetch(step.c_before[lane] + unit);
    }
  }

  // The element-wise part of one lane's step: gradients of the gates' arguments for the units in [begin, end), while
  // the rows of the next lane are prefetched.
  [[gnu::noinline]] void gates(const Step& step, int lane, int next, int64_t begin, int64_t end) {
    // Copies on the stack, because the compiler must assume that the stores below change `step`.
    const S* gates = step.gates[lane];
    const S* output = step.output[lane];
    const S* h_before = step.h_before[lane];
    const S* c_states = step.c_states[lane];
    const S* c_before = step.c_before[lane];
    const S* grad_c_states = step.grad_c_states[lane];
    const S* grad_output = l_.projection_size ? nullptr : step.grad_output[lane];
    A *dm = step.dm[lane], *dc = step.dc[lane];
    X* da = (X*)step.da[lane];
    S* previous_h = step.previous_h[lane];
    bool projects = l_.projection_size > 0;
    for (int64_t unit = begin; unit < end; unit += width) {
      fetch(step, next, unit);
      int count = (int)(end - unit < width ? end - unit : width);
      V save[Cell::saved + 1], argument[Cell::slots], c = {}, c_last = {}, d_c = {}, h = {}, y = {};
#pragma GCC unroll 8
      for (int s = 0; s < Cell::saved; s++) save[s] = load(gates + unit * Cell::saved + s * width);
      V d_h = load(dm + unit, count);
      if (grad_output) d_h += load(grad_output + unit, count);
      if constexpr (Cell::has_c) {
        c = load(c_states + unit, count), c_last = load(c_before + unit, count);
        d_c = load(dc + unit, count);
        if (grad_c_states) d_c += load(grad_c_states + unit, count);
      }
      if constexpr (Cell::saved == 0) y = load(output + unit, count);
      if (!projects) h = load(h_before + unit, count);
      V direct = Cell::backward(save, y, h, c_last, c, d_h, d_c, argument);
#pragma GCC unroll 8
      for (int s = 0; s < Cell::slots; s++) store(da + at_slot(s) + unit, argument[s], count);
      if constexpr (Cell::has_c) store(dc + unit, d_c, count);
      if (!projects) {
        store(dm + unit, direct, count);
        if (previous_h) store(previous_h + unit, h, count);
      } else if constexpr (Cell::projects) {
        store(step.unprojected[lane] + unit, Cell::unprojected(save, c), count);
      }
    }
  }

  // The position of a slot's gradient in a row of scratch: the products through h read the first `gates` blocks.
  static constexpr int block(int slot) {
    for (int gate = 0; gate < Cell::gates; gate++)
      if (Cell::hidden_slot(gate) == slot) return gate;
    return Cell::gates;
  }
  static_assert(Cell::slots <= Cell::gates + 1, "one slot at most that no hidden product reaches");
  int64_t at_slot(int slot) const {
    return block(slot) < Cell::gates ? block(slot) * H_ : words<S>(Cell::gates * H_) * (int64_t)(sizeof(A) / sizeof(X));
  }

  void give_gates(const Step& step, int lane, int64_t begin, int64_t end) {
    for (int slot = 0; slot < Cell::slots; slot++)
      copy_columns(step.grad_gates[lane] + slot * H_, (const X*)step.da[lane] + at_slot(slot), begin, end);
  }

  // The step before the cell's own gradients if h is a projection: h = W_hr m, so dm = dh W_hr.
  void unproject(const Step& step, int active, int d) {
    for (int lane = 0; lane < active; lane++) {
      for (int64_t column = 0; column < P_; column += width) {
        int count = (int)(P_ - column < width ? P_ - column : width);
        V sum = load(step.dh[lane] + column, count);
        if (step.grad_output[lane]) sum += load(step.grad_output[lane] + column, count);
        store((X*)step.projected[lane] + column, sum, count);
        store(step.grad_h[lane] + column, sum, count);
      }
      if (step.previous_h[lane]) copy_columns(step.previous_h[lane], step.h_before[lane], 0, P_);
    }
    for (int lane = 0; lane < active; lane++) memset((void*)step.dm[lane], 0, c_stride_ * sizeof(A));
    for (int64_t panel = 0; panel < projection_[d].count(); panel++)
      multiply_panel(projection_[d], panel, active, step.projected, step.dm);
    // The product through W_hh starts from zero.
    for (int lane = 0; lane < active; lane++) memset((void*)step.dh[lane], 0, P_ * sizeof(A));
  }
};

}  // namespace raglane::RAGLANE_TARGET
