"""The torch functions that accept a ragged batch: the tables of ``Ragged.__torch_function__``.

Element-wise functions and functions of the feature dimensions act on the flat values. Any other
function would mix elements of different sequences, or needs dimensions that a ragged batch does not
have; its error names a replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import quote
from raglane.errors import ArgumentTypeError, ShapeError

Kind = str
"""``"element"``, ``"feature"`` (acts on the last dimensions) or ``"dim"`` (acts on the argument
``dim``)."""

_ELEMENT = """
abs absolute acos acosh add addcdiv addcmul alpha_dropout angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor bernoulli ceil celu clamp clamp_max clamp_min clip clone conj copysign cos cosh deg2rad detach digamma
div divide dropout elu empty_like eq erf erfc erfinv exp exp2 expit expm1 fix float_power floor floor_divide fmax
fmin fmod frac full_like ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot
i0 imag isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu lerp less less_equal lgamma log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt
masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal ones_like polygamma
positive pow prelu rad2deg rand_like randn_like real reciprocal relu relu6 remainder round rrelu rsqrt rsub selu
sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
tanhshrink threshold true_divide trunc where xlogy zeros_like
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__
__ror__ __xor__ __rxor__
""".split()

_FEATURE = ("linear", "matmul", "layer_norm", "rms_norm", "group_norm", "embedding", "one_hot")

# Functions with an argument ``dim`` or ``dims``: its position and its default.
_DIMENSION: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        """all amax amin any argmax argmin count_nonzero cummax cummin cumprod cumsum flip index_select log_softmax
        logcumsumexp logsumexp max mean median min narrow nanmean nansum prod select softmax softmin squeeze std
        std_mean sum unflatten unsqueeze var var_mean""".split(),
        (1, None),
    ),
    **dict.fromkeys(("argsort", "sort"), (1, -1)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "unbind"), (1, 0)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), (2, 0)),
    **dict.fromkeys(("diff", "topk"), (2, -1)),
    **dict.fromkeys(("norm", "roll"), (2, None)),
    "cosine_similarity": (2, 1),
    "glu": (1, -1),
    "gumbel_softmax": (4, -1),
    "normalize": (2, 1),
}

# Functions whose result has one dimension more.
_ADDING = {"stack", "unsqueeze"}

_HINTS = {
    "sum": "call r.sum() for one sum per sequence, r.values.sum() for all, or pass dim=-1 for the features",
    "mean": "call r.mean() for one mean per sequence, r.values.mean() for all, or pass dim=-1 for the features",
    "max": "call r.max() for the maximum of each sequence, torch.maximum(a, b), or pass dim=-1 for the features",
    "min": "call r.min() for the minimum of each sequence, torch.minimum(a, b), or pass dim=-1 for the features",
    "softmax": "call r.softmax() for the steps of each sequence, or pass dim=-1 for the features",
    "cumsum": "call r.cumsum() for the steps of each sequence, or pass dim=-1 for the features",
    "flip": "call r.reverse() to turn every sequence around, or pass dims=(-1,) for the features",
    "roll": "call r.shift(k), which shifts within each sequence",
    "cat": "call a.concat(b) to join sequence by sequence, Ragged([*a, *b]) to join the batches, or pass dim=-1",
    "stack": "call Ragged([*a, *b]) to join batches, or pass dim=-1",
    "matmul": "call r @ matrix, torch.nn.functional.linear(r, weight), or r.map(lambda values: values @ matrix)",
    "pad": "call r.to_padded(padding_value=...)",
    "numpy": "use r.values.numpy()",
    "_pack_padded_sequence": "call r.to_packed(), because a Ragged has no padding",
    "transpose_": "call r.to_list() for its sequences, because a Ragged has no padding",
}
_HINTS["concat"] = _HINTS["concatenate"] = _HINTS["cat"]
_HINTS["mm"] = _HINTS["bmm"] = _HINTS["einsum"] = _HINTS["__matmul__"] = _HINTS["matmul"]
_HINTS["shape"] = _HINTS["size"] = _HINTS["ndim"] = (
    "use len(r), r.lengths and r.features, or r.values.shape of the flat tensor"
)
_HINTS["flatten"] = _HINTS["reshape"] = _HINTS["transpose"] = _HINTS["permute"] = (
    "call r.map(f) with an f that reshapes (N, *features) and keeps N"
)
for _loss in "cross_entropy nll_loss mse_loss l1_loss huber_loss binary_cross_entropy_with_logits ctc_loss".split():
    _HINTS[_loss] = f"call rl.nn.losses.{_loss}, which counts each real element once"
_CONVERSIONS = "float double half bfloat16 int long bool cpu cuda".split()
_HINTS |= dict.fromkeys(_CONVERSIONS, "call r.to(...), e.g. r.to(torch.float32)")
_OTHER_LOSSES = "smooth_l1_loss binary_cross_entropy kl_div".split()
_HINTS |= dict.fromkeys(
    _OTHER_LOSSES, "call it on r.values and targets.values, which counts each real element once"
)


def _table() -> dict[Callable[..., Any], Kind]:
    """Return the kind of each torch function, in all modules of torch that contain it."""
    homes = (torch, torch.nn.functional, Tensor, torch.special, torch._C._nn)
    table: dict[Callable[..., Any], Kind] = {}
    for kind, names in (("element", _ELEMENT), ("feature", _FEATURE), ("dim", _DIMENSION)):
        for name in names:
            for home in homes:
                function = getattr(home, name, None)
                if callable(function):
                    table[function] = kind
    return table


_TABLE = _table()


def is_elementwise(function: Any) -> bool:
    """Return True for a torch function of each element."""
    return _TABLE.get(function) == "element"


def kind_of(function: Callable[..., Any]) -> Kind:
    """Return how ``function`` acts on a ragged batch."""
    kind = _TABLE.get(function)
    if kind is None:
        name = getattr(function, "__name__", str(function))
        rule = "a function of each element, or of its features, to accept a Ragged"
        raise ArgumentTypeError(name, "a Ragged", rule, hint(name))
    return kind


def hint(name: str) -> str:
    """Return the replacement of a torch function, for messages."""
    general = (
        "call r.map(f) if f treats the rows of r.values independently, or use r.values, the flat tensor, "
        "or r.to_padded()"
    )
    features = (
        f"call torch.{name}(r, ..., dim=-1) for the features" if name in _DIMENSION else general
    )
    return _HINTS.get(name, features)


def check_dimension(name: str, dim: Any, features: int) -> None:
    """Raise if ``dim`` is not a feature dimension, counted from the end."""
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if all(isinstance(d, int) and -features <= d < 0 for d in dims) and dims:
        return
    rule = f"a feature dimension, counted from the end (here {features})"
    fix = _HINTS.get(name, "pass dim=-1 for the features, or use r.to_padded()")
    raise ArgumentTypeError(f"dim of {name}", quote(dim), rule, fix)


def apply(
    kind: type[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a torch function on the flat values of the ragged batches among its arguments."""
    acts_on = kind_of(function)
    name = getattr(function, "__name__", str(function))
    if kwargs.get("out") is not None:
        rule = "left out for a Ragged, which is immutable"
        raise ArgumentTypeError("out", "a tensor", rule, "use the result of the call")
    found = _arguments(args, kwargs)
    batches = [value for value in found if isinstance(value, kind)]
    features = batches[0].values.dim() - 1
    for other in batches[1:]:
        _check_together(name, batches[0], other)
    if acts_on == "element":
        for value in found:
            if isinstance(value, Tensor) and value.dim() > features:
                rule = f"called with a plain tensor of at most {features} dimension(s), those of an element"
                fix = "call r.spread(x) for one value per sequence, or r.map(lambda v: v + x) for one per element"
                raise ShapeError(name, f"a tensor of shape {tuple(value.shape)}", rule, fix)
    elif acts_on == "dim":
        place, default = _DIMENSION[name]
        # torch also accepts NumPy's name, axis.
        dim = kwargs.get(
            "dim",
            kwargs.get("dims", kwargs.get("axis", args[place] if len(args) > place else default)),
        )
        check_dimension(name, dim, features + (name in _ADDING))
    else:
        _check_features(name, kind, args, kwargs, features)
    if "inplace" in kwargs:
        kwargs["inplace"] = False
    plain_args = [_values(kind, value) for value in args]
    plain_kwargs = {key: _values(kind, value) for key, value in kwargs.items()}
    result = function(*plain_args, **plain_kwargs)
    if isinstance(result, list | tuple):
        return type(result)([batches[0].map(lambda _, part=part: part) for part in result])
    return batches[0].map(lambda _: result)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return all arguments, including those in lists."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(value if isinstance(value, list | tuple) else [value])
    return found


def _values(kind: type[Any], value: Any) -> Any:
    """Replace ragged batches, also in a list, by their flat values."""
    if isinstance(value, kind):
        return value.values
    if isinstance(value, list | tuple) and any(isinstance(item, kind) for item in value):
        return [_values(kind, item) for item in value]
    return value


def _check_together(name: str, batch: Any, other: Any) -> None:
    if batch.values.dim() != other.values.dim():
        got = f"batches with elements of shape {tuple(batch.features)} and {tuple(other.features)}"
        fix = "give the smaller one a dimension, r.map(lambda values: values.unsqueeze(-1))"
        raise ShapeError(
            name, got, "called with elements that have the same number of feature dimensions", fix
        )
    other._needs_lengths_of(name, batch, "the other batch")


def _check_features(
    name: str, kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any], features: int
) -> None:
    """Raise if there are too few feature dimensions, or another argument than the input is
    ragged.
    """
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, kind) or any(
        isinstance(value, kind) for value in _arguments(args, kwargs)[1:]
    ):
        fix = "pass r.values"
        raise ArgumentTypeError(
            name, "a Ragged as another argument", "called with a Ragged only as its input", fix
        )
    needed = 0
    if name == "matmul":
        other = args[1] if len(args) > 1 else kwargs["other"]
        if other.dim() > 2:
            rule, fix = "called with a vector or a matrix", "call it on r.values, or in r.map(...)"
            raise ShapeError(name, f"a tensor of shape {tuple(other.shape)}", rule, fix)
    if name in ("linear", "matmul", "group_norm"):
        needed = 1
    elif name in ("layer_norm", "rms_norm"):
        needed = len(kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1])
    if features < needed:
        rule = f"called with elements that have the last {needed} feature dimension(s)"
        fix = "give the elements one, r.map(lambda values: values.unsqueeze(-1))"
        raise ArgumentTypeError(name, f"elements of {features} feature dimension(s)", rule, fix)
