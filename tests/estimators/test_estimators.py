"""The estimators pass scikit-learn's checks, and accept the panels of sktime and aeon."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_classifiers_train,
    check_estimator,
    check_regressors_train,
)

import raglane as rl
from raglane.data import Columns
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.sklearn import RecurrentClassifier, RecurrentRegressor

_TINY: dict[str, Any] = {
    "hidden_size": 2,
    "epochs": 1,
    "lr": 0.05,
    "batch_size": 64,
    "threads": 1,
    "device": "cpu",
}
_QUICK: dict[str, Any] = {"hidden_size": 6, "epochs": 15, "lr": 0.05, "threads": 1, "device": "cpu"}


def _sequences(count: int = 20, channels: int = 2) -> tuple[list[np.ndarray[Any, Any]], list[str]]:
    """Sequences ``(L, C)`` that rise or fall."""
    random = np.random.default_rng(0)
    signs = [1 if number % 2 else -1 for number in range(count)]
    lengths = random.integers(2, 7, count)
    noise = [random.normal(size=(length, channels)) / 10 for length in lengths]
    rises = [
        sign * np.linspace(-1, 1, length)[:, None]
        for sign, length in zip(signs, lengths, strict=True)
    ]
    labels = ["up" if sign > 0 else "down" for sign in signs]
    sequences = [rise + part for rise, part in zip(rises, noise, strict=True)]
    return sequences if channels > 1 else [sequence[:, 0] for sequence in sequences], labels


# These require more than one epoch, as in the next test.
_TRAINED = ("check_classifiers_train", "check_regressors_train")


@pytest.mark.parametrize("kind", [RecurrentClassifier, RecurrentRegressor])
def test_scikit_learns_own_checks(kind: Any) -> None:
    expected = dict.fromkeys(_TRAINED, "an epoch learns too little")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(kind(**_TINY), on_fail=None, expected_failed_checks=expected)
    assert len(results) > 50
    assert [
        (found["check_name"], found["exception"])
        for found in results
        if found["status"] == "failed"
    ] == []
    # check_array_api_input is skipped: it requires an environment variable that SciPy reads at its
    # import.
    others = {found["check_name"] for found in results if found["status"] != "passed"}
    assert others <= {"check_array_api_input", *_TRAINED}


def test_estimators_learn_what_scikit_learn_wants_learned() -> None:
    classifier = RecurrentClassifier(**(_QUICK | {"epochs": 8, "batch_size": 128}))
    regressor = RecurrentRegressor(
        hidden_size=16, epochs=40, lr=0.05, batch_size=64, threads=1, device="cpu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_classifiers_train("RecurrentClassifier", classifier)
        check_regressors_train("RecurrentRegressor", regressor)


def test_each_panel_is_taken_as_it_is() -> None:
    sequences, labels = _sequences()
    first = [sequence.T for sequence in sequences]
    nested = pd.DataFrame(
        {name: [pd.Series(part[place]) for part in first] for place, name in enumerate("ab")}
    )
    rows = pd.MultiIndex.from_tuples(
        [(row, step) for row, part in enumerate(sequences) for step in range(len(part))]
    )
    indexed = pd.DataFrame(np.concatenate(sequences), index=rows, columns=["a", "b"])
    tables = [pd.DataFrame(sequence, columns=["a", "b"]) for sequence in sequences]
    ragged = rl.Ragged([torch.tensor(sequence) for sequence in sequences])
    records = rl.data.read(sequences, rl.data.Columns(need_labels=False))
    expected = None
    for panel, channels in (
        (first, "first"),
        (sequences, "last"),
        ([torch.tensor(sequence, requires_grad=True) for sequence in sequences], "last"),
        ([sequence.tolist() for sequence in first], "first"),
        *(
            (each, channels)
            for each in (nested, indexed, tables, ragged, records)
            for channels in ("first", "last")
        ),
    ):
        found = (
            RecurrentClassifier(channels=channels, **_TINY).fit(panel, labels).predict_proba(panel)
        )
        expected = found if expected is None else expected
        assert np.array_equal(found, expected), type(panel)
    with pytest.raises(DataError, match="y must be in the order of the sequences, '0', '1'"):
        RecurrentClassifier(**_TINY).fit(indexed, pd.Series(labels)[::-1])
    # Channels with names are found in any order; those of a model of arrays have none.
    x0 = indexed.set_axis(["x1", "x0"], axis=1)
    several = (
        (nested, nested[["b", "a"]]),
        (indexed, indexed[["b", "a"]], sequences),
        (sequences, indexed),
    )
    for panels in (*several, (x0, x0[["x0", "x1"]])):
        model = RecurrentClassifier(channels="last", **_TINY).fit(panels[0], labels)
        run = rl.fit(panels[0], labels, epochs=1, hidden_size=4, threads=1)
        for panel in panels[1:]:
            assert np.array_equal(model.predict_proba(panel), model.predict_proba(panels[0]))
            assert run.evaluate(panel, labels)["loss"] == run.evaluate(panels[0], labels)["loss"]


def test_arrays_of_three_dimensions() -> None:
    random = np.random.default_rng(0)
    array, labels = random.normal(size=(12, 5, 3)), [0, 1] * 6
    last = RecurrentClassifier(**_QUICK).fit(array, labels)
    first = RecurrentClassifier(channels="first", **_QUICK).fit(array.transpose(0, 2, 1), labels)
    run = rl.fit(array, labels, **_TINY, progress=False)
    assert last.run_.channels == first.run_.channels == run.channels == ("x0", "x1", "x2")
    assert not hasattr(last, "n_features_in_")
    assert np.array_equal(first.predict_proba(array.transpose(0, 2, 1)), last.predict_proba(array))
    assert np.array_equal(last.predict_proba(array), last.predict_proba(torch.tensor(array)))
    assert np.array_equal(last.predict_proba(array), last.predict_proba(list(array)))
    assert last.predict([[], []]).shape == (2,)  # no element, so no channel is wrong
    words = r"3 channels, as in fit, got 5 channels in sequences \(steps, channels\)\. .* or channels='first'"
    with pytest.raises(DataError, match=words):
        last.predict(array.transpose(0, 2, 1))


def test_patience_and_a_callback_end_a_training() -> None:
    sequences, labels = _sequences(channels=1)
    rows: list[dict[str, float]] = []

    def stop_after_three(row: dict[str, float]) -> bool:
        rows.append(row)
        return len(rows) == 3

    model: Any = RecurrentClassifier(**_QUICK, callback=stop_after_three).fit(sequences, labels)
    assert (model.n_iter_, [row["epoch"] for row in rows]) == (3, [1, 2, 3])
    history = model.run_.result.state.history
    assert rows == history
    assert (
        RecurrentClassifier(**_QUICK, callback=rows.append).fit(sequences, labels).n_iter_,
        len(rows),
    ) == (15, 18)
    assert [row["train_loss"] for row in rows[3:6]] == [row["train_loss"] for row in history]
    noise = np.random.default_rng(0).normal(size=(40, 6))
    assert (
        RecurrentRegressor(**(_QUICK | {"epochs": 200}), patience=2)
        .fit(noise, noise[::-1, 0])
        .n_iter_
        < 200
    )
    with pytest.raises(ArgumentTypeError, match=r"callback must be a function .* got 3"):
        RecurrentClassifier(**_TINY, callback=3).fit(sequences, labels)


def test_validation_data_select_the_best_epoch() -> None:
    sequences, labels = _sequences()
    numbers = [float(sequence[-1, 0]) for sequence in sequences]
    for kind, y, other in (
        (RecurrentClassifier, labels, labels[::-1]),
        (RecurrentRegressor, numbers, numbers[::-1]),
    ):
        # Of wrong targets, the first epochs are the best.
        fits = (
            kind(**_QUICK, patience=3, validation=(sequences, part)).fit(sequences, y)
            for part in (y, other)
        )
        right, wrong = fits
        assert wrong.n_iter_ < right.n_iter_, kind
        notes = (
            "training: 20 sequences, 85 elements of 2 channels, from memory",
            "validation: 20 sequences of memory",
        )
        assert right.run_.notes[:2] == notes
        assert clone(wrong).fit(sequences, y).n_iter_ == wrong.n_iter_
    # The row that is left, since nothing of it is held out.
    for held in ({"validation": ([[0.2, 0.3]], [1.0])}, {"validation_fraction": 0}):
        assert RecurrentRegressor(**_TINY, **held).fit(np.ones((1, 2)), [2.0]).n_iter_ == 1


@pytest.mark.parametrize(
    ("validation", "error", "words"),
    [
        (
            0.2,
            ArgumentTypeError,
            r"validation must be a pair \(X, y\), or None, got 0.2. Pass both, or a share .* as ",
        ),
        (
            ([[0.1]], ["odd"]),
            DataError,
            "validation must be of the classes in y, got the class 'odd'",
        ),
        (([[0.1]], ["up", "down"]), ValueError, "inconsistent numbers of samples"),
        (([np.ones((2, 3))], ["up"]), DataError, r"1 channel, as in fit, got 3 channels"),
    ],
)
def test_validation_data_that_do_not_fit(
    validation: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RecurrentClassifier(**_TINY, validation=validation).fit([[0.1, 0.2], [0.3]], ["up", "down"])


def test_a_row_of_an_array_is_a_sequence_of_one_channel() -> None:
    random = np.random.default_rng(0)
    array, numbers = random.normal(size=(30, 4)), random.normal(size=30)
    model = RecurrentRegressor(**_QUICK).fit(array, numbers)
    assert (model.n_features_in_, model.run_.channels) == (4, ("x0",))
    tensor = torch.tensor(array, requires_grad=True)
    for same in (list(array), array.tolist(), pd.DataFrame(array), tensor, array[:, :, None]):
        assert np.array_equal(model.predict(same), model.predict(array))
    assert model.predict([row[:2] for row in array]).shape == (30,)
    with pytest.raises(
        ValueError, match="X has 2 features, but RecurrentRegressor is expecting 4 features"
    ):
        model.predict(array[:, :2])
    with pytest.warns(UserWarning, match="column-vector"):
        assert RecurrentRegressor(**_TINY).fit(array, numbers[:, None]).predict(array).shape == (
            30,
        )
    named = RecurrentRegressor(**_TINY).fit(pd.DataFrame(array, columns=list("abcd")), numbers)
    assert named.feature_names_in_.tolist() == list("abcd")
    assert not hasattr(
        named.fit([row[: 1 + place % 4] for place, row in enumerate(array)], numbers),
        "n_features_in_",
    )
    assert named.predict(array[:, :3]).shape == (30,)


def test_texts() -> None:
    texts, labels = ["good day", "bad day today", "good night", "bad bad"] * 5, [True, False] * 10
    for X in (texts, [text.split() for text in texts], np.array(texts), pd.Series(texts)):
        model = RecurrentClassifier(**_QUICK).fit(X, labels)
        assert model.predict(X).tolist() == labels
    with pytest.raises(DataError, match=r"tokens, as in fit.*, got .*3 channels"):
        model.predict([np.ones((2, 3))])


def test_labels_come_back_as_they_were() -> None:
    sequences, words = _sequences()
    for up, down in (("up", "down"), (2, 10), (-1.0, 1.0), (True, False)):
        labels = np.array([up if word == "up" else down for word in words])
        model = RecurrentClassifier(**_QUICK).fit(sequences, labels)
        assert model.classes_.tolist() == sorted([up, down])
        assert model.predict(sequences).tolist() == labels.tolist()
        assert model.predict(sequences).dtype == labels.dtype
        assert np.allclose(model.predict_proba(sequences).sum(1), 1, rtol=1e-15, atol=0)
        assert (
            model.predict_proba(sequences).argmax(1).tolist()
            == np.searchsorted(model.classes_, labels).tolist()
        )
    # Several numbers per sequence.
    numbers = np.array([[len(sequence), sequence[-1, 0]] for sequence in sequences])
    several = RecurrentRegressor(**(_QUICK | {"epochs": 80, "loss": "huber"})).fit(
        sequences, numbers
    )
    assert several.predict(sequences).shape == (20, 2)
    assert several.score(sequences, numbers) > 0.8
    # As many numbers as steps are those of a sequence too.
    several.fit([sequence[:2] for sequence in sequences], numbers)
    assert several.predict(sequences[:3]).shape == (3, 2)


def test_pipelines_searches_copies_and_pickles() -> None:
    sequences, labels = _sequences()
    model = RecurrentClassifier(**_QUICK)
    grid = GridSearchCV(model, {"hidden_size": np.array([2, 4]), "cell": ["rnn", "gru"]}, cv=2).fit(
        sequences, labels
    )
    assert grid.best_params_["cell"] in ("rnn", "gru")
    assert grid.best_estimator_.run_.model.config.hidden_size in (2, 4)
    assert cross_val_predict(model, sequences, labels, cv=2).shape == (20,)
    array = np.random.default_rng(0).normal(size=(20, 5))
    array[::2] += 3
    pipeline = make_pipeline(StandardScaler(), RecurrentClassifier(**_QUICK)).fit(
        array, [1, 0] * 10
    )
    assert pipeline.score(array, [1, 0] * 10) == 1.0
    model.fit(sequences, labels)
    with pytest.raises(NotFittedError):
        clone(model).predict(sequences)
    expected = model.predict_proba(sequences)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(sequences), expected)
    assert np.array_equal(clone(model).fit(sequences, labels).predict_proba(sequences), expected)
    # Each sequence has the same bits in any batch.
    alone = np.concatenate([model.predict_proba([sequence]) for sequence in sequences[::-1]])
    assert np.array_equal(alone[::-1], expected)


def test_parameters_are_the_settings() -> None:
    model = RecurrentClassifier(hidden_size=3)
    assert repr(model) == "RecurrentClassifier(hidden_size=3)"
    settings = set(rl.training.settings.Settings().to_config()) - {"task", "seed"}
    assert set(model.get_params()) == settings | {
        "random_state",
        "channels",
        "validation",
        "callback",
        # Of Columns.
        "tokens",
        "split",
        "keep_trailing",
    }
    assert model.set_params(lr=0.5).lr == 0.5
    tags = RecurrentRegressor(missing="zero").__sklearn_tags__()
    assert (tags.target_tags.multi_output, model.__sklearn_tags__().input_tags.allow_nan) == (
        True,
        False,
    )
    assert (
        tags.input_tags.three_d_array == tags.input_tags.string == tags.input_tags.allow_nan is True
    )
    with pytest.raises(TypeError, match="layer"):
        RecurrentClassifier(layer="gru")
    seeds = [
        RecurrentClassifier(random_state=seed, **_TINY)
        for seed in (0, 0, 1, np.random.RandomState(3), None)
    ]
    sequences, labels = _sequences(channels=1)
    found = [each.fit(sequences, labels).predict_proba(sequences).tolist() for each in seeds]
    assert found[0] == found[1]
    assert len({str(each) for each in found[:4]}) == 3


@pytest.mark.parametrize(
    ("parameters", "X", "y", "error", "words"),
    [
        (
            {"hidden_size": "many"},
            None,
            None,
            ArgumentTypeError,
            "hidden_size must be .*got 'many'",
        ),
        (
            {"channels": "middle"},
            None,
            None,
            ArgumentError,
            "channels must be .*first, last.*, got 'middle'",
        ),
        (
            {},
            [np.ones((3, 4)), np.ones((3, 2))],
            ["a", "b"],
            DataError,
            r"X\[1\] must be .*got 2 .*channels='first'",
        ),
        ({}, None, ["a"], ValueError, "inconsistent numbers of samples"),
        ({}, [[np.nan, 1.0]] * 4, ["a", "b"] * 2, DataError, "finite"),
        ({}, {"x": 1}, ["a"], TypeError, "dict|float"),
        (
            {},
            [np.ma.array([1.0, 2.0], mask=[False, True])] * 4,
            ["a", "b"] * 2,
            ArgumentTypeError,
            "masked elements",
        ),
        ({}, [], [], DataError, "at least one sequence, got no sequences"),
        (
            {},
            None,
            ["same"] * 20,
            DataError,
            "y must be of at least two classes, got only the class 'same'",
        ),
        *(
            ({"random_state": n}, None, None, ArgumentError, f"random_state must .*, got {n}")
            for n in (-1, 2**63)
        ),
        (
            {},
            None,
            ["a", None] * 10,
            DataError,
            "y must be .*a class for each sequence, got None for sequence 1",
        ),
        ({}, None, np.array(["a", np.nan] * 10, dtype=object), ValueError, "Input contains NaN"),
        (
            {},
            [[[1.0, 2.0], [3.0]], [[1.0, 2.0]]],
            ["a", "b"],
            ArgumentTypeError,
            r"data\[0\] must be an array",
        ),
    ],
)
def test_mistakes(
    parameters: dict[str, Any], X: Any, y: Any, error: type[Exception], words: str
) -> None:
    sequences, labels = _sequences(channels=1)
    model = RecurrentClassifier(**_TINY).fit(sequences, labels).set_params(**parameters)
    with pytest.raises(error, match=words):
        model.fit(sequences if X is None else X, labels if y is None else y)
    with pytest.raises(
        NotFittedError
    ):  # not the classes of the second fit with the network of the first
        model.predict(sequences)


def test_missing_values_where_they_are_allowed() -> None:
    array, labels = np.random.default_rng(0).normal(size=(12, 4)), [0, 1] * 6
    array[3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        RecurrentClassifier(**_TINY).fit(array, labels)
    assert np.isfinite(
        RecurrentClassifier(missing="zero", **_TINY).fit(array, labels).predict_proba(array)
    ).all()


_IDS = [[3, 1, 2], [1, 2, 1], [3, 3, 1], [2, 2, 2]] * 3
_OTHERS = sorted(
    {field.name for field in fields(Columns)}
    - {"task", "need_labels", "tokens", "split", "keep_trailing"}
)


@pytest.mark.parametrize(
    "ids",
    [
        _IDS,
        [torch.tensor(row) for row in _IDS],
        np.array(_IDS),
        rl.Ragged([torch.tensor(row) for row in _IDS]),
    ],
    ids=["lists", "tensors", "array", "Ragged"],
)
def test_whole_numbers_are_tokens_of_estimators(ids: Any) -> None:
    labels = ["a", "b", "a", "b"] * 3
    model = RecurrentClassifier(tokens=True, validation_fraction=0, **_TINY).fit(ids, labels)
    assert {"1", "2", "3"} <= set(model.run_.preprocessor.vocabulary or ())
    assert len(model.predict(ids)) == len(labels)
    plain = RecurrentClassifier(validation_fraction=0, **_TINY).fit(ids, labels)
    assert plain.run_.preprocessor.vocabulary is None


@pytest.mark.parametrize("name", _OTHERS)
def test_other_options_of_columns_are_refused_by_estimators(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        RecurrentClassifier(**{name: "x"})


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({"tokens": True}, [[0.5, 1.0], [1.5]]),
        ({"split": "characters"}, [[0.5, 1.0], [1.5]]),
        ({"split": "characters"}, [["a", "b"], ["c"]]),
    ],
)
def test_options_without_a_use_are_refused(options: dict[str, Any], sequences: Any) -> None:
    model = RecurrentClassifier(validation_fraction=0, **options, **_TINY)
    with pytest.raises(ArgumentError, match=next(iter(options))):
        model.fit(sequences, ["a", "b"])


def test_missing_elements_at_the_end_and_splits() -> None:
    rows = [[0.5, 1.0, np.nan], [1.5, 2.0, np.nan]] * 4
    labels = ["a", "b"] * 4
    for keep, steps in ((False, 2), (True, 3)):
        model = RecurrentClassifier(
            keep_trailing=keep, missing="zero", validation_fraction=0, **_TINY
        )
        model.fit(rows, labels)
        assert model.run_.read(rows, need_labels=False).lengths.tolist() == [steps] * 8
    texts = RecurrentClassifier(split="characters", validation_fraction=0, **_TINY)
    texts.fit(["ab", "ba"] * 4, labels)
    assert {"a", "b"} <= set(texts.run_.preprocessor.vocabulary or ())
