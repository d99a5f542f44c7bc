"""Missing features: found and named, or filled, with a channel that says what was missing.

A feature is missing where it is NaN or infinite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raglane.checks import check_choice
from raglane.data.records import Records, place_of
from raglane.errors import DataError, argument, message, quote

__all__ = ["MISSING", "check_policy", "fill_missing", "how_to_fill", "refuse_missing"]

MISSING = ("error", "zero", "forward")


def check_policy(missing: str) -> None:
    """Raise :class:`~raglane.errors.ArgumentError` unless ``missing`` is one of ``MISSING``."""
    check_choice("missing", missing, MISSING)


def how_to_fill() -> str:
    """How to let missing features pass, for whoever trains, and for whoever predicts with a model that refuses them.

    Example:
        >>> how_to_fill()
        "train with missing='zero' or missing='forward'"
    """
    return f"train with {argument('missing', 'zero')} or {argument('missing', 'forward')}"


def refuse_missing(records: Records) -> None:
    """Raise if a feature is missing, naming the first: its row, step and channel.

    Args:
        records: with features ``(N, C)``.

    Raises:
        DataError: a feature is NaN or infinite.

    Example:
        >>> from raglane.data.records import offsets_of
        >>> values = np.array([[1.0], [np.nan]], dtype=np.float32)
        >>> refuse_missing(Records(values, offsets_of([1, 1]), ids=("a", "b"), channels=("x0",)))
        Traceback (most recent call last):
        ...
        raglane.errors.DataError: .: got nan in row 1 (id 'b'), step 0, channel 'x0' (1 of 2 features is missing); \
the rule: features are finite numbers. Fix: correct the data, or train with missing='zero' or missing='forward'.
    """
    absent = ~np.isfinite(records.values)
    count = int(absent.sum())
    if count == 0:
        return
    element, channel = divmod(int(absent.argmax()), absent.shape[1])
    row, step = place_of(records.offsets, element)
    place = f"{records.describe_row(row)}, step {step}, channel {quote(records.channels[channel])}"
    share = f"{count} of {absent.size} features {'is' if count == 1 else 'are'} missing"
    value = records.values[element, channel]
    if np.isinf(value):
        # The file may well hold a finite number: readers make float32 of it, which has no place for 1e300.
        share += "; a number beyond 3.4e38 does not fit float32 and is read as infinite"
    got = f"{value} in {place} ({share})"
    fix = f"correct the data, or {how_to_fill()}"
    raise DataError(message(f"{records.source}", got, "features are finite numbers", fix))


def fill_missing(
    values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], missing: str
) -> npt.NDArray[np.float32]:
    """Fill what is missing, and append for each channel one that is 1 where it was missing, else 0.

    ``"zero"`` fills with 0; ``"forward"`` with the last value before it in the same sequence and channel, and with 0
    where there is none. Call it on scaled features: there 0 is the mean.

    Args:
        values: ``(N, C)`` float32, NaN or infinite where missing.
        offsets: ``(B + 1,)`` int64.
        missing: ``"zero"`` or ``"forward"``.

    Returns:
        ``(N, 2 C)`` float32: the ``C`` filled channels, then the ``C`` that say what was missing.

    Example:
        >>> gaps = np.array([[1.0], [np.nan], [np.nan], [4.0]], dtype=np.float32)
        >>> fill_missing(gaps, np.array([0, 2, 4]), "forward").tolist()
        [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [4.0, 0.0]]
    """
    absent = ~np.isfinite(values)
    result = np.empty((values.shape[0], 2 * values.shape[1]), dtype=np.float32)
    filled, flags = np.split(result, 2, axis=1)
    flags[:] = absent
    if missing == "zero":
        filled[:] = np.where(absent, np.float32(0), values)
        return result
    # The last row at or before each that is present; one before the start of the sequence belongs to another.
    last = np.maximum.accumulate(np.where(absent, -1, np.arange(len(values))[:, None]), axis=0)
    starts = np.repeat(offsets[:-1], np.diff(offsets))[:, None]
    carried = np.take_along_axis(values, np.maximum(last, 0), axis=0) if len(values) else values
    filled[:] = np.where(last >= starts, carried, np.float32(0))
    return result
