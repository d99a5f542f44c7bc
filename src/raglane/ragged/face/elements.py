"""Functions of each element, and functions of the features of each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.face.entry import (
    Arguments,
    FunctionRow,
    ModuleEntry,
    Options,
    batches_of,
    check_together,
    like,
    ragged_input,
    refuse_out,
    rows_of,
)

_NAMES = """
abs absolute acos acosh add addcdiv addcmul alpha_dropout angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor bernoulli ceil celu clamp clamp_max clamp_min clip clone conj conj_physical copysign cos cosh deg2rad
detach digamma div divide dropout elu empty_like eq erf erfc erfcx erfinv exp exp2 expit expm1
fix float_power floor floor_divide fmax fmin fmod frac full_like gammaln ge gelu greater greater_equal gt hardshrink
hardsigmoid hardswish hardtanh heaviside hypot i0 i0e i1 i1e igamma igammac imag isclose isfinite isinf isnan isneginf
isposinf isreal ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_ndtr logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply
mvlgamma multigammaln nan_to_num ndtr ndtri ne neg negative nextafter not_equal ones_like poisson polygamma positive
pow rad2deg rand_like randint_like randn_like real reciprocal relu relu6 remainder resolve_conj resolve_neg
round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub
subtract tan tanh tanhshrink threshold true_divide trunc where xlog1py xlogy zeros_like zeta entr psi
gcd lcm complex polar airy_ai gammainc gammaincc chebyshev_polynomial_t chebyshev_polynomial_u
chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
legendre_polynomial_p modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0
bessel_j0 bessel_j1 bessel_y0 bessel_y1
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__
__ror__ __xor__ __rxor__
"""

# Without an operator of ONNX, or of complex numbers.
_NOT_IN_ONNX = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
chebyshev_polynomial_w complex copysign digamma erfinv fmax fmin gammainc gammaincc gammaln gcd hermite_polynomial_h
hermite_polynomial_he hypot i0 i0e i1 i1e igamma igammac imag laguerre_polynomial_l lcm legendre_polynomial_p lgamma
modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma ndtri nextafter
poisson polar polygamma psi rrelu scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t
shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 zeta
"""


def each(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a function of each element on the flat values."""
    if entry.refused:
        entry.refuse_transformations(batches_of((*args, *kwargs.values()))[0])
    if len(args) == 1 and not kwargs and isinstance(args[0], FlatBatch):
        values = entry.function(args[0]._values)
        if isinstance(values, Tensor):
            return args[0]._like(values)
        rule = "called with two more arguments, the values for True and for False"
        fix = "pass those, or r.values for the indices of all real elements"
        raise ArgumentTypeError(entry.name, "only a Ragged", rule, fix)
    refuse_out(kwargs)
    batch, *others = batches_of((*args, *kwargs.values()))
    for other in others:
        check_together(entry.name, batch, other)
    if "inplace" in kwargs:
        kwargs["inplace"] = False
    rows = [rows_of(entry.name, value, batch) for value in args]
    named = {name: rows_of(entry.name, value, batch) for name, value in kwargs.items()}
    return batch._like(entry.function(*rows, **named))


def read(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Return a property of the flat values, such as the number of bytes of each."""
    return entry.function(
        *[value._values if isinstance(value, FlatBatch) else value for value in args], **kwargs
    )


def with_others(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a function of each element whose other arguments are whole tensors, such as
    boundaries.
    """
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound[entry.default])
    if entry.name == "searchsorted" and bound["sorted_sequence"].dim() != 1:
        rule = "of one dimension, the same for all elements"
        got = f"shape {tuple(bound['sorted_sequence'].shape)}"
        raise ShapeError("sorted_sequence", got, rule, "search in each sequence of r.to_list()")
    rows = {
        name: value._values if isinstance(value, FlatBatch) else value
        for name, value in bound.items()
    }
    # The first parameters have no names in every function.
    first = [rows.pop(name) for name in entry.signature[: entry.by_position] if name in rows]
    return like(batch, entry.function(*first, **rows))


def prelu(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call ``prelu`` with one weight: several are those of dimension 1, which are steps."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound["input"])
    if bound["weight"].numel() != 1:
        rule = "one number, because its channels are dimension 1, the steps of a Ragged"
        fix = "call r.map(f), which gives the module the flat rows (N, C)"
        raise ArgumentTypeError("weight", f"{bound['weight'].numel()} numbers", rule, fix)
    return batch._like(entry.function(batch._values, bound["weight"]))


def dropout_of_steps(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Zero whole steps: the channels of these functions are dimension 1."""
    batch = ragged_input(entry, args[0] if args else kwargs.pop("input"))
    if not batch.feature_shape:
        rule = "called with elements that have features, of which it zeroes all"
        raise ShapeError(entry.name, batch._shape_text(), rule, "call torch.nn.functional.dropout")
    rest = [*args[1:3], *(kwargs[name] for name in ("p", "training") if name in kwargs)]
    return batch._like(entry.function(batch._values.unsqueeze(0), *rest).squeeze(0))


def dist(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Return the norm of the difference of all real values."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound["input"])
    other = ragged_input(entry, bound["other"])
    check_together(entry.name, batch, other)
    return torch.dist(batch._values, other._values, bound.get("p", 2))


def expand_as(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Repeat a tensor or Ragged in the shape of another: ``x[:, None].expand_as(r)``."""
    other = ragged_input(entry, kwargs["other"] if kwargs else args[1])
    if isinstance(args[0], FlatBatch):
        check_together(entry.name, other, args[0])
    rows = rows_of(entry.name, args[0], other)
    return other._like(rows.expand_as(other._values))


def rows_of_features(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a function of the last dimensions on the flat values."""
    bound = entry.bind(args, kwargs)
    batch = ragged_input(entry, bound[entry.signature[0]])
    if len(batches_of(bound.values())) > 1:
        fix = "call it on r.values and the values of the other, if they have the same rows"
        raise ArgumentTypeError(
            entry.name, "a second Ragged", "called with a Ragged only as its input", fix
        )
    needed = entry.default or 0
    if "normalized_shape" in bound:
        needed = len(bound["normalized_shape"])
    if batch._values.dim() - 1 < needed:
        count = batch._values.dim() - 1
        rule = f"called with elements that have the last {needed} feature dimension(s)"
        fix = "give the elements one, r.unsqueeze(-1)"
        raise ShapeError(entry.name, f"elements of {count} feature dimension(s)", rule, fix)
    bound[entry.signature[0]] = batch._values
    return batch._like(entry.function(**bound))


def pairs(entry: ModuleEntry, args: Arguments, kwargs: Options) -> Any:
    """Call a function of the rows of two batches, such as ``pairwise_distance``."""
    bound = entry.bind(args, kwargs)
    batch, *others = batches_of(bound.values())
    for other in others:
        check_together(entry.name, batch, other)
    if not batch.feature_shape or len(others) != 1:
        rule = "called with two batches of elements with features"
        fix = "wrap the other with rl.Ragged, or repeat it with r.broadcast(x)"
        raise ArgumentTypeError(entry.name, "other arguments", rule, fix)
    rows = {
        name: value._values if isinstance(value, FlatBatch) else value
        for name, value in bound.items()
    }
    return batch._like(entry.function(**rows))


ROWS: dict[str, FunctionRow] = {
    **{name: FunctionRow("each element", each) for name in _NAMES.split()},
    **{name: FunctionRow("each element", each, refused="onnx") for name in _NOT_IN_ONNX.split()},
    **dict.fromkeys(
        """numel nelement is_floating_point is_complex is_signed is_conj is_neg is_inference is_contiguous is_pinned
        element_size get_device""".split(),
        FunctionRow("property", read),
    ),
    "expand_as": FunctionRow("each element", expand_as),
    "prelu": FunctionRow("each element", prelu, "input weight"),
    **dict.fromkeys(
        "dropout1d dropout2d dropout3d feature_alpha_dropout".split(),
        FunctionRow("features", dropout_of_steps),
    ),
    "linear": FunctionRow("features", rows_of_features, "input weight bias", default=1),
    "layer_norm": FunctionRow(
        "features", rows_of_features, "input normalized_shape weight bias eps cudnn_enable"
    ),
    "rms_norm": FunctionRow("features", rows_of_features, "input normalized_shape weight eps"),
    "embedding": FunctionRow(
        "features",
        rows_of_features,
        "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    ),
    "one_hot": FunctionRow("features", rows_of_features, "input num_classes"),
    "pairwise_distance": FunctionRow("features", pairs, "x1 x2 p eps keepdim"),
    "bilinear": FunctionRow("features", pairs, "input1 input2 weight bias"),
    "isin": FunctionRow(
        "each element",
        with_others,
        "elements test_elements * assume_unique invert",
        default="elements",
        refused="onnx",
    ),
    "bucketize": FunctionRow(
        "each element",
        with_others,
        "input boundaries * out_int32 right",
        default="input",
        refused="onnx",
    ),
    "searchsorted": FunctionRow(
        "each element",
        with_others,
        "sorted_sequence input * out_int32 right side sorter",
        default="input",
        refused="onnx",
    ),
    "frexp": FunctionRow("each element", with_others, "input", default="input", refused="onnx"),
    "dist": FunctionRow("reduction", dist, "input other p"),
}
