"""Inputs X of estimators: arrays, lists, texts, and the panels of sktime and aeon."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raglane._utils.checks import check_choice
from raglane.data.objects import is_panel, is_text, records_from
from raglane.data.records import Columns, Records
from raglane.errors import DataError, message, require
from raglane.ragged import Ragged

require("sklearn", "sklearn")

from sklearn.utils.validation import check_array, validate_data  # noqa: E402

_NO_LABELS = Columns(need_labels=False)


def check_channels(channels: Any) -> None:
    """Raise :class:`~raglane.errors.ArgumentError` unless ``channels`` is ``"first"`` or ``"last"``."""
    check_choice("channels", channels, ("first", "last"))


def sequences_from(estimator: Any, X: Any, channels: str, missing: str, *, reset: bool) -> Records:  # noqa: N803
    """The sequences of an estimator's X."""
    if reset:
        for name in ("n_features_in_", "feature_names_in_", "_channels"):
            vars(estimator).pop(name, None)
    is_rows = not (isinstance(X, (Ragged, Records)) or is_panel(X) or _is_list(X) or getattr(X, "ndim", 0) == 3)
    if is_rows:
        records = _rows(estimator, X, missing, reset)
    elif isinstance(X, (Ragged, Records)) or is_panel(X):
        records = records_from(X, columns=_NO_LABELS)
    else:
        parts = list(X)
        records = records_from(parts if is_text(parts) else _steps_first(parts, channels), columns=_NO_LABELS)
    found = None if records.is_tokens else len(records.channels)
    if reset:
        estimator._channels = found
        if not is_rows and found == 1 and len(set(records.lengths.tolist())) == 1:
            # They could have been an array (n, L), and one that comes later is to have as many columns.
            estimator.n_features_in_ = int(records.lengths[0])
    elif len(records.values) and found != estimator._channels:
        got, known = (_words(count) for count in (found, estimator._channels))
        where = "(channels, steps)" if channels == "first" else "(steps, channels)"
        fix = f"give sequences {where}, or another argument channels, which is {channels!r}"
        raise DataError(message("X", got, f"this estimator was fitted on {known}", fix))
    return records


def _words(channels: int | None) -> str:
    return "tokens" if channels is None else f"{channels} channel{'' if channels == 1 else 's'}"


def _is_list(X: Any) -> bool:  # noqa: N803
    """True for sequences one after the other: lists or arrays, or texts."""
    is_column = isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype.kind in "OU"
    if not (isinstance(X, (list, tuple)) or is_column or hasattr(X, "to_list")) or len(X) == 0:
        return False
    first = next(iter(X))
    return isinstance(first, (str, list, tuple)) or (hasattr(first, "__len__") and getattr(first, "ndim", 1) in (1, 2))


def _steps_first(parts: list[Any], channels: str) -> list[Any]:
    """Sequences ``(L,)`` as they are, and those of two dimensions as ``(L, C)``."""
    found: list[Any] = []
    widths: dict[int, int] = {}
    for place, part in enumerate(parts):
        plain = part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else part
        try:
            array = np.asarray(plain)
        except ValueError:
            # Lists of other lengths in a list: records_from has the words.
            found.append(part)
            continue
        if array.ndim == 2:
            array = array.T if channels == "first" else array
            widths[place] = array.shape[1]
        found.append(array)
    typical = next(iter(widths.values()), 0)
    odd = next((place for place, width in widths.items() if width != typical), None)
    if odd is not None:
        where, other = ("(channels, steps)", "last") if channels == "first" else ("(steps, channels)", "first")
        got = f"{_words(widths[odd])} in an array {where}"
        rule = f"as many in every sequence, and the first has {typical}"
        raise DataError(message(f"X[{odd}]", got, rule, f"correct it, or pass channels={other!r}"))
    return found


def _rows(estimator: Any, X: Any, missing: str, reset: bool) -> Records:  # noqa: N803
    """An array ``(n, L)``: one sequence of one channel per row."""
    rules: dict[str, Any] = {
        "dtype": np.float64,
        "ensure_all_finite": True if missing == "error" else "allow-nan",
        "ensure_min_samples": 2 if reset and estimator.validation_fraction else 1,
    }
    if isinstance(X, torch.Tensor):
        X = X.detach().cpu().numpy()  # noqa: N806
    if reset or hasattr(estimator, "n_features_in_"):
        found = validate_data(estimator, X, reset=reset, **rules)
    else:
        # It was fitted on sequences of any lengths.
        found = check_array(X, **rules)
    return records_from(found, columns=_NO_LABELS)
