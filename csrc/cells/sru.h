// Simple recurrent unit: f = sigmoid(a_f + v_f c), r = sigmoid(a_r + v_r c), c' = n + f (c - n), h' = x + r (c' - x).
// See src/raglane/cells/sru.py. x is the input itself, or a fourth product if the sizes differ.
#pragma once

#include "cells/elementwise.h"

namespace raglane::RAGLANE_TARGET {

template <class A, bool PROJECTS = false> struct Sru {
  using V = Vec<A>;
  using projected = Sru<A, true>;
  static constexpr int gates = PROJECTS ? 4 : 3, slots = gates, saved = gates, recurrent = 2;  // n, f, r, x
  static constexpr bool has_c = true, skips = !PROJECTS, whole_rows = true;
  static constexpr int unit_vectors = 1;
  static constexpr int first_bias = 1, biases = 2;

  template <int N> static RAGLANE_INLINE void forward(V* a, const V* u, const V* x, V* c, V* y) {
    V *n = a, *f = a + N, *r = a + 2 * N;
    if (PROJECTS) x = a + 3 * N;
    RAGLANE_EACH f[i] = fma(u[i], c[i], f[i]);
    RAGLANE_EACH r[i] = fma(u[N + i], c[i], r[i]);
    squash<A, 2 * N, 0>(f);
    RAGLANE_EACH {
      c[i] = fma(f[i], c[i] - n[i], n[i]);
      y[i] = fma(r[i], c[i] - x[i], x[i]);
    }
  }

  template <int N> static RAGLANE_INLINE void backward(const Walked<V>& w, V* a, V* d, V* du) {
    V *n = a, *f = a + N, *r = a + 2 * N, one = splat<V>((A)1);
    const V* x = PROJECTS ? a + 3 * N : w.x;
    RAGLANE_EACH {
      V d_read = w.dy[i] * r[i], dc = d[i] + d_read, d_kept = dc * f[i];
      r[i] = d_read * (w.after[i] - x[i]) * (one - r[i]);
      f[i] = d_kept * (w.before[i] - n[i]) * (one - f[i]);
      n[i] = dc - d_kept;
      V dx = w.dy[i] - d_read;
      if constexpr (PROJECTS) a[3 * N + i] = dx;
      else w.dx[i] = dx;
      du[i] = f[i] * w.before[i];
      du[N + i] = r[i] * w.before[i];
      d[i] = fma(f[i], w.u[i], fma(r[i], w.u[N + i], d_kept));
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
