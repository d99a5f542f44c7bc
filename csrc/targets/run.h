// Dispatch from a call's cell and dtype to the compiled loop. Included by the files that the build compiles
// once per instruction set, with that set's flags.
#pragma once

#include "cells/table.h"
#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

template <template <class, class> class Loop, class S> int32_t run_cell(const Call& call) {
  using A = typename Arithmetic<S>::type;
  switch (call.layer->cell) {
#define RAGLANE_RUN(type, ...) \
  case cell_##type: return launch<Loop<type<A>, S>>(call);
    RAGLANE_MATRIX_CELLS(RAGLANE_RUN)
#undef RAGLANE_RUN
  }
  return RAGLANE_BAD_ARGUMENT;
}

// An element-wise cell, which adds its input unchanged or by a product.
template <template <class, class> class Loop, class Cell, class S> int32_t run_skipping(const ElementwiseCall& call) {
  if constexpr (Cell::skips)
    if (call.layer->weights[0].skip) return launch<Loop<typename Cell::projected, S>>(call);
  return launch<Loop<Cell, S>>(call);
}

template <template <class, class> class Loop, class S> int32_t run_cell(const ElementwiseCall& call) {
  using A = typename Arithmetic<S>::type;
  switch (call.layer->cell) {
#define RAGLANE_RUN(type, ...) \
  case cell_##type: return run_skipping<Loop, type<A>, S>(call);
    RAGLANE_ELEMENTWISE_CELLS(RAGLANE_RUN)
#undef RAGLANE_RUN
  }
  return RAGLANE_BAD_ARGUMENT;
}

// Run a loop of either kind.
template <template <class, class> class Loop, class C> int32_t run(const C& call) {
  switch (call.layer->dtype) {
#if !defined(RAGLANE_FAMILY)  // the family has these loops
    case RAGLANE_FLOAT32: return run_cell<Loop, float>(call);
    case RAGLANE_FLOAT64: return run_cell<Loop, double>(call);
#endif
    case RAGLANE_BFLOAT16: return run_cell<Loop, bfloat16>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

}  // namespace raglane::RAGLANE_TARGET
