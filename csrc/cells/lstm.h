// Long short-term memory: c' = f c + i g, h' = o tanh(c'). See src/raglane/cells/lstm.py.
#pragma once

#include "../activations.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Lstm {
  using V = Vec<A>;
  static constexpr int gates = 4, slots = 4, saved = 4;  // i, f, g, o
  static constexpr bool has_c = true;
  static constexpr int unit_vectors = 1;
  static constexpr int hidden_slot(int gate) { return gate; }

  static RAGLANE_INLINE V forward(const V* a, V /*h*/, V& c, V* save) {
    V i = sigmoid<A>(a[0]), f = sigmoid<A>(a[1]), g = tanh<A>(a[2]), o = sigmoid<A>(a[3]);
    save[0] = i, save[1] = f, save[2] = g, save[3] = o;
    c = fma(f, c, i * g);
    return o * tanh<A>(c);
  }

  // dc comes in as the gradient of c after this step, and leaves as that of c before it.
  static RAGLANE_INLINE V backward(const V* save, V /*output*/, V /*h*/, V c_before, V c, V dh, V& dc, V* da) {
    V i = save[0], f = save[1], g = save[2], o = save[3];
    V one = splat<V>((A)1);
    V t = tanh<A>(c);
    V d = fma(dh * o, fma(-t, t, one), dc);
    da[0] = d * g * i * (one - i);
    da[1] = d * c_before * f * (one - f);
    da[2] = d * i * fma(-g, g, one);
    da[3] = dh * t * o * (one - o);
    dc = d * f;
    return V{};
  }

  static RAGLANE_INLINE V unprojected(const V* save, V c) { return save[3] * tanh<A>(c); }
};

}  // namespace raglane::RAGLANE_TARGET
