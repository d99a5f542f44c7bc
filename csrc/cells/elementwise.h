// The interface of an element-wise cell to the time loops: gate arithmetic on N vectors of units.
//
//   gates          input products per unit; `slots` is the same
//   recurrent      factors of the state per unit
//   saved          vectors of a step that backward reads: `gates`, in the place of the arguments, or 0
//   has_c          c is the recurrent state, and h only the output; otherwise h is both
//   skips          the output adds the unchanged input. Then `projected` is the cell that adds a product
//                  instead, which is the last of its gates
//   whole_rows     true: products are always in scratch
//   unit_vectors   vectors of units in a panel of weights
//   first_bias, biases   the gates with a bias
//   forward(a, u, x, state, y)   a: in, arguments of the gates, gate after gate of N vectors; out, saved numbers.
//                  u: recurrent factors. x: the input if the cell skips. state: before, then after the step.
//   backward(w, a, d, du)   a: in, saved numbers; out, gradients of the arguments. d: the gradient of the state after
//                  the step, then before it; if h is the state, it includes the output's. du: the recurrent factors'.
#pragma once

#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

// Inputs of a backward step in addition to the saved gates; N vectors each.
template <class V> struct Walked {
  const V* u;       // recurrent factors
  const V* x;       // the input if the cell skips, else unset
  const V* y;       // the output if nothing is saved, else unset
  const V* before;  // the recurrent state
  const V* after;   // c after the step, for cells that have one
  const V* dy;      // the output's gradient, for cells with c
  V* dx;            // out: the input's, if the cell skips
};

}  // namespace raglane::RAGLANE_TARGET
