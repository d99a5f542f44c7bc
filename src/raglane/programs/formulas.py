"""Operations of torch expressed in those of programs: pointwise ones, and those on segments of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from raglane.programs.expressions import (
    Expression,
    Operand,
    cos,
    each,
    exp,
    expm1,
    floor,
    function,
    log,
    log1p,
    sigmoid,
    sign,
    sin,
    stop,
    tanh,
    where,
)
from raglane.programs.graph import Refused

# From torch 2.14 on, the gradient of torch.clamp at a bound is another.
_CLAMP_PASSES = torch.__version__ < "2.14.dev0"


def _linear(operation: str, *, swaps: bool = False) -> Callable[..., Expression]:
    """Return the formula of ``a + alpha * b``, ``a - alpha * b`` or, if it swaps them, ``b - alpha
    * a``.
    """

    def formula(a: Operand, b: Operand, alpha: float = 1) -> Expression:
        if swaps:
            a, b = b, a
        return each(operation, a, b if alpha == 1 else b * float(alpha))

    return formula


def _div(a: Operand, b: Operand, rounding_mode: str | None = None) -> Expression:
    if rounding_mode == "floor":
        return _divided(a, b, rounding_mode)[0]
    quotient = each("div", a, b)
    return quotient if rounding_mode is None else _trunc(quotient)


def _remainder(rounding_mode: str) -> Callable[[Operand, Operand], Expression]:
    """Return the formula of a remainder, with the sign of the divisor if rounded down, else of the
    dividend.
    """
    return lambda a, b: _divided(a, b, rounding_mode)[1]


def _divided(a: Operand, b: Operand, rounding_mode: str) -> tuple[Expression, Expression]:
    """Return a rounded quotient and its remainder, 0 if the dtype cannot represent such quotients
    exactly.
    """
    quotient = each("div", a, b)
    a = quotient.filled(a)
    b = quotient.filled(b)
    rounds_down = rounding_mode == "floor"
    whole = floor(quotient) if rounds_down else _trunc(quotient)
    # Rounded once, so it is exact. 0 times infinity would be NaN.
    left = -whole * b + a
    left = where(whole.equals(0.0), a, left)
    # A quotient that was rounded up to the next integer is one too large; the sign of the remainder
    # shows it.
    unit = quotient.filled(1.0) if rounds_down else sign(whole)
    has_sign = (left < 0.0).differs((b if rounds_down else a) < 0.0)
    is_over = has_sign & left
    left = where(is_over, left + unit * b, left)
    left = where(abs(left) > abs(b), 0.0, left)
    return where(is_over, whole - unit, whole), left


def _pow(a: Operand, exponent: Operand) -> Expression:
    if isinstance(exponent, Expression) or not isinstance(a, Expression):
        return each("pow", a, exponent)
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "copy"}
    if exponent in simple:
        return each(simple[exponent], a)
    if exponent not in (2, 3, 4):
        return each("pow", a, float(exponent))
    square = a * a
    if exponent == 2:
        return square
    return square * (a if exponent == 3 else square)


def _clamp(
    a: Expression,
    min: Operand | None = None,
    max: Operand | None = None,
    *,
    passes: bool = _CLAMP_PASSES,
) -> Expression:
    """Return ``a`` clamped to bounds, at which the gradient passes or is that of ``max`` and
    ``min``, 0 for numbers.
    """
    sides = (min, "at_least", ("lt", "le"), "max"), (max, "at_most", ("gt", "ge"), "min")
    for bound, name, (beyond, at_or_beyond), extreme in sides:
        if bound is None:
            continue
        if not isinstance(bound, Expression):
            bound = float(bound)
            a = each(name, a, bound) if passes else where(each(at_or_beyond, a, bound), bound, a)
        elif passes:
            a = where(each(beyond, a, bound) | bound.differs(bound), bound, a)  # or NaN
        else:
            a = each(extreme, a, bound)
    return a


def _lerp(a: Expression, b: Expression, weight: Operand) -> Expression:
    # Not a + weight * (b - a), because a weight of 1 must give b for any a.
    rest = 1.0 - weight
    return b * weight + a * rest


def _added(operation: str) -> Callable[..., Expression]:
    """Return the formula ``a + value * operation(b, c)``."""

    def formula(a: Expression, b: Operand, c: Operand, value: float = 1) -> Expression:
        return a + each(operation, b, c) * float(value)

    return formula


def _gelu(a: Expression, approximate: str = "none") -> Expression:
    if approximate == "tanh":
        cube = a * a * a
        share = tanh((a + cube * 0.044715) * math.sqrt(2 / math.pi))
    else:
        share = each("erf", a * math.sqrt(0.5))
    return (a * 0.5) * (share + 1.0)


def _softplus(a: Expression, beta: float = 1, threshold: float = 20) -> Expression:
    scaled = a * float(beta)
    is_large = scaled > float(threshold)
    # Clamped to the threshold, so that the branch not chosen does not overflow, nor its gradient.
    soft = log1p(exp(each("at_most", scaled, float(threshold))))
    return where(is_large, a, soft * (1 / beta))


def log_sigmoid(a: Expression) -> Expression:
    """Return the logarithm of the sigmoid without overflow; its derivative at 0 is a half."""
    is_below = a < 0.0
    below = where(is_below, a, 0.0)
    near = where(is_below, a, -a)
    return below - log1p(exp(near))


def _elu(a: Expression, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expression:
    below = expm1(each("at_most", a, 0.0) * float(input_scale))
    return where(a > 0.0, a, below * float(alpha)) * float(scale)


def _logit(a: Expression, eps: float | None = None) -> Expression:
    share = a if eps is None else _clamp(a, eps, 1 - eps, passes=True)
    return log(share / (1.0 - share))


def _rectified(a: Expression, slope: Operand) -> Expression:
    return where(a > 0.0, a, a * slope)


def _log_add_exp(a: Expression, b: Expression) -> Expression:
    # The distance of equal infinities is 0.
    distance = where(a.equals(b), 0.0, a - b)
    return each("max", a, b) + log1p(exp(-abs(distance)))


def _round(a: Expression, decimals: int = 0) -> Expression:
    if decimals:
        raise Refused(f"no program rounds to {decimals} decimals")
    return each("round", a)


def _trunc(a: Expression) -> Expression:
    return sign(a) * floor(abs(a))


def _soft_shrink(a: Expression, bound: float = 0.5) -> Expression:
    moved = a - sign(a) * float(bound)
    return where(abs(a) > float(bound), moved, a * 0.0)


def _hard_shrink(a: Expression, bound: float = 0.5) -> Expression:
    return where(abs(a) <= float(bound), 0.0, a)


def _hard_sigmoid(a: Expression) -> Expression:
    return _clamp(a + 3.0, 0.0, 6.0, passes=False) * (1 / 6)


_SAME = (
    "neg",
    "abs",
    "sign",
    "relu",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sigmoid",
    "tanh",
    "erf",
    "sin",
    "cos",
    "floor",
    "mul",
    "where",
    "through",
)

FORMULAS: dict[str, Callable[..., Expression]] = {
    **{name: function(name) for name in _SAME},
    "tan": lambda a: sin(a) / cos(a),
    # A difference of two exponentials would lose all digits near 0.
    "sinh": lambda a: (expm1(a) - expm1(-a)) * 0.5,
    "cosh": lambda a: (exp(a) + exp(-a)) * 0.5,
    "round": _round,
    "trunc": _trunc,
    "ceil": lambda a: -floor(-a),
    "frac": lambda a: a - _trunc(a),
    "softshrink": _soft_shrink,
    "hardshrink": _hard_shrink,
    "add": _linear("add"),
    "sub": _linear("sub"),
    "rsub": _linear("sub", swaps=True),
    "div": _div,
    "maximum": function("max"),
    "minimum": function("min"),
    "special_erf": function("erf"),
    "sgn": sign,
    "square": lambda a: a * a,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda a, low: _clamp(a, low),
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "lerp": _lerp,
    "addcmul": _added("mul"),
    "addcdiv": _added("div"),
    "gelu": _gelu,
    "silu": lambda a: a * sigmoid(a),
    "mish": lambda a: a * tanh(_softplus(a)),
    "softplus": _softplus,
    "elu": _elu,
    "celu": lambda a, alpha=1: _elu(a, alpha, 1, 1 / alpha),
    "logit": _logit,
    "leaky_relu": lambda a, slope=0.01: _rectified(a, float(slope)),
    "_prelu_kernel": _rectified,
    "remainder": _remainder("floor"),
    "fmod": _remainder("trunc"),
    "hardtanh": lambda a, low=-1.0, high=1.0: _clamp(a, low, high, passes=False),
    "hardsigmoid": _hard_sigmoid,
    "hardswish": lambda a: a * _hard_sigmoid(a),
    "threshold": lambda a, threshold, value: where(a <= float(threshold), float(value), a),
    "logaddexp": _log_add_exp,
    "exp2": lambda a: exp(a * math.log(2)),
    "log2": lambda a: log(a) * (1 / math.log(2)),
    "log10": lambda a: log(a) * (1 / math.log(10)),
    "masked_fill": lambda a, mask, value: where(mask, value, a),
}
"""Functions of operands (expressions or numbers) by the name of torch's operation."""

TRUTHS: dict[str, Callable[..., Expression]] = {
    **{name: function(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), function("and")),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), function("or")),
    **dict.fromkeys(("bitwise_not", "logical_not"), function("not")),
    **dict.fromkeys(("bitwise_xor", "logical_xor", "__xor__"), function("ne")),
    "isnan": lambda a: a.differs(a),
}
"""Functions with boolean results."""


def mean(a: Expression, segments: int) -> Expression:
    """Return the mean of each segment."""
    return a.sums(segments) * (segments / len(a))


def largest(a: Expression, segments: int) -> Expression:
    """Return the largest column of each segment."""
    if len(a) == segments:
        return a
    return Expression(a.graph, a.graph.reduce("row_max", a.columns, segments))


def smallest(a: Expression, segments: int) -> Expression:
    """Return the smallest column of each segment."""
    return -largest(-a, segments)


def product(a: Expression, segments: int) -> Expression:
    """Return the product of each segment, by multiplying halves until one column is left."""
    table = a.columns.reshape(segments, -1)
    while table.shape[1] > 1:
        half = table.shape[1] // 2
        first = Expression(a.graph, table[:, :half].reshape(-1))
        second = Expression(a.graph, table[:, half : 2 * half].reshape(-1))
        pairs = (first * second).columns.reshape(segments, half)
        table = np.concatenate([pairs, table[:, 2 * half :]], 1)
    return Expression(a.graph, table[:, 0])


def softmax(a: Expression, segments: int) -> Expression:
    """Return the softmax of each segment."""
    e = exp(a - largest(a, segments).spread(len(a)))
    return e / e.sums(segments).spread(len(a))


def log_sum(a: Expression, segments: int) -> Expression:
    """Return the logarithm of the sum of exponentials of each segment."""
    top = largest(a, segments)
    # Infinities are not subtracted, because their difference is NaN.
    top = where(abs(top).equals(math.inf), 0.0, top)
    return log(exp(a - top.spread(len(a))).sums(segments)) + top


def log_softmax(a: Expression, segments: int) -> Expression:
    """Return the logarithm of the softmax of each segment."""
    # Not a - logsumexp(a), which would lose digits of large numbers.
    below = a - largest(a, segments).spread(len(a))
    return below - log(exp(below).sums(segments)).spread(len(a))


def first_of(formula: Callable[[Expression, int], Expression]) -> Callable[..., Expression]:
    """Return the formula of the largest or smallest column whose gradient goes only to the first of
    equals.
    """

    def first(a: Expression, segments: int) -> Expression:
        if len(a) == segments:
            return a
        top = stop(formula(a, segments))
        is_top = a.equals(top.spread(len(a)))
        is_first = is_top & is_top.cumsum(segments).equals(1.0)
        chosen = where(is_first, a, 0.0).sums(segments)
        return where(top.equals(top), chosen, top)  # NaN has no first

    return first


def root(a: Expression) -> Expression:
    """Return the root of a sum of squares; its gradient at 0, e.g. for an initial state of zeros,
    is 0 as in torch.
    """
    is_zero = a.equals(0.0)
    return where(is_zero, 0.0, each("sqrt", where(is_zero, 1.0, a)))


def variance(correction: float) -> Callable[[Expression, int], Expression]:
    """Return the formula of the variance of each segment, divided by its number of columns minus
    ``correction``.
    """

    def formula(a: Expression, segments: int) -> Expression:
        centred = a - mean(a, segments).spread(len(a))
        freedom = len(a) / segments - correction
        if freedom <= 0:
            raise Refused("it takes the variance of one number")
        return (centred * centred).sums(segments) * (1 / freedom)

    return formula
