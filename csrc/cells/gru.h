// Gated recurrent unit, reset after the product: n = tanh(a_n + r b), h' = n + z (h - n), with b = W_hn h + b_hn.
// See src/raglane/cells/gru.py.
#pragma once

#include "../activations.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Gru {
  using V = Vec<A>;
  // The candidate's two products meet only after the reset gate, so they have a slot each: r, z, a_n, b.
  static constexpr int gates = 3, slots = 4, saved = 4;
  static constexpr bool has_c = false;
  static constexpr int unit_vectors = 1;
  static constexpr int hidden_slot(int gate) { return gate < 2 ? gate : 3; }

  static RAGLANE_INLINE V forward(const V* a, V h, V& /*c*/, V* save) {
    V r = sigmoid<A>(a[0]), z = sigmoid<A>(a[1]);
    V n = tanh<A>(fma(r, a[3], a[2]));
    save[0] = r, save[1] = z, save[2] = n, save[3] = a[3];
    return fma(z, h - n, n);
  }

  // Returns what reaches h before the step past all products: z * dh.
  static RAGLANE_INLINE V backward(const V* save, V /*output*/, V h, V /*c_before*/, V /*c*/, V dh, V& /*dc*/, V* da) {
    V r = save[0], z = save[1], n = save[2], b = save[3];
    V one = splat<V>((A)1);
    V dn = dh * (one - z) * fma(-n, n, one);
    da[0] = dn * b * r * (one - r);
    da[1] = dh * (h - n) * z * (one - z);
    da[2] = dn;
    da[3] = dn * r;
    return dh * z;
  }

  static RAGLANE_INLINE V unprojected(const V* /*save*/, V /*c*/) { return V{}; }
};

}  // namespace raglane::RAGLANE_TARGET
