"""Missing features, which are NaN or infinite: refused, or filled, with channels that mark them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.messages import argument, quote
from raglane._utils.tracing import refuse_jit_trace
from raglane.data.records import place_of
from raglane.errors import DataError, ShapeError
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged

BLOCKS = {"raise": 1, "zero": 2, "forward": 2, "elapsed": 3}
"""The number of input columns per channel for each policy for missing features."""

MISSING = tuple(BLOCKS)


def how_to_fill() -> str:
    """Return the part of a fix that names the options for missing features."""
    return f"train with {argument('missing', 'zero')} or {argument('missing', 'forward')}"


def refuse_absent(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    channels: Sequence[str],
    where: Callable[[int], tuple[str, str]],
) -> None:
    """Raise a DataError for the first missing value; ``where`` returns the source and the
    description of a row.
    """
    absent = ~np.isfinite(values)
    count = int(absent.sum())
    if count == 0:
        return
    element, channel = divmod(int(absent.argmax()), absent.shape[1])
    row, step = place_of(offsets, element)
    source, sequence = where(row)
    share = f"{count} of {absent.size} features {'is' if count == 1 else 'are'} missing"
    value = values[element, channel]
    if np.isinf(value):
        # The file may contain a finite number such as 1e300, which readers convert to float32.
        share += "; a number beyond 3.4e38 does not fit float32 and is read as infinite"
    got = f"{value} in {sequence}, step {step}, channel {quote(channels[channel])} ({share})"
    raise DataError(
        source, got, "data with finite numbers", f"correct the data, or {how_to_fill()}"
    )


def fill_missing(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    missing: str,
    gaps: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float32]:
    """Fill missing values, and append for each channel a mask that is 1 where it was missing.

    ``"zero"`` fills with 0, the mean of scaled features; ``"forward"`` with the previous value in
    the same sequence and channel, or 0 without one. ``"elapsed"`` fills like ``"forward"``, and
    appends for each channel the time since its previous observation, or since the start of the
    sequence.
    """
    absent = ~np.isfinite(values)
    result = np.empty((values.shape[0], BLOCKS[missing] * values.shape[1]), dtype=np.float32)
    filled, flags, *elapsed = np.split(result, BLOCKS[missing], axis=1)
    flags[:] = absent
    if missing == "zero":
        filled[:] = np.where(absent, np.float32(0), values)
        return result
    # The last row with an observation at or before each row. It may belong to the previous
    # sequence.
    last = np.maximum.accumulate(np.where(absent, -1, np.arange(len(values))[:, None]), axis=0)
    starts = np.repeat(offsets[:-1], np.diff(offsets))[:, None]
    carried = np.take_along_axis(values, np.maximum(last, 0), axis=0) if len(values) else values
    filled[:] = np.where(last >= starts, carried, np.float32(0))
    if elapsed and len(values):
        elapsed[0][:] = since_observed(
            absent, offsets, np.ones(len(values)) if gaps is None else gaps
        )
    return result


def since_observed(
    absent: npt.NDArray[np.bool_],
    offsets: npt.NDArray[np.int64],
    gaps: npt.NDArray[np.float64],
    begin: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the time since the previous observation of each channel, ``(N, C)``; ``begin (B, C)``
    in first rows.

    It is summed from row to row, so that its bits depend only on the sequence, which may come in
    pieces.
    """
    channels = absent.shape[1]
    row = np.arange(len(absent))[:, None]
    before = np.maximum.accumulate(np.where(absent, -1, row), axis=0)
    before = np.concatenate([np.full((1, channels), -1), before[:-1]])
    starts = np.repeat(offsets[:-1], np.diff(offsets))[:, None]
    counts = (row - np.maximum(before, starts)).ravel()
    times = np.zeros(counts.shape)
    if begin is not None:
        is_full = np.diff(offsets) > 0
        times.reshape(absent.shape)[offsets[:-1][is_full]] = begin[is_full]
    order = np.argsort(counts, kind="stable")
    bounds = np.bincount(counts).cumsum()
    for first, end in pairwise(bounds.tolist()):
        rows = order[first:end]
        times[rows] = times[rows - channels] + gaps[rows // channels]
    return times.reshape(absent.shape)


def mark_missing(batch: Ragged, gaps: Ragged | None = None) -> Ragged:
    """Make the input of :class:`raglane.nn.GRUD` from sequences with missing values.

    Scale the values first, so that 0 is the mean of each channel.

    Args:
        batch: values ``(N, C)`` of a floating-point dtype, NaN or infinite where missing.
        gaps: values ``(N,)`` of the same lengths, the time since the previous element; the first of
            a sequence is ignored. None means 1 for every element.

    Returns:
        Values ``(N, 3 C)`` float32 on the device of ``batch``, without gradients, in three blocks:
        the value, or the previous observation (0 without one) where it is missing; a mask that is 1
        where it is missing; the time since the previous observation of the channel, or since the
        start of the sequence.

    Raises:
        ArgumentTypeError: an argument is not Ragged.
        ShapeError: the elements have another shape, or the gaps other lengths.

    Example:
        >>> series = Ragged([torch.tensor([[1.0], [torch.nan], [3.0]])])
        >>> gaps = Ragged([torch.tensor([0.0, 2.0, 0.5])])
        >>> mark_missing(series, gaps).values.tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 2.0], [3.0, 0.0, 2.5]]
    """
    check_ragged("batch", batch)
    refuse_jit_trace("a call of mark_missing")
    if len(batch.feature_shape) != 1 or not batch.values.is_floating_point():
        got = f"{batch.values.dtype} values of shape {tuple(batch.values.shape)}"
        raise ShapeError(
            "batch",
            got,
            "a batch of floating-point values (N, channels)",
            "reshape or convert them",
        )
    times = None
    if gaps is not None:
        check_ragged("gaps", gaps)
        if gaps.values.dim() != 1 or not torch.equal(gaps.lengths_cpu, batch.lengths_cpu):
            got = f"{len(gaps)} sequences, elements of shape {tuple(gaps.feature_shape)}"
            raise ShapeError(
                "gaps", got, "one number per element of batch", "build both from the same sequences"
            )
        times = gaps.values.detach().cpu().double().numpy()
    filled = fill_missing(
        batch.values.detach().cpu().float().numpy(), batch.offsets.cpu().numpy(), "elapsed", times
    )
    return batch.with_values(torch.from_numpy(filled).to(batch.values.device))
