// Minimal LSTM: keep = f / (f + i) with f, i = sigmoid(a_f), sigmoid(a_i), h' = n + keep (h - n).
// See src/raglane/cells/minlstm.py.
#pragma once

#include "cells/elementwise.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct MinLstm {
  using V = Vec<A>;
  static constexpr int gates = 3, slots = 3, saved = 3, recurrent = 0;  // the arguments of f and i, and n
  static constexpr bool has_c = false, skips = false, whole_rows = true;
  static constexpr int unit_vectors = 1;
  static constexpr int first_bias = 0, biases = 3;

  // NOTE (both gates closed): f / (f + i) = (1 + e^-i) / ((1 + e^-i) + (1 + e^-f)) of the arguments. With all terms
  // times e^s, s = min(f, i, 0), no exponent is above 0 and one of e^s, e^(s-f), e^(s-i) is e^0. So nothing overflows,
  // and the denominator 2 e^s + e^(s-i) + e^(s-f) is in [1, 4]: at least 2 if s is 0, else at least 1.
  // A lower bound keeps s finite, so that s - f is a number.
  template <int N> struct Shares {
    V e[3 * N];  // e^s, e^(s-f), e^(s-i)
    V sum[N];

    RAGLANE_INLINE Shares(const V* f, const V* i_) {
      RAGLANE_EACH {
        V a = at_least(-least, f[i]), b = at_least(-least, i_[i]);
        V s = a < b ? a : b;
        s = s < (A)0 ? s : V{};
        e[i] = s, e[N + i] = s - a, e[2 * N + i] = s - b;
      }
      exp<A, 3 * N>(e);
      RAGLANE_EACH sum[i] = kept(i) + passed(i);
    }
    // Times the sum: keep, and 1 - keep.
    RAGLANE_INLINE V kept(int i) const { return e[i] + e[2 * N + i]; }
    RAGLANE_INLINE V passed(int i) const { return e[i] + e[N + i]; }
    static constexpr A least = (A)1e30;
  };

  template <int N> static RAGLANE_INLINE void forward(V* a, const V* /*u*/, const V* /*x*/, V* h, V* y) {
    const V* n = a + 2 * N;
    Shares<N> shares(a, a + N);
    V keep[N];
    RAGLANE_EACH keep[i] = shares.kept(i);
    quotient<N>(keep, shares.sum);
    RAGLANE_EACH y[i] = h[i] = fma(keep[i], h[i] - n[i], n[i]);
  }

  // d keep / d f = keep (1 - f) (1 - keep) = keep e^(s-f) / sum, and alike for i with the other sign.
  template <int N> static RAGLANE_INLINE void backward(const Walked<V>& w, V* a, V* d, V* /*du*/) {
    V *f = a, *i_ = a + N, *n = a + 2 * N;
    Shares<N> shares(f, i_);
    V share[N];
    RAGLANE_EACH share[i] = splat<V>((A)1);
    quotient<N>(share, shares.sum);
    RAGLANE_EACH {
      V keep = shares.kept(i) * share[i], pass = shares.passed(i) * share[i];
      V d_keep = d[i] * (w.before[i] - n[i]) * share[i];
      f[i] = d_keep * keep * shares.e[N + i];
      i_[i] = -(d_keep * pass * shares.e[2 * N + i]);
      n[i] = d[i] * pass;
      d[i] = d[i] * keep;
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
