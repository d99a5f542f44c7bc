"""Weights and reductions of the losses of sequences, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_choice, check_device, check_kind
from raglane._utils.tracing import has_tangent, is_differentiated
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged

LabelReduction = Literal["mean", "sum", "none"]

_OF_LABELS = ("mean", "sum", "none")


def sequence_weights(weights: Any, batch: Ragged) -> Tensor:
    """Return validated weights of sequences, ``(B,)``, in the dtype of the sums."""
    values = check_tensor(
        "sample_weight",
        weights,
        batch,
        "pass one number per sequence, such as torch.tensor(weights)",
    )
    if values.shape != (len(batch),):
        rule = f"one number for each of the {len(batch)} sequences"
        fix = "pass a tensor (B,)"
        raise ShapeError("sample_weight", f"shape {tuple(values.shape)}", rule, fix)
    check_numbers("sample_weight", values)
    return values.to(wide(batch.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, or 0 without a gradient if the denominator is 0."""
    # The numerator may differ from 0 then: label smoothing adds losses of other classes to a class
    # of weight 0.
    nothing = denominator == 0
    return numerator.masked_fill(nothing, 0) / denominator.masked_fill(nothing, 1)


def label_scales(shares: Tensor, labels: Tensor, reduction: LabelReduction) -> Tensor:
    """Return the factor of each sequence's loss in a reduction; ``shares`` are the weights
    ``(B,)``.

    A mean divides the loss of a sequence by its number of labels, at least 1, as torch's CTC does.
    """
    if reduction != "mean":
        return shares
    return ratio(shares / labels.clamp(min=1), shares.sum())


def reduce_per_label(
    losses: Tensor, shares: Tensor, labels: Tensor, reduction: LabelReduction
) -> Tensor:
    """Reduce the losses ``(B,)`` of sequences; see :func:`label_scales`."""
    scales = label_scales(shares, labels, reduction)
    # A weight of 0 times an infinite loss would be NaN.
    weighted = losses.masked_fill(scales == 0, 0) * scales
    return weighted if reduction == "none" else weighted.sum()


def once(
    gradients: Sequence[Tensor | None], function: str, argument: str, *values: Tensor | None
) -> list[Tensor | None]:
    """Return gradients that depend on ``values`` and, with ``create_graph=True``, raise if
    differentiated again.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    apply: Any = _Once.apply
    return [
        None if gradient is None else apply(gradient, function, argument, *values)
        for gradient in gradients
    ]


class _Once(torch.autograd.Function):
    """Returns a gradient that depends on ``values``, and raises if it is differentiated again.

    torch's ``once_differentiable`` does not raise if another loss is differentiated too, and omits
    the terms from here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        loss: str,
        argument: str,
        *values: Tensor | None,  # noqa: ARG004
    ) -> Tensor:
        """Return the gradient."""
        ctx.names = loss, argument
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        """Raise the error of a second derivative."""
        loss, argument = ctx.names
        rule = f"the first derivative, the only one of {loss}, as in torch"
        fix = "leave out create_graph=True, or penalise another loss"
        raise ArgumentError(argument, "a second derivative", rule, fix)


def check_untransformed(function: str, argument: str, values: Sequence[Tensor]) -> None:
    """Raise for derivatives of torch.func and forward_ad: an operator would drop tangents."""
    if has_tangent(values) or any(map(is_differentiated, values)):
        got = "a tensor of torch.func or forward_ad"
        rule = f"a plain tensor, since {function} has only gradients"
        raise ArgumentError(argument, got, rule, "use torch.autograd.grad or backward()")


def check_label_reduction(reduction: Any) -> None:
    """Raise if this is not the name of a reduction of losses per sequence."""
    fix = "pass 'mean' for the mean over sequences"
    check_choice("reduction", reduction, _OF_LABELS, fix)


def check_predictions(name: str, batch: Any) -> None:
    """Raise if predictions are not a Ragged of a floating-point dtype."""
    rule = "a Ragged of predictions, one per element"
    if isinstance(batch, PackedSequence):
        check_ragged(name, batch, rule)
    fix = "wrap it with rl.Ragged, or for one prediction per sequence call the loss of torch.nn.functional"
    check_kind(name, batch, Ragged, rule, fix)
    if not batch.values.is_floating_point():
        raise ArgumentTypeError(
            name, str(batch.dtype), "of a floating-point dtype", "call .to(torch.float32)"
        )


def check_tensor(name: str, tensor: Any, batch: Ragged, fix: str) -> Tensor:
    """Return a dense tensor of real numbers on the device of the batch, or raise."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(name, f"a {type(tensor).__name__}", "a tensor", fix)
    if (
        tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.is_complex()
        or tensor.is_quantized
    ):
        got = (
            "a nested tensor"
            if tensor.is_nested
            else f"a tensor of {tensor.layout} and {tensor.dtype}"
        )
        raise ArgumentTypeError(name, got, "a dense tensor of real numbers", fix)
    check_device(name, tensor, batch.device)
    return tensor


def check_numbers(name: str, numbers: Tensor) -> None:
    """Raise if weights on a CPU are not finite numbers of at least 0."""
    if numbers.is_cpu and not torch.compiler.is_compiling():
        wrong = ~((numbers >= 0) & numbers.isfinite())
        if bool(wrong.any()):
            got = f"{numbers[wrong][0].item()}"
            raise ArgumentError(name, got, "finite numbers of at least 0", "correct or remove it")
