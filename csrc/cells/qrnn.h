// Pooling of a quasi-recurrent network: c' = n + f (c - n), h' = o c'. See src/raglane/cells/qrnn.py.
#pragma once

#include "cells/elementwise.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Qrnn {
  using V = Vec<A>;
  static constexpr int gates = 3, slots = 3, saved = 3, recurrent = 0;  // n, f, o
  static constexpr bool has_c = true, skips = false, whole_rows = true;
  static constexpr int unit_vectors = 1;
  static constexpr int first_bias = 0, biases = 3;

  template <int N> static RAGLANE_INLINE void forward(V* a, const V* /*u*/, const V* /*x*/, V* c, V* y) {
    V gate[3 * N];  // f, o, n
    V *f = gate, *o = gate + N, *n = gate + 2 * N;
    RAGLANE_EACH f[i] = a[N + i], o[i] = a[2 * N + i], n[i] = a[i];
    squash<A, 2 * N, N>(gate);
    RAGLANE_EACH {
      a[i] = n[i], a[N + i] = f[i], a[2 * N + i] = o[i];
      c[i] = fma(f[i], c[i] - n[i], n[i]);
      y[i] = o[i] * c[i];
    }
  }

  template <int N> static RAGLANE_INLINE void backward(const Walked<V>& w, V* a, V* d, V* /*du*/) {
    V *n = a, *f = a + N, *o = a + 2 * N, one = splat<V>((A)1);
    RAGLANE_EACH {
      V dc = fma(w.dy[i], o[i], d[i]), d_kept = dc * f[i];
      o[i] = w.dy[i] * w.after[i] * o[i] * (one - o[i]);
      f[i] = d_kept * (w.before[i] - n[i]) * (one - f[i]);
      n[i] = (dc - d_kept) * fnma(n[i], n[i], one);
      d[i] = d_kept;
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
