// exp, tanh and sigmoid on a vector: in float at most 4 ulp from the true value, over the whole range.
//
// The way of all three: x = n * ln 2 + r with |r| <= ln 2 / 2, and exp(r) - 1 by a polynomial. tanh is built on
// exp - 1, which keeps its accuracy near zero; sigmoid on exp(-|x|), which never overflows and reaches down into the
// denormal numbers. NaN goes through all three.
#pragma once

#include "simd.h"

namespace raglane::RAGLANE_TARGET {

template <class A> struct Reduction;
template <> struct Reduction<float> {
  static constexpr float magic = 0x1.8p23f;  // added and subtracted, it rounds to an integer
  static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
  static constexpr float lowest = -105.0f, highest = 89.5f;  // exp is 0 below, inf above
  static constexpr float tanh_end = 10.0f;                   // tanh is 1 above
  static constexpr int bias = 127, mantissa = 23;
  // (exp(r) - 1 - r) / r^2, fitted on |r| <= 1.01 ln 2 / 2 to a quarter of an ulp of exp(r)
  static constexpr int terms = 5;
  static constexpr float polynomial[terms] = {0x1p-1f, 0x1.5554a8p-3f, 0x1.55547ep-5f, 0x1.122d8ep-7f, 0x1.6da0cp-10f};
};
template <> struct Reduction<double> {
  static constexpr double magic = 0x1.8p52;
  static constexpr double ln2_high = 0x1.62e42fefap-1, ln2_low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double lowest = -746.0, highest = 710.5;
  static constexpr double tanh_end = 20.0;
  static constexpr int bias = 1023, mantissa = 52;
  static constexpr int terms = 12;  // Taylor's: the first term left out is 4e-18 of the sum
  static constexpr double polynomial[terms] = {
      1.0 / 2,     1.0 / 6,      1.0 / 24,      1.0 / 120,      1.0 / 720,        1.0 / 5040,
      1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
};

template <class A> struct Split {
  typename Lanes<A>::integer n;
  Vec<A> tail;  // exp(r) - 1
};

// exp(x) = 2^n * (1 + tail) for x between lowest and highest.
template <class A> RAGLANE_INLINE Split<A> split(Vec<A> x) {
  using V = Vec<A>;
  using I = typename Lanes<A>::integer;
  using R = Reduction<A>;
  V shifted = fma(x, splat<V>((A)1.44269504088896340736), splat<V>(R::magic));
  I n = (I)shifted - (I)splat<V>(R::magic);
  V rounded = shifted - R::magic;
  V r = fma(rounded, splat<V>(-R::ln2_high), x);
  r = fma(rounded, splat<V>(-R::ln2_low), r);
  V p = splat<V>(R::polynomial[R::terms - 1]);
#pragma GCC unroll 16
  for (int i = R::terms - 2; i >= 0; i--) p = fma(p, r, splat<V>(R::polynomial[i]));
  return {n, fma(r * r, p, r)};
}

// 2^n for n in the range of normal numbers.
template <class A> RAGLANE_INLINE Vec<A> power_of_two(typename Lanes<A>::integer n) {
  return (Vec<A>)((n + Reduction<A>::bias) << Reduction<A>::mantissa);
}

template <class A> RAGLANE_INLINE Vec<A> scale(Split<A> s) {
#if RAGLANE_LEVEL == 3
  if constexpr (sizeof(A) == 4)
    return (Vec<A>)_mm512_scalef_ps((__m512)(s.tail + 1.0f), _mm512_cvtepi32_ps((__m512i)s.n));
#endif
  auto half = s.n >> 1;  // 2^n alone may be no normal number; the second product rounds into the denormals
  return (s.tail + (A)1) * power_of_two<A>(half) * power_of_two<A>(s.n - half);
}

template <class A> RAGLANE_INLINE Vec<A> exp(Vec<A> x) {
  using V = Vec<A>;
  using R = Reduction<A>;
  x = x < R::lowest ? splat<V>(R::lowest) : x;  // NaN compares false and stays
  x = x > R::highest ? splat<V>(R::highest) : x;
  return scale<A>(split<A>(x));
}

// The sign bit of every entry, and all others.
template <class A> RAGLANE_INLINE typename Lanes<A>::integer sign_bit() {
  return (typename Lanes<A>::integer){} + (sizeof(A) == 4 ? INT32_MIN : INT64_MIN);
}
template <class A> RAGLANE_INLINE Vec<A> magnitude(Vec<A> x) {
  using I = typename Lanes<A>::integer;
  return (Vec<A>)((I)x & ~sign_bit<A>());
}

template <class A> RAGLANE_INLINE Vec<A> sigmoid(Vec<A> x) {
  using R = Reduction<A>;
  using V = Vec<A>;
  V y = -magnitude<A>(x);
  y = y < R::lowest ? splat<V>(R::lowest) : y;
  V e = scale<A>(split<A>(y));
  return quotient(x < (A)0 ? e : splat<V>((A)1), e + (A)1);
}

template <class A> RAGLANE_INLINE Vec<A> tanh(Vec<A> x) {
  using R = Reduction<A>;
  using V = Vec<A>;
  using I = typename Lanes<A>::integer;
  V y = magnitude<A>(x);
  y = y > R::tanh_end ? splat<V>(R::tanh_end) : y;
  Split<A> s = split<A>(y * (A)-2);
  V power = power_of_two<A>(s.n);
  V less_one = fma(power, s.tail, power - (A)1);  // exp(-2 |x|) - 1
  V t = quotient(-less_one, less_one + (A)2);
  return (V)((I)t | ((I)x & sign_bit<A>()));
}

}  // namespace raglane::RAGLANE_TARGET
