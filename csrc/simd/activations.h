// exp, expm1, tanh, sigmoid, log, log1p, softplus and erf on a vector: in float at most 4 ulp from the true value, over the
// whole range.
//
// The first four use x = n * ln 2 + r with |r| <= ln 2 / 2, and exp(r) - 1 by a polynomial. tanh uses
// exp - 1, which is accurate near zero; sigmoid uses exp(-|x|), which never overflows and includes
// denormal numbers. NaN gives NaN.
#pragma once

#include "simd/simd.h"

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

// All functions interleave the steps of N vectors: each is one long chain of operations, and
// the processor's window is too small to overlap it with the next.
template <class A, int N> struct Split {
  Vec<A> shifted[N];  // magic + n: its lowest bits are the integer n
  Vec<A> n[N];
  Vec<A> tail[N];  // exp(r) - 1

  RAGLANE_INLINE typename Lanes<A>::integer integer(int i) const {
    using I = typename Lanes<A>::integer;
    return (I)shifted[i] - (I)splat<Vec<A>>(Reduction<A>::magic);
  }
};

// exp(x) = 2^n * (1 + tail) for x between lowest and highest.
template <class A, int N> RAGLANE_INLINE Split<A, N> split(const Vec<A>* x) {
  using V = Vec<A>;
  using R = Reduction<A>;
  Split<A, N> s;
  V r[N], p[N];
  RAGLANE_EACH s.shifted[i] = fma(x[i], splat<V>((A)1.44269504088896340736), splat<V>(R::magic));
  RAGLANE_EACH s.n[i] = s.shifted[i] - R::magic;
  RAGLANE_EACH r[i] = fma(s.n[i], splat<V>(-R::ln2_high), x[i]);
  RAGLANE_EACH r[i] = fma(s.n[i], splat<V>(-R::ln2_low), r[i]);
  RAGLANE_EACH p[i] = splat<V>(R::polynomial[R::terms - 1]);
#pragma GCC unroll 16
  for (int term = R::terms - 2; term >= 0; term--)
    RAGLANE_EACH p[i] = fma(p[i], r[i], splat<V>(R::polynomial[term]));
  RAGLANE_EACH s.tail[i] = fma(r[i] * r[i], p[i], r[i]);
  return s;
}

// 2^n for n in the range of normal numbers.
template <class A> RAGLANE_INLINE Vec<A> power_of_two(typename Lanes<A>::integer n) {
  return (Vec<A>)((n + Reduction<A>::bias) << Reduction<A>::mantissa);
}

// x * 2^n, n as numbers of x's type and as integers. 2^n may not be a normal number; the second product rounds.
template <class V, class I> RAGLANE_INLINE V times_power_of_two(V x, V, I n) {
  using A = decltype(x[0] + x[0]);
  I half = n >> 1;
  return x * power_of_two<A>(half) * power_of_two<A>(n - half);
}

// exp(x), including denormal results.
template <class A, int N> RAGLANE_INLINE Vec<A> whole(const Split<A, N>& s, int i) {
  return times_power_of_two(s.tail[i] + (A)1, s.n[i], s.integer(i));
}

template <class A, int N> RAGLANE_INLINE void exp(Vec<A>* x) {
  using R = Reduction<A>;
  RAGLANE_EACH x[i] = at_most(R::highest, at_least(R::lowest, x[i]));
  Split<A, N> s = split<A, N>(x);
  RAGLANE_EACH x[i] = whole(s, i);
}

// first * 2^n for a normal result: the low bits of `shifted` are added to the exponent.
template <class A, int N> RAGLANE_INLINE Vec<A> raised(A first, const Split<A, N>& s, int i) {
  using I = typename Lanes<A>::integer;
  return (Vec<A>)((I)splat<Vec<A>>(first) + ((I)s.shifted[i] << Reduction<A>::mantissa));
}

// exp(x) for x <= 0, including denormal results: as a normal number, whose product with a constant rounds.
template <class A, int N> RAGLANE_INLINE Vec<A> at_most_one(const Split<A, N>& s, int i) {
  if constexpr (vector_bytes == 64 && sizeof(A) == 4) return whole(s, i);  // an instruction of AVX-512
  constexpr A large = sizeof(A) == 4 ? 0x1p64 : 0x1p512;
  Vec<A> power = raised(large, s, i);
  return fma(s.tail[i], power, power) * (1 / large);
}

// The sign bit of every entry.
template <class A> RAGLANE_INLINE typename Lanes<A>::integer sign_bit() {
  return (typename Lanes<A>::integer){} + (sizeof(A) == 4 ? INT32_MIN : INT64_MIN);
}
// -|x|
template <class A> RAGLANE_INLINE Vec<A> below_zero(Vec<A> x) {
  using I = typename Lanes<A>::integer;
  return (Vec<A>)((I)x | sign_bit<A>());
}

#if defined(RAGLANE_ROUGH)
// The same as squash() below within 2^-13, for sets that compute only bfloat16, whose numbers have 2^-9: fewer terms, and
// the reciprocal as the processor estimates it.
template <int SIGMOIDS, int TANHS> RAGLANE_INLINE void squash_roughly(F* x) {
  constexpr int N = SIGMOIDS + TANHS;
  constexpr float log2e = 1.44269504f;
  // 2^f for f from 0 to 1, and (2^f - 1) / f for f from -1/2 to 1/2, fitted for the least relative error.
  constexpr float power[] = {0x1.00002cp+0f, 0x1.62d166p-1f, 0x1.ee798ap-3f, 0x1.aa13f4p-5f, 0x1.bb7cd0p-7f};
  constexpr float less_one[] = {0x1.62e2d6p-1f, 0x1.ebff06p-3f, 0x1.c96b4ap-5f, 0x1.3b2aaap-7f};
  F f[N], y[N];
  RAGLANE_EACH y[i] = i < SIGMOIDS ? x[i] * -log2e : at_most(9.0f, at_least(-9.0f, x[i])) * (-2 * log2e);
  RAGLANE_EACH f[i] = i < SIGMOIDS ? (F)_mm512_reduce_ps((__m512)y[i], 0x09) : (F)_mm512_reduce_ps((__m512)y[i], 0x08);
  F p[N];
  RAGLANE_EACH p[i] = splat<F>(i < SIGMOIDS ? power[4] : less_one[3]);
#pragma GCC unroll 8
  for (int term = 3; term >= 1; term--)
    RAGLANE_EACH p[i] = fma(p[i], f[i], splat<F>(i < SIGMOIDS ? power[term] : less_one[term - 1]));
  // exp(-x) + 1; exp(-2 x) - 1 and exp(-2 x) + 1, the former exact near zero.
  RAGLANE_EACH p[i] = i < SIGMOIDS ? fma(p[i], f[i], splat<F>(power[0])) : p[i] * f[i];
  RAGLANE_EACH y[i] = (F)_mm512_scalef_ps(i < SIGMOIDS ? (__m512)p[i] : _mm512_set1_ps(1), (__m512)(i < SIGMOIDS ? y[i] : y[i] - f[i]));
  RAGLANE_EACH p[i] = i < SIGMOIDS ? p[i] : fnma(y[i], p[i], 1.0f - y[i]);
  RAGLANE_EACH y[i] = i < SIGMOIDS ? y[i] + 1.0f : 2.0f - p[i];
  RAGLANE_EACH y[i] = (F)_mm512_rcp14_ps((__m512)y[i]);
  RAGLANE_EACH x[i] = i < SIGMOIDS ? y[i] : p[i] * y[i];
}
#endif

// x[i] = sigmoid(x[i]) for the first SIGMOIDS, tanh(x[i]) for the TANHS after them: they share most of the work.
template <class A, int SIGMOIDS, int TANHS> RAGLANE_INLINE void squash(Vec<A>* x) {
#if defined(RAGLANE_ROUGH)
  if constexpr (sizeof(A) == 4) return squash_roughly<SIGMOIDS, TANHS>(x);
#endif
  using R = Reduction<A>;
  using V = Vec<A>;
  using I = typename Lanes<A>::integer;
  constexpr int N = SIGMOIDS + TANHS;
  V y[N], t[N];
  RAGLANE_EACH y[i] = i < SIGMOIDS ? at_least(R::lowest, below_zero<A>(x[i]))
                                   : at_least(-R::tanh_end, below_zero<A>(x[i])) * (A)2;
  Split<A, N> s = split<A, N>(y);
  RAGLANE_EACH y[i] = i < SIGMOIDS ? at_most_one(s, i) : raised((A)1, s, i);
  // exp(-|x|) or 1 over exp(-|x|) + 1; 1 - exp(-2 |x|) over exp(-2 |x|) + 1, which is tanh(|x|)
  RAGLANE_EACH t[i] = i >= SIGMOIDS ? fnma(y[i], s.tail[i], (A)1 - y[i]) : (I)x[i] < 0 ? y[i] : splat<V>((A)1);
  RAGLANE_EACH y[i] = i < SIGMOIDS ? y[i] + (A)1 : (A)2 - t[i];
  quotient<N>(t, y);
  RAGLANE_EACH x[i] = i < SIGMOIDS ? t[i] : (V)((I)t[i] | ((I)x[i] & sign_bit<A>()));
}

template <class A> RAGLANE_INLINE Vec<A> sigmoid(Vec<A> x) {
  squash<A, 1, 0>(&x);
  return x;
}
template <class A> RAGLANE_INLINE Vec<A> tanh(Vec<A> x) {
  squash<A, 0, 1>(&x);
  return x;
}

template <class A> RAGLANE_INLINE Vec<A> silu(Vec<A> x) { return x * sigmoid<A>(x); }
// The Gaussian error linear unit, by tanh.
template <class A> RAGLANE_INLINE Vec<A> gelu(Vec<A> x) {
  const Vec<A> inner = (A)0.7978845608028654 * (x + (A)0.044715 * x * x * x);
  return (A)0.5 * x * ((A)1 + tanh<A>(inner));
}

// exp(x) - 1
template <class A, int N> RAGLANE_INLINE void expm1(Vec<A>* x) {
  using R = Reduction<A>;
  using V = Vec<A>;
  RAGLANE_EACH x[i] = at_most(R::highest, at_least((A)-40, x[i]));  // below that it is -1
  Split<A, N> s = split<A, N>(x);
  RAGLANE_EACH {
    V power = power_of_two<A>(s.integer(i));  // not finite for large n, where the 1 vanishes
    x[i] = s.n[i] > (A)60 ? whole(s, i) : fma(power, s.tail[i], power - (A)1);
  }
}

// ---- logarithms --------------------------------------------------------------------------------------------------

// x = 2^n * m with m between sqrt(1/2) and sqrt(2).
template <class A> struct Logarithm;
template <> struct Logarithm<float> {
  static constexpr int32_t root = 0x3f3504f3;  // the bits of sqrt(1/2)
  static constexpr float magic = 0x1.8p23f, smallest = 0x1p-126f, larger = 0x1p25f, by = 25;
  static constexpr float infinity = __builtin_inff();
  static constexpr int terms = 6;
};
template <> struct Logarithm<double> {
  static constexpr int64_t root = 0x3fe6a09e667f3bcd;
  static constexpr double magic = 0x1.8p52, smallest = 0x1p-1022, larger = 0x1p54, by = 54;
  static constexpr double infinity = __builtin_inf();
  static constexpr int terms = 12;
};

template <class A> struct Scaled {
  Vec<A> n, m;
};
template <class A> RAGLANE_INLINE Scaled<A> scaled(Vec<A> x) {
  using L = Logarithm<A>;
  using I = typename Lanes<A>::integer;
  using V = Vec<A>;
  V is_small = x < L::smallest ? splat<V>((A)1) : V{};
  x = is_small != (A)0 ? x * L::larger : x;
  I n = ((I)x - L::root) >> Reduction<A>::mantissa;
  V whole = (V)(n + (I)splat<V>(L::magic)) - L::magic;
  return {fma(is_small, splat<V>(-L::by), whole), (V)((I)x - (n << Reduction<A>::mantissa))};
}

// log(1 + f) for |f| < 0.42: 2 atanh(f / (2 + f)), by Taylor's polynomial; the first term left out is 1e-9 of the sum
// in float, 1e-18 in double.
template <class A> RAGLANE_INLINE Vec<A> log_near_one(Vec<A> f) {
  using V = Vec<A>;
  constexpr int terms = Logarithm<A>::terms;
  V twice = f / fma(f, splat<V>((A)0.5), splat<V>((A)1)), square = twice * twice * (A)0.25;
  V p = splat<V>((A)1 / (2 * terms + 1));
#pragma GCC unroll 16
  for (int term = terms - 1; term >= 1; term--) p = fma(p, square, splat<V>((A)1 / (2 * term + 1)));
  return fma(twice * square, p, twice);
}

// The same with n * ln 2 + rest added, and the values of a logarithm at the ends of its range.
template <class A> RAGLANE_INLINE Vec<A> log_from(Vec<A> x, Vec<A> f, Vec<A> n, Vec<A> rest) {
  using R = Reduction<A>;
  using V = Vec<A>;
  V low = fma(n, splat<V>(R::ln2_low), rest);
  V log = fma(n, splat<V>(R::ln2_high), log_near_one<A>(f) + low);
  log = x == (A)0 ? splat<V>(-Logarithm<A>::infinity) : log;
  log = x < (A)0 ? splat<V>((A)__builtin_nan("")) : log;
  return ((x == Logarithm<A>::infinity) | (x != x)) ? x : log;
}

template <class A> RAGLANE_INLINE Vec<A> log(Vec<A> x) {
  Scaled<A> s = scaled<A>(x);
  return log_from<A>(x, s.m - (A)1, s.n, Vec<A>{});
}

// log(1 + x): near zero x is its own f; otherwise the rounding error of 1 + x, divided by it, is added.
template <class A> RAGLANE_INLINE Vec<A> log1p(Vec<A> x) {
  using V = Vec<A>;
  V sum = x + (A)1, one = sum - x, lost = (x - (sum - one)) + ((A)1 - one);
  Scaled<A> s = scaled<A>(sum);
  V f = s.n == (A)0 ? x : s.m - (A)1;
  return log_from<A>(sum, f, s.n, s.n == (A)0 ? V{} : lost / sum);
}

// log(1 + exp(x)) = max(x, 0) + log(1 + u) for u = exp(-|x|), the latter in float as u times a polynomial that is
// fitted to 2^-27 on 0 to 1.
template <class A> RAGLANE_INLINE Vec<A> softplus(Vec<A> x) {
  using V = Vec<A>;
  V u = below_zero<A>(x);
  exp<A, 1>(&u);
  if constexpr (sizeof(A) == 8) return at_least((A)0, x) + log1p<A>(u);
  constexpr float polynomial[] = {
      0x1p+0f, -0x1.ffffbep-2f, 0x1.554c8p-2f, -0x1.ff0f88p-3f, 0x1.92f696p-3f,
      -0x1.39756p-3f, 0x1.b2535ap-4f, -0x1.d29ccp-5f, 0x1.453f04p-6f, -0x1.a93354p-9f};
  V p = splat<V>(polynomial[9]);
#pragma GCC unroll 16
  for (int term = 8; term >= 0; term--) p = fma(p, u, splat<V>(polynomial[term]));
  return fma(u, p, at_least((A)0, x));
}

// The rates of a scan's decays exp(d a). In float, where the processor has multiply-adds, a in units of log 2, in two parts whose
// sum is exact to 2^-48; otherwise a itself.
template <class A> inline constexpr bool has_units = sizeof(A) == 4 && vector_bytes >= 32;
template <class A> inline constexpr A rate_unit = has_units<A> ? 0.693147180559945309417 : 1.0;
template <class A> struct Rate {
  Vec<A> whole, rest;
};
template <class A> RAGLANE_INLINE Rate<A> rate_of(Vec<A> a) {
  if constexpr (!has_units<A>) return {a, a};
  const Vec<A> unit = splat<Vec<A>>((A)0x1.715476p+0), whole = a * unit;
  return {whole, fma(a, unit, -whole) + a * (A)0x1.4ae0cp-26};
}

// x[i] = exp(d[i] a) by its rate: 2^n 2^f, the latter by a polynomial on |f| <= 1/2. f has bounds, because beyond 2^22 it means
// nothing. AVX-512 takes any n; elsewhere decays below 2^-125 are 0, and the polynomial is twice 2^f, whose product with half
// the power does not overflow before the result.
template <class A, int N> RAGLANE_INLINE void decays(Vec<A>* x, const Vec<A>* d, const Rate<A>* rate) {
  using V = Vec<A>;
  if constexpr (!has_units<A>) {
    RAGLANE_EACH x[i] = d[i] * rate[i].whole;
    exp<A, N>(x);
  } else {
    constexpr bool scales = vector_bytes == 64;
    constexpr float magic = 0x1.8p23f + 126, first = scales ? 1 : 2;  // the low bits of magic + n are n + 126
    constexpr float polynomial[] = {0x1p+0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
    V shifted[N], n[N], p[N];
    RAGLANE_EACH shifted[i] = fma(d[i], rate[i].whole, splat<V>(magic));
    if constexpr (!scales) RAGLANE_EACH shifted[i] = at_most(magic + 129, at_least(magic - 126, shifted[i]));
    RAGLANE_EACH n[i] = shifted[i] - magic;
    RAGLANE_EACH x[i] = fma(d[i], rate[i].rest, fma(d[i], rate[i].whole, -n[i]));
    RAGLANE_EACH x[i] = within_one(x[i]);
    RAGLANE_EACH p[i] = splat<V>(first * polynomial[5]);
#pragma GCC unroll 16
    for (int term = 4; term >= 0; term--) RAGLANE_EACH p[i] = fma(p[i], x[i], splat<V>(first * polynomial[term]));
    if constexpr (scales) RAGLANE_EACH x[i] = times_power_of_two(p[i], n[i], I{});
    else RAGLANE_EACH x[i] = p[i] * (V)((I)shifted[i] << 23);
  }
}

// Rare in recurrences: number by number.
template <class A> RAGLANE_INLINE Vec<A> erf(Vec<A> x) {
  for (int i = 0; i < Lanes<A>::width; i++) {
    if constexpr (sizeof(A) == 4) x[i] = __builtin_erff(x[i]);
    else x[i] = __builtin_erf(x[i]);
  }
  return x;
}

}  // namespace raglane::RAGLANE_TARGET
