// Plain data shared by the code that is compiled once, and the code that is compiled once per instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi/raglane.h"

namespace raglane {

// The header of packed weights: the call for which they were packed.
struct PackedHeader {
  int64_t abi, isa, cell, dtype, directions, input_size, hidden_size, rest;  // rest: P of a projection; or of a skip, 1
  // Of a program's weights: their number, that of their numbers, and a hash of their shapes.
  static PackedHeader of_program(int64_t isa, int64_t dtype, int64_t weights, int64_t numbers, int64_t shapes) {
    return {RAGLANE_ABI, isa, -1, dtype, 0, weights, numbers, shapes};
  }
};
static_assert(sizeof(PackedHeader) == 64, "what follows is aligned");

// The memory for packed weights, null if only their bytes are counted; and their bytes, header included.
struct PackTo {
  void* to;
  int64_t* bytes;
};

// The sequences of a checked call, and facts that depend only on the lengths.
struct Batch {
  const int64_t *begins, *ends;  // of sequence b the elements [begins[b], ends[b]) are computed
  int64_t elements;
  const int64_t* order;  // the sequences that are not empty, longest first
  int64_t ordered;       // how many
  int64_t longest;       // the largest length
  int64_t cache;         // bytes of a core's own cache
  // Element t of sequence b is row rows[b] + starts[t] of values and output; null if it is element begins[b] + t.
  const int64_t *rows = nullptr, *starts = nullptr;
};

// Division of a backward pass into rounds, each of which covers a limited number of steps of some sequences.
struct Rounds {
  int64_t steps, count;
  const int64_t* first;     // (count + 1): index in `sequence` of a round's first sequence
  const int64_t* sequence;  // of each round, those with the most left first
  int64_t most_sequences, most_elements;  // of a round
};

// One round in one direction.
struct Round {
  int64_t direction;
  const int64_t* row;  // index of the first row of each sequence in memory that rounds share
};

// A checked call.
struct Call : Batch {
  const raglane_layer* layer;
  PackTo packing = {};  // of a call that packs weights
  const Rounds* rounds = nullptr;  // of a backward pass that recomputes the gates
  const Round* round = nullptr;    // the current one

  // The directions that run in parallel, from this one.
  int64_t first_direction() const { return round ? round->direction : 0; }
  int64_t directions() const { return round ? 1 : layer->directions; }
};

// Adjacent sequences, [begin, end), which are processed by one thread at a time.
struct Group {
  int64_t begin, end;
  int64_t place;  // index among all groups, in the order of the sequences
};

// A checked element-wise call, with facts that depend only on the lengths. Sums are computed per group, so the
// groups must not depend on anything else, such as the number of threads.
struct ElementwiseCall {
  const raglane_layer* layer;
  const Group* group;  // those with the most elements first
  int64_t groups;
  int64_t largest;  // elements of the first
  int64_t cache;    // bytes of a core's own cache
  PackTo packing = {};  // of a call that packs
};

// The backward time loop of a call of either kind.
struct Walk {
  const void* call;
  int32_t (*run)(const void* call);
};

// Elements of a sequence from one saved state of a linear recurrence to the next. With 32, of 16 states saved states are
// 1/32 of all.
inline constexpr int border = 32;

// A checked call of a recurrence, divided into groups of sequences as an element-wise one.
template <class Call> struct GroupedCall {
  const Call* call;
  const Group* group;
  int64_t groups;
};
using SelectiveScan = GroupedCall<raglane_selective_scan>;

// A checked call of linear attention.
struct LinearAttention {
  const raglane_attention* attention;
  const int64_t* order;  // the sequences, longest first; the states of those that are empty pass through
  int64_t ordered;
};

struct Code;

// A checked call of a program.
struct ProgramCall : Batch {
  const raglane_program* program;
  const Code* code;
  PackTo packing = {};  // of a call that packs weights
};

}  // namespace raglane
