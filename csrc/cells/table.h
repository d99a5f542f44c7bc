// The table of cells, one line each: all facts but their arithmetic.
//
// A cell's number is its index here, matrix cells before element-wise ones. The time loops, the C interface and the
// driver use these lines, and Python reads them by raglane_describe_cell. A new cell is a header in this
// folder, which is included below, and a line.
//
//   type       its class template, type<A>, in the header, whose constants are compared with the table
//   name       as in raglane.cells.CELLS
//   gates      G, input products per unit
//   slots      S, blocks of H per element that backward writes to grad_gates
//   saved      blocks of H per element that forward saves in gates, or 0
//   c          there is a second state, c
//   projects   h may be a projection
//   skips      the output adds the input: unchanged, or by one more product, with its own gate
//   factors    V, recurrent factors per unit
//   biases     blocks of H in a bias
#pragma once

#include "abi/raglane.h"

// Cells with a matrix product of their state.
//       type         name            gates  slots  saved  c  projects
#define RAGLANE_MATRIX_CELLS(CELL)                                    \
  CELL(  RnnTanh,     "rnn_tanh",     1,     1,     0,     0, 0)      \
  CELL(  RnnRelu,     "rnn_relu",     1,     1,     0,     0, 0)      \
  CELL(  Lstm,        "lstm",         4,     4,     4,     1, 1)      \
  CELL(  Gru,         "gru",          3,     4,     4,     0, 0)

// Cells whose units read only their own state; here slots are gates.
//       type         name            gates  saved  c  skips  factors  biases
#define RAGLANE_ELEMENTWISE_CELLS(CELL)                                      \
  CELL(  IndRnnTanh,  "indrnn_tanh",  1,     0,     0, 0,     1,       1)    \
  CELL(  IndRnnRelu,  "indrnn_relu",  1,     0,     0, 0,     1,       1)    \
  CELL(  MinGru,      "mingru",       2,     2,     0, 0,     0,       2)    \
  CELL(  MinLstm,     "minlstm",      3,     3,     0, 0,     0,       3)    \
  CELL(  Qrnn,        "qrnn",         3,     3,     1, 0,     0,       3)    \
  CELL(  Sru,         "sru",          3,     3,     1, 1,     2,       2)

namespace raglane {

enum CellNumber : int64_t {
#define RAGLANE_NUMBER(type, ...) cell_##type,
  RAGLANE_MATRIX_CELLS(RAGLANE_NUMBER) RAGLANE_ELEMENTWISE_CELLS(RAGLANE_NUMBER)
#undef RAGLANE_NUMBER
  cell_count
};

inline constexpr raglane_cell_facts cell_table[cell_count] = {
#define RAGLANE_FACTS(type, name, gates, slots, saved, has_c, projects) \
  {name, 0, gates, slots, saved, has_c, projects, 0, 0, gates},
    RAGLANE_MATRIX_CELLS(RAGLANE_FACTS)
#undef RAGLANE_FACTS
#define RAGLANE_FACTS(type, name, gates, saved, has_c, skips, factors, biases) \
  {name, 1, gates, gates, saved, has_c, 0, skips, factors, biases},
    RAGLANE_ELEMENTWISE_CELLS(RAGLANE_FACTS)
#undef RAGLANE_FACTS
};

}  // namespace raglane

// Code that is compiled once per instruction set includes the arithmetic.
#if defined(RAGLANE_TARGET)
#include "cells/elman.h"
#include "cells/gru.h"
#include "cells/indrnn.h"
#include "cells/lstm.h"
#include "cells/mingru.h"
#include "cells/minlstm.h"
#include "cells/qrnn.h"
#include "cells/sru.h"

namespace raglane::RAGLANE_TARGET {

// A line of a matrix cell agrees with the cell's header.
template <class Cell> constexpr bool fits_matrix(const raglane_cell_facts& facts) {
  static_assert(Cell::saved == 0 || (Cell::unit_vectors == 1 && Cell::whole_rows), "see cells/matrix.h");
  // Only the last gate may have a slot for its hidden product, after all others; callers rely on this.
  bool in_order = Cell::slots == Cell::gates || (Cell::slots == Cell::gates + 1 && Cell::only_input(Cell::gates - 1));
  for (int gate = 0; gate < Cell::gates; gate++)
    in_order = in_order && Cell::hidden_slot(gate) == (gate == Cell::gates - 1 ? Cell::slots - 1 : gate);
  return in_order && facts.gates == Cell::gates && facts.slots == Cell::slots && facts.saved == Cell::saved &&
         (Cell::saved == 0 || Cell::saved == Cell::slots) && facts.has_c == Cell::has_c &&
         facts.projects == Cell::projects;
}

// The same for an element-wise cell. If it skips by a product, `type::projected` has the arithmetic.
template <class Cell> constexpr bool fits_elementwise(const raglane_cell_facts& facts) {
  if constexpr (Cell::skips) {
    using Projected = typename Cell::projected;
    static_assert(Projected::gates == Cell::gates + 1 && Projected::slots == Cell::slots + 1 &&
                  Projected::saved == Cell::saved + 1 && !Projected::skips);
  }
  return facts.gates == Cell::gates && facts.slots == Cell::slots && facts.saved == Cell::saved &&
         (Cell::saved == 0 || Cell::saved == Cell::slots) && facts.has_c == Cell::has_c &&
         facts.skips == Cell::skips && facts.factors == Cell::recurrent && facts.biases == Cell::biases;
}

#define RAGLANE_HOLD(type, ...) static_assert(fits_matrix<type<float>>(cell_table[cell_##type]), #type);
RAGLANE_MATRIX_CELLS(RAGLANE_HOLD)
#undef RAGLANE_HOLD
#define RAGLANE_HOLD(type, ...) static_assert(fits_elementwise<type<float>>(cell_table[cell_##type]), #type);
RAGLANE_ELEMENTWISE_CELLS(RAGLANE_HOLD)
#undef RAGLANE_HOLD

}  // namespace raglane::RAGLANE_TARGET
#endif
