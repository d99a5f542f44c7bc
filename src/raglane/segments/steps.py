"""Functions of torch over the steps of each sequence, of flat values and offsets.

Values, gradients and the results of empty sequences are those of torch for each sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.tracing import has_tangent, is_for_onnx
from raglane.errors import ArgumentError
from raglane.segments import like_rows, summable


def _spread(per_sequence: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    return segments.spread(per_sequence, offsets, values.shape[0])


def mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean of each sequence, NaN if it is empty."""
    wide = summable(values)
    lengths = offsets.diff()
    result = segments.sum(wide, offsets, lengths) / like_rows(lengths, wide)
    return result if result.dtype is values.dtype else result.to(values.dtype)


def logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the log-sum-exp of each sequence, ``-inf`` if it is empty."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.get_default_dtype())
    return segments.logsumexp(values, offsets, -torch.inf)


def prod(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of each sequence, 1 if it is empty."""
    if has_tangent([values]):  # of which torch's scatter_reduce computes a wrong one
        rule = "values without a tangent of forward_ad"
        raise ArgumentError("prod", "values with a tangent", rule, "call r.log().sum(1).exp()")
    wide = summable(values)
    owners = like_rows(segments.segment_ids(offsets, values.shape[0]), values).expand_as(values)
    start = wide.new_ones((offsets.shape[0] - 1, *values.shape[1:]))
    result = start.scatter_reduce(0, owners, wide, reduce="prod")
    return result.to(values.dtype) if values.is_floating_point() else result


def var(
    values: Tensor, offsets: Tensor, unbiased: bool = True, correction: float | None = None
) -> Tensor:
    """Return the variance of each sequence."""
    if correction is None:
        correction = 1 if unbiased else 0
    wide = summable(values)
    deviations = wide - _spread(mean(wide, offsets), wide, offsets)
    squares = (deviations * deviations.conj()).real if wide.is_complex() else deviations.square()
    counts = (offsets.diff() - correction).clamp(min=0).to(squares.dtype)
    result = segments.sum(squares, offsets) / like_rows(counts, squares)
    return result if values.is_complex() else result.to(values.dtype)


def root(squares: Tensor, exponent: float = 2) -> Tensor:
    """Return the root of sums of powers; the gradient of 0 is 0, as that of torch's norms."""
    is_zero = squares == 0
    positive = squares.masked_fill(is_zero, 1)
    roots = positive.sqrt() if exponent == 2 else positive ** (1 / exponent)
    return roots.masked_fill(is_zero, 0)


def std(
    values: Tensor, offsets: Tensor, unbiased: bool = True, correction: float | None = None
) -> Tensor:
    """Return the standard deviation of each sequence."""
    return root(var(values, offsets, unbiased, correction))


def norm(values: Tensor, offsets: Tensor, p: float | str | None = 2) -> Tensor:
    """Return the p-norm of each sequence."""
    exponent = 2.0 if p in ("fro", None) else float(p)
    sizes = values.abs()
    if exponent == torch.inf:
        return amax(sizes, offsets)
    if exponent == -torch.inf:
        return _with_nan(segments.min(sizes, offsets, torch.inf), sizes, offsets)
    if exponent == 0:
        return segments.sum((values != 0).to(sizes.dtype), offsets)
    if exponent == 1:
        return segments.sum(sizes, offsets)
    if exponent == 2:
        return root(segments.sum(sizes.square(), offsets))
    is_zero = sizes == 0
    powers = sizes.masked_fill(is_zero, 1) ** exponent
    powers = powers.masked_fill(is_zero, 0 if exponent > 0 else torch.inf)
    return root(segments.sum(powers, offsets), exponent)


def amax(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest element of each sequence."""
    return _with_nan(segments.max(values, offsets), values, offsets)


def amin(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the smallest element of each sequence."""
    return _with_nan(segments.min(values, offsets), values, offsets)


def _with_nan(extremes: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """Return NaN for sequences with NaN, which the ScatterElements of ONNX Runtime overlooks."""
    if not (is_for_onnx() and values.is_floating_point()):
        return extremes
    return extremes.masked_fill(segments.sum(values.isnan(), offsets) > 0, torch.nan)


def aminmax(values: Tensor, offsets: Tensor) -> Any:
    """Return the least and greatest elements of each sequence."""
    pair: Any = (amin(values, offsets), amax(values, offsets))
    return torch.return_types.aminmax(pair)


def count_nonzero(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of elements of each sequence that are not 0."""
    return segments.sum(values != 0, offsets)


def any(values: Tensor, offsets: Tensor) -> Tensor:
    """Return True for sequences with an element that is not 0."""
    return _truth(count_nonzero(values, offsets) > 0, values)


def all(values: Tensor, offsets: Tensor) -> Tensor:
    """Return True for sequences without an element that is 0."""
    return _truth(segments.sum(values == 0, offsets) == 0, values)


def _truth(result: Tensor, values: Tensor) -> Tensor:
    # The result of torch.any and torch.all is uint8 for uint8.
    return result.to(torch.uint8) if values.dtype is torch.uint8 else result


def nansum(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of the elements of each sequence that are not NaN."""
    return segments.sum(values.masked_fill(values.isnan(), 0), offsets)


def nanmean(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean of the elements of each sequence that are not NaN."""
    return nansum(values, offsets) / segments.sum(~values.isnan(), offsets)


def argmax(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the step of the first maximum of each sequence and feature; NaN counts as largest."""
    return _first_step(values, offsets, amax)


def argmin(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the step of the first minimum of each sequence and feature; NaN counts as smallest."""
    return _first_step(values, offsets, amin)


def _first_step(values: Tensor, offsets: Tensor, extreme: Any) -> Tensor:
    values = values.detach()
    total = values.shape[0]
    is_extreme = (values == _spread(extreme(values, offsets), values, offsets)) | values.isnan()
    rows = like_rows(torch.arange(total, device=values.device), values)
    rows = torch.where(is_extreme, rows, total)
    return segments.min(rows, offsets) - like_rows(offsets[:-1], values)


def take_steps(values: Tensor, offsets: Tensor, steps: Tensor) -> Tensor:
    """Return ``values[step]`` of each sequence and feature, for steps ``(B, *features)``."""
    rows = steps + like_rows(offsets[:-1], values)
    return values.gather(0, rows)


def max(values: Tensor, offsets: Tensor) -> Any:
    """Return ``torch.return_types.max`` of each sequence and feature."""
    steps = argmax(values, offsets)
    return torch.return_types.max((take_steps(values, offsets, steps), steps))


def min(values: Tensor, offsets: Tensor) -> Any:
    """Return ``torch.return_types.min`` of each sequence and feature."""
    steps = argmin(values, offsets)
    return torch.return_types.min((take_steps(values, offsets, steps), steps))


def log_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the steps of each sequence."""
    wide = summable(values)
    _, total, largest = segments.exponentials(values, offsets)
    shifted = wide - _spread(largest, values, offsets)
    return (shifted - _spread(total.log(), values, offsets)).to(values.dtype)


def softmin(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the softmax of the negative values over the steps of each sequence."""
    return segments.softmax(-values, offsets)


def order(values: Tensor, offsets: Tensor, descending: bool = False) -> Tensor:
    """Return the rows ``(N, *features)`` that sort each sequence and feature; the sort is
    stable.
    """
    by_value = values.argsort(dim=0, descending=descending, stable=True)
    owners = segments.segment_ids(offsets, values.shape[0])[by_value]
    return by_value.gather(0, owners.argsort(dim=0, stable=True))
