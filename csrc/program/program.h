// The time loop of all programs.
//
// Lanes and teams are as in the other loops. A team divides the columns of products; for the rest it divides the lanes.
#pragma once

#include "program/plan.h"

namespace raglane::RAGLANE_TARGET {

using tuning::program_rows;

template <class A> class ProgramScan : ProgramPlan<A> {
  using Plan = ProgramPlan<A>;
  using typename Plan::Fetch, typename Plan::Phase, typename Plan::Slot, typename Plan::Walk;
  using Plan::call_, Plan::code_, Plan::p_, Plan::row_bytes, Plan::tensor;
  using Plan::fetches_, Plan::number_count_, Plan::numbers_, Plan::first_number_, Plan::operations_;
  using Plan::phase_count_, Plan::phases_, Plan::walks_, Plan::product_count_, Plan::products_, Plan::slot_count_, Plan::slots_;
  using Plan::lane_size_, Plan::kept_size_, Plan::block_size_, Plan::members_, Plan::fetches_weights_, Plan::weights_;

 public:
  explicit ProgramScan(const ProgramCall& call) : Plan(call) {}

  bool reserve() {
    bool poison = p_.flags & RAGLANE_POISON;
    if (!Plan::plan() || !barriers_.reserve(p_.threads + 1, false)) return false;
    for (int64_t i = 0; i <= p_.threads; i++) barriers_.get()[i] = Barrier{};
    Division division((int)p_.threads, 1, members_);
    capacity_ = lane_capacity(call_, division.teams(0), lane_size_ * (int64_t)sizeof(A));
    if (!packed_.reserve(p_.packed ? 0 : Plan::packed_size_, poison) || !shared_.reserve(Plan::call_size_, poison))
      return false;
    place_weights(code_, weights_.get(), packed_weights<A>(p_.packed, packed_.get()));
    lanes_size_ = row_stride<A>(capacity_ * lane_size_);
    return lanes_.reserve(division.teams(0) * lanes_size_, poison) &&
           blocks_.reserve(p_.threads * program_rows * block_size_, poison) &&
           prepared_.reserve(Plan::prepared_size_, poison) &&
           tables_.reserve(p_.threads * slot_count_ * most_lanes, false);
  }

  void work(int thread, int threads) {
    if (!p_.packed) pack_weights(code_, weights_.get(), thread, threads);
    if (thread == threads - 1) share(), keep_empty();
    barriers_.get()[p_.threads].wait(threads);
    if (product_count_ > 0) {
      prepare(thread, threads);
      barriers_.get()[p_.threads].wait(threads);
    }
    Division division(threads, 1, members_);
    if (!division.idle(thread)) scan(thread, division);
  }

 private:
  int64_t lanes_size_ = 0;
  int capacity_ = 1;
  Scratch<A> packed_, shared_, prepared_;
  Scratch<A> lanes_, blocks_;  // of teams, and of threads
  Scratch<A*> tables_;
  Scratch<Barrier> barriers_;
  Queue queue_;

  // Vectors and numbers, for all lanes.
  void share() {
    for (int64_t b = 0; b < code_.blocks; b++)
      if (code_.block[b].kind == RAGLANE_VECTOR)
        copy_columns(shared_.get() + slots_.get()[b].place, (const A*)tensor(RAGLANE_VECTOR, code_.block[b].index).data,
                     0, code_.block[b].width);
    for (int64_t i = 0; i < number_count_; i++)
      shared_.get()[slots_.get()[first_number_ + i].place] = numbers_.get()[i];
  }

  A* row_of_tensor(int64_t tensor, int64_t row) const {
    return (A*)p_.tensors[tensor].data + row * p_.tensors[tensor].strides[0];
  }
  int64_t slot_of(int64_t sequence) const { return p_.slots ? p_.slots[sequence] : sequence; }

  // An empty sequence's final states are its initial ones.
  void keep_empty() {
    for (int64_t b = 0; b < p_.sequences && !p_.slots; b++)
      for (int64_t s = 0; s < code_.states && p_.offsets[b] == p_.offsets[b + 1]; s++)
        copy_columns(row_of_tensor(code_.first_tensor[RAGLANE_LOCAL + 2] + s, b),
                     (const A*)row_of_tensor(code_.first_tensor[RAGLANE_STATE] + s, b), 0, Plan::next(s).width);
  }

  // ---- the loop ---------------------------------------------------------------------------------------------------

  static A** rows_of(A** table, int64_t slot) { return table + slot * most_lanes; }

  // The table of a thread, without rows of elements, which change from step to step.
  void fill(A** table, A* scratch, A* blocks) {
    for (int64_t s = 0; s < slot_count_; s++)
      for (int lane = 0; lane < most_lanes; lane++) {
        const Slot& slot = slots_.get()[s];
        A* row = slot.home == Plan::in_lane    ? scratch + lane * lane_size_
                 : slot.home == Plan::in_block ? blocks + lane % program_rows * block_size_
                                         : shared_.get();
        rows_of(table, s)[lane] = row_bytes(slot) != 0 ? nullptr : row + slot.place;
      }
  }

  void find_elements(A** table, const int64_t* element, int count) {
    for (int64_t s = 0; s < slot_count_; s++) {
      const Slot& slot = slots_.get()[s];
      if (slot.home != Plan::in_tensor && slot.home != Plan::prepared) continue;
      void* first = slot.home == Plan::prepared ? prepared_.get() + slot.place : p_.tensors[slot.place].data;
      const int64_t bytes = row_bytes(slot);
      A** rows = rows_of(table, s);
      for (int lane = 0; lane < count; lane++) rows[lane] = (A*)((unsigned char*)first + element[lane] * bytes);
    }
  }

  A** table_of(int thread) const { return tables_.get() + thread * slot_count_ * most_lanes; }

  // A thread's part of the products before the loop, on at most as many rows as lanes.
  void prepare(int thread, int threads) {
    A** table = table_of(thread);
    fill(table, lanes_.get(), blocks_.get());
    const Team alone{0, 1, 0, 1, true, nullptr};
    for (int64_t begin = (int64_t)thread * most_lanes; begin < p_.elements; begin += (int64_t)threads * most_lanes) {
      int count = (int)(p_.elements - begin < most_lanes ? p_.elements - begin : most_lanes);
      int64_t element[most_lanes];
      for (int i = 0; i < count; i++) element[i] = begin + i;
      find_elements(table, element, count);
      const LaneProduct<A>*product = products_.get(), *end = product + product_count_, *next;
      for (; product < end; product = next) {
        for (next = product + 1; next < end && next->instruction == product->instruction;) next++;
        multiply_lanes(product, (int)(next - product), table, count, alone, false, fetches_weights_);
      }
    }
  }

  void scan(int thread, const Division& division) {
    Team team = division.team(thread, 0, barriers_.get());
    A* scratch = lanes_.get() + division.slot(thread) * lanes_size_;
    A** table = table_of(thread);
    fill(table, scratch, blocks_.get() + thread * program_rows * block_size_);
    LaneSet lanes(call_, team, &queue_, capacity_, p_.ascending);
    // All members advance their lanes in the same way, and the first one copies.
    auto start = [&](int lane) {
      if (team.member > 0) return;
      for (int64_t b = 0; b < code_.blocks; b++) {
        const CodeBlock& block = code_.block[b];
        if (block.kind != RAGLANE_STATE && block.kind != RAGLANE_SEQUENCE) continue;
        const int64_t sequence = lanes.sequence[lane], row = block.kind == RAGLANE_STATE ? slot_of(sequence) : sequence;
        const A* from = row_of_tensor(code_.first_tensor[block.kind] + block.index, row);
        copy_columns(rows_of(table, b)[lane], from, 0, block.width);
      }
    };
    auto finish = [&](int lane) {
      if (team.member > 0) return;
      for (int64_t b = 0; b < code_.blocks; b++) {
        const CodeBlock& block = code_.block[b];
        if (block.kind != RAGLANE_STATE) continue;
        A* to = row_of_tensor(code_.first_tensor[RAGLANE_LOCAL + 2] + block.index, slot_of(lanes.sequence[lane]));
        copy_columns(to, (const A*)rows_of(table, b)[lane], 0, block.width);
      }
    };
    auto move = [&](int from, int to) {
      if (team.member == 0) memcpy(scratch + to * lane_size_, scratch + from * lane_size_, kept_size_ * sizeof(A));
    };
    lanes.fill(start);
    team.barrier->wait(team.members);
    for (bool backwards = false; lanes.active > 0; backwards = !backwards) {
      find_elements(table, lanes.element, lanes.active);
      for (int64_t p = 0; p < phase_count_; p++) run(phases_.get()[p], table, lanes.active, team, backwards);
      team.barrier->wait(team.members);
      lanes.advance(finish, start, move);
      team.barrier->wait(team.members);
    }
  }

  // A member's lanes, then, after the barrier, its part of the product's columns.
  void run(const Phase& phase, A* const* table, int active, const Team& team, bool backwards) {
    const int begin = active * team.member / team.members, end = active * (team.member + 1) / team.members;
    if (phase.end > phase.begin)
      for (int first = begin; first < end; first += program_rows)
        run(phase, table, first, end - first < program_rows ? end - first : program_rows);
    if (phase.products == 0) return;
    team.barrier->wait(team.members);
    multiply_lanes(phase.product, phase.products, table, active, team, backwards, fetches_weights_);
    team.barrier->wait(team.members);
  }

  void run(const Phase& phase, A* const* table, int first, int count) {
    for (int64_t f = phase.first_fetch; f < phase.end_fetch; f++) {
      const Fetch& fetch = fetches_.get()[f];
      for (int lane = first; lane < first + count; lane++)
        for (int64_t byte = 0; byte < fetch.bytes; byte += 64)
          __builtin_prefetch((const unsigned char*)table[fetch.slot + lane] + fetch.next + byte);
    }
    for (int64_t w = phase.first_walk; w < phase.end_walk; w++) {
      const Walk& walk = walks_.get()[w];
      if (walk.rows == 1) run(walk, table, first, count, 0, 1);
      else
        for (int lane = first; lane < first + count; lane++)
          for (int64_t row = 0; row < walk.rows; row += walk.step)
            run(walk, table, lane, 1, row, row + walk.step < walk.rows ? row + walk.step : walk.rows);
    }
  }

  void run(const Walk& walk, A* const* table, int first, int count, int64_t begin, int64_t end) {
    for (int64_t i = walk.begin; i < walk.end; i++) {
      const Operation<A>& operation = operations_.get()[i];
      operation.run(operation, table, first, count, begin, end);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
