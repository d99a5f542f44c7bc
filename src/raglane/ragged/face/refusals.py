"""Messages for torch functions that a Ragged does not accept."""

from __future__ import annotations

import re
from types import FrameType

import torch

from raglane.errors import ArgumentTypeError

_EACH = "call it on each sequence of r.to_list(), or r.map(f) with an f that treats each row alone"

# Patterns of names, the reason and the replacement. The first that matches the whole name counts.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "_pack_padded_sequence|transpose_",
        "because a Ragged has no padding",
        "call r.to_packed(), or r.to_list() for its sequences",
    ),
    (
        r"(?!__).*[^_]_|__i\w+__|__setitem__|set_|.*_\.out",
        "because a Ragged is immutable",
        "use the function of the same name without an underscore, which returns a new batch",
    ),
    (
        r".*(conv|pool|fold|interpolate|upsample|grid_sample|pixel|lrn|local_response).*",
        "because it would read across the ends of sequences",
        "use rl.nn.Conv1d, rl.nn.MaxPool1d or rl.nn.AvgPool1d, or call it on each sequence of r.to_list()",
    ),
    (
        r".*(batch_norm|group_norm).*",
        "because its channels are dimension 1, the steps of a Ragged",
        "call r.map(f), which gives the module the flat rows (N, C)",
    ),
    (
        r".*instance_norm.*",
        "because its channels are dimension 1, the steps of a Ragged",
        "write (r - r.mean(1, keepdim=True)) / r.std(1, unbiased=False, keepdim=True)",
    ),
    (
        r"(quantized_)?(lstm|gru|rnn)(_\w+)?",
        "because the layers of torch read padded or packed sequences",
        "use the layer of the same name of rl.nn, which has the same weights",
    ),
    (
        r".*multi_head_attention.*|_transformer_encoder.*|_native_multi.*",
        "because it would attend across sequences",
        "use rl.nn.Attention, which has the same weights",
    ),
    (r"ctc_loss", "because it reads padded targets", "call rl.transduction.ctc_loss"),
    (
        r".*_loss|kl_div|binary_cross_entropy.*",
        "because only the functions of torch.nn.functional count each real element once",
        "call the loss of torch.nn.functional or torch.nn",
    ),
    (
        r"view.*|reshape.*|resize.*|ravel|T|H|mT|mH|t|adjoint|as_strided",
        "because sequences and steps stay the first two dimensions",
        "call r.flatten(2), r.unflatten(-1, sizes), r.unsqueeze(-1) or r.transpose(-1, -2)",
    ),
    (
        r"grad|grad_fn|grad_dtype|is_leaf|retains?_grad|data|register_hook|output_nr",
        "because its values are the tensor of the graph",
        "use those, e.g. r.values.grad or torch.autograd.grad(loss, r.values)",
    ),
    (r"backward", "because it is no scalar", "call r.sum().backward(), or r.mean()"),
    (
        r"item|__float__|__int__|__index__|__complex__",
        "because it is no single number",
        "call r.values.item() if it has one element, or e.g. r.mean().item()",
    ),
    (
        r"numpy|__array.*|__dlpack.*",
        "because its sequences have different lengths",
        "call r.to_numpy()",
    ),
    (
        "broadcast_tensors",
        "because sequences have different lengths",
        "use Categorical, Normal or Bernoulli of rl.distributions in place of those of "
        "torch.distributions, and r.values for others; or call r.broadcast(x)",
    ),
    (
        "ndimension",
        "because sequences have different lengths",
        "use Categorical of rl.distributions in place of that of torch.distributions; or call r.dim()",
    ),
    (
        r"repeat|tile|expand|broadcast_\w+|repeat_interleave",
        "because lengths differ",
        "call x[:, None].expand_as(r) or r.broadcast(x) for one row per sequence",
    ),
    (r"narrow|select\w*", "because lengths differ", "index the steps, e.g. r[:, :5] or r[:, -1]"),
    (
        r"scatter.*|index_(add|copy|fill|put|reduce).*|masked_scatter|put",
        "because a Ragged is immutable",
        "call torch.where(mask, r, other) with a mask of the same lengths",
    ),
    (
        r"unique.*|bincount|histc?|histogram.*",
        "because it mixes sequences",
        "call it on r.values, all real elements",
    ),
)


def _reason(name: str) -> tuple[str, str]:
    """Return why a function does not accept a Ragged, and the replacement."""
    for pattern, reason, fix in REFUSALS:
        if re.fullmatch(pattern, name):
            return reason, fix
    return "because it may mix elements of different sequences", _EACH


def _sentences(first: str, name: str) -> str:
    reason, fix = _reason(name)
    return f"{first}, {reason}. {fix[:1].upper()}{fix[1:]}."


_LAZY = (
    torch.nn.modules.batchnorm._LazyNormBase.initialize_parameters.__code__,
    torch.nn.modules.conv._LazyConvXdMixin._get_in_channels.__code__,
)


def refuse_lazy(caller: FrameType) -> None:
    """Raise for a lazy module that reads its number of channels, dimension 1, from a shape.

    A Ragged has no number of steps, and the error of torch would be one of None.
    """
    if caller.f_code in _LAZY:
        name = type(caller.f_locals["self"]).__name__
        kind = re.sub("(?<!^)(?=[A-Z])", "_", name.removeprefix("Lazy")).lower()
        raise ArgumentTypeError(_sentences(f"{name} does not accept a Ragged", kind))


def refusal(name: str) -> ArgumentTypeError:
    """Return the error of a function that does not accept a Ragged."""
    return ArgumentTypeError(_sentences(f"{name} does not accept a Ragged", name))


def attribute_error(name: str) -> AttributeError:
    """Return the error of an attribute of torch.Tensor that a Ragged does not have."""
    return AttributeError(
        _sentences(f"A Ragged does not have the attribute {name} of a tensor", name)
    )
