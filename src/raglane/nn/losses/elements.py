"""Losses per element: of classes, and of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.checks import check_number, check_whole
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.losses.comparison import (
    Comparison,
    Reduction,
    check_numbers,
    check_tensor,
    compare,
    wide,
)
from raglane.ragged import Ragged

_ONE_PER_CLASS = "pass a tensor (C,); weights of elements and sequences are sample_weight"


def cross_entropy(
    input: Ragged,
    target: Ragged,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return the cross-entropy of logits with classes, or with probabilities of classes.

    It is ``-weight[target] * log_softmax(input)[target]``, or ``-sum(weight * target *
    log_softmax(input))`` for probabilities.

    Args:
        input: ``(N, C)``, floating-point: logits, before any softmax.
        target: a Ragged of the same lengths: classes ``(N,)`` of an integer dtype, or
            probabilities ``(N, C)``, floating-point.
        weight: ``(C,)``, one number of at least 0 per class. A mean over elements divides by the
            weights of their classes; with probabilities, by their number, as in torch.
        ignore_index: elements of this class do not count. Ignored for probabilities.
        label_smoothing: from 0 to 1, the share of a target that is distributed evenly over all
            classes (Szegedy et al. 2016, "Rethinking the Inception architecture for computer
            vision").
        sample_weight: a Ragged ``(N,)`` or a tensor ``(B,)``; see :mod:`raglane.nn.losses`.
        reduction: ``"mean"``, ``"sum"``, ``"none"`` or ``"sequence_mean"``; see
            :mod:`raglane.nn.losses`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` for the reduction ``"none"``.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ShapeError: lengths, shapes or devices do not match.
        ArgumentError: a class does not exist, or a weight is negative or not finite (checked only
            on a CPU); the reduction is unknown, or ``label_smoothing`` is out of range.

    Example:
        >>> logits = Ragged([torch.zeros(3, 4), torch.zeros(0, 4), torch.zeros(1, 4)])
        >>> cross_entropy(logits, Ragged([[0, 3, -100], [], [2]])).exp().round().item()
        4.0
        >>> each = cross_entropy(logits, logits.broadcast(torch.tensor([0, 1, 2])), reduction="none")
        >>> each.lengths.tolist()
        [3, 0, 1]
    """
    check_number("label_smoothing", label_smoothing, "from 0 to 1", lambda share: 0 <= share <= 1)
    pair = compare(input, target, sample_weight, reduction)
    logits = pair.predictions
    targets = pair.targets
    _check_scores(logits)
    scale = _class_weights(weight, pair)
    function = partial(F.cross_entropy, label_smoothing=label_smoothing)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            got = f"floating-point elements of shape {tuple(targets.shape[1:])}"
            rule = (
                f"probabilities of the {logits.shape[1]} classes, or one class, of an integer dtype"
            )
            raise ShapeError("target", got, rule, "call .to(torch.int64) on classes")
        return pair.reduce(function(logits, targets.to(logits.dtype), scale, reduction="none"))
    return _of_classes(function, pair, scale, ignore_index)


def nll_loss(
    input: Ragged,
    target: Ragged,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return the negative log-likelihood of classes, ``-weight[target] * input[target]``.

    The result and the errors are those of :func:`cross_entropy`.

    Args:
        input: ``(N, C)``, floating-point: log-probabilities, e.g. ``torch.log_softmax(logits,
            dim=-1)``.
        target: a Ragged of the same lengths, classes ``(N,)`` of an integer dtype.
        weight: as for :func:`cross_entropy`.
        ignore_index: as for :func:`cross_entropy`.
        sample_weight: as for :func:`cross_entropy`.
        reduction: as for :func:`cross_entropy`.

    Example:
        >>> nll_loss(Ragged([[[-1.0, -2.0], [-3.0, -4.0]]]), Ragged([[1, 0]])).item()
        2.5
    """
    pair = compare(input, target, sample_weight, reduction)
    _check_scores(pair.predictions)
    return _of_classes(F.nll_loss, pair, _class_weights(weight, pair), ignore_index)


def _of_classes(
    function: Callable[..., Tensor], pair: Comparison, scale: Tensor | None, ignore_index: int
) -> Tensor | Ragged:
    """Return a loss of ``(N, C)`` with classes ``(N,)``; rows count by the weight of their
    class.
    """
    classes = _classes(pair.targets, pair.predictions.shape[1], ignore_index)
    losses = function(pair.predictions, classes, scale, reduction="none", ignore_index=ignore_index)
    counted = classes != ignore_index
    if scale is None:
        return pair.reduce(losses, counted.to(losses.dtype))
    # ignore_index may be out of range.
    counts = scale.index_select(0, classes.masked_fill(~counted, 0)).masked_fill(~counted, 0)
    return pair.reduce(losses, counts)


def _check_scores(scores: Tensor) -> None:
    if scores.dim() != 2 or scores.shape[1] == 0:
        rule = "one number per class, (N, C), for at least one class"
        fix = (
            "make the classes the only dimension of an element, e.g. with .map(lambda values: ...)"
        )
        raise ShapeError("input", f"elements of shape {tuple(scores.shape[1:])}", rule, fix)


def _class_weights(weight: Any, pair: Comparison) -> Tensor | None:
    if weight is None:
        return None
    scores = pair.predictions
    factors = check_tensor("weight", weight, pair.batch, _ONE_PER_CLASS)
    if factors.shape != scores.shape[1:]:
        rule = f"one number for each of the {scores.shape[1]} classes"
        raise ShapeError("weight", f"shape {tuple(factors.shape)}", rule, _ONE_PER_CLASS)
    check_numbers("weight", factors)
    return factors.to(scores.dtype)


def _classes(targets: Tensor, count: int, ignore_index: int) -> Tensor:
    """Return targets as int64 classes, one per row; on a CPU, raise if one does not exist."""
    check_whole("ignore_index", ignore_index)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise ArgumentTypeError(
            "target", str(targets.dtype), "classes of an integer dtype", "call .to(torch.int64)"
        )
    if targets.dim() != 1:
        fix = "drop the dimension with target.map(lambda values: values.squeeze(-1))"
        raise ShapeError(
            "target",
            f"elements of shape {tuple(targets.shape[1:])}",
            "one class per element, (N,)",
            fix,
        )
    classes = targets.long()
    if classes.is_cpu and not torch.compiler.is_compiling():
        outside = (classes != ignore_index) & ((classes < 0) | (classes >= count))
        if bool(outside.any()):
            rule = f"from 0 to {count - 1}, for the {count} classes of input, or ignore_index, {ignore_index}"
            fix = "check how the classes are numbered"
            raise ArgumentError("target", f"class {int(classes[outside][0])}", rule, fix)
    return classes


def mse_loss(
    input: Ragged,
    target: Ragged,
    *,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return the squared error, ``(input - target) ** 2``.

    Args:
        input: ``(N, *features)``, floating-point.
        target: a Ragged ``(N, *features)`` of the same lengths; converted to the dtype of
            ``input``.
        sample_weight: a Ragged ``(N,)`` or a tensor ``(B,)``; see :mod:`raglane.nn.losses`.
        reduction: ``"mean"``, ``"sum"``, ``"none"`` or ``"sequence_mean"``; see
            :mod:`raglane.nn.losses`.

    Returns:
        A 0-d tensor, or a Ragged ``(N, *features)`` for the reduction ``"none"``.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind.
        ShapeError: lengths, shapes or devices do not match.
        ArgumentError: the reduction is unknown.

    Example:
        >>> input, target = Ragged([[1., 2., 3.], [4.]]), Ragged([[1., 2., 6.], [9.]])
        >>> mse_loss(input, target).item(), mse_loss(input, target, reduction="sequence_mean").item()
        (8.5, 14.0)
    """
    return _elementwise(F.mse_loss, input, target, sample_weight, reduction)


def l1_loss(
    input: Ragged,
    target: Ragged,
    *,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return the absolute error (MAE), ``|input - target|``.

    Arguments, result and errors are those of :func:`mse_loss`.

    Example:
        >>> l1_loss(Ragged([[1., 2.], [4.]]), Ragged([[1., 5.], [1.]])).item()
        2.0
    """
    return _elementwise(F.l1_loss, input, target, sample_weight, reduction)


def huber_loss(
    input: Ragged,
    target: Ragged,
    delta: float = 1.0,
    *,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return Huber's error.

    With ``d = |input - target|`` it is ``d ** 2 / 2`` up to ``delta``, and ``delta * (d - delta /
    2)`` beyond (Huber 1964, "Robust estimation of a location parameter"). ``delta`` is a number
    above 0, in the units of ``input``; otherwise an ArgumentError is raised. The other arguments,
    the result and the errors are those of :func:`mse_loss`.

    Example:
        >>> huber_loss(Ragged([[1., 4.]]), Ragged([[2., 1.]]), reduction="none").values.tolist()
        [0.5, 2.5]
    """
    check_number("delta", delta, "above 0", lambda number: number > 0)
    return _elementwise(partial(F.huber_loss, delta=delta), input, target, sample_weight, reduction)


def binary_cross_entropy_with_logits(
    input: Ragged,
    target: Ragged,
    pos_weight: Tensor | None = None,
    *,
    sample_weight: Ragged | Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor | Ragged:
    """Return the binary cross-entropy of logits.

    ``-(pos_weight * target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input)))``

    The result and the other errors are those of :func:`mse_loss`.

    Args:
        input: ``(N, *features)``, floating-point: logits, before any sigmoid.
        target: a Ragged ``(N, *features)`` of the same lengths: booleans or numbers from 0 to 1.
        pos_weight: a factor for the loss of targets of 1: one number, or one per feature. As in
            torch, means are not divided by it, unlike ``sample_weight``.
        sample_weight: as for :func:`mse_loss`.
        reduction: as for :func:`mse_loss`.

    Raises:
        ShapeError: ``pos_weight`` has another shape.
        ArgumentError: ``pos_weight`` is negative or not finite, or a target is below 0 or above 1;
            both are checked only on a CPU.

    Example:
        >>> loss = binary_cross_entropy_with_logits(Ragged([[0.0, 0.0]]), Ragged([[True, False]]))
        >>> loss.exp().item()
        2.0
    """

    def function(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        scale = None if pos_weight is None else _label_weights(pos_weight, logits, input)
        _check_labels(targets)
        return F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=scale, reduction=reduction
        )

    return _elementwise(function, input, target, sample_weight, reduction)


def _check_labels(targets: Tensor) -> None:
    """Raise if a label on a CPU is below 0 or above 1; NaN is allowed."""
    if targets.is_cpu and not torch.compiler.is_compiling():
        wrong = (targets < 0) | (targets > 1)
        if bool(wrong.any()):
            fix = "divide by the largest value, or compare with a threshold"
            raise ArgumentError("target", f"{targets[wrong][0].item()}", "from 0 to 1", fix)


def _label_weights(pos_weight: Any, logits: Tensor, batch: Ragged) -> Tensor:
    """Return ``pos_weight`` as a scalar, or in the shape of a row."""
    fix = "pass a tensor: one number, or one per label"
    factors = check_tensor("pos_weight", pos_weight, batch, fix)
    check_numbers("pos_weight", factors)
    factors = factors.to(logits.dtype)
    if factors.numel() == 1:
        return factors.reshape(())
    if factors.shape != logits.shape[1:]:
        got = f"shape {tuple(factors.shape)}"
        rule = f"one number, or of the shape of an element, {tuple(logits.shape[1:])}"
        raise ShapeError("pos_weight", got, rule, "pass one weight per label")
    return factors


def _elementwise(
    function: Callable[..., Tensor],
    predictions: Ragged,
    target: Ragged,
    sample_weight: Ragged | Tensor | None,
    reduction: Reduction,
) -> Tensor | Ragged:
    """Return a loss whose function returns one number for each of ``(N, *features)``."""
    pair = compare(predictions, target, sample_weight, reduction)
    if pair.targets.shape != pair.predictions.shape:
        shape = tuple(pair.predictions.shape[1:])
        rule = f"of the shape of input, with elements of shape {shape}; nothing is broadcast"
        fix = "reshape one with .map(lambda values: values.squeeze(-1)), or unsqueeze(-1)"
        raise ShapeError("target", f"elements of shape {tuple(pair.targets.shape[1:])}", rule, fix)
    losses = function(pair.predictions, pair.targets.to(pair.predictions.dtype), reduction="none")
    if losses.dim() == 1 or reduction == "none":
        return pair.reduce(losses)
    flat = losses.flatten(1)
    summed = flat.sum(1, dtype=wide(losses.dtype))
    if reduction != "sum":  # not a mean, which is NaN for elements without features
        summed = summed / max(flat.shape[1], 1)
    return pair.reduce(summed, dtype=losses.dtype)
