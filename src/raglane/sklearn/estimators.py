"""A classifier and a regressor for scikit-learn, which call :func:`raglane.fit`."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_choice, check_whole
from raglane._utils.messages import count_of, quote, require
from raglane.data.assemble.in_memory import check_order
from raglane.data.columns import Columns
from raglane.data.dataset import Dataset
from raglane.data.reading import read
from raglane.data.records import Targets
from raglane.data.sources.objects import is_panel, is_text
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.ragged import Ragged
from raglane.runs.fit import fit
from raglane.runs.run import Run, in_order
from raglane.training.settings import Settings

require("sklearn", "sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import (  # noqa: E402
    assert_all_finite,
    check_array,
    check_consistent_length,
    check_random_state,
    column_or_1d,
)
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

# Settings that are no parameters: the class determines the task, and the seed is called
# random_state.
_OWN = ("task", "seed")
# The parameters that tell how sequences are read, with their defaults.
_READING: dict[str, Any] = {"tokens": None, "split": None, "keep_trailing": False}
# The layout of a sequence by the value of channels, and the other value.
_LAYOUTS = {"first": ("(channels, steps)", "last"), "last": ("(steps, channels)", "first")}


def _sequences_from(estimator: Any, X: Any, *, reset: bool) -> Dataset:  # noqa: N803
    """Return X as a dataset: arrays, lists, texts, and panels of sktime and aeon."""
    if reset:
        _forget(estimator)
    channels = estimator.channels
    check_choice("channels", channels, tuple(_LAYOUTS))
    is_batch = isinstance(X, (Ragged, Dataset)) or is_panel(X)
    is_rows = not (is_batch or _is_list(X) or getattr(X, "ndim", 0) == 3)
    columns = _columns_of(estimator)
    if is_rows and not columns.tokens:
        records = _rows(estimator, X, columns, reset=reset)
    elif is_batch or columns.tokens:
        records = read(X, columns)
    else:
        records = _listed(X, columns, channels)
    _check_used(records, columns)
    _check_channels(estimator, records, is_rows=is_rows, reset=reset)
    return _in_order_of_fit(records, estimator._names)


def _check_channels(estimator: Any, records: Dataset, *, is_rows: bool, reset: bool) -> None:
    """Remember the channels of fit, or raise if the sequences have others."""
    count = None if records.is_tokens else len(records.channels)
    if reset:
        estimator._channels = count
        estimator._names = records.channels
        if not is_rows and count == 1 and len(set(records.lengths.tolist())) == 1:
            # Equivalent to an array (n, L), so a later array must have L columns.
            estimator.n_features_in_ = int(records.lengths[0])
    elif len(records.values) and count != estimator._channels:
        layout, other = _LAYOUTS[estimator.channels]
        got = f"{_kind(count)} in sequences {layout}"
        rule = f"{_kind(estimator._channels)}, as in fit"
        fix = f"pass sequences {layout}, or channels={other!r} to the estimator"
        raise DataError("X", got, rule, fix)


def _listed(X: Any, columns: Columns, channels: str) -> Dataset:  # noqa: N803
    sequences = list(X)
    if not is_text(sequences):
        sequences = _steps_first(sequences, channels)
    return read(sequences, columns)


def _columns_of(estimator: Any) -> Columns:
    chosen = {name: getattr(estimator, name) for name in _READING}
    return Columns(need_labels=False, **chosen)


def _check_used(records: Dataset, columns: Columns) -> None:
    """Raise for an option that these sequences have no use for."""
    if columns.tokens and not records.is_tokens:
        rule = "None or False for sequences of fractions or channels"
        raise ArgumentError("tokens", "True", rule, "pass lists of whole numbers, or leave it out")
    if columns.split is not None and not (records.is_tokens and records.columns.split):
        rule = "None for sequences that are no texts"
        raise ArgumentError("split", quote(columns.split), rule, "leave it out")


def _in_order_of_fit(records: Dataset, names: tuple[str, ...]) -> Dataset:
    """Return records with the channels in the order of a fit, as Run.read does: channels of arrays
    have no names, and agree with others by their order.
    """
    count = 0 if records.is_tokens else len(records.channels)
    unnamed = tuple(f"x{column}" for column in range(count))
    if unnamed not in (records.channels, names):
        return records
    channels = tuple(in_order(records.channels, names))
    return Dataset(replace(records.records, channels=channels))


def _forget(estimator: Any) -> None:
    """Remove what a fit has found out about its data, and its run: after a fit that fails, it would
    predict the classes of one call with the network of another.
    """
    for name in ("n_features_in_", "feature_names_in_", "_channels", "_names", "run_"):
        vars(estimator).pop(name, None)


def _kind(channels: int | None) -> str:
    return "tokens" if channels is None else count_of(channels, "channel")


def _is_list(X: Any) -> bool:  # noqa: N803
    """Return True for a list of sequences: lists, arrays or texts."""
    is_column = isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype.kind in "OU"
    if not (isinstance(X, (list, tuple)) or is_column or hasattr(X, "to_list")):
        return False
    first = next(iter(X), ())
    return isinstance(first, (str, list, tuple)) or (
        hasattr(first, "__len__") and getattr(first, "ndim", 1) in (1, 2)
    )


def _steps_first(parts: list[Any], channels: str) -> list[Any]:
    """Transpose sequences ``(C, L)`` to ``(L, C)`` if channels are first, and check the number of
    channels.
    """
    sequences: list[Any] = []
    widths: dict[int, int] = {}
    for index, sequence in enumerate(parts):
        plain = sequence.detach().cpu().numpy() if isinstance(sequence, torch.Tensor) else sequence
        try:
            array = np.asanyarray(plain)  # read refuses a mask
        except ValueError:
            # Lists of different lengths: read raises with a better message.
            sequences.append(sequence)
            continue
        if array.ndim == 2:
            array = array.T if channels == "first" else array
            widths[index] = array.shape[1]
        sequences.append(array)
    typical = next(iter(widths.values()), 0)
    odd = next((index for index, width in widths.items() if width != typical), None)
    if odd is not None:
        where, other = _LAYOUTS[channels]
        got = f"{_kind(widths[odd])} in an array {where}"
        rule = f"of {_kind(typical)}, as the first sequence"
        raise DataError(f"X[{odd}]", got, rule, f"correct it, or pass channels={other!r}")
    return sequences


def _rows(estimator: Any, X: Any, columns: Columns, *, reset: bool) -> Dataset:  # noqa: N803
    """Return the rows of an array ``(n, L)`` as sequences of one channel."""
    rules: dict[str, Any] = {
        "dtype": np.float64,
        "ensure_all_finite": True if estimator.missing == "raise" else "allow-nan",
        "ensure_min_samples": 2
        if reset and estimator.validation_fraction and estimator.validation is None
        else 1,
    }
    if isinstance(X, torch.Tensor):
        X = X.detach().cpu().numpy()  # noqa: N806
    if reset or hasattr(estimator, "n_features_in_"):
        rows = validate_data(estimator, X, reset=reset, **rules)
    else:
        # The estimator was fitted on sequences of different lengths.
        rows = check_array(X, **rules)
    return read(rows, columns)


def _targets(y: Any, records: Dataset, *, numbers: bool) -> npt.NDArray[Any]:
    """Return valid targets: ``(n,)`` classes, or ``(n,)`` or ``(n, T)`` finite numbers."""
    if y is None:
        # scikit-learn's checks require these words.
        rule = "an array: a supervised estimator requires y to be passed, but the target y is None"
        raise ArgumentError("y", "None", rule, "pass one entry per sequence")
    check_order("y", y, records.records.ids)
    if numbers:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        y = column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y
    else:
        y = column_or_1d(y, warn=True)
        absent = [label is None for label in y.tolist()]
        if any(absent):
            got = f"None for sequence {absent.index(True)}"
            rule = "an array with a class for each sequence"
            raise DataError("y", got, rule, "fill it, or leave the sequence out")
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
    check_consistent_length(records, y)
    return np.asarray(y)


def _signature() -> inspect.Signature:
    """Return the signature of an estimator: the settings of a training, and its own parameters."""
    kind = inspect.Parameter.KEYWORD_ONLY
    chosen = [(field.name, field.default) for field in fields(Settings) if field.name not in _OWN]
    extra = [("random_state", 0), ("channels", "last"), ("validation", None), ("callback", None)]
    extra += _READING.items()
    parameters = [
        inspect.Parameter(name, kind, default=default) for name, default in (*chosen, *extra)
    ]
    return inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
    )


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of the estimators: parameters, training and prediction."""

    _task: str

    def __init__(self, **parameters: Any) -> None:
        bound = _PARAMETERS.bind(self, **parameters)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name != "self":
                setattr(self, name, value)

    def _labelled(self, X: Any, y: Any, *, reset: bool) -> Dataset:  # noqa: N803
        """Return X with its targets; ``reset`` for the training data, which determine classes and
        channels.
        """
        raise NotImplementedError

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train the network.

        Args:
            X: ``n`` sequences.
            y: ``(n,)`` classes, or ``(n,)`` or ``(n, T)`` numbers.

        Raises:
            ValueError: as :func:`raglane.fit`, or ``X`` and ``y`` have different lengths.
        """
        records = self._labelled(X, y, reset=True)
        validation_data = None
        if self.validation is not None:
            if not (isinstance(self.validation, tuple) and len(self.validation) == 2):
                fix = "pass both, or a share of the training data as validation_fraction"
                raise ArgumentTypeError(
                    "validation", quote(self.validation), "a pair (X, y), or None", fix
                )
            validation_data = self._labelled(*self.validation, reset=False)
        options = {
            field.name: getattr(self, field.name)
            for field in fields(Settings)
            if field.name not in _OWN
        }
        seed = self.random_state
        if not isinstance(seed, (int, np.integer)):
            seed = check_random_state(seed).randint(2**31 - 1)
        seed = check_whole("random_state", seed, 0, most=2**63 - 1)
        options |= {"task": self._task, "seed": seed, "callback": self.callback}
        self.run_ = fit(records, validation=validation_data, progress=False, **options)
        self.n_iter_ = 0 if self.run_.result is None else self.run_.result.state.epoch
        return self

    def _predict(self, X: Any, **options: Any) -> dict[str, list[Any]]:  # noqa: N803
        check_is_fitted(self, "run_")
        run: Run = self.run_
        return run.predict(
            _sequences_from(self, X, reset=False), device=self.device, **options
        ).columns

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.input_tags.allow_nan = self.missing != "raise"
        return tags


_PARAMETERS = _signature()
vars(_Estimator)["__init__"].__signature__ = _PARAMETERS


class RecurrentClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A recurrent network that predicts a class for each sequence.

    ``X`` is an array ``(n, L, C)`` of sequences, steps and channels, as for :func:`raglane.fit`; a
    list of sequences, ``(L, C)``, or ``(L,)`` for one channel; an array ``(n, L)``, one sequence of
    one channel per row; texts; or a panel of sktime or aeon. In tables whose entries are Series,
    tables with an index of (sequence, step), and lists of tables, channels are columns.

    Args:
        channels: ``"last"`` for sequences ``(steps, channels)``; ``"first"`` for ``(channels,
            steps)``, as in arrays of sktime and aeon. The layout is never guessed from sizes.
        random_state: the seed of weights, order, dropout and validation split: a number, a
            ``RandomState`` or None.
        validation: ``(X, y)``, whose loss selects the best epoch and stops training early; None
            holds out ``validation_fraction`` of the training data.
        callback: the function that :func:`raglane.fit` calls after each epoch.
        tokens: True to read whole numbers as tokens.
        split: the tokenization of texts, as for :class:`raglane.data.Columns`.
        keep_trailing: True to keep elements at the end of a sequence that are missing in all
            channels.
        **parameters: the settings of :func:`raglane.fit`, see
            :class:`~raglane.training.settings.Settings`. ``patience=5`` stops after 5 epochs
            without a lower validation loss.

    Attributes:
        classes_: ``(K,)``, the sorted classes.
        run_: the trained :class:`raglane.Run`.
        n_iter_: the number of trained epochs.
        n_features_in_: ``L``, if all training sequences have one channel and ``L`` steps. Then a
            later array ``(n, L)`` must have ``L`` columns; sequences in a list may have any length.

    Example:
        >>> rises = RecurrentClassifier(hidden_size=8, epochs=60, validation_fraction=0)
        >>> rises.fit([[0.1, 0.5, 0.9], [0.2, 0.7], [0.9, 0.4], [0.8, 0.3, 0.1]], ["yes", "yes", "no", "no"])
        RecurrentClassifier(epochs=60, hidden_size=8, validation_fraction=0)
        >>> rises.predict([[0.3, 0.6, 0.8], [0.7, 0.2]]).tolist()
        ['yes', 'no']
    """

    _task = "classify"

    def _labelled(self, X: Any, y: Any, *, reset: bool) -> Dataset:  # noqa: N803
        records = _sequences_from(self, X, reset=reset)
        y = _targets(y, records, numbers=False)
        if reset:
            self.classes_ = np.unique(y)
            if len(self.classes_) == 1:
                got = f"only the class {quote(self.classes_.tolist()[0])}"
                fix = "add sequences of another class"
                raise DataError("y", got, "of at least two classes", fix)
        unseen = y[~np.isin(y, self.classes_)]
        if len(unseen):
            got = f"the class {quote(unseen.tolist()[0])}"
            raise DataError(
                "validation",
                got,
                "of the classes in y",
                "leave its sequences out, or train on some",
            )
        # Trained on indices, so that predictions have the type of y.
        return read(records, Columns(), labels=np.searchsorted(self.classes_, y).tolist())

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the probabilities of the classes, ``(n, K)``, in the order of ``classes_``."""
        answers = self._predict(X, probabilities=True)
        shares = np.array([answers[f"p_{column}"] for column in range(len(self.classes_))])
        # log_loss warns of the sums of float32. Python's sum has the same order, so the same bits,
        # in any batch.
        return (shares / sum(shares)).T

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return the class of each sequence, ``(n,)``."""
        indexes = np.array(self._predict(X)["prediction"], dtype=np.int64)
        return self.classes_[indexes]


class RecurrentRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A recurrent network that predicts one or several numbers for each sequence.

    ``X`` and the parameters are those of :class:`RecurrentClassifier`; ``loss`` is ``"mse"``,
    ``"mae"``, ``"huber"`` or ``"quantile"``.

    Attributes:
        run_: the trained :class:`raglane.Run`.
        n_iter_: the number of trained epochs.
        n_features_in_: as for :class:`RecurrentClassifier`.

    Example:
        >>> means = RecurrentRegressor(hidden_size=8, epochs=150, lr=0.02, validation_fraction=0)
        >>> _ = means.fit([[0.1, 0.3], [0.2, 0.7, 0.9], [0.9, 0.7], [0.4]], [0.2, 0.6, 0.8, 0.4])
        >>> means.predict([[0.1, 0.3]]).round(1).tolist()
        [0.2]
    """

    _task = "regress"

    def _labelled(self, X: Any, y: Any, *, reset: bool) -> Dataset:  # noqa: N803
        records = _sequences_from(self, X, reset=reset)
        y = _targets(y, records, numbers=True)
        if reset:
            self._is_matrix = y.ndim == 2
        labelled = read(records, Columns("regress"), labels=y.reshape(len(y), -1)[:, 0].tolist())
        if y.ndim == 1:
            return labelled
        # Per sequence, also if its numbers are as many as the elements.
        names = tuple(f"labels_{column}" for column in range(y.shape[1]))
        return Dataset(replace(labelled.records, targets=Targets(y, names=names)))

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the numbers of each sequence, ``(n,)`` or ``(n, T)``."""
        numbers = np.array(self._predict(X)["prediction"], dtype=np.float64)
        return numbers.reshape(len(numbers), -1) if self._is_matrix else numbers

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
