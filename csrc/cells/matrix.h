// The interface of a cell with a matrix product of its state to the time loops: gate arithmetic on vectors of units.
//
//   gates          products per unit, of the input and of h; each pair has one sum
//   slots          sums per unit: `gates`, or one more if the last gate's two products have separate sums
//   saved          vectors of a step that backward reads: `slots`, or 0 if it computes them from the output
//   has_c          there is a second state, c
//   projects       h may be a projection, of the result of `unprojected`
//   unit_vectors   vectors of units in a panel of weights; 1 if gates are saved
//   whole_rows     prepared products have room for whole vectors: if gates are saved
//   hidden_slot(gate)    the slot of a gate's hidden product
//   only_input(slot)     true for a slot without a hidden product
//   ends_in_tanh   the loop applies tanh to `last`, for several rows together, between `open` and `close`
//   open(a, c, save, last)   for ROWS rows. a: the sums. c: before, then after the step. save: numbers known so far
//   close(last, h, save)     the new h, from the previous one; the remaining numbers to save
//   backward(save, output, h, c_before, c, dh, dc, da)   h: before the step, unset if it is a projection. dc: the
//                  gradient of c after the step, then before it. da: out, the sums' gradients by slot. Returns the
//                  gradient of the previous h that does not pass the products.
//   unprojected(save, c)     the input of a projection, for cells that project
#pragma once

#include "simd/activations.h"
