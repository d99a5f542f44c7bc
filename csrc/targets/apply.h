// The functions of the cells on arrays.
#pragma once

#include "abi/raglane.h"
#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

template <class A> void apply_to(int64_t function, const A* in, const A* factor, A* out, int64_t count) {
  for (int64_t i = 0; i < count; i += Lanes<A>::width) {
    int here = (int)(count - i < Lanes<A>::width ? count - i : Lanes<A>::width);
    Vec<A> x = load(in + i, here);
    switch (function) {
      case RAGLANE_EXP: exp<A, 1>(&x); break;
      case RAGLANE_TANH: x = tanh<A>(x); break;
      case RAGLANE_SIGMOID: x = sigmoid<A>(x); break;
      case RAGLANE_EXPM1: expm1<A, 1>(&x); break;
      case RAGLANE_LOG: x = log<A>(x); break;
      case RAGLANE_LOG1P: x = log1p<A>(x); break;
      case RAGLANE_ERF: x = erf<A>(x); break;
      case RAGLANE_SQRT: x = square_root(x); break;
      case RAGLANE_SOFTPLUS: x = softplus<A>(x); break;
      case RAGLANE_GELU: x = gelu<A>(x); break;
      default: x = silu<A>(x);
    }
    store(out + i, factor ? x * load(factor + i, here) : x, here);
  }
}

inline void apply(int64_t dtype, int64_t function, const void* in, const void* factor, void* out, int64_t count) {
  if (dtype == RAGLANE_FLOAT64)
    return apply_to<double>(function, (const double*)in, (const double*)factor, (double*)out, count);
  apply_to<float>(function, (const float*)in, (const float*)factor, (float*)out, count);
}

}  // namespace raglane::RAGLANE_TARGET
