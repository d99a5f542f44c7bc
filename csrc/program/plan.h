// The plan of a program for one call: the memory of its rows, and the order of its work.
//
// Rows are in slots: those of the program's blocks, of its outputs, of numbers, and of rows
// added here, such as a widened row of an element. A table has the address of the row of each slot and lane;
// instructions use only this table.
#pragma once

#include "program/product.h"
#include "program/sharing.h"
#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

template <class A> class ProgramPlan {
  static constexpr int width = Lanes<A>::width;

 protected:
  // The memory of a slot's rows.
  enum Home {
    in_tensor,  // the caller's, indexed by element
    in_lane,    // in the lane's scratch
    in_block,   // in scratch shared with the lanes of other blocks of rows
    in_call,    // one row for all lanes
    prepared    // a product of an element's row that was computed before the loop
  };
  struct Slot {
    Home home;
    int64_t width;
    int64_t place;  // in_tensor: index of the tensor; otherwise numbers before it
  };
  // Instructions [begin, end), in walks, followed by products that are computed together, if there are any. While they
  // run, the rows of elements that they will read in the next step are prefetched.
  struct Phase {
    int64_t begin, end, first_fetch, end_fetch, first_walk, end_walk;
    int products;
    const LaneProduct<A>* product;
  };
  // Instructions [begin, end): on matrices, `step` of their rows are computed by all of them before the next ones, so that
  // results that others read stay in the nearest cache.
  struct Walk {
    int64_t begin, end, rows, step;
  };
  struct Fetch {
    int64_t slot, next, bytes;  // `next`: bytes from a lane's row to that of the next step
  };

  explicit ProgramPlan(const ProgramCall& call)
      : call_(call), p_(*call.program), code_(*call.code), operation_(4 * code_.instructions + code_.blocks +
                                                                        3 * (code_.outputs + code_.states)) {}

  bool plan() {
    int64_t numbers = 6 * code_.instructions + code_.outputs + code_.states;
    int64_t most_slots = 2 * code_.blocks + code_.outputs + code_.states + numbers;
    decide();
    if (!slots_.reserve(most_slots, false) || !operations_.reserve(operation_, false) ||
        !phases_.reserve(code_.instructions + 1, false) || !walks_.reserve(operation_, false) || !fetches_.reserve(3 * operation_, false) ||
        !products_.reserve(2 * most_products(), false) || !weights_.reserve(code_.weights, false) ||
        !numbers_.reserve(numbers, false))
      return false;
    for (int64_t w = 0; w < code_.weights; w++) {
      weights_.get()[w].place(code_.weight[w], tensor(RAGLANE_LOCAL, w));
      packed_size_ += weights_.get()[w].size();
    }
    lay_out();
    translate();
    lane_size_ = row_stride<A>(lane_size_), block_size_ = row_stride<A>(block_size_);
    return true;
  }

  const ProgramCall& call_;
  const raglane_program& p_;
  const Code& code_;
  int64_t operation_;  // the maximum; then their number
  int64_t slot_count_ = 0, phase_count_ = 0, walk_count_ = 0, fetch_count_ = 0, number_count_ = 0, product_count_ = 0;
  int64_t first_number_ = 0;
  int64_t lane_size_ = 0, kept_size_ = 0, block_size_ = 0, call_size_ = 0, prepared_size_ = 0, packed_size_ = 0;
  int members_ = 1;
  bool prepares_ = false;
  bool fetches_weights_ = false;  // panels of weights are fetched ahead, because a core's cache does not hold those of a step
  Scratch<Slot> slots_;
  Scratch<Operation<A>> operations_;
  Scratch<Phase> phases_;
  Scratch<Walk> walks_;
  Scratch<LaneProduct<A>> products_;  // those that are computed before the loop; behind them, those of phases
  Scratch<Fetch> fetches_;
  Scratch<PackedWeight<A>> weights_;
  Scratch<A> numbers_;

  const raglane_tensor& tensor(int64_t kind, int64_t index) const {
    return p_.tensors[code_.first_tensor[kind] + index];
  }
  bool is_narrow(const raglane_tensor& tensor) const { return tensor.dtype != p_.dtype; }

  // For a slot with a row per element, the bytes from one to the next; otherwise 0.
  int64_t row_bytes(const Slot& slot) const {
    if (slot.home == prepared) return row_stride<A>(slot.width) * (int64_t)sizeof(A);
    if (slot.home != in_tensor) return 0;
    const raglane_tensor& tensor = p_.tensors[slot.place];
    return tensor.strides[0] * (is_narrow(tensor) ? 2 : (int64_t)sizeof(A));
  }

  const CodeOutput& next(int64_t state) const { return code_.output[code_.outputs + state]; }

 private:
  // Choose teams, and the products of elements that are prepared before the loop, as for layers: see scan/prepared.h.
  void decide() {
    int64_t bytes = 0, results = 0, depth = 0;
    for (int64_t w = 0; w < code_.weights; w++) {
      bytes += code_.weight[w].groups * code_.weight[w].rows * code_.weight[w].depth * (int64_t)sizeof(A);
      depth = std::max(depth, code_.weight[w].depth);
    }
    members_ = wanted_members(call_, p_.flags, bytes, p_.threads);
    fetches_weights_ = bytes / members_ > call_.cache &&
               2 * panel_vectors * vector_bytes * depth <= tuning::fetched_of_cache * call_.cache;
    bool cached = bytes <= call_.cache / tuning::weights_of_cache;
    double rows = average_rows(call_, Division((int)p_.threads, 1, members_).teams(0));
    for (int64_t i = 0; i < code_.instructions; i++)
      if (can_prepare(code_.instruction[i])) results += row_stride<A>(code_.instruction[i].width);
    prepares_ = rows < (cached ? tuning::fold_rows_cached : tuning::fold_rows);
    if ((double)p_.elements * (double)results * sizeof(A) > (double)tuning::most_products) prepares_ = false;
    if (p_.flags & RAGLANE_FOLD) prepares_ = false;
    if (p_.flags & RAGLANE_PREPARE) prepares_ = true;
  }

  int64_t most_products() const {
    int64_t most = 0;
    for (int64_t i = 0; i < code_.instructions; i++)
      if (code_.instruction[i].operation == RAGLANE_OF_PRODUCT) most += code_.instruction[i].segments;
    return most;
  }

  // A product depends only on the element, and nothing else writes to its result.
  bool can_prepare(const CodeInstruction& i) const {
    if (i.operation != RAGLANE_OF_PRODUCT || i.width != code_.block[i.results[0].block].width) return false;
    for (int o = 0; o < 2; o++) {
      if (i.operands[o].block < 0) continue;
      const CodeBlock& block = code_.block[i.operands[o].block];
      bool is_element = block.kind == RAGLANE_ELEMENT && !is_narrow(tensor(RAGLANE_ELEMENT, block.index));
      if (!is_element && block.kind != RAGLANE_VECTOR) return false;
    }
    int writers = 0;
    for (int64_t other = 0; other < code_.instructions; other++)
      for (int r = 0; r < facts_of_operation(code_.instruction[other].operation).results; r++)
        writers += code_.instruction[other].results[r].block == i.results[0].block;
    return writers == 1;
  }
  bool is_prepared(int64_t block) const {
    for (int64_t i = 0; prepares_ && i < code_.instructions; i++)
      if (code_.instruction[i].results[0].block == block && can_prepare(code_.instruction[i])) return true;
    return false;
  }

  int64_t add_slot(Home home, int64_t columns, int64_t tensor = 0) {
    int64_t& size = home == in_lane    ? lane_size_
                    : home == in_block ? block_size_
                    : home == prepared ? prepared_size_
                                       : call_size_;
    slots_.get()[slot_count_] = {home, columns, home == in_tensor ? tensor : size};
    if (home != in_tensor) size += row_stride<A>(columns) * (home == prepared ? p_.elements : 1);
    return slot_count_++;
  }
  // A slot of one number.
  int64_t add_number(double number) {
    A value = (A)number;
    for (int64_t i = 0; i < number_count_; i++)
      if (memcmp(&numbers_.get()[i], &value, sizeof value) == 0) return first_number_ + i;
    numbers_.get()[number_count_++] = value;
    return add_slot(in_call, 1);
  }

  // The slots of the blocks, in their order; then those of the outputs. Rows that a lane copies when it moves come
  // first in its scratch.
  void lay_out() {
    slot_count_ = code_.blocks;
    for (int pass = 0; pass < 2; pass++)
      for (int64_t b = 0; b < code_.blocks; b++) {
        const CodeBlock& block = code_.block[b];
        bool moves = block.kind == RAGLANE_STATE || block.kind == RAGLANE_SEQUENCE;
        if (moves != (pass == 0)) continue;
        int64_t after = slot_count_;
        slot_count_ = b;
        if (block.kind == RAGLANE_VECTOR) add_slot(in_call, block.width);
        else if (block.kind == RAGLANE_ELEMENT && !is_narrow(tensor(RAGLANE_ELEMENT, block.index)))
          add_slot(in_tensor, block.width, code_.first_tensor[RAGLANE_ELEMENT] + block.index);
        else if (block.kind == RAGLANE_LOCAL) add_local(b);
        else add_slot(in_lane, block.width);
        slot_count_ = after;
        if (pass == 0) kept_size_ = lane_size_;
      }
    for (int64_t o = 0; o < code_.outputs; o++)
      add_slot(in_tensor, code_.output[o].width, code_.first_tensor[RAGLANE_LOCAL + 1] + o);
  }

  // A local that becomes a state or an output is computed in its memory, if nothing there has still to be read.
  void add_local(int64_t local) {
    int64_t columns = code_.block[local].width;
    for (int64_t s = 0; s < code_.states; s++)
      if (is_all_of(code_, next(s), local) && !is_prepared(local) && may_share(code_, local, block_of_state(s))) {
        slots_.get()[slot_count_] = slots_.get()[block_of_state(s)];
        return;
      }
    for (int64_t o = 0; o < code_.outputs; o++)
      if (may_be_output(local, o)) {
        add_slot(in_tensor, columns, code_.first_tensor[RAGLANE_LOCAL + 1] + o);
        return;
      }
    if (is_prepared(local)) add_slot(prepared, columns);
    else add_slot(code_.block[local].carried ? in_lane : in_block, columns);
  }

  bool may_be_output(int64_t local, int64_t o) const {
    const raglane_tensor& to = tensor(RAGLANE_LOCAL + 1, o);
    if (!is_all_of(code_, code_.output[o], local) || is_narrow(to)) return false;
    for (int64_t b = 0; b < code_.blocks; b++)
      if (code_.block[b].kind == RAGLANE_ELEMENT && tensor(RAGLANE_ELEMENT, code_.block[b].index).data == to.data &&
          (is_prepared(local) || !may_share(code_, local, b)))
        return false;
    return true;
  }

  At at(const Place& place) {
    if (place.block < 0) return {add_number(place.number) * most_lanes, 0, 0};
    return {place.block * most_lanes, place.start, place.spread ? 0 : 1};
  }
  static constexpr At nowhere = {-1, 0, 0};
  static At all_of(int64_t slot) { return {slot * most_lanes, 0, 1}; }
  // Whole vectors may be read if they begin within the columns of a place.
  bool is_padded(const At& at) const { return at.step == 0 || slots_.get()[at.slot / most_lanes].home != in_tensor; }

  Operation<A>& add(Run<A> run, At to, At from, int64_t columns) {
    Operation<A>& operation = operations_.get()[operation_++];
    operation = {run, {to, nowhere}, {from, nowhere, nowhere}, columns, 1, columns, 1, true, false, 0, nullptr};
    return operation;
  }

  void translate() {
    operation_ = 0;
    // Numbers are consecutive slots, so all other slots come before them.
    int64_t raw = slot_count_;
    for (int64_t b = 0; b < code_.blocks; b++)
      if (code_.block[b].kind == RAGLANE_ELEMENT && is_narrow(tensor(RAGLANE_ELEMENT, code_.block[b].index)))
        add_slot(in_tensor, code_.block[b].width, code_.first_tensor[RAGLANE_ELEMENT] + code_.block[b].index);
    int64_t spreads = slot_count_;
    for (int64_t i = 0; i < code_.instructions; i++)
      for (int o = 0; o < 3; o++)
        if (must_spread(code_.instruction[i], o)) add_slot(in_block, columns_read(code_.instruction[i], o, code_.weight));
    int64_t copies = slot_count_;
    for (int64_t s = 0; s < code_.states; s++)
      if (meets_states(s)) add_slot(in_block, code_.output[code_.outputs + s].width);
    first_number_ = slot_count_;
    for (int64_t b = 0; b < code_.blocks; b++)
      if (code_.block[b].kind == RAGLANE_ELEMENT && is_narrow(tensor(RAGLANE_ELEMENT, code_.block[b].index)))
        add(widen<A>, all_of(b), all_of(raw++), code_.block[b].width);
    copy_outputs(true);
    Phase* phase = phases_.get();
    phase->begin = 0;
    LaneProduct<A>* next_product = products_.get() + most_products();
    for (int64_t i = 0; i < code_.instructions; i++) {
      const CodeInstruction& instruction = code_.instruction[i];
      if (prepares_ && can_prepare(instruction)) {
        for (int64_t part = 0; part < instruction.segments; part++)
          products_.get()[product_count_++] = product_of(instruction, part);
      } else if (instruction.operation == RAGLANE_OF_PRODUCT) {
        const LaneProduct<A>* first = next_product;
        bool all_join = phase > phases_.get() && phase->begin == operation_;
        for (int64_t part = 0; part < instruction.segments; part++) {
          *next_product = product_of(instruction, part);
          all_join = all_join && joins(*next_product, phase[-1]);
          next_product++;
        }
        if (all_join) {
          phase[-1].products += (int)instruction.segments;
          continue;
        }
        phase->product = first, phase->products = (int)instruction.segments, phase->end = operation_;
        (++phase)->begin = operation_;
      } else {
        translate(instruction, spreads);
      }
    }
    finish_step(copies);
    phase->products = 0, phase->end = operation_;
    phase_count_ = phase - phases_.get() + 1;
    for (int64_t p = 0; p < phase_count_; p++) fetch_for(phases_.get()[p]), divide(phases_.get()[p]);
    shrink();
  }

  // ---- walks over the rows of matrices ----------------------------------------------------------------------------

  void divide(Phase& phase) {
    phase.first_walk = walk_count_;
    for (int64_t i = phase.begin; i < phase.end; i++) {
      const Operation<A>& operation = operations_.get()[i];
      Walk* last = walk_count_ > phase.first_walk ? &walks_.get()[walk_count_ - 1] : nullptr;
      if (last && continues(operation, *last)) {
        last->end = i + 1;
        continue;
      }
      const int64_t fitting = tuning::program_block / (operation.part * (int64_t)sizeof(A));
      walks_.get()[walk_count_++] = {i, i + 1, operation.is_matrix ? operation.segments : 1, fitting < 1 ? 1 : fitting};
    }
    phase.end_walk = walk_count_;
  }
  bool continues(const Operation<A>& operation, const Walk& walk) const {
    const Operation<A>& first = operations_.get()[walk.begin];
    if (!operation.is_matrix || !first.is_matrix) return operation.is_matrix == first.is_matrix;
    if (operation.segments != first.segments || operation.part != first.part) return false;
    for (int64_t i = walk.begin; i < walk.end; i++) {
      const Operation<A>& before = operations_.get()[i];
      if (!row_by_row(before, before.to[0], operation, operation.to[0])) return false;
      for (int o = 0; o < 3; o++)
        if (!row_by_row(before, before.to[0], operation, operation.from[o]) ||
            !row_by_row(before, before.from[o], operation, operation.to[0]))
          return false;
    }
    return true;
  }
  // Each row of a matrix meets only the same row of another, or they share no memory.
  bool row_by_row(const Operation<A>& of_one, const At& one, const Operation<A>& of_other, const At& other) const {
    if (one.slot < 0 || other.slot < 0) return true;
    const Slot &a = slots_.get()[one.slot / most_lanes], &b = slots_.get()[other.slot / most_lanes];
    const bool in_one_tensor = a.home == in_tensor && b.home == in_tensor && p_.tensors[a.place].data == p_.tensors[b.place].data;
    if (!is_same(a, b) && !in_one_tensor) return true;
    if (one.row > 0 && one.row == other.row && one.start == other.start) return true;
    return one.start + extent(of_one, one) <= other.start || other.start + extent(of_other, other) <= one.start;
  }
  static int64_t extent(const Operation<A>& operation, const At& at) {
    const int64_t last = at.row > 0 ? (operation.segments - 1) * at.row : (operation.segments / operation.group - 1) * at.group;
    return last + (at.step ? operation.part : 1);
  }

  // Matrices that only one walk writes and reads need no more memory than it computes together.
  void shrink() {
    for (int64_t b = 0; b < code_.blocks; b++) {
      const Slot& slot = slots_.get()[b];
      if (slot.home != in_block || code_.block[b].kind != RAGLANE_LOCAL) continue;
      const int64_t walk = only_walk_of(b);
      if (walk < 0) continue;
      for (int64_t i = walks_.get()[walk].begin; i < walks_.get()[walk].end; i++) {
        Operation<A>& operation = operations_.get()[i];
        for (At* at : {&operation.to[0], &operation.from[0], &operation.from[1], &operation.from[2]})
          if (at->slot == b * most_lanes) at->back = at->row;
      }
    }
  }
  // The index of the walk; -1 for several, or for other columns than those of its matrices.
  int64_t only_walk_of(int64_t block) const {
    for (int64_t o = 0; o < code_.outputs + code_.states; o++)
      if (code_.output[o].place.block == block) return -1;
    int64_t found = -1;
    for (int64_t w = 0; w < walk_count_; w++)
      for (int64_t i = walks_.get()[w].begin; i < walks_.get()[w].end; i++) {
        const Operation<A>& operation = operations_.get()[i];
        for (const At* at : {&operation.to[0], &operation.to[1], &operation.from[0], &operation.from[1], &operation.from[2]}) {
          if (at->slot != block * most_lanes) continue;
          if (!operation.is_matrix || at->start != 0 || at->row != operation.part || !at->step || (found >= 0 && found != w)) return -1;
          found = w;
        }
      }
    for (int64_t i = 0; found >= 0 && i < code_.instructions; i++) {
      if (code_.instruction[i].operation != RAGLANE_OF_PRODUCT) continue;
      for (const Place& place : {code_.instruction[i].operands[0], code_.instruction[i].operands[1], code_.instruction[i].results[0]})
        if (place.block == block) return -1;
    }
    return found;
  }

  void fetch_for(Phase& phase) {
    phase.first_fetch = fetch_count_;
    for (int64_t i = phase.begin; i < phase.end; i++)
      for (const At& at : operations_.get()[i].from) {
        if (at.slot < 0 || next_row(at.slot / most_lanes) == 0) continue;
        bool known = false;
        for (int64_t f = phase.first_fetch; f < fetch_count_; f++) known |= fetches_.get()[f].slot == at.slot;
        const Slot& slot = slots_.get()[at.slot / most_lanes];
        bool narrow = slot.home == in_tensor && is_narrow(p_.tensors[slot.place]);
        int64_t bytes = slot.width * (narrow ? 2 : (int64_t)sizeof(A));
        if (!known) fetches_.get()[fetch_count_++] = {at.slot, next_row(at.slot / most_lanes), bytes};
      }
    phase.end_fetch = fetch_count_;
  }

  // An operand is one column of an operation that reads all columns.
  bool must_spread(const CodeInstruction& i, int operand) const {
    OperationFacts facts = facts_of_operation(i.operation);
    if (facts.each || is_dot(i.operation) || operand >= facts.operands || i.operation == RAGLANE_OF_PRODUCT) return false;
    return i.operands[operand].block < 0 || i.operands[operand].spread;
  }

  void translate(const CodeInstruction& i, int64_t& spreads) {
    OperationFacts facts = facts_of_operation(i.operation);
    const int64_t part = i.width / i.segments;
    bool is_matrix = (facts.each && i.segments > 1) || is_dot(i.operation);
    for (int o = 0; facts.each && o < facts.operands; o++)
      is_matrix |= i.operands[o].block >= 0 && i.operands[o].spread > RAGLANE_ONE;
    Operation<A> operation = {run_of<A>(i.operation), {nowhere, nowhere}, {nowhere, nowhere, nowhere}, i.width, i.segments, part,
                              i.segments / i.groups, true, is_matrix, (A)i.epsilon, i.runs};
    // Whole vectors, if the numbers beyond the columns are padding.
    bool whole = facts.each && !is_matrix;
    for (int r = 0; r < facts.results; r++) {
      operation.to[r] = at(i.results[r]);
      if (i.operation == RAGLANE_OF_ROW_DOT) operation.to[r].row = 1;
      else if (i.operation == RAGLANE_OF_COLUMN_DOT) operation.to[r].group = part;
      else if (is_matrix) operation.to[r].row = part;
      whole &= i.results[r].start + i.width == code_.block[i.results[r].block].width && is_padded(operation.to[r]);
    }
    for (int o = 0; o < facts.operands; o++) {
      operation.from[o] = at(i.operands[o]);
      if (is_matrix) spread_over(operation.from[o], i.operands[o], part);
      operation.is_flat &= i.operands[o].block < 0 || i.operands[o].spread <= RAGLANE_ONE;
      whole &= is_padded(operation.from[o]);
      if (!must_spread(i, o)) continue;
      int64_t columns = columns_read(i, o, code_.weight);
      add(run_of<A>(RAGLANE_OF_COPY), all_of(spreads), operation.from[o], columns);
      operation.from[o] = all_of(spreads++);
    }
    if (whole) operation.part = (i.width + width - 1) / width * width;
    operations_.get()[operation_++] = operation;
  }
  static void spread_over(At& at, const Place& place, int64_t part) {
    if (place.block < 0 || place.spread == RAGLANE_ONE) return;
    if (place.spread == RAGLANE_BY_ROW) at.row = 1, at.step = 0;
    else at.step = 1, at.row = place.spread == RAGLANE_ADJACENT ? part : 0, at.group = part - at.row;
  }

  LaneProduct<A> product_of(const CodeInstruction& i, int64_t part) {
    const PackedWeight<A>& weight = weights_.get()[i.weight];
    At to = at(i.results[0]), start = at(i.operands[0]), from = at(i.operands[1]);
    to.start += part * weight.columns(), start.start += part * weight.columns() * start.step;
    from.start += part * weight.groups * weight.panels.depth * from.step;
    bool ends = i.results[0].start + (part + 1) * weight.columns() == code_.block[i.results[0].block].width && is_padded(to);
    return {to,   start,            from, &weight, &i,
            ends, is_padded(start), start.step ? next_row(start.slot / most_lanes) : 0};
  }

  // A product may be computed together with those of a phase: it has their weight and kind of places, and neither
  // reads or writes what the other writes.
  bool joins(const LaneProduct<A>& product, const Phase& phase) const {
    const LaneProduct<A>& first = *phase.product;
    if (product.weight != first.weight || product.from.step != first.from.step || product.start.step != first.start.step)
      return false;
    for (const LaneProduct<A>* other = phase.product; other < phase.product + phase.products; other++)
      if (meet(product, *other) || meet(*other, product)) return false;
    return true;
  }
  // One product writes to columns that another reads or writes, or to the caller's memory, where rows may overlap.
  bool meet(const LaneProduct<A>& writer, const LaneProduct<A>& other) const {
    const Slot& to = slots_.get()[writer.to.slot / most_lanes];
    if (to.home == in_tensor) return true;
    const int64_t begin = writer.to.start, end = begin + writer.weight->columns();
    auto overlaps = [&](const At& at, int64_t columns) {
      const Slot& slot = slots_.get()[at.slot / most_lanes];
      return is_same(slot, to) && at.start < end && begin < at.start + (at.step ? columns : 1);
    };
    return overlaps(other.from, other.weight->groups * other.weight->panels.depth) ||
           overlaps(other.start, other.weight->columns()) || overlaps(other.to, other.weight->columns());
  }

  // The next value of a state is the current value of another state, or its own in other columns.
  bool meets_states(int64_t state) const {
    return is_state(code_, next(state).place) && !stays(state);
  }
  bool stays(int64_t state) const {
    const CodeOutput& next = code_.output[code_.outputs + state];
    if (next.place.block < 0) return false;
    const CodeBlock& block = code_.block[next.place.block];
    return block.kind == RAGLANE_STATE && block.index == state && (!next.place.spread || block.width == 1) &&
           next.place.start == 0;
  }

  // Bytes from a lane's row of a slot to that of the next step.
  int64_t next_row(int64_t slot) const {
    int64_t bytes = row_bytes(slots_.get()[slot]);
    return p_.ascending ? bytes : -bytes;
  }

  // Outputs that are states are copied when a step begins, all others when it ends.
  void copy_outputs(bool of_states) {
    for (int64_t o = 0; o < code_.outputs; o++) {
      const CodeOutput& output = code_.output[o];
      if (is_state(code_, output.place) != of_states) continue;
      int64_t to = code_.first_tensor[RAGLANE_LOCAL + 1] + o;
      if (output.place.block >= 0 && is_in(slots_.get()[output.place.block], to)) continue;
      add(is_narrow(p_.tensors[to]) ? round_off<A> : run_of<A>(RAGLANE_OF_COPY), all_of(code_.blocks + o),
          at(output.place), output.width);
    }
  }
  static bool is_in(const Slot& slot, int64_t tensor) { return slot.home == in_tensor && slot.place == tensor; }

  // The copies at the end of a step.
  void finish_step(int64_t copies) {
    const Run<A> copy = run_of<A>(RAGLANE_OF_COPY);
    copy_outputs(false);
    int64_t to = copies, from = copies;
    for (int64_t s = 0; s < code_.states; s++)
      if (meets_states(s)) add(copy, all_of(to++), at(next(s).place), next(s).width);
    for (int64_t s = 0; s < code_.states; s++) {
      int64_t state = block_of_state(s), block = next(s).place.block;
      if (meets_states(s)) add(copy, all_of(state), all_of(from++), next(s).width);
      else if (!stays(s) && (block < 0 || !is_same(slots_.get()[block], slots_.get()[state])))
        add(copy, all_of(state), at(next(s).place), next(s).width);
    }
  }
  static bool is_same(const Slot& one, const Slot& other) {
    return one.home == other.home && one.place == other.place;
  }
  int64_t block_of_state(int64_t state) const {
    int64_t b = 0;
    while (code_.block[b].kind != RAGLANE_STATE || code_.block[b].index != state) b++;
    return b;
  }
};

}  // namespace raglane::RAGLANE_TARGET
