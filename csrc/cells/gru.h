// Gated recurrent unit, reset after the product: n = tanh(a_n + r b), h' = n + z (h - n), with b = W_hn h + b_hn.
// See src/raglane/cells/gru.py.
#pragma once

#include "cells/matrix.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Gru {
  using V = Vec<A>;
  // The reset gate comes between the candidate's two products, so each has its slot: r, z, a_n, b.
  static constexpr int gates = 3, slots = 4, saved = 4;
  static constexpr bool has_c = false, projects = false;
  static constexpr int unit_vectors = 1;
  static constexpr bool whole_rows = true;
  static constexpr int hidden_slot(int gate) { return gate < 2 ? gate : 3; }
  static constexpr bool only_input(int slot) { return slot == 2; }

  static constexpr bool ends_in_tanh = true;

  template <int ROWS>
  static RAGLANE_INLINE void open(const V (*a)[slots], V* /*c*/, V (*save)[saved + 1], V* last) {
    V gate[2 * ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) gate[i] = a[i][0], gate[ROWS + i] = a[i][1];
    squash<A, 2 * ROWS, 0>(gate);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      save[i][0] = gate[i], save[i][1] = gate[ROWS + i], save[i][3] = a[i][3];
      last[i] = fma(gate[i], a[i][3], a[i][2]);
    }
  }
  static RAGLANE_INLINE V close(V n, V h, V* save) {
    save[2] = n;
    return fma(save[1], h - n, n);
  }

  // Returns the gradient of the previous h that does not pass the products: z * dh.
  static RAGLANE_INLINE V backward(const V* save, V /*output*/, V h, V /*c_before*/, V /*c*/, V dh, V& /*dc*/, V* da) {
    V r = save[0], z = save[1], n = save[2], b = save[3];
    V one = splat<V>((A)1);
    V dn = dh * (one - z) * fnma(n, n, one);
    da[0] = dn * b * r * (one - r);
    da[1] = dh * (h - n) * z * (one - z);
    da[2] = dn;
    da[3] = dn * r;
    return dh * z;
  }
};

}  // namespace raglane::RAGLANE_TARGET
