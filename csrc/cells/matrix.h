// What a cell whose weights meet the state is to the time loops: gate arithmetic on vectors of units.
//
//   gates          products per unit, of the input and of h, each pair with one sum
//   slots          sums per unit: `gates`, or one more where the last gate's two products are summed apart
//   saved          vectors that backward reads of a step: `slots`, or 0 where the output says enough
//   has_c          there is a second state, c
//   projects       h may be a projection, of what `unprojected` gives
//   unit_vectors   vectors of units in a panel of weights; 1 where gates are saved
//   whole_rows     prepared products have room for whole vectors: where gates are saved
//   hidden_slot(gate)    the slot of a gate's hidden product
//   only_input(slot)     no hidden product reaches a slot
//   ends_in_tanh   the loop puts `last` through tanh, that of several rows at once, between `open` and `close`
//   open(a, c, save, last)   for ROWS rows. a: the sums. c: before, then after the step. save: what is known so far
//   close(last, h, save)     the new h, from that before; what is left to save
//   backward(save, output, h, c_before, c, dh, dc, da)   h: before the step, unset where it is a projection. dc: the
//                  gradient of c after the step, then before it. da: out, the sums' gradients, slot by slot. Returns what
//                  reaches h before the step past all products.
//   unprojected(save, c)     what a projection reads, for cells that project
#pragma once

#include "simd/activations.h"
