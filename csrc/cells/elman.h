// Elman's network: h' = tanh(a) or relu(a), a = W_ih x + b_ih + W_hh h + b_hh. See src/raglane/cells/elman.py.
#pragma once

#include "cells/matrix.h"

namespace raglane::RAGLANE_TARGET {

template <class A, bool RELU> struct Elman {
  using V = Vec<A>;
  static constexpr int gates = 1, slots = 1, saved = 0;
  static constexpr bool has_c = false, projects = false;
  static constexpr int unit_vectors = 4;  // a single gate would leave most registers unused
  static constexpr bool whole_rows = false;  // products may be in the output, which has no room for whole vectors
  static constexpr int hidden_slot(int gate) { return gate; }
  static constexpr bool only_input(int /*slot*/) { return false; }

  static constexpr bool ends_in_tanh = !RELU;

  template <int ROWS>
  static RAGLANE_INLINE void open(const V (*a)[slots], V* /*c*/, V (*/*save*/)[saved + 1], V* last) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) last[i] = RELU ? (a[i][0] < (A)0 ? V{} : a[i][0]) : a[i][0];  // NaN stays
  }
  static RAGLANE_INLINE V close(V last, V /*h*/, V* /*save*/) { return last; }

  static RAGLANE_INLINE V backward(const V* /*save*/, V output, V /*h*/, V /*c_before*/, V /*c*/, V dh, V& /*dc*/,
                                   V* da) {
    if constexpr (RELU) da[0] = output > (A)0 ? dh : V{};
    else da[0] = dh * fnma(output, output, splat<V>((A)1));
    return V{};
  }
};

template <class A> using RnnTanh = Elman<A, false>;
template <class A> using RnnRelu = Elman<A, true>;

}  // namespace raglane::RAGLANE_TARGET
