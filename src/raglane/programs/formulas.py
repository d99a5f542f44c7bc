"""Operations of torch expressed in those of programs: pointwise ones, and those on parts of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from raglane.programs.graph import Columns, Graph, Refused

Number = Columns | float
# From torch 2.14 on, the gradient of torch.clamp at a bound is another.
_CLAMP_PASSES = torch.__version__ < "2.14.dev0"


def _plain(name: str) -> Callable[..., Columns]:
    return lambda g, *operands: g.each(name, *operands)


def _linear(name: str, *, swaps: bool = False) -> Callable[..., Columns]:
    """Return the formula of ``a + alpha * b``, ``a - alpha * b`` or, if it swaps them, ``b - alpha
    * a``.
    """

    def formula(g: Graph, a: Number, b: Number, alpha: float = 1) -> Columns:
        a, b = (b, a) if swaps else (a, b)
        if alpha != 1:
            b = float(b) * alpha if isinstance(b, float | int) else g.each("mul", b, float(alpha))
        return g.each(name, a, b)

    return formula


def _div(g: Graph, a: Number, b: Number, rounding_mode: str | None = None) -> Columns:
    if rounding_mode == "floor":
        return _divided(g, a, b, rounding_mode)[0]
    share = g.each("div", a, b)
    return share if rounding_mode is None else _trunc(g, share)


def _remainder(rounding_mode: str) -> Callable[[Graph, Number, Number], Columns]:
    """Return the formula of a remainder, with the sign of the divisor if rounded down, else of the
    dividend.
    """
    return lambda g, a, b: _divided(g, a, b, rounding_mode)[1]


def _divided(g: Graph, a: Number, b: Number, rounding_mode: str) -> tuple[Columns, Columns]:
    """Return a rounded quotient and its remainder, 0 if the dtype cannot represent such quotients
    exactly.
    """
    width = next(len(part) for part in (a, b) if not isinstance(part, float | int))
    a, b = [g.full(part, width) if isinstance(part, float | int) else part for part in (a, b)]
    share = g.each("div", a, b)
    whole = g.each("floor", share) if rounding_mode == "floor" else _trunc(g, share)
    # Rounded once, so it is exact. 0 times infinity would be NaN.
    left = g.each("add", g.each("mul", g.each("neg", whole), b), a)
    left = g.each("where", g.each("eq", whole, 0.0), a, left)
    # A quotient that was rounded up to the next integer is one too large; the sign of the remainder
    # shows it.
    one = g.full(1.0, width) if rounding_mode == "floor" else g.each("sign", whole)
    has_sign = g.each(
        "ne", g.each("lt", left, 0.0), g.each("lt", b if rounding_mode == "floor" else a, 0.0)
    )
    is_over = g.each("and", has_sign, left)
    left = g.each("where", is_over, g.each("add", left, g.each("mul", one, b)), left)
    left = g.each("where", g.each("gt", g.each("abs", left), g.each("abs", b)), 0.0, left)
    return g.each("where", is_over, g.each("sub", whole, one), whole), left


def _pow(g: Graph, a: Number, exponent: Number) -> Columns:
    if not isinstance(exponent, float | int) or isinstance(a, float | int):
        return g.each("pow", a, exponent)
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in simple:
        return g.each(simple[exponent], a)
    if exponent not in (1, 2, 3, 4):
        return g.each("pow", a, float(exponent))
    if exponent == 1:
        return g.each("copy", a)
    square = g.each("mul", a, a)
    return square if exponent == 2 else g.each("mul", square, a if exponent == 3 else square)


def _clamp(
    g: Graph, a: Columns, min: Any = None, max: Any = None, *, passes: bool = _CLAMP_PASSES
) -> Columns:
    """Return ``a`` clamped to bounds, at which the gradient passes or is that of ``max`` and
    ``min``, 0 for numbers.
    """
    sides = (min, "at_least", ("lt", "le"), "max"), (max, "at_most", ("gt", "ge"), "min")
    for bound, name, (beyond, at_or_beyond), extreme in sides:
        if isinstance(bound, float | int) and passes:
            a = g.each(name, a, float(bound))
        elif isinstance(bound, float | int):
            a = g.each("where", g.each(at_or_beyond, a, float(bound)), float(bound), a)
        elif bound is not None and not passes:
            a = g.each(extreme, a, bound)
        elif bound is not None:
            is_beyond = g.each("or", g.each(beyond, a, bound), g.each("ne", bound, bound))  # or NaN
            a = g.each("where", is_beyond, bound, a)
    return a


def _lerp(g: Graph, a: Columns, b: Columns, weight: Number) -> Columns:
    # Not a + weight * (b - a), because a weight of 1 must give b for any a.
    rest = (
        1.0 - weight
        if isinstance(weight, float | int)
        else g.each("sub", g.full(1.0, len(a)), weight)
    )
    return g.each("add", g.each("mul", b, weight), g.each("mul", a, rest))


def _added(operation: str) -> Callable[..., Columns]:
    """Return the formula ``a + value * operation(b, c)``."""

    def formula(g: Graph, a: Columns, b: Columns, c: Columns, value: float = 1) -> Columns:
        found = g.each(operation, b, c)
        return g.each("add", a, found if value == 1 else g.each("mul", found, float(value)))

    return formula


def _gelu(g: Graph, a: Columns, approximate: str = "none") -> Columns:
    if approximate == "tanh":
        cube = g.each("mul", g.each("mul", a, a), a)
        inner = g.each(
            "mul", g.each("add", a, g.each("mul", cube, 0.044715)), math.sqrt(2 / math.pi)
        )
        share = g.each("tanh", inner)
    else:
        share = g.each("erf", g.each("mul", a, math.sqrt(0.5)))
    return g.each("mul", g.each("mul", a, 0.5), g.each("add", share, 1.0))


def _softplus(g: Graph, a: Columns, beta: float = 1, threshold: float = 20) -> Columns:
    scaled = a if beta == 1 else g.each("mul", a, float(beta))
    is_large = g.each("gt", scaled, float(threshold))
    # Clamped to the threshold, so that the branch not chosen does not overflow, nor its gradient.
    soft = g.each("log1p", g.each("exp", g.each("at_most", scaled, float(threshold))))
    return g.each("where", is_large, a, soft if beta == 1 else g.each("mul", soft, 1 / beta))


def log_sigmoid(g: Graph, a: Columns) -> Columns:
    """Return the logarithm of the sigmoid without overflow; its derivative at 0 is a half."""
    is_below = g.each("lt", a, 0.0)
    below = g.each("where", is_below, a, 0.0)
    near = g.each("where", is_below, a, g.each("neg", a))
    return g.each("sub", below, g.each("log1p", g.each("exp", near)))


def _elu(
    g: Graph, a: Columns, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Columns:
    below = g.each("expm1", g.each("mul", g.each("at_most", a, 0.0), float(input_scale)))
    found = g.each(
        "where",
        g.each("gt", a, 0.0),
        a,
        below if alpha == 1 else g.each("mul", below, float(alpha)),
    )
    return found if scale == 1 else g.each("mul", found, float(scale))


def _logit(g: Graph, a: Columns, eps: float | None = None) -> Columns:
    held = a if eps is None else _clamp(g, a, eps, 1 - eps, passes=True)
    return g.each("log", g.each("div", held, g.each("sub", g.full(1.0, len(held)), held)))


def _rectified(g: Graph, a: Columns, slope: Number) -> Columns:
    return g.each("where", g.each("gt", a, 0.0), a, g.each("mul", a, slope))


def _log_add_exp(g: Graph, a: Columns, b: Columns) -> Columns:
    # The distance of equal infinities is 0.
    apart = g.each("where", g.each("eq", a, b), 0.0, g.each("sub", a, b))
    return g.each(
        "add",
        g.each("max", a, b),
        g.each("log1p", g.each("exp", g.each("neg", g.each("abs", apart)))),
    )


def _round(g: Graph, a: Columns, decimals: int = 0) -> Columns:
    if decimals:
        raise Refused(f"no program rounds to {decimals} decimals")
    return g.each("round", a)


def _trunc(g: Graph, a: Columns) -> Columns:
    return g.each("mul", g.each("sign", a), g.each("floor", g.each("abs", a)))


def _shrunk(g: Graph, a: Columns, bound: float = 0.5) -> Columns:
    moved = g.each("sub", a, g.each("mul", g.each("sign", a), float(bound)))
    return g.each(
        "where", g.each("gt", g.each("abs", a), float(bound)), moved, g.each("mul", a, 0.0)
    )


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
)

FORMULAS: dict[str, Callable[..., Columns]] = {
    **{name: _plain(name) for name in (*_SAME, "erf", "sin", "cos", "floor", "mul", "where")},
    "tan": lambda g, a: g.each("div", g.each("sin", a), g.each("cos", a)),
    # A difference of two exponentials would lose all digits near 0.
    "sinh": lambda g, a: g.each(
        "mul", g.each("sub", g.each("expm1", a), g.each("expm1", g.each("neg", a))), 0.5
    ),
    "cosh": lambda g, a: g.each(
        "mul", g.each("add", g.each("exp", a), g.each("exp", g.each("neg", a))), 0.5
    ),
    "round": _round,
    "trunc": _trunc,
    "ceil": lambda g, a: g.each("neg", g.each("floor", g.each("neg", a))),
    "frac": lambda g, a: g.each("sub", a, _trunc(g, a)),
    "softshrink": _shrunk,
    "hardshrink": lambda g, a, bound=0.5: g.each(
        "where", g.each("le", g.each("abs", a), float(bound)), 0.0, a
    ),
    "add": _linear("add"),
    "sub": _linear("sub"),
    "rsub": _linear("sub", swaps=True),
    "div": _div,
    "maximum": _plain("max"),
    "minimum": _plain("min"),
    "special_erf": _plain("erf"),
    "sgn": _plain("sign"),
    "square": lambda g, a: g.each("mul", a, a),
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda g, a, low: _clamp(g, a, low),
    "clamp_max": lambda g, a, high: _clamp(g, a, None, high),
    "lerp": _lerp,
    "addcmul": _added("mul"),
    "addcdiv": _added("div"),
    "gelu": _gelu,
    "silu": lambda g, a: g.each("mul", a, g.each("sigmoid", a)),
    "mish": lambda g, a: g.each("mul", a, g.each("tanh", _softplus(g, a))),
    "softplus": _softplus,
    "elu": _elu,
    "celu": lambda g, a, alpha=1: _elu(g, a, alpha, 1, 1 / alpha),
    "logit": _logit,
    "leaky_relu": lambda g, a, slope=0.01: _rectified(g, a, float(slope)),
    "_prelu_kernel": _rectified,
    "remainder": _remainder("floor"),
    "fmod": _remainder("trunc"),
    "hardtanh": lambda g, a, low=-1.0, high=1.0: _clamp(g, a, low, high, passes=False),
    "hardsigmoid": lambda g, a: g.each(
        "mul", _clamp(g, g.each("add", a, 3.0), 0.0, 6.0, passes=False), 1 / 6
    ),
    "hardswish": lambda g, a: g.each("mul", a, FORMULAS["hardsigmoid"](g, a)),
    "threshold": lambda g, a, threshold, value: g.each(
        "where", g.each("le", a, float(threshold)), float(value), a
    ),
    "logaddexp": _log_add_exp,
    "exp2": lambda g, a: g.each("exp", g.each("mul", a, math.log(2))),
    "log2": lambda g, a: g.each("mul", g.each("log", a), 1 / math.log(2)),
    "log10": lambda g, a: g.each("mul", g.each("log", a), 1 / math.log(10)),
    "through": _plain("through"),
    "masked_fill": lambda g, a, mask, value: g.each("where", mask, value, a),
}
"""Functions of a graph and operands (columns or numbers) by the name of torch's operation."""

TRUTHS: dict[str, Callable[..., Columns]] = {
    **{name: _plain(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), _plain("and")),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _plain("or")),
    **dict.fromkeys(("bitwise_not", "logical_not"), _plain("not")),
    **dict.fromkeys(("bitwise_xor", "logical_xor", "__xor__"), _plain("ne")),
    "isnan": lambda g, a: g.each("ne", a, a),
}
"""Functions with boolean results."""


def mean(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the mean of each part."""
    return g.each("mul", g.sums(a, parts), parts / len(a))


def largest(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the largest column of each part."""
    return g.reduce("row_max", a, parts) if len(a) > parts else a


def smallest(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the smallest column of each part."""
    return g.each("neg", largest(g, g.each("neg", a), parts))


def product(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the product of each part, by multiplying halves until one column is left."""
    table = np.asarray(a).reshape(parts, -1)
    while table.shape[1] > 1:
        half = table.shape[1] // 2
        pairs = g.each(
            "mul", table[:, :half].reshape(-1), table[:, half : 2 * half].reshape(-1)
        ).reshape(parts, half)
        table = np.concatenate([pairs, table[:, 2 * half :]], 1)
    return table[:, 0]


def _spread(columns: Columns, width: int) -> Columns:
    return np.repeat(columns, width // len(columns))


def softmax(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the softmax of each part."""
    e = g.each("exp", g.each("sub", a, _spread(largest(g, a, parts), len(a))))
    return g.each("div", e, _spread(g.sums(e, parts), len(a)))


def log_sum(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the logarithm of the sum of exponentials of each part."""
    top = largest(g, a, parts)
    # Infinities are not subtracted, because their difference is NaN.
    top = g.each("where", g.each("eq", g.each("abs", top), math.inf), 0.0, top)
    e = g.each("exp", g.each("sub", a, _spread(top, len(a))))
    return g.each("add", g.each("log", g.sums(e, parts)), top)


def log_softmax(g: Graph, a: Columns, parts: int) -> Columns:
    """Return the logarithm of the softmax of each part."""
    # Not a - logsumexp(a), which would lose digits of large numbers.
    below = g.each("sub", a, _spread(largest(g, a, parts), len(a)))
    return g.each("sub", below, _spread(g.each("log", g.sums(g.each("exp", below), parts)), len(a)))


def first_of(
    formula: Callable[[Graph, Columns, int], Columns],
) -> Callable[[Graph, Columns, int], Columns]:
    """Return the formula of the largest or smallest column whose gradient goes only to the first of
    equals.
    """

    def first(g: Graph, a: Columns, parts: int) -> Columns:
        if len(a) == parts:
            return a
        top = g.each("stop", formula(g, a, parts))
        is_top = g.each("eq", a, _spread(top, len(a)))
        is_first = g.each("and", is_top, g.each("eq", g.cumsum(is_top, parts), 1.0))
        chosen = g.sums(g.each("where", is_first, a, 0.0), parts)
        return g.each("where", g.each("eq", top, top), chosen, top)  # NaN has no first

    return first


def root(g: Graph, a: Columns) -> Columns:
    """Return the root of a sum of squares; its gradient at 0, e.g. for an initial state of zeros,
    is 0 as in torch.
    """
    is_zero = g.each("eq", a, 0.0)
    return g.each("where", is_zero, 0.0, g.each("sqrt", g.each("where", is_zero, 1.0, a)))


def variance(correction: float) -> Callable[[Graph, Columns, int], Columns]:
    """Return the formula of the variance of each part, divided by its number of columns minus
    ``correction``.
    """

    def formula(g: Graph, a: Columns, parts: int) -> Columns:
        centred = g.each("sub", a, _spread(mean(g, a, parts), len(a)))
        left = len(a) / parts - correction
        if left <= 0:
            raise Refused("it takes the variance of one number")
        return g.each("mul", g.sums(g.each("mul", centred, centred), parts), 1 / left)

    return formula
