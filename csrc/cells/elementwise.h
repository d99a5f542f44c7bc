// What an element-wise cell is to the time loops: gate arithmetic on N vectors of units side by side.
//
//   gates          input products per unit; `slots` is the same
//   recurrent      factors of the state per unit
//   saved          what backward reads of a step: `gates` vectors, in the place of the arguments, or 0
//   has_c          the state that recurs is c, and h the output alone; else h is both
//   skips          the output takes up the input as it is. Then `projected` is the cell that takes up a product
//                  in its place, which is the last of its gates
//   whole_rows     true: products always rest in scratch
//   unit_vectors   vectors of units in a panel of weights
//   first_bias, biases   the gates that have one
//   forward(a, u, x, state, y)   a: arguments of the gates, gate after gate of N vectors, in; what is saved, out.
//                  u: recurrent factors. x: the input where the cell skips. state: before, then after the step.
//   backward(w, a, d, du)   a: what was saved in, gradients of the arguments out. d: the gradient of the state after
//                  the step, then before it; where h recurs, that of the output is in it. du: the recurrent factors'.
#pragma once

#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

// What backward reads of a step besides the saved gates; N vectors each.
template <class V> struct Walked {
  const V* u;       // recurrent factors
  const V* x;       // the input where the cell skips, else unset
  const V* y;       // the output where nothing is saved, else unset
  const V* before;  // the state that recurs
  const V* after;   // c after the step, for cells that have one
  const V* dy;      // the output's gradient, for cells with c
  V* dx;            // out: the input's, where the cell skips
};

}  // namespace raglane::RAGLANE_TARGET
