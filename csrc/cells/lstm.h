// Long short-term memory: c' = f c + i g, h' = o tanh(c'). See src/raglane/cells/lstm.py.
#pragma once

#include "cells/matrix.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Lstm {
  using V = Vec<A>;
  static constexpr int gates = 4, slots = 4, saved = 4;  // i, f, g, o
  static constexpr bool has_c = true, projects = true;
  static constexpr int unit_vectors = 1;
  static constexpr bool whole_rows = true;
  static constexpr int hidden_slot(int gate) { return gate; }
  static constexpr bool only_input(int /*slot*/) { return false; }

  static constexpr bool ends_in_tanh = true;

  template <int ROWS>
  static RAGLANE_INLINE void open(const V (*a)[slots], V* c, V (*save)[saved + 1], V* last) {
    V gate[4 * ROWS];  // i, f, o, g
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
      gate[i] = a[i][0], gate[ROWS + i] = a[i][1], gate[2 * ROWS + i] = a[i][3], gate[3 * ROWS + i] = a[i][2];
    squash<A, 3 * ROWS, ROWS>(gate);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      save[i][0] = gate[i], save[i][1] = gate[ROWS + i];
      save[i][2] = gate[3 * ROWS + i], save[i][3] = gate[2 * ROWS + i];
      last[i] = c[i] = fma(gate[ROWS + i], c[i], gate[i] * gate[3 * ROWS + i]);
    }
  }
  static RAGLANE_INLINE V close(V last, V /*h*/, V* save) { return save[3] * last; }

  // dc: the gradient of c after this step, then before it.
  static RAGLANE_INLINE V backward(const V* save, V /*output*/, V /*h*/, V c_before, V c, V dh, V& dc, V* da) {
    V i = save[0], f = save[1], g = save[2], o = save[3];
    V one = splat<V>((A)1);
    V t = tanh<A>(c);
    V d = fma(dh * o, fnma(t, t, one), dc);
    da[0] = d * g * i * (one - i);
    da[1] = d * c_before * f * (one - f);
    da[2] = d * i * fnma(g, g, one);
    da[3] = dh * t * o * (one - o);
    dc = d * f;
    return V{};
  }

  static RAGLANE_INLINE V unprojected(const V* save, V c) { return save[3] * tanh<A>(c); }
};

}  // namespace raglane::RAGLANE_TARGET
