// The forward time loop: one for all cells and dtypes.
#pragma once

#include <new>

#include "gemm/packed.h"
#include "scan/prepared.h"
#include "scan/states.h"
#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class ForwardScan {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  using X = typename Operand<S>::type;  // the type of the products' operands
  static constexpr int width = Lanes<A>::width;
  static constexpr bool has_operands = in_pairs<S> || in_bytes<S>;  // in addition to the states
  static constexpr int whole_panel = Cell::gates * Cell::unit_vectors, whole_tile = most_rows(whole_panel);
  static constexpr int finished_rows = whole_tile < 6 ? whole_tile : 6;  // whose element-wise arithmetic is interleaved

 public:
  explicit ForwardScan(const Call& call)
      : call_(call), l_(*call.layer), H_(l_.hidden_size), P_(l_.projection_size ? l_.projection_size : H_),
        h_stride_(row_stride<A>(P_)), c_stride_(row_stride<A>(H_)),
        operand_stride_(has_operands ? row_stride<A>(operand_words<S>(P_)) : h_stride_),
        state_size_(2 * h_stride_ + (Cell::has_c ? c_stride_ : 0) + (l_.projection_size ? c_stride_ : 0)),
        operand_size_(has_operands ? 2 * operand_stride_ + (l_.projection_size ? c_stride_ : 0) : 0),
        weights_(l_), input_(weights_.input), prepared_(l_, input_) {}

  bool reserve() {
    bool poison = l_.flags & RAGLANE_POISON;
    decide((input_.panels(0).size() + weights_.hidden[0].size()) * (int64_t)sizeof(A));
    if (!weights_.reserve(poison)) return false;
    int64_t rows = l_.threads * capacity_;
    if (!states_.reserve(rows * state_size_, poison) || !operands_.reserve(rows * operand_size_, false)) return false;
    memset((void*)operands_.get(), 0, rows * operand_size_ * sizeof(A));  // unused numbers of words stay zero
    if (!barriers_.reserve(l_.threads + 1, false)) return false;
    for (int64_t i = 0; i <= l_.threads; i++) barriers_.get()[i] = Barrier{};
    return input_.reserve(l_.threads, poison) && prepared_.reserve(poison);
  }

  void work(int thread, int threads) {
    Division division(threads, (int)l_.directions, members_);
    weights_.pack(thread, threads);
    if (thread == threads - 1) keep_empty();
    barriers_.get()[l_.threads].wait(threads);
    if (prepared_.wanted()) {
      for (int d = 0; d < l_.directions; d++) {
        Panels<S> input = weights_.input_of(d, thread);
        prepared_.make(d, thread, threads, input, [&](int64_t panel) {
          if (weights_.input_packed != Packed::before) weights_.pack_input(d, input, panel);
        });
      }
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
  MatrixWeights<Cell, S> weights_;
  InputProducts<Cell, S>& input_;
  PreparedProducts<Cell, S> prepared_;
  bool fetches_ = false;  // panels are fetched ahead, because a core's cache does not hold those of a step
  bool streams_ = false;  // saved gates bypass the caches, which could not hold them until they are read
  int members_ = 1, capacity_ = 1;
  Scratch<A> states_, operands_;
  Scratch<Barrier> barriers_;
  Queue queues_[2];

  // The rows of a team's step. Those of lanes are adjacent in scratch, those of elements in the caller's
  // memory.
  struct Step {
    int d;
    Panels<S> input, hidden;
    const int64_t *element, *row;  // the element that each lane computes, and its row in values and output
    A *before, *after, *c;         // of the first lane: h before and after, c
    A *operand, *next_operand;     // `before` and `after` as operands of products
    int64_t after_stride, next_stride;
    S *output, *gates, *c_states;     // of the first element; null if not needed
    const A* x[most_lanes];        // a lane's input, if input products are folded in
    int64_t x_stride;              // from one to the next, of rows in words
    int active;                    // lanes
    int64_t next;                  // the panel after this one, to be fetched, or -1
    const A* operands[most_lanes]; // a lane's row of `operand`
  };

  // ---- before the loop -------------------------------------------------------------------------------------------

  void decide(int64_t panel_bytes) {
    int64_t hidden_bytes = weights_.hidden[0].size() * (int64_t)sizeof(A);
    members_ = wanted_members(call_, hidden_bytes, weights_.hidden[0].count());
    Division division((int)l_.threads, (int)l_.directions, members_);
    int teams = division.teams(0) > 0 ? division.teams(0) : 1;
    prepared_.decide(average_rows(call_, teams), panel_bytes, call_.cache, call_.longest);
    const int64_t read = prepared_.wanted() ? hidden_bytes : panel_bytes;
    fetches_ = read / members_ > tuning::fetched_of_cache * call_.cache &&
               2 * read / weights_.hidden[0].count() <= tuning::fetched_of_cache * call_.cache;
    if constexpr (Cell::saved > 0) {
      int64_t row = l_.gate_stride * (int64_t)sizeof(S);
      bool aligned = (uintptr_t)l_.gates % 64 == 0 && row % 64 == 0;
      bool large = l_.elements * row > tuning::streamed_caches * call_.cache;
      streams_ = l_.gates && !prepared_.wanted() && aligned && large;
    }
    capacity_ = lane_capacity(call_, teams, (2 * h_stride_ + c_stride_) * (int64_t)sizeof(A));
    decide_packing(division);
  }

  // A panel that one thread uses is packed when it is in the nearest caches anyway.
  void decide_packing(const Division& division) {
    if (l_.packed) return;
    const bool is_alone = l_.threads == 1 || (l_.directions == 1 && division.teams(0) == 1);
    const bool used_once = call_.longest <= 1 && call_.ordered <= capacity_;
    // The gates of a tile read the scales of int8 weights while the products of the next one run.
    const Packed at_use = used_once && !in_bytes<S> ? Packed::in_turn : Packed::at_use;
    if (is_alone) weights_.hidden_packed = at_use;
    if (is_alone && !prepared_.wanted()) weights_.input_packed = at_use;
    if (prepared_.wanted() && prepared_.by_panels(l_.threads)) weights_.input_packed = Packed::in_turn;
  }

  // An empty sequence's final state is its initial one.
  void keep_empty() {
    for (int64_t b = 0; b < l_.sequences && !l_.slots; b++) {
      if (l_.offsets[b] != l_.offsets[b + 1]) continue;
      for (int d = 0; d < l_.directions; d++) {
        int64_t row = d * l_.sequences + b;
        copy_columns((S*)l_.final_h + row * P_, (const S*)l_.initial_h + row * P_, 0, P_);
        if (Cell::has_c) copy_columns((S*)l_.final_c + row * H_, (const S*)l_.initial_c + row * H_, 0, H_);
      }
    }
  }

  int count_at(int64_t column) const { return (int)(H_ - column < width ? H_ - column : width); }

  // The gates' arguments of a tile while they are summed: for each row and slot, the units of one panel. Prepared
  // and saved rows have the same layout, panel after panel.
  struct Sums : PanelPlace<Cell, A> {
    using Place = PanelPlace<Cell, A>;
    alignas(64) A memory[whole_tile * Cell::slots * Place::slot_size];
    A* row[whole_tile];
    const A* biases[whole_tile];
    int64_t of_hidden[panel_vectors];
#if defined(RAGLANE_TILES)
    // In int8 `memory` has the integers of x and this those of h, and the scales of the panel's columns follow.
    alignas(64) A of_h[in_bytes<S> ? whole_tile * Cell::slots * Place::slot_size : 1];
    const A *x_scales, *h_scales;
#endif

    explicit Sums(const Place& place, int rows = whole_tile) : Place(place) {
      for (int r = 0; r < rows; r++) row[r] = memory + r * Cell::slots * Place::slot_size, biases[r] = place.bias;
      for (int v = 0; v < Cell::gates * place.units; v++)
        of_hidden[v] = Cell::hidden_slot(Place::gate_of(v)) * Place::slot_size + of_input_in_gate(v);
    }

   private:
    int64_t of_input_in_gate(int v) const { return (v - Place::gate_of(v) * this->units) * width; }
  };

  // ---- the loop ---------------------------------------------------------------------------------------------------

  void scan(int d, int thread, const Division& division) {
    Team team = division.team(thread, d, barriers_.get());
    bool ascending = d == 0;
    // A team's scratch: h twice, c, and the input of a projection; with pairs, operands of both h and of that
    // input.
    A* before = states_.get() + division.slot(thread) * capacity_ * state_size_;
    A* after = before + capacity_ * h_stride_;
    A* c = after + capacity_ * h_stride_;
    A* unprojected = c + (Cell::has_c ? capacity_ * c_stride_ : 0);
    // int8 operands need whole rows, which a member has only after the barrier, so each member converts all of
    // them.
    int64_t slot = in_bytes<S> ? thread : division.slot(thread);
    A* operand = has_operands ? operands_.get() + slot * capacity_ * operand_size_ : before;
    A* next_operand = has_operands ? operand + capacity_ * operand_stride_ : after;
    A* projected = has_operands ? next_operand + capacity_ * operand_stride_ : unprojected;
    // The panels of this member, and their columns.
    int64_t first_panel = weights_.hidden[d].count() * team.member / team.members;
    int64_t end_panel = weights_.hidden[d].count() * (team.member + 1) / team.members;
    int64_t begin = first_panel * weights_.hidden[d].panel_columns(), end = end_panel * weights_.hidden[d].panel_columns();
    end = end < H_ ? end : H_;
    int64_t h_begin = team.members > 1 ? begin : 0, h_end = team.members > 1 ? end : P_;

    LaneSet lanes(call_, team, &queues_[d], capacity_, ascending);
    auto start = [&](int lane) {
      const StateRow<S> h(l_, d, lanes.sequence[lane], P_), initial_c(l_, d, lanes.sequence[lane], H_);
      h.read(l_.initial_h, before + lane * h_stride_, h_begin, h_end);
      if (in_pairs<S>) h.read(l_.initial_h, in_row(operand, lane), h_begin, h_end);
      if (Cell::has_c) initial_c.read(l_.initial_c, c + lane * c_stride_, begin, end);
    };
    auto finish = [&](int lane) {
      const StateRow<S> h(l_, d, lanes.sequence[lane], P_), final_c(l_, d, lanes.sequence[lane], H_);
      h.write(l_.final_h, before + lane * h_stride_, h_begin, h_end);
      if (Cell::has_c) final_c.write(l_.final_c, c + lane * c_stride_, begin, end);
    };
    auto move = [&](int from, int to) {
      copy_columns(before + to * h_stride_, before + from * h_stride_, h_begin, h_end);
      if (in_pairs<S>) copy_columns(in_row(operand, to), (const X*)in_row(operand, from), h_begin, h_end);
      if (Cell::has_c) copy_columns(c + to * c_stride_, c + from * c_stride_, begin, end);
    };

    lanes.fill(start);
    team.barrier->wait(team.members);
    Step step;
    step.input = weights_.input_of(d, thread), step.hidden = weights_.hidden_of(d, thread);
    bool packs = weights_.hidden_packed != Packed::before;
    step.d = d, step.element = lanes.element, step.row = lanes.row(), step.c = c, step.x_stride = input_.x_stride();
    const bool projects = l_.projection_size > 0;
    step.after_stride = projects ? c_stride_ : h_stride_, step.next_stride = projects ? c_stride_ : operand_stride_;
    step.output = l_.output ? (S*)l_.output + d * P_ : nullptr;
    step.gates = Cell::saved && l_.gates ? (S*)l_.gates + d * l_.elements * l_.gate_stride : nullptr;
    step.c_states = Cell::has_c && l_.c_states ? (S*)l_.c_states + d * l_.elements * H_ : nullptr;
    for (bool backwards = false; lanes.active > 0; backwards = !backwards) {
      step.before = before, step.after = projects ? unprojected : after;
      step.operand = operand, step.next_operand = projects ? projected : next_operand;
      for (int lane = 0; lane < lanes.active; lane++) {
        if (!prepared_.wanted()) step.x[lane] = input_.row(step.row[lane], thread, lane);
        if constexpr (in_bytes<S>) to_bytes(before + lane * h_stride_, P_, operand + lane * operand_stride_);
        step.operands[lane] = operand + lane * operand_stride_;
      }
      step.active = lanes.active;
      // Alternately forward and backward over the panels: those that were read last are still in the cache.
      const auto each = [&](auto&& with) RAGLANE_INLINE_LAMBDA {
        for (int64_t i = first_panel; i < end_panel; i++) {
          const int64_t panel = backwards ? first_panel + end_panel - 1 - i : i;
          if (packs) pack(step, panel);
          step.next = fetches_ && !packs && i + 1 < end_panel ? panel + (backwards ? -1 : 1) : -1;
          for (int first = 0, size; first < lanes.active; first += size) {
            size = next_tile(lanes.active - first, whole_panel);
            with(first, size, panel);
          }
        }
      };
#if defined(RAGLANE_TILES)
      const bool one_by_one = lanes.active <= (in_bytes<S> ? tuning::alone_rows_in_bytes : tuning::alone_rows);
#endif
#if defined(RAGLANE_TILES)
      if (one_by_one) each([&](int first, int size, int64_t panel) { tile(step, first, size, panel); });
      else step_in_tiles(step, each);
#else
      if (lanes.active == 1) step_of_one(step, first_panel, end_panel, backwards, packs);
      else each([&](int first, int size, int64_t panel) { tile(step, first, size, panel); });
#endif
      packs = false;
      if (projects) project(step, lanes.active, after, next_operand);
      A* swap = before;
      before = after, after = swap;
      swap = operand;
      operand = next_operand, next_operand = swap;
      lanes.advance(finish, start, move);
      team.barrier->wait(team.members);
    }
    finish_streams();
  }

  // Pack a panel of the weights just before the first step that uses it.
  void pack(Step& step, int64_t panel) const {
    if (!prepared_.wanted()) weights_.pack_input(step.d, step.input, panel);
    weights_.pack_hidden(step.d, step.hidden, panel);
  }

  // A lane's row of h as an operand.
  X* in_row(A* operand, int lane) const { return (X*)(operand + lane * operand_stride_); }

  // Row r of a tile before its products. Returns the start of the hidden product.
  RAGLANE_INLINE const A* start_row(const Step& step, int lane, Sums& sums, int r) {
    const int64_t element = step.element[lane];
    fetch(step, element, step.row[lane], sums);
    if (!prepared_.wanted()) {
      sums.start(sums.row[r], Cell::gates);
    } else if constexpr (Cell::saved > 0) {
      return prepared_.at(step.d, element) + sums.chunk;
    } else {
      for (int u = 0; u < sums.units; u++) {
        int64_t column = sums.unit + u * width;
        store(sums.row[r] + u * width, load(prepared_.at(step.d, element) + column, count_at(column)));
      }
    }
    return sums.row[r];
  }
  RAGLANE_INLINE Product<A> of_input(const Step& step, int first, int64_t panel, const Sums& sums) const {
    return {step.x + first,   step.input.at(panel), step.input.steps(), sums.biases,
            sums.of_bias, sums.row,             sums.of_input};
  }
  RAGLANE_INLINE Product<A> of_hidden(const Step& step, int first, int64_t panel, const Sums& sums,
                                      const A* const* prepared) const {
    return {step.operands + first, step.hidden.at(panel), step.hidden.steps(), prepared,
            sums.of_hidden,        sums.row,              sums.of_hidden};
  }

  // The units of one panel for several rows: from the products to the new state, while all data is in the nearest
  // cache.
  void tile(const Step& step, int first, int size, int64_t panel) {
    Sums sums(input_.at(step.d, panel));
    int vectors = Cell::gates * sums.units;
    const A* prepared[whole_tile];
    for (int r = 0; r < size; r++) prepared[r] = start_row(step, first + r, sums, r);
    const auto product = [&](const Panels<S>& weights, Product<A> rows) RAGLANE_INLINE_LAMBDA {
      const A* next = step.next < 0 ? nullptr : weights.at(step.next);
      multiply<X>(size, vectors, rows.fetch(next, first, size, step.active, vectors));
    };
    if (!prepared_.wanted()) product(step.input, of_input(step, first, panel, sums));
    product(step.hidden, of_hidden(step, first, panel, sums, prepared));
    finish(step, first, size, sums, sums.row, prepared, Nothing{});
  }

#if !defined(RAGLANE_TILES)
  // The step of a single row, which two panels at a time: the gates of one vector are a long chain of operations.
  void step_of_one(Step& step, int64_t first_panel, int64_t end_panel, bool backwards, bool packs) {
    const auto at = [&](int64_t i) { return backwards ? first_panel + end_panel - 1 - i : i; };
    const auto is_whole = [&](int64_t panel) { return step.hidden.units_in(panel) == Cell::unit_vectors; };
    int64_t i = first_panel;
    for (; !packs && i + 2 <= end_panel && is_whole(at(i)) && is_whole(at(i + 1)); i += 2) row(step, at(i), at(i + 1));
    for (; i < end_panel; i++) {
      if (packs) pack(step, at(i));
      row(step, at(i));
    }
  }

  void row(const Step& step, int64_t panel) {
    Sums sums(input_.at(step.d, panel), 1);
    const A* prepared = start_row(step, 0, sums, 0);
    const int vectors = Cell::gates * sums.units;
    if (!prepared_.wanted()) multiply<X>(1, vectors, of_input(step, 0, panel, sums));
    multiply<X>(1, vectors, of_hidden(step, 0, panel, sums, &prepared));
    const Sums* const panels[1] = {&sums};
    finish_row<1>(step, panels, &prepared);
  }

  // Two whole panels.
  void row(const Step& step, int64_t panel, int64_t next) {
    Sums sums(input_.at(step.d, panel), 1), next_sums(input_.at(step.d, next), 1);
    const A* const prepared[2] = {start_row(step, 0, sums, 0), start_row(step, 0, next_sums, 0)};
    if (!prepared_.wanted())
      multiply_two<whole_panel, X>(of_input(step, 0, panel, sums), of_input(step, 0, next, next_sums));
    multiply_two<whole_panel, X>(of_hidden(step, 0, panel, sums, prepared),
                                 of_hidden(step, 0, next, next_sums, prepared + 1));
    const Sums* const panels[2] = {&sums, &next_sums};
    if constexpr (Cell::unit_vectors == 1) finish_row<2>(step, panels, prepared);
    else finish_row<1>(step, panels, prepared), finish_row<1>(step, panels + 1, prepared + 1);
  }

  // The gates of all vectors of some panels, for the row of the first lane.
  template <int PANELS> RAGLANE_INLINE void finish_row(const Step& step, const Sums* const* panels, const A* const* prepared) {
    constexpr int vectors = PANELS * Cell::unit_vectors, together = registers == 32 ? vectors : 1;
    V last[vectors], save[vectors][Cell::saved + 1], c[vectors];
#pragma GCC unroll 8
    for (int first = 0; first < vectors; first += together) {
      V arguments[together][Cell::slots];
#pragma GCC unroll 8
      for (int i = 0; i < together; i++) {
        const Sums& sums = *panels[(first + i) / Cell::unit_vectors];
        const int u = (first + i) % Cell::unit_vectors;
        const bool exists = Cell::unit_vectors == 1 || u < sums.units;
#pragma GCC unroll 8
        for (int slot = 0; slot < Cell::slots; slot++) {
          const A* from = Cell::only_input(slot) ? prepared[(first + i) / Cell::unit_vectors] : sums.row[0];
          arguments[i][slot] = exists ? load(from + slot * sums.slot_size + u * width) : V{};
        }
        if constexpr (Cell::has_c) c[first + i] = load((const A*)step.c + sums.unit + u * width);
      }
      Cell::template open<together>(arguments, c + first, save + first, last + first);
    }
    if constexpr (Cell::ends_in_tanh) squash<A, 0, vectors>(last);
    const Results results(*this, step);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
      const Sums& sums = *panels[i / Cell::unit_vectors];
      const int u = i % Cell::unit_vectors;
      if (Cell::unit_vectors == 1 || u < sums.units) results.put(0, sums, u, last[i], c[i], save[i]);
    }
  }
#endif

#if defined(RAGLANE_TILES)
  static constexpr bool splits = Cell::slots > Cell::gates;
  using Products = TileProducts<X, splits>;

  // Between two rows of gates, some steps of the next products; there are none after the last tile.
  struct WithoutSteps {
    static constexpr bool reads_integers = in_bytes<S>;
    RAGLANE_INLINE void operator()() const {}
  };
  struct WithSteps {
    static constexpr bool reads_integers = in_bytes<S>;
    Products& products;
    const int steps;
    RAGLANE_INLINE void operator()() const {
      for (int i = 0; i < steps; i++) products.advance();
    }
  };

  // A tile between its products and its gates.
  struct Pending {
    Sums sums;
    const A* prepared[whole_tile];
    int first, size;

    Pending(const Sums::Place& place, int first, int size) : sums(place, size), first(first), size(size) {}
  };

  // All tiles of a step. The gates of one are computed while the tile registers make the products of the next.
  template <class Each> void step_in_tiles(const Step& step, Each&& each) {
    alignas(64) unsigned char memory[2][sizeof(Pending)];
    Pending* last = nullptr;
    int turn = 0;
    each([&](int first, int size, int64_t panel) {
      Pending* tile = new (memory[turn]) Pending(input_.at(step.d, panel), first, size);
      turn = 1 - turn;
      Products products = begin(step, *tile, panel);
      if (last) {
        // Calls of the function below that finish() makes.
        const int calls = (last->size + 1) / 2 * last->sums.units;
        const int at_once = (int)((products.steps() + calls - 1) / calls);
        finish(step, *last, WithSteps{products, at_once});
      }
      products.finish();
      last = tile;
    });
    if (last) finish(step, *last, WithoutSteps{});
  }

  // Begin the products of a tile with a panel.
  Products begin(const Step& step, Pending& tile, int64_t panel) {
    const int d = step.d, first = tile.first;
    Sums& sums = tile.sums;
    TileSums at;
    at.start_words = 0, at.to_words = Cell::slots * sums.slot_size;
    const bool folded = !prepared_.wanted();
    for (int r = 0; r < tile.size; r++) {
      const int64_t element = step.element[first + r];
      fetch(step, element, step.row[first + r], sums);
      tile.prepared[r] = sums.row[r];
      if (folded) continue;
      if constexpr (Cell::saved > 0) {
        tile.prepared[r] = prepared_.at(d, element) + sums.chunk;
      } else {
        for (int u = 0; u < sums.units; u++) {
          int64_t column = sums.unit + u * width;
          store(sums.row[r] + u * width, load(prepared_.at(d, element) + column, count_at(column)));
        }
      }
    }
    const A* start = sums.row[0];
    if (!folded && !in_bytes<S>) {
      int64_t spacing = row_spacing(tile.prepared, tile.size);
      if (spacing < 0) {
        for (int r = 0; r < tile.size; r++)
          for (int slot = 0; slot < Cell::slots; slot++)
            for (int u = 0; u < sums.units; u++) {
              int at = slot * sums.slot_size + u * width;
              store(sums.row[r] + at, load(tile.prepared[r] + at));
            }
        spacing = 4 * at.to_words;
      } else {
        start = tile.prepared[0];
      }
      at.start_words = spacing / 4;
    }
    for (int v = 0; v < Cell::gates * sums.units; v++) {
      const int64_t of_hidden_bias = Cell::hidden_slot(v / sums.units) * sums.bias_stride + v % sums.units * width;
      at.start[0][v] = folded ? sums.bias + sums.of_bias[v] : start + sums.of_input[v];
      at.start[1][v] = folded ? sums.bias + of_hidden_bias : start + sums.of_hidden[v];
      at.to[0][v] = sums.row[0] + sums.of_input[v];
      at.to[1][v] = (in_bytes<S> ? sums.of_h : sums.row[0]) + sums.of_hidden[v];
    }
    const Panels<S>& inputs = step.input;
    if constexpr (in_bytes<S>) {  // of a panel's heading, the second row
      const int64_t row = Cell::gates * sums.units * width;
      sums.x_scales = inputs.at(panel) + row, sums.h_scales = step.hidden.at(panel) + row;
    }
    const int vectors = Cell::gates * sums.units;
    // Each tile of rows fetches its share of the next panels.
    const bool fetches = step.next >= 0 && tile.size < step.active;
    const int64_t passes = Products::passes(tile.size > most_tile_rows, vectors);
    const int64_t bytes = vectors * tile_words * tile_words * (int64_t)sizeof(A) / passes;
    const auto factor = [&](const Panels<S>& weights, const A* rows, int64_t row_words) {
      TileFactor factor = {rows, row_words, weights.at(panel), weights.steps()};
      if (!fetches) return factor;
      const int64_t size = weights.steps() * vectors * tile_words;
      factor.next = weights.at(step.next) + size * first / step.active;
      factor.next_bytes = bytes * tile.size / step.active;
      return factor;
    };
    TileFactor x = {nullptr, 0, nullptr, 0};
    if (folded) x = factor(inputs, step.x[first], step.x_stride);
    const TileFactor h = factor(step.hidden, step.operands[first], operand_stride_);
    flush(sums.memory);
    return Products(tile.size, vectors, x, h, at);
  }

  // The sum of a slot from the integers of its products.
  RAGLANE_INLINE V scaled(const Step& step, int lane, int slot, int u, const Sums& sums, const A* summed,
                          const A* prepared) const {
    const bool folded = !prepared_.wanted();
    const int64_t at = slot * sums.slot_size + u * width;
    V sum = load(folded ? sums.bias + slot * sums.bias_stride + u * width : prepared + at);
    if (folded && slot < Cell::gates)
      sum = add_bytes(sum, (I)load(summed + at), step.x[lane][step.input.steps()],
                      load(sums.x_scales + (slot * sums.units + u) * width));
    if (Cell::only_input(slot)) return sum;
    const int gate = slot < Cell::gates ? slot : Cell::gates - 1;
    return add_bytes(sum, (I)load(sums.of_h + (summed - sums.memory) + at),
                     step.operands[lane][step.hidden.steps()],
                     load(sums.h_scales + (gate * sums.units + u) * width));
  }

  template <class Meanwhile> void finish(const Step& step, const Pending& tile, const Meanwhile& meanwhile) {
    finish(step, tile.first, tile.size, tile.sums, tile.sums.row, tile.prepared, meanwhile);
  }
#endif

  // Of a tile whose products are complete, and have their scales.
  struct Nothing {
    static constexpr bool reads_integers = false;
    RAGLANE_INLINE void operator()() const {}
  };

  // The gates of a tile. meanwhile() is called after each two rows.
  template <class Meanwhile>
  RAGLANE_INLINE void finish(const Step& step, int first, int size, const Sums& sums, const A* const* summed,
                             const A* const* prepared, const Meanwhile& meanwhile) {
    for (int begin = 0; begin < size; begin += finished_rows)
      for (int u = 0; u < sums.units; u++)
        finish(step, first + begin, size - begin < finished_rows ? size - begin : finished_rows, u, sums,
               summed + begin, prepared + begin, meanwhile);
  }

  // Prefetch the memory that the tile will write, and the start of the next panel's tile, during the product:
  // short ranges at many addresses, which the processor does not prefetch itself.
  RAGLANE_INLINE void fetch(const Step& step, int64_t element, int64_t row, const Sums& sums) {
    if (step.output && l_.projection_size == 0)
      __builtin_prefetch(step.output + row * l_.directions * P_ + sums.unit, 1);
    if constexpr (Cell::saved > 0)
      if (step.gates && !prepared_.wanted() && !streams_)
        for (int s = 0; s < Cell::saved; s++)
          __builtin_prefetch(step.gates + element * l_.gate_stride + sums.chunk + s * sums.slot_size, 1);
    if constexpr (Cell::has_c)
      if (step.c_states) __builtin_prefetch(step.c_states + element * H_ + sums.unit, 1);
    if constexpr (Cell::saved > 0)
      if (prepared_.wanted()) {
        const A* next = prepared_.at(step.d, element + (step.d == 0 ? 1 : -1));
        for (int s = 0; s < Cell::slots; s++) __builtin_prefetch(next + sums.chunk + s * sums.slot_size, 1);
      }
  }

  // Where a step's results are stored: copies on the stack, because the compiler must assume that the stores change them.
  struct Results {
    const int64_t h_stride, c_stride, after_stride, next_stride, H, output_stride, gate_stride;
    const int64_t *elements, *rows;
    const A* before;
    A *after, *c_after, *next_operand;
    S *output, *gates, *c_states;
    const bool streams;

    RAGLANE_INLINE Results(const ForwardScan& scan, const Step& step)
        : h_stride(scan.h_stride_), c_stride(scan.c_stride_), after_stride(step.after_stride),
          next_stride(step.next_stride), H(scan.H_), output_stride(scan.l_.directions * scan.P_),
          gate_stride(scan.l_.gate_stride), elements(step.element), rows(step.row), before(step.before),
          after(step.after), c_after(step.c), next_operand(step.next_operand),
          output(scan.l_.projection_size == 0 ? step.output : nullptr), gates(step.gates), c_states(step.c_states),
          streams(scan.streams_) {}

    // One vector of a lane's units.
    RAGLANE_INLINE void put(int lane, const Sums& sums, int u, V last, V c, V* save) const {
      const int64_t unit = sums.unit + u * width;
      const int count = (int)(H - unit < width ? H - unit : width);
      V h = Cell::close(last, load(before + lane * h_stride + unit), save);
      // Scratch rows and saved rows have room for whole vectors; the caller's memory does not.
      store(after + lane * after_stride + unit, h);
      if constexpr (in_pairs<S>) store((X*)(next_operand + lane * next_stride) + unit, h, count);
      if constexpr (Cell::has_c) store(c_after + lane * c_stride + unit, c);
      if (output) store(output + rows[lane] * output_stride + unit, h, count);
      if constexpr (Cell::saved > 0)
        if (gates) {
#pragma GCC unroll 8
          for (int s = 0; s < Cell::saved; s++) {
            S* to = gates + elements[lane] * gate_stride + sums.chunk + s * sums.slot_size + u * width;
            streams ? stream(to, save[s]) : store(to, save[s]);
          }
        }
      if constexpr (Cell::has_c)
        if (c_states) store(c_states + elements[lane] * H + unit, c, count);
    }
  };

  // The cell's arithmetic for one vector of units. It interleaves several rows, because that of one row
  // is a long chain of operations: first all up to the final tanh of every cell, then all tanh, then the rest.
  template <class Meanwhile>
  RAGLANE_INLINE void finish(const Step& step, int first, int size, int u, const Sums& sums, const A* const* summed,
                             const A* const* prepared, const Meanwhile& meanwhile) {
    V last[finished_rows], save[finished_rows][Cell::saved + 1], c[finished_rows];
#pragma GCC unroll 8
    for (V& row : last) row = V{};  // for an initialiser GCC calls a slow string instruction
    constexpr int together = registers == 32 ? 2 : 1;
    int r = 0;
    for (; r + together <= size; r += together) {
      open<together, Meanwhile::reads_integers>(step, first + r, u, sums, summed + r, prepared + r, c + r, save + r, last + r);
      meanwhile();
    }
    for (; r < size; r++) {
      open<1, Meanwhile::reads_integers>(step, first + r, u, sums, summed + r, prepared + r, c + r, save + r, last + r);
      meanwhile();
    }
    if constexpr (Cell::ends_in_tanh) squash<A, 0, finished_rows>(last);
    const Results results(*this, step);
    for (r = 0; r < size; r++) results.put(first + r, sums, u, last[r], c[r], save[r]);
  }

  template <int ROWS, bool INTEGERS>
  RAGLANE_INLINE void open(const Step& step, int first, int u, const Sums& sums, const A* const* summed,
                           const A* const* prepared, V* c, V (*save)[Cell::saved + 1], V* last) {
    V arguments[ROWS][Cell::slots];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
      for (int slot = 0; slot < Cell::slots; slot++) {
        // A slot without a hidden product is read from the prepared row.
        const A* from = Cell::only_input(slot) ? prepared[i] : summed[i];
        arguments[i][slot] = load(from + slot * sums.slot_size + u * width);
#if defined(RAGLANE_TILES)
        if constexpr (INTEGERS) arguments[i][slot] = scaled(step, first + i, slot, u, sums, summed[i], prepared[i]);
#endif
      }
      if constexpr (Cell::has_c) c[i] = load((const A*)step.c + (first + i) * c_stride_ + sums.unit + u * width);
    }
    Cell::template open<ROWS>(arguments, c, save, last);
  }

  // h = W_hr m, for all lanes.
  void project(const Step& step, int active, A* after, A* next_operand) {
    A *to[most_lanes], *from[most_lanes];
    for (int lane = 0; lane < active; lane++) {
      to[lane] = after + lane * h_stride_;
      A* unprojected = step.after + lane * step.after_stride;
      from[lane] = has_operands ? step.next_operand + lane * step.next_stride : unprojected;
      if constexpr (in_bytes<S>) to_bytes(unprojected, H_, from[lane]);
      memset((void*)to[lane], 0, h_stride_ * sizeof(A));
    }
    const Panels<S>& projection = weights_.projection[step.d];
    for (int64_t panel = 0; panel < projection.count(); panel++)
      multiply_panel(projection, panel, active, from, to);
    for (int lane = 0; lane < active; lane++) {
      if (in_pairs<S>) copy_columns(in_row(next_operand, lane), (const A*)to[lane], 0, P_);
      if (!step.output) continue;
      copy_columns(step.output + step.row[lane] * l_.directions * P_, (const A*)to[lane], 0, P_);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
