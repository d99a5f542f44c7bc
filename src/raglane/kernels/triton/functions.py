"""Functions that kernels call: exp, tanh, sigmoid, log and others, with the polynomials of the cpu
kernels.

In float32, at most a few roundings from the true value. NaN gives NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power_of_two(n):
    """2^n for whole numbers n of the range of normal numbers."""
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _split(x):
    """Return n and tail with exp(x) = 2^n * (1 + tail)."""
    n = tl.floor(x * 1.44269504088896340736 + 0.5)
    r = tl.fma(n, tl.full(n.shape, -0.693145751953125, tl.float32), x)
    r = tl.fma(n, tl.full(n.shape, -1.428606765330187e-06, tl.float32), r)
    p = r * 0.001394759863615036 + 0.008367246948182583
    p = p * r + 0.041666265577077866
    p = p * r + 0.16666537523269653
    p = p * r + 0.5
    return n, r * r * p + r


@triton.jit
def exp(x):
    """The exponential function, including denormal results."""
    x = tl.where(x < -105.0, -105.0, tl.where(x > 89.5, 89.5, x))
    n, tail = _split(x)
    half = tl.floor(n * 0.5)
    return (tail + 1.0) * _power_of_two(half) * _power_of_two(n - half)


@triton.jit
def expm1(x):
    """exp(x) - 1."""
    x = tl.where(x < -40.0, -40.0, tl.where(x > 89.5, 89.5, x))
    n, tail = _split(x)
    half = tl.floor(n * 0.5)
    whole = (tail + 1.0) * _power_of_two(half) * _power_of_two(n - half)
    power = _power_of_two(tl.where(n > 60.0, 0.0, n))
    return tl.where(n > 60.0, whole, power * tail + (power - 1.0))


@triton.jit
def div(a, b):
    """The quotient, rounded once."""
    a, b = tl.broadcast(a, b)
    return tl.div_rn(a, b)


@triton.jit
def reciprocal(x):
    """1 / x."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    return reciprocal(tl.sqrt_rn(x))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by exp(-|x|), which never overflows."""
    y = exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0.0, y, tl.full(x.shape, 1.0, tl.float32)), y + 1.0)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, by exp(-2 |x|) - 1."""
    y = -2.0 * tl.abs(x)
    n, tail = _split(tl.where(y < -20.0, -20.0, y))
    power = _power_of_two(n)
    t = power * tail + (power - 1.0)
    size = tl.div_rn(t, t + 2.0)
    return tl.where(x < 0.0, size, -size)


@triton.jit
def _log_near_one(f):
    """log(1 + f) for |f| < 0.42: 2 atanh(f / (2 + f))."""
    twice = tl.div_rn(f, f * 0.5 + 1.0)
    square = twice * twice * 0.25
    p = square * 0.07692307692307693 + 0.09090909090909091
    p = p * square + 0.1111111111111111
    p = p * square + 0.14285714285714285
    p = p * square + 0.2
    p = p * square + 0.3333333333333333
    return twice * square * p + twice


@triton.jit
def _scaled(x):
    """Return n and m with x = 2^n * m, and m between sqrt(1/2) and sqrt(2)."""
    is_small = x < 1.17549435e-38
    x = tl.where(is_small, x * 33554432.0, x)
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23
    m = (bits - (n << 23)).to(tl.float32, bitcast=True)
    return n.to(tl.float32) - tl.where(is_small, 25.0, 0.0), m


@triton.jit
def _log_from(x, f, n, rest):
    low = n * 1.428606765330187e-06 + rest
    log = n * 0.693145751953125 + (_log_near_one(f) + low)
    log = tl.where(x == 0.0, float("-inf"), log)
    log = tl.where(x < 0.0, float("nan"), log)
    return tl.where((x == float("inf")) | (x != x), x, log)


@triton.jit
def log(x):
    """The natural logarithm."""
    n, m = _scaled(x)
    return _log_from(x, m - 1.0, n, 0.0)


@triton.jit
def log1p(x):
    """log(1 + x): near zero x is its own f; otherwise the rounding error of 1 + x, divided by it,
    is added.
    """
    total = x + 1.0
    added = total - x
    lost = (x - (total - added)) + (1.0 - added)
    n, m = _scaled(total)
    is_near = n == 0.0
    f = tl.where(is_near, x, m - 1.0)
    return _log_from(
        total, f, n, tl.where(is_near, 0.0, tl.div_rn(lost, tl.where(total == 0.0, 1.0, total)))
    )


@triton.jit
def pow(a, b):
    """A to the power b, by exp(b log |a|)."""
    a, b = tl.broadcast(a, b)
    whole = tl.floor(b) == b
    is_odd = whole & (tl.floor(b * 0.5) * 2.0 != b)
    size = exp(b * log(tl.abs(a)))
    power = tl.where(a < 0.0, tl.where(whole, tl.where(is_odd, -size, size), float("nan")), size)
    return tl.where(b == 0.0, 1.0, power)


@triton.jit
def round_half_even(x):
    """The nearest whole number, halves to the even one."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def larger(a, b):
    """The larger number; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller number; NaN if one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(x):
    """The largest number of each row, ``(rows, 1)``; NaN if there is one."""
    return tl.reduce(x, 1, larger, keep_dims=True)
