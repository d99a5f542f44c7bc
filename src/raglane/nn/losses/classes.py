"""Losses of classes: cross-entropy of logits, and negative log-likelihood of log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.checks import check_number, check_whole
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, message
from raglane.nn.losses.comparison import Comparison, Reduction, check_numbers, check_tensor, compare
from raglane.ragged import Ragged


def cross_entropy(
    input: Ragged,
    target: Ragged | Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """Cross-entropy of logits with classes, or with probabilities of classes.

    ``-weight[target] * log_softmax(input)[target]``; for probabilities ``-sum(weight * target * log_softmax(input))``.

    Args:
        input: ``(N, C)``, floating-point: logits, before any softmax.
        target: classes, of an integer dtype, a Ragged ``(N,)`` of the same lengths or a tensor ``(B,)``; or
            probabilities, floating-point, ``(N, C)`` or ``(B, C)``.
        weight: ``(C,)``, one number of at least 0 per class. A mean over elements divides by the weights of their
            classes; with probabilities, by their number, as in torch.
        ignore_index: elements of this class do not count. Without effect where ``target`` holds probabilities.
        label_smoothing: from 0 to 1, the share of a target that goes evenly to all classes (Szegedy et al. 2016,
            "Rethinking the Inception architecture for computer vision").
        weights: a Ragged ``(N,)`` or a tensor ``(B,)``; see :mod:`raglane.nn.losses`.
        reduction: ``"element"``, ``"sequence"`` or ``"none"``; see :mod:`raglane.nn.losses`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ShapeError: lengths, shapes or devices that do not fit.
        ArgumentError: a class that does not exist or a weight that is not finite or below 0 (looked for on a
            CPU), an unknown reduction, or ``label_smoothing`` out of range.

    Example:
        >>> logits = Ragged([torch.zeros(3, 4), torch.zeros(0, 4), torch.zeros(1, 4)])
        >>> cross_entropy(logits, Ragged([[0, 3, -100], [], [2]])).exp().round().item()
        4.0
        >>> cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="none").lengths.tolist()
        [3, 0, 1]
    """
    check_number("label_smoothing", label_smoothing, "from 0 to 1", lambda share: 0 <= share <= 1)
    pair = compare(input, target, weights, reduction)
    logits, targets = pair.predictions, pair.targets
    _check_scores(logits)
    scale = _class_weights(weight, pair)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            got = f"floating-point elements of shape {tuple(targets.shape[1:])}"
            rule = f"probabilities of the {logits.shape[1]} classes, or one class of an integer dtype"
            raise ShapeError(message("target", got, rule, "call .to(torch.int64) on classes"))
        losses = F.cross_entropy(
            logits, targets.to(logits.dtype), scale, reduction="none", label_smoothing=label_smoothing
        )
        return pair.reduce(losses)
    classes = _classes(targets, logits.shape[1], ignore_index)
    losses = F.cross_entropy(
        logits, classes, scale, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return pair.reduce(losses, _counts(classes, scale, ignore_index, losses))


def nll_loss(
    input: Ragged,
    target: Ragged | Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    weights: Ragged | Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor | Ragged:
    """The negative log-likelihood of classes, ``-weight[target] * input[target]``.

    Args:
        input: ``(N, C)``, floating-point: log-probabilities, for instance ``torch.log_softmax(logits, dim=-1)``.
        target: classes, of an integer dtype, a Ragged ``(N,)`` of the same lengths or a tensor ``(B,)``.
        weight: as for :func:`cross_entropy`.
        ignore_index: as for :func:`cross_entropy`.
        weights: as for :func:`cross_entropy`.
        reduction: as for :func:`cross_entropy`.

    Returns:
        A 0-d tensor, or a Ragged ``(N,)`` where the reduction is ``"none"``.

    Raises:
        RaglaneError: as :func:`cross_entropy`.

    Example:
        >>> nll_loss(Ragged([[[-1.0, -2.0], [-3.0, -4.0]]]), Ragged([[1, 0]])).item()
        2.5
    """
    pair = compare(input, target, weights, reduction)
    _check_scores(pair.predictions)
    scale = _class_weights(weight, pair)
    classes = _classes(pair.targets, pair.predictions.shape[1], ignore_index)
    losses = F.nll_loss(pair.predictions, classes, scale, reduction="none", ignore_index=ignore_index)
    return pair.reduce(losses, _counts(classes, scale, ignore_index, losses))


def _counts(classes: Tensor, scale: Tensor | None, ignore_index: int, losses: Tensor) -> Tensor:
    """As how many elements each row counts: 0 where its class is ignored, else the weight of the class."""
    counted = classes != ignore_index
    if scale is None:
        return counted.to(losses.dtype)
    # The class to ignore need not be an index.
    return scale.index_select(0, classes.masked_fill(~counted, 0)).masked_fill(~counted, 0)


def _check_scores(scores: Tensor) -> None:
    if scores.dim() != 2 or scores.shape[1] == 0:
        rule = "one number per class, (N, C), and at least one class"
        fix = "put the classes last and nothing beside them, for instance with .map(lambda values: ...)"
        raise ShapeError(message("input", f"elements of shape {tuple(scores.shape[1:])}", rule, fix))


def _class_weights(weight: Any, pair: Comparison) -> Tensor | None:
    if weight is None:
        return None
    scores = pair.predictions
    given = check_tensor(
        "weight", weight, pair.batch, "pass a tensor (C,); weights=, with an s, is for elements and sequences"
    )
    if given.shape != scores.shape[1:]:
        rule = f"one number for each of the {scores.shape[1]} classes"
        fix = "pass a tensor (C,); weights=, with an s, is for elements and sequences"
        raise ShapeError(message("weight", f"shape {tuple(given.shape)}", rule, fix))
    check_numbers("weight", given)
    return given.to(scores.dtype)


def _classes(targets: Tensor, count: int, ignore_index: int) -> Tensor:
    """Targets as int64 classes, one per row; on a CPU, classes that exist."""
    check_whole("ignore_index", ignore_index)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise ArgumentTypeError(
            message("target", str(targets.dtype), "classes of an integer dtype", "call .to(torch.int64)")
        )
    if targets.dim() != 1:
        rule = "one class per element, (N,)"
        fix = "drop the dimension with target.map(lambda values: values.squeeze(-1))"
        raise ShapeError(message("target", f"elements of shape {tuple(targets.shape[1:])}", rule, fix))
    classes = targets.long()
    if classes.is_cpu and not torch.compiler.is_compiling():
        outside = (classes != ignore_index) & ((classes < 0) | (classes >= count))
        if bool(outside.any()):
            rule = f"from 0 to {count - 1}, since input has {count} classes, or ignore_index, {ignore_index}"
            fix = "see how the classes were numbered"
            raise ArgumentError(message("target", f"class {int(classes[outside][0])}", rule, fix))
    return classes
