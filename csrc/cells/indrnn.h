// Independently recurrent network: h' = tanh(a) or relu(a), a = W x + b + u h. See src/raglane/cells/indrnn.py.
#pragma once

#include "cells/elementwise.h"

namespace raglane::RAGLANE_TARGET {

template <class A, bool RELU> struct IndRnn {
  using V = Vec<A>;
  static constexpr int gates = 1, slots = 1, saved = 0, recurrent = 1;
  static constexpr bool has_c = false, skips = false, whole_rows = true;
  static constexpr int unit_vectors = 4;
  static constexpr int first_bias = 0, biases = 1;

  template <int N> static RAGLANE_INLINE void forward(V* a, const V* u, const V* /*x*/, V* h, V* y) {
    RAGLANE_EACH a[i] = fma(u[i], h[i], a[i]);
    if constexpr (!RELU) squash<A, 0, N>(a);
    RAGLANE_EACH y[i] = h[i] = RELU ? (a[i] < (A)0 ? V{} : a[i]) : a[i];  // NaN stays
  }

  template <int N> static RAGLANE_INLINE void backward(const Walked<V>& w, V* a, V* d, V* du) {
    RAGLANE_EACH {
      if constexpr (RELU) a[i] = w.y[i] > (A)0 ? d[i] : V{};
      else a[i] = d[i] * fnma(w.y[i], w.y[i], splat<V>((A)1));
      du[i] = a[i] * w.before[i];
      d[i] = a[i] * w.u[i];
    }
  }
};

template <class A> using IndRnnTanh = IndRnn<A, false>;
template <class A> using IndRnnRelu = IndRnn<A, true>;

}  // namespace raglane::RAGLANE_TARGET
