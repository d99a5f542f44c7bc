// Minimal gated recurrent unit: z = sigmoid(a_z), h' = h + z (n - h). See src/raglane/cells/mingru.py.
#pragma once

#include "cells/elementwise.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct MinGru {
  using V = Vec<A>;
  static constexpr int gates = 2, slots = 2, saved = 2, recurrent = 0;  // z, n
  static constexpr bool has_c = false, skips = false, whole_rows = true;
  static constexpr int unit_vectors = 2;
  static constexpr int first_bias = 0, biases = 2;

  template <int N> static RAGLANE_INLINE void forward(V* a, const V* /*u*/, const V* /*x*/, V* h, V* y) {
    V *z = a, *n = a + N;
    squash<A, N, 0>(z);
    RAGLANE_EACH y[i] = h[i] = fma(z[i], n[i] - h[i], h[i]);
  }

  template <int N> static RAGLANE_INLINE void backward(const Walked<V>& w, V* a, V* d, V* /*du*/) {
    V *z = a, *n = a + N;
    RAGLANE_EACH {
      V dn = d[i] * z[i];
      z[i] = dn * (n[i] - w.before[i]) * ((A)1 - z[i]);
      n[i] = dn;
      d[i] = d[i] - dn;
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
