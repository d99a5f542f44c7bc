"""Predictions and targets of a loss brought together row by row, and the losses weighed and reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_device, check_kind
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged

Reduction = Literal["element", "sequence", "none"]

_REDUCTIONS = ("element", "sequence", "none")


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Predictions and targets, one row per element, and how the losses of the rows are weighed."""

    batch: Ragged  # the predictions as they were given
    predictions: Tensor  # ``(N, *features)``; zeros in rows of weight 0
    targets: Tensor  # ``(N, ...)``; floating-point ones are zeros in rows of weight 0
    row_weights: Tensor | None  # ``(N,)`` of the dtype that losses are added up in, or None for ones
    sequence_weights: Tensor | None  # ``(B,)``, where the means of sequences are weighed; else None
    reduction: Reduction  # how the losses become one number

    def reduce(self, losses: Tensor, counts: Tensor | None = None) -> Tensor | Ragged:
        """Reduce the losses of the rows."""
        if self.reduction == "none":
            return self.batch._like(
                losses if self.row_weights is None else (losses * self.row_weights).to(losses.dtype)
            )
        summed = losses.to(wide(losses.dtype))
        counts = torch.ones_like(summed) if counts is None else counts.to(summed.dtype)
        if self.row_weights is not None:
            summed, counts = summed * self.row_weights, counts * self.row_weights
        if self.reduction == "element":
            return ratio(summed.sum(), counts.sum()).to(losses.dtype)
        offsets = self.batch.offsets
        elements = segments.sum(counts, offsets)
        means = ratio(segments.sum(summed, offsets), elements)
        shares = (elements != 0).to(summed.dtype)
        if self.sequence_weights is not None:
            shares = shares * self.sequence_weights
        return ratio((means * shares).sum(), shares.sum()).to(losses.dtype)


def compare(predictions: Any, target: Any, weights: Any, reduction: Any) -> Comparison:
    """Check the arguments of a loss against each other, and bring them together row by row."""
    check_reduction(reduction)
    check_predictions("input", predictions)
    rows = _rows("target", target, predictions)
    row_weights, of_sequences, counted = _weigh(weights, predictions, reduction)
    values = predictions.values
    if counted is not None:
        values = _zero_unless(counted, values)
        # Classes are not numbers that could be NaN, and 0 need not be one of them.
        rows = _zero_unless(counted, rows) if rows.is_floating_point() else rows
    return Comparison(predictions, values, rows, row_weights, of_sequences, reduction)


def _weigh(weights: Any, batch: Ragged, reduction: Reduction) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The weights of rows and of sequences, and which rows have any; None where there is nothing to say."""
    if weights is None:
        return None, None, None
    if isinstance(weights, Ragged):
        weights._needs_lengths_of("weights", batch, "the predictions have")
        given = weights.values
        if given.dim() != 1:
            rule = "a Ragged of one number per element"
            fix = "pass a Ragged without features, e.g. weights.map(lambda values: values.squeeze(-1))"
            raise ShapeError(message("weights", f"elements of shape {tuple(weights.features)}", rule, fix))
        check_tensor("weights", given, batch, "pass real numbers")
        check_numbers("weights", given)
        return given.to(wide(batch.dtype)), None, given != 0
    given = sequence_weights(weights, batch)
    spread = segments.spread(given, batch.offsets, batch.values.shape[0])
    if reduction == "sequence":
        return None, given, spread != 0
    return spread, None, spread != 0


def sequence_weights(weights: Any, batch: Ragged) -> Tensor:
    """Check weights of sequences."""
    given = check_tensor("weights", weights, batch, "pass one number per sequence, such as torch.tensor(weights)")
    if given.shape != (len(batch),):
        rule = f"one number for each of the {len(batch)} sequences"
        fix = "pass a tensor (B,), or a Ragged for one per element"
        raise ShapeError(message("weights", f"shape {tuple(given.shape)}", rule, fix))
    check_numbers("weights", given)
    return given.to(wide(batch.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up losses in: float32 for anything narrower."""
    return torch.promote_types(dtype, torch.float32)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 without a gradient where the denominator is 0: nothing was counted there."""
    # A numerator may be left over: smoothed labels of a class of weight 0 share in the loss of the others.
    nothing = denominator == 0
    return numerator.masked_fill(nothing, 0) / denominator.masked_fill(nothing, 1)


def check_reduction(reduction: Any) -> None:
    """Refuse what is not a reduction."""
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        fix = "for torch's 'mean' pass 'element'; for its 'sum' pass 'none' and add up the values"
        raise ArgumentError(message("reduction", quote(reduction), f"one of {', '.join(map(repr, _REDUCTIONS))}", fix))


def check_predictions(name: str, batch: Any) -> None:
    """Refuse predictions that are not a Ragged, or not of a floating-point dtype."""
    fix = "for one prediction per sequence call torch.nn.functional's own loss; else wrap it with rl.Ragged"
    check_kind(name, batch, Ragged, "a Ragged of predictions, one per element", fix)
    if not batch.values.is_floating_point():
        raise ArgumentTypeError(message(name, str(batch.dtype), "of a floating-point dtype", "call .to(torch.float32)"))


def _rows(name: str, given: Any, batch: Ragged) -> Tensor:
    """One row per element: the values of a Ragged, or those of a tensor spread over the elements of its sequences."""
    if isinstance(given, Ragged):
        given._needs_lengths_of(name, batch, "the predictions have")
        return check_tensor(name, given.values, batch, "pass real numbers")
    check_tensor(name, given, batch, "wrap it with rl.Ragged, for one per element, or pass a tensor, one per sequence")
    if given.dim() == 0 or given.shape[0] != len(batch):
        rule = f"a tensor with one row for each of the {len(batch)} sequences"
        fix = "for one per element pass a Ragged, rl.Ragged.from_flat(values, lengths=...)"
        raise ShapeError(message(name, f"a tensor of shape {tuple(given.shape)}", rule, fix))
    return segments.spread(given, batch.offsets, batch.values.shape[0])


def check_tensor(name: str, given: Any, batch: Ragged, fix: str) -> Tensor:
    """A dense tensor of real numbers on the device of the batch."""
    if not isinstance(given, Tensor):
        raise ArgumentTypeError(message(name, f"a {type(given).__name__}", "a tensor", fix))
    if given.is_nested or given.layout is not torch.strided or given.is_complex() or given.is_quantized:
        got = "a nested tensor" if given.is_nested else f"a tensor of {given.layout} and {given.dtype}"
        raise ArgumentTypeError(message(name, got, "a dense tensor of real numbers", fix))
    check_device(name, given, batch.device)
    return given


def check_numbers(name: str, numbers: Tensor) -> None:
    """Refuse weights that are not finite numbers of at least 0; they are looked at on a CPU alone."""
    if numbers.is_cpu and not torch.compiler.is_compiling():
        wrong = ~((numbers >= 0) & numbers.isfinite())
        if bool(wrong.any()):
            got = f"{numbers[wrong][0].item()}"
            raise ArgumentError(message(name, got, "finite numbers of at least 0", "check how they are computed"))


def _zero_unless(counted: Tensor, rows: Tensor) -> Tensor:
    """Zeros in rows that do not count: multiplying by 0 would leave a NaN, and a NaN in its gradient."""
    return rows.masked_fill(~counted.view((-1,) + (1,) * (rows.dim() - 1)), 0)
