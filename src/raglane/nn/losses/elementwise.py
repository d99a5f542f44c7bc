"""Losses that compare number with number: squared, absolute and Huber's error, and binary cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.checks import check_number
from raglane.errors import ArgumentError, ShapeError, message
from raglane.nn.losses.comparison import Reduction, check_numbers, check_tensor, compare
from raglane.ragged import Ragged


def mse_loss(
    input: Ragged,
    target: Ragged | Tensor,
    *,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """The squared error, ``(input - target) ** 2``, a mean over the features of each element.

    Args:
        input: ``(N, *features)``, floating-point.
        target: a Ragged ``(N, *features)`` of the same lengths, or a tensor ``(B, *features)``; converted to the
            dtype of ``input``.
        weights: a Ragged ``(N,)`` or a tensor ``(B,)``; see :mod:`raglane.nn.losses`.
        reduction: ``"element"``, ``"sequence"`` or ``"none"``; see :mod:`raglane.nn.losses`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ShapeError: lengths, shapes or devices that do not fit.
        ArgumentError: an unknown reduction.

    Example:
        >>> input, target = Ragged([[1., 2., 3.], [4.]]), Ragged([[1., 2., 6.], [9.]])
        >>> mse_loss(input, target).item(), mse_loss(input, target, reduction="sequence").item()
        (8.5, 14.0)
    """
    return _elementwise(partial(F.mse_loss, reduction="none"), input, target, weights, reduction)


def l1_loss(
    input: Ragged,
    target: Ragged | Tensor,
    *,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """The absolute error (MAE), ``|input - target|``, a mean over the features of each element.

    Args:
        input: ``(N, *features)``, floating-point.
        target: as for :func:`mse_loss`.
        weights: as for :func:`mse_loss`.
        reduction: as for :func:`mse_loss`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        RaglaneError: as :func:`mse_loss`.

    Example:
        >>> l1_loss(Ragged([[1., 2.], [4.]]), Ragged([[1., 5.], [1.]])).item()
        2.0
    """
    return _elementwise(partial(F.l1_loss, reduction="none"), input, target, weights, reduction)


def huber_loss(
    input: Ragged,
    target: Ragged | Tensor,
    delta: float = 1.0,
    *,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """Huber's error, a mean over the features of each element.

    From Huber 1964, "Robust estimation of a location parameter". With ``d = |input - target|``: ``d ** 2 / 2`` up to
    ``delta``, and ``delta * (d - delta / 2)`` beyond.

    Args:
        input: ``(N, *features)``, floating-point.
        target: as for :func:`mse_loss`.
        delta: where it turns from squared to linear, in the units of ``input``; above 0.
        weights: as for :func:`mse_loss`.
        reduction: as for :func:`mse_loss`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        ArgumentError: ``delta`` not above 0.
        RaglaneError: as :func:`mse_loss`.

    Example:
        >>> huber_loss(Ragged([[1., 4.]]), Ragged([[2., 1.]]), reduction="none").values.tolist()
        [0.5, 2.5]
    """
    check_number("delta", delta, "above 0", lambda number: number > 0)
    return _elementwise(partial(F.huber_loss, reduction="none", delta=delta), input, target, weights, reduction)


def binary_cross_entropy_with_logits(
    input: Ragged,
    target: Ragged | Tensor,
    pos_weight: Tensor | None = None,
    *,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """Binary cross-entropy of logits, a mean over the features of each element (one per label where it has many).

    ``-(pos_weight * target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input)))``

    Args:
        input: ``(N, *features)``, floating-point: logits, before any sigmoid.
        target: a Ragged ``(N, *features)`` of the same lengths, or a tensor ``(B, *features)``: booleans or numbers
            from 0 to 1.
        pos_weight: how many times a target of 1 counts in the loss: one number, or one per feature. Unlike ``weights``
            it takes no part in what a mean divides by, as in torch.
        weights: as for :func:`mse_loss`.
        reduction: as for :func:`mse_loss`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        ShapeError: a ``pos_weight`` of another shape.
        ArgumentError: a ``pos_weight`` that is not finite or below 0, or a target below 0 or above 1; both are
            looked for on a CPU.
        RaglaneError: as :func:`mse_loss`.

    Example:
        >>> loss = binary_cross_entropy_with_logits(Ragged([[0.0, 0.0]]), Ragged([[True, False]]))
        >>> loss.exp().item()
        2.0
    """

    def function(logits: Tensor, targets: Tensor) -> Tensor:
        scale = None if pos_weight is None else _label_weights(pos_weight, logits, input)
        _check_labels(targets)
        return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=scale, reduction="none")

    return _elementwise(function, input, target, weights, reduction)


def _check_labels(targets: Tensor) -> None:
    """Refuse, on a CPU, labels below 0 or above 1. A NaN stays in its sequence, as everywhere."""
    if targets.is_cpu and not torch.compiler.is_compiling():
        wrong = (targets < 0) | (targets > 1)
        if bool(wrong.any()):
            got = f"{targets[wrong][0].item()} among them"
            raise ArgumentError(message("target", got, "from 0 to 1", "divide by the largest, or compare with it"))


def _label_weights(pos_weight: Any, logits: Tensor, batch: Ragged) -> Tensor:
    """``pos_weight`` as it meets the features of each row."""
    given = check_tensor("pos_weight", pos_weight, batch, "pass a tensor: one number, or one per label")
    check_numbers("pos_weight", given)
    given = given.to(logits.dtype)
    if given.numel() == 1:
        return given.reshape(())
    if given.shape != logits.shape[1:]:
        rule = f"one number, or the shape of an element, {tuple(logits.shape[1:])}"
        raise ShapeError(message("pos_weight", f"shape {tuple(given.shape)}", rule, "pass one weight per label"))
    return given


def _elementwise(
    function: Callable[[Tensor, Tensor], Tensor],
    predictions: Ragged,
    target: Ragged | Tensor,
    weights: Ragged | Tensor | None,
    reduction: Reduction,
) -> Tensor | Ragged:
    """The loss whose function gives one number for each of ``(N, *features)``."""
    pair = compare(predictions, target, weights, reduction)
    if pair.targets.shape != pair.predictions.shape:
        rule = f"the shape of an element of input, {tuple(pair.predictions.shape[1:])}; nothing is broadcast"
        fix = "reshape one with .map(lambda values: values.squeeze(-1)), or unsqueeze(-1)"
        raise ShapeError(message("target", f"elements of shape {tuple(pair.targets.shape[1:])}", rule, fix))
    losses = function(pair.predictions, pair.targets.to(pair.predictions.dtype))
    if losses.dim() > 1:
        # Elements without a feature have nothing to be wrong about, where a mean would be NaN.
        losses = losses.flatten(1)
        losses = losses.sum(1) / max(losses.shape[1], 1)
    return pair.reduce(losses)
