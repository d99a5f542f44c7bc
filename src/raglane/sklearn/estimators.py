"""A classifier and a regressor with scikit-learn's manners, over :func:`raglane.fit`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_choice
from raglane._utils.messages import message, require
from raglane.data.dataset import Dataset
from raglane.data.reading import is_panel, is_text, read
from raglane.data.records import Columns
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.runs.fit import fit
from raglane.runs.run import Run
from raglane.training.settings import Settings

require("sklearn", "sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, check_random_state, column_or_1d  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

# The task is that of the class, and scikit-learn calls the seed random_state.
_OWN = ("task", "seed")
_NO_LABELS = Columns(need_labels=False)


def _sequences_from(estimator: Any, X: Any, *, reset: bool) -> Dataset:  # noqa: N803
    """The sequences of an estimator's X: arrays, lists, texts, and the panels of sktime and aeon."""
    channels = estimator.channels
    check_choice("channels", channels, ("first", "last"))
    if reset:
        for name in ("n_features_in_", "feature_names_in_", "_channels"):
            vars(estimator).pop(name, None)
    is_rows = not (isinstance(X, (Ragged, Dataset)) or is_panel(X) or _is_list(X) or getattr(X, "ndim", 0) == 3)
    if is_rows:
        records = _rows(estimator, X, reset)
    elif isinstance(X, (Ragged, Dataset)) or is_panel(X):
        records = read(X, _NO_LABELS)
    else:
        parts = list(X)
        records = read(parts if is_text(parts) else _steps_first(parts, channels), _NO_LABELS)
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
        raise DataError(message("X", got, f"like the data of fit, {known}", fix))
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
            # Lists of other lengths in a list: read has the words.
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
        rule = f"a sequence with the {typical} channels of the first"
        raise DataError(message(f"X[{odd}]", got, rule, f"correct it, or pass channels={other!r}"))
    return found


def _rows(estimator: Any, X: Any, reset: bool) -> Dataset:  # noqa: N803
    """An array ``(n, L)``: one sequence of one channel per row."""
    rules: dict[str, Any] = {
        "dtype": np.float64,
        "ensure_all_finite": True if estimator.missing == "error" else "allow-nan",
        "ensure_min_samples": 2 if reset and estimator.validation_fraction else 1,
    }
    if isinstance(X, torch.Tensor):
        X = X.detach().cpu().numpy()  # noqa: N806
    if reset or hasattr(estimator, "n_features_in_"):
        found = validate_data(estimator, X, reset=reset, **rules)
    else:
        # It was fitted on sequences of any lengths.
        found = check_array(X, **rules)
    return read(found, _NO_LABELS)


def _targets(y: Any, records: Dataset, *, numbers: bool) -> npt.NDArray[Any]:
    """The targets: ``(n,)`` classes, or ``(n,)`` or ``(n, T)`` finite numbers."""
    if y is None:
        rule = "an estimator that is supervised requires y to be passed, but the target y is None"
        raise ArgumentError(message("y", "None", rule, "pass one entry per sequence"))
    if numbers:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        y = column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y
    else:
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
    check_consistent_length(records, y)
    found: npt.NDArray[Any] = y
    return found


def _signature() -> inspect.Signature:
    """The arguments of an estimator: the settings of a training, by their names and defaults, and two of its own."""
    kind = inspect.Parameter.KEYWORD_ONLY
    chosen = [(field.name, field.default) for field in fields(Settings) if field.name not in _OWN]
    own = [("random_state", 0), ("channels", "first")]
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in (*chosen, *own)]
    return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters])


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """Parameters, the reading of X, training and pickling of both estimators."""

    _task: str

    def __init__(self, **parameters: Any) -> None:
        bound = _PARAMETERS.bind(self, **parameters)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name != "self":
                setattr(self, name, value)

    def _train(self, records: Dataset) -> None:
        options = {field.name: getattr(self, field.name) for field in fields(Settings) if field.name not in _OWN}
        seed = self.random_state
        if not isinstance(seed, (int, np.integer)):
            seed = check_random_state(seed).randint(2**31 - 1)
        self.run_ = fit(records, task=self._task, seed=seed, progress=False, **options)
        self.n_iter_ = 0 if self.run_.result is None else self.run_.result.state.epoch

    def _answers(self, X: Any, **options: Any) -> dict[str, list[Any]]:  # noqa: N803
        check_is_fitted(self)
        run: Run = self.run_
        return run.predict(_sequences_from(self, X, reset=False), device=self.device, **options).columns

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.input_tags.allow_nan = self.missing != "error"
        return tags


_PARAMETERS = _signature()
vars(_Estimator)["__init__"].__signature__ = _PARAMETERS


class RecurrentClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A recurrent network that gives each sequence a class.

    ``X`` is a list of sequences, ``(L,)`` or of several channels; an array ``(n, L)``, one sequence of one channel per
    row; an array of three dimensions; texts; or a panel of sktime or aeon: tables whose entries are Series, tables
    with an index of (sequence, step), and lists of tables say by themselves what is a channel.

    Args:
        channels: where the channels of arrays of two dimensions in a list, and of an array of three, are: ``"first"``,
            ``(channels, steps)``, as sktime and aeon have them; or ``"last"``, ``(steps, channels)``, as the rest of
            Raglane and tslearn have them. Nothing is guessed from sizes.
        random_state: of weights, order, dropout and the held-out part: a number, a ``RandomState`` or None.
        **parameters: the others are those of :func:`raglane.fit`, see :class:`~raglane.training.settings.Settings`.

    Attributes:
        classes_: ``(K,)``, the classes, sorted.
        run_: the trained :class:`raglane.Run`.
        n_iter_: the epochs that were trained.
        n_features_in_: ``L``, where all sequences of the training part had one channel and ``L`` steps: an array
            ``(n, L)`` that comes later has as many. Sequences in a list may have any lengths.

    Example:
        >>> rises = RecurrentClassifier(hidden_size=8, epochs=60, validation_fraction=0)
        >>> rises.fit([[0.1, 0.5, 0.9], [0.2, 0.7], [0.9, 0.4], [0.8, 0.3, 0.1]], ["yes", "yes", "no", "no"])
        RecurrentClassifier(epochs=60, hidden_size=8, validation_fraction=0)
        >>> rises.predict([[0.3, 0.6, 0.8], [0.7, 0.2]]).tolist()
        ['yes', 'no']
    """

    _task = "classify"

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train.

        Args:
            X: ``n`` sequences.
            y: ``(n,)``, the class of each.

        Raises:
            ValueError: as :func:`raglane.fit`, and where ``X`` and ``y`` do not fit together.
        """
        records = _sequences_from(self, X, reset=True)
        self.classes_, places = np.unique(_targets(y, records, numbers=False), return_inverse=True)
        # By their places, so that labels of any kind come back as they were.
        self._train(read(records, Columns(), labels=places.tolist()))
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """The probability of each class, ``(n, K)``, in the order of ``classes_``."""
        answers = self._answers(X, probabilities=True)
        return np.column_stack([answers[f"p_{place}"] for place in range(len(self.classes_))])

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """The class of each sequence, ``(n,)``."""
        places = np.array(self._answers(X)["prediction"], dtype=np.int64)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class RecurrentRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A recurrent network that gives each sequence a number, or several.

    ``X`` and the parameters are those of :class:`RecurrentClassifier`; ``loss`` is ``"mse"``, ``"mae"``, ``"huber"`` or
    ``"quantile"``.

    Attributes:
        run_: the trained :class:`raglane.Run`.
        n_iter_: the epochs that were trained.
        n_features_in_: as that of :class:`RecurrentClassifier`.

    Example:
        >>> means = RecurrentRegressor(hidden_size=8, epochs=150, lr=0.02, validation_fraction=0)
        >>> _ = means.fit([[0.1, 0.3], [0.2, 0.7, 0.9], [0.9, 0.7], [0.4]], [0.2, 0.6, 0.8, 0.4])
        >>> means.predict([[0.1, 0.3]]).round(1).tolist()
        [0.2]
    """

    _task = "regress"

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train.

        Args:
            X: ``n`` sequences.
            y: ``(n,)`` or ``(n, T)``, the numbers of each.

        Raises:
            ValueError: as :func:`raglane.fit`, and where ``X`` and ``y`` do not fit together.
        """
        records = _sequences_from(self, X, reset=True)
        y = _targets(y, records, numbers=True)
        self._train(read(records, Columns("regress"), labels=y.tolist()))
        self._is_matrix = y.ndim == 2
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """The numbers of each sequence, ``(n,)`` or ``(n, T)``."""
        found = np.array(self._answers(X)["prediction"], dtype=np.float64)
        return found.reshape(len(found), -1) if self._is_matrix else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
