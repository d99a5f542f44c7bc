// What one instruction set provides: the time loops for every cell and dtype. Included by one file an instruction
// set, which the build compiles with that set's flags.
#pragma once

#include "cells/elman.h"
#include "cells/gru.h"
#include "cells/lstm.h"
#include "scan_backward.h"
#include "scan_forward.h"

namespace raglane::RAGLANE_TARGET {

// Call run(Constant<cell>) ... the cell and the dtype as types.
template <template <class, class> class Scan, class S> int32_t run_cell(const Call& call) {
  using A = typename Arithmetic<S>::type;
  switch (call.layer->cell) {
    case RAGLANE_RNN_TANH: return launch<Scan<Elman<A, false>, S>>(call);
    case RAGLANE_RNN_RELU: return launch<Scan<Elman<A, true>, S>>(call);
    case RAGLANE_LSTM: return launch<Scan<Lstm<A>, S>>(call);
    case RAGLANE_GRU: return launch<Scan<Gru<A>, S>>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

template <template <class, class> class Scan> int32_t run(const Call& call) {
  switch (call.layer->dtype) {
#if RAGLANE_LEVEL <= 3  // what follows adds to AVX-512 for bfloat16 alone
    case RAGLANE_FLOAT32: return run_cell<Scan, float>(call);
    case RAGLANE_FLOAT64: return run_cell<Scan, double>(call);
#endif
    case RAGLANE_BFLOAT16: return run_cell<Scan, bfloat16>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

template <class A> int32_t apply_to(int64_t function, const A* in, A* out, int64_t count) {
  for (int64_t i = 0; i < count; i += Lanes<A>::width) {
    int here = (int)(count - i < Lanes<A>::width ? count - i : Lanes<A>::width);
    Vec<A> x = load(in + i, here);
    switch (function) {
      case RAGLANE_EXP: exp<A, 1>(&x); break;
      case RAGLANE_TANH: x = tanh<A>(x); break;
      case RAGLANE_SIGMOID: x = sigmoid<A>(x); break;
      default: return RAGLANE_BAD_ARGUMENT;
    }
    store(out + i, x, here);
  }
  return RAGLANE_OK;
}

inline int32_t apply(int64_t dtype, int64_t function, const void* in, void* out, int64_t count) {
  switch (dtype) {
    case RAGLANE_FLOAT32: return apply_to<float>(function, (const float*)in, (float*)out, count);
    case RAGLANE_FLOAT64: return apply_to<double>(function, (const double*)in, (double*)out, count);
  }
  return RAGLANE_BAD_ARGUMENT;
}

}  // namespace raglane::RAGLANE_TARGET
