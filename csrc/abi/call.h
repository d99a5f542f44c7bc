// What the parts that are compiled once per instruction set share with the part that is compiled once: plain data.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi/raglane.h"

namespace raglane {

// What lies before packed weights: what they were packed for.
struct PackedHeader {
  int64_t abi, isa, cell, dtype, directions, input_size, hidden_size, rest;  // rest: P of a projection; or of a skip, 1
};
static_assert(sizeof(PackedHeader) == 64, "what follows is aligned");

// Where weights are to be packed, null where only their bytes are asked for; and how many these are, header included.
struct PackTo {
  void* to;
  int64_t* bytes;
};

// The sequences of a checked call, and what depends on the lengths alone.
struct Batch {
  const int64_t *begins, *ends;  // of sequence b the elements [begins[b], ends[b]) are computed
  int64_t elements;
  const int64_t* order;  // the sequences that are not empty, longest first
  int64_t ordered;       // how many
  int64_t longest;       // the largest length
  int64_t cache;         // bytes of a core's own cache
};

// How a backward pass is divided into rounds, which walk some sequences back by so many steps at most.
struct Rounds {
  int64_t steps, count;
  const int64_t* first;     // (count + 1): where a round's sequences begin in `sequence`
  const int64_t* sequence;  // of each round, those with the most left first
  int64_t most_sequences, most_elements;  // of a round
};

// One of them, in one direction.
struct Round {
  int64_t direction;
  const int64_t* row;  // where the rows of a sequence's elements begin in memory that rounds share
};

// A checked call.
struct Call : Batch {
  const raglane_layer* layer;
  PackTo packing = {};  // of a call that packs
  const Rounds* rounds = nullptr;  // of a backward pass that computes the gates again
  const Round* round = nullptr;    // the one that is walked back now

  // The directions that are walked at once, from this one on.
  int64_t first_direction() const { return round ? round->direction : 0; }
  int64_t directions() const { return round ? 1 : layer->directions; }
};

// Sequences that follow each other, [begin, end), which one thread at a time walks through.
struct Group {
  int64_t begin, end;
  int64_t place;  // among all groups, in the order of the sequences
};

// A checked element-wise call, with what depends on the lengths alone. No sum reaches over the end of a group, so the
// groups depend on nothing else: not on the number of threads.
struct ElementwiseCall {
  const raglane_layer* layer;
  const Group* group;  // those with the most elements first
  int64_t groups;
  int64_t largest;  // elements of the first
  int64_t cache;    // bytes of a core's own cache
  PackTo packing = {};  // of a call that packs
};

struct Code;

// A checked call of a program.
struct ProgramCall : Batch {
  const raglane_program* program;
  const Code* code;
};

}  // namespace raglane
