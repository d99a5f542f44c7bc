// The gradients of values and weights of a call: for layers of both kinds, and for outer products.
#pragma once

#include "cells/table.h"
#include "gemm/layer_gradients.h"

namespace raglane::RAGLANE_TARGET {

template <class S> void describe_matrix(const raglane_layer& l, int d, DirectionGradients<S>& of) {
  const raglane_cell_facts& cell = cell_table[l.cell];
  const raglane_weight_gradients& wanted = l.grad_weights[d];
  const int64_t N = l.elements, H = l.hidden_size, P = l.projection_size ? l.projection_size : H, D = l.input_size;
  const int64_t gates = cell.gates * H;
  auto rows = [&](const void* data, int64_t columns) { return data ? (const S*)data + d * N * columns : nullptr; };
  of = {};
  of.rows[0] = {rows(l.grad_gates, l.gate_stride), l.gate_stride, cell.slots * H};
  if (wanted.projection) of.rows[1] = {rows(l.grad_h, P), P, P};
  of.factors[0] = {(const S*)l.values, D, l.grad_weights[0].input || l.grad_weights[1].input ? D : 0};
  of.factors[1] = {rows(l.previous_h, P), P, wanted.hidden ? P : 0};
  of.factors[2] = {rows(l.unprojected, H), H, wanted.projection ? H : 0};
  if (l.grad_values) of.terms[0] = {(const S*)l.weights[d].input, 0, gates};
  // The first rows of the gates belong to both input and hidden products. The hidden product of a GRU's candidate has
  // its own gradients, after all others.
  of.biased = gates, of.shared = cell.slots > cell.gates ? gates - H : gates;
  of.outers[0] = {(S*)wanted.input, 0, 0, gates, 0};
  of.outers[1] = {(S*)wanted.hidden, 0, 0, of.shared, 1};
  if (wanted.hidden && of.shared < gates) of.outers[2] = {(S*)wanted.hidden + of.shared * P, 0, gates, H, 1};
  of.outers[3] = {(S*)wanted.projection, 1, 0, P, 2};
  of.input_bias = (S*)wanted.input_bias, of.hidden_bias = (S*)wanted.hidden_bias;
}

// The time loop itself sums the gradients of biases and factors over the elements.
template <class S> void describe_elementwise(const raglane_layer& l, int d, DirectionGradients<S>& of) {
  const raglane_weight_gradients& wanted = l.grad_weights[d];
  const int64_t N = l.elements, H = l.hidden_size, D = l.input_size, gates = cell_table[l.cell].gates * H;
  const int64_t columns = gates + (l.weights[d].skip ? H : 0);
  of = {};
  of.rows[0] = {(const S*)l.grad_gates + d * N * columns, columns, columns};
  bool reads = false;
  for (const raglane_weight_gradients& w : l.grad_weights) reads = reads || w.input || w.skip;
  of.factors[0] = {(const S*)l.values, D, reads ? D : 0};
  if (l.grad_values) {
    of.terms[0] = {(const S*)l.weights[d].input, 0, gates};
    if (l.weights[d].skip) of.terms[1] = {(const S*)l.weights[d].skip, gates, H};
    if (l.grad_skip) of.passed = (const S*)l.grad_skip + d * N * D;
  }
  of.outers[0] = {(S*)wanted.input, 0, 0, gates, 0};
  of.outers[1] = {(S*)wanted.skip, 0, gates, H, 0};
}

inline bool wants_any(const raglane_layer& l) {
  bool wanted = l.grad_values, by_walk = cell_table[l.cell].is_elementwise;
  for (const raglane_weight_gradients& w : l.grad_weights) {
    wanted = wanted || w.input || w.hidden_bias || w.projection || w.skip;
    wanted = wanted || (!by_walk && (w.hidden || w.input_bias));
  }
  return wanted;
}

#if !defined(RAGLANE_FAMILY)  // pairs are not multiplied here
template <class S> int32_t walk_and_gradients_of(const raglane_layer& l, const Walk& walk) {
  DirectionGradients<S> of[2];
  for (int d = 0; d < l.directions; d++)
    cell_table[l.cell].is_elementwise ? describe_elementwise(l, d, of[d]) : describe_matrix(l, d, of[d]);
  LayerGradients<S> gradients(of, (int)l.directions, l.elements, l.input_size, (S*)l.grad_values);
  if (!gradients.reserve(l.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
  int32_t status = walk.run(walk.call);
  if (status == RAGLANE_OK) start(gradients, l.threads);
  return status;
}

// Run the backward time loop, and compute the gradients that the call requires, if any. Their scratch is reserved
// first: the loop may overwrite the saved gates, and a failed call must leave them unchanged.
inline int32_t with_gradients(const raglane_layer& layer, const Walk& walk) {
  if (!wants_any(layer)) return walk.run(walk.call);
  switch (layer.dtype) {
    case RAGLANE_FLOAT32: return walk_and_gradients_of<float>(layer, walk);
    case RAGLANE_FLOAT64: return walk_and_gradients_of<double>(layer, walk);
    case RAGLANE_BFLOAT16: return walk_and_gradients_of<bfloat16>(layer, walk);
  }
  return RAGLANE_BAD_ARGUMENT;
}

// Only outer products and sums, group by group.
template <class S> int32_t outer_products_of(const raglane_outer& o) {
  for (int64_t g = 0; g < o.groups; g++) {
    DirectionGradients<S> of = {};
    of.rows[0] = {(const S*)o.left + g * o.left_columns, o.left_stride, o.left_columns};
    of.factors[0] = {(const S*)o.right + g * o.right_columns, o.right_stride, o.to ? o.right_columns : 0};
    if (o.to) of.outers[0] = {(S*)o.to + g * o.left_columns * o.right_columns, 0, 0, o.left_columns, 0};
    if (o.sums) of.input_bias = (S*)o.sums + g * o.left_columns;
    of.biased = of.shared = o.left_columns;
    LayerGradients<S> gradients(&of, 1, o.elements, o.right_columns, nullptr);
    if (!gradients.reserve(o.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    start(gradients, o.threads);
  }
  return RAGLANE_OK;
}

inline int32_t outer_products(const raglane_outer& o) {
  switch (o.dtype) {
    case RAGLANE_FLOAT32: return outer_products_of<float>(o);
    case RAGLANE_FLOAT64: return outer_products_of<double>(o);
    case RAGLANE_BFLOAT16: return outer_products_of<bfloat16>(o);
  }
  return RAGLANE_BAD_ARGUMENT;
}
#endif

}  // namespace raglane::RAGLANE_TARGET
