"""What is learned of the training part, and the arithmetic of missing features, against obvious
loops.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_datasets import changed, dataset
from raglane import Ragged
from raglane.data import Dataset, Preprocessor, mark_missing
from raglane.data.prepare.encoders import UNKNOWN, sort_labels
from raglane.data.prepare.missing import fill_missing
from raglane.data.records import Targets, offsets_of
from raglane.errors import ArgumentError, CheckpointError, DataError
from small_files import refused


def features(seed: int | None = None, gaps: float = 0.0) -> Dataset:
    """Random sequences of 3 channels, lengths 0 and 1 among them, with a share of gaps."""
    random = np.random.default_rng(seed)
    lengths = np.concatenate([[0, 1], random.integers(0, 12, 20), [0, 5]])
    values = random.normal(5, 3, size=(lengths.sum(), 3)).astype(np.float32)
    absent = random.random(values.shape) < gaps
    values[absent] = random.choice([np.nan, np.inf, -np.inf], absent.sum())
    labels = tuple(random.choice(["2", "10", "1"], len(lengths)))
    return dataset(values, offsets_of(lengths), labels=labels, channels=("a", "b", "c"))


def tokens(sequences: list[str], **others: Any) -> Dataset:
    flat = np.array([word for text in sequences for word in text.split()], dtype=object)
    return dataset(flat, offsets_of([len(text.split()) for text in sequences]), **others)


def test_labels_that_are_numbers_are_ordered_as_numbers() -> None:
    assert sort_labels(["10", "9", "2.5", "-1", "9"]) == ["-1", "2.5", "9", "10"]
    assert sort_labels(["b", "nan", "a10", "a2", "3"]) == ["3", "a10", "a2", "b", "nan"]


def test_scaling_is_that_of_the_training_part() -> None:
    train, test = features(), features()
    fitted = Preprocessor.fit(train, task="classify")
    assert fitted.labels == ("1", "2", "10")
    assert (fitted.input_size, fitted.class_count) == (3, 3)
    known = train.values.astype(np.float64)
    expected = (test.values.astype(np.float64) - known.mean(0)) / known.std(0)
    data: Any = fitted.apply(test).tensors()
    assert data.values.dtype == torch.float32
    np.testing.assert_allclose(data.values.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert data.targets.tolist() == [("1", "2", "10").index(label) for label in test.labels or ()]
    assert data.targets.dtype == torch.int64
    assert torch.equal(data.lengths, test.lengths)


@pytest.mark.parametrize("count", [5, 1000])
def test_a_channel_that_never_changes_is_divided_by_one(count: int) -> None:
    """The deviation of many times 0.1, added up in float32, is rounding, not 0: a later 0.2 would
    become millions.
    """
    values = np.full((count, 1), 0.1, np.float32)
    assert (values.std() > 0) == (count == 1000)
    records = dataset(values, offsets_of([2, count - 2]), channels=("x0",))
    fitted = Preprocessor.fit(records, task="forecast")
    assert fitted.std == (1.0,)
    assert fitted.apply(records).tensors().values.abs().max() < 1e-6


def test_large_values_keep_their_differences() -> None:
    places = np.arange(8)
    records = dataset((1e7 + places)[:, None].astype(np.float32), offsets_of([8]), channels=("x",))
    values = Preprocessor.fit(records, task="forecast").apply(records).tensors().values
    np.testing.assert_allclose(values[:, 0].numpy(), (places - 3.5) / places.std(), rtol=1e-6)


def _slow_observations(
    values: npt.NDArray[Any], lengths: list[int], gaps: npt.NDArray[Any]
) -> list[list[float]]:
    """Element by element: what was last seen in the same sequence, and how long ago."""
    rows, element = [], 0
    for length in lengths:
        seen, since = [0.0] * values.shape[1], [0.0] * values.shape[1]
        for step in range(length):
            gap = 0.0 if step == 0 else float(gaps[element])
            since = [time + gap for time in since]
            known = np.isfinite(values[element])
            elapsed = list(since)
            seen = [
                float(new) if there else old
                for new, there, old in zip(values[element], known, seen, strict=True)
            ]
            since = [0.0 if there else time for there, time in zip(known, since, strict=True)]
            rows.append([*seen, *(0.0 if there else 1.0 for there in known), *elapsed])
            element += 1
    return rows


@pytest.mark.parametrize("missing", ["zero", "forward"])
@pytest.mark.parametrize("standardize", [True, False])
def test_missing_features_against_a_loop(missing: str, standardize: bool) -> None:
    for gaps in (0.0, 0.3, 0.9):
        records = features(gaps=gaps)
        fitted = Preprocessor.fit(
            records, task="classify", missing=missing, standardize=standardize
        )
        mean, std = [0.0] * 3, [1.0] * 3
        if standardize:
            known = [np.float64(channel[np.isfinite(channel)]) for channel in records.values.T]
            mean, std = [float(np.mean(k)) for k in known], [float(np.std(k)) for k in known]
            np.testing.assert_allclose(fitted.mean or (), mean, rtol=1e-9)
            np.testing.assert_allclose(fitted.std or (), std, rtol=1e-9)
        assert fitted.input_size == 6
        scaled = (records.values - mean) / std
        wanted = np.array(
            _slow_observations(scaled, records.lengths.tolist(), np.zeros(len(scaled)))
        )[:, :6]
        if missing == "zero":
            wanted[:, :3] = np.where(np.isfinite(scaled), scaled, 0)
        np.testing.assert_allclose(
            fitted.apply(records).tensors().values.numpy(), wanted, rtol=1e-5, atol=1e-6
        )


def test_a_channel_without_a_single_value() -> None:
    records = dataset(
        np.array([[np.nan, 1], [np.nan, 3]], np.float32), offsets_of([2]), channels=("a", "b")
    )
    fitted = Preprocessor.fit(records, task="forecast", missing="zero")
    assert (fitted.mean, fitted.std) == ((0.0, 2.0), (1.0, 1.0))
    assert fitted.apply(records).tensors().values.tolist() == [[0, -1, 1, 0], [0, 1, 1, 0]]


@given(st.integers(0, 29), st.integers(0, 2), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_missing_feature_is_named(element: int, channel: int, value: float) -> None:
    lengths = [3, 0, 10, 1, 16]
    values = np.zeros((30, 3), np.float32)
    values[element, channel] = value
    ids = ("p", "q", "r", "s", "t")
    records = dataset(values, offsets_of(lengths), ids=ids, channels=("a", "b", "c"))
    row, step = [(row, step) for row, length in enumerate(lengths) for step in range(length)][
        element
    ]
    words = rf"{value} in row {row} \(id '{ids[row]}'\), step {step}, channel '{'abc'[channel]}'.*missing='forward'"
    with pytest.raises(DataError, match=words):
        Preprocessor.fit(records, task="forecast")
    with pytest.raises(DataError, match=words):
        Preprocessor("forecast", ("a", "b", "c")).apply(records)


def test_the_vocabulary_goes_by_frequency_and_keeps_place_0_for_the_unknown() -> None:
    records = tokens(["b a a c", "", "a b d <unk>"], labels=("x", "y", "x"))
    fitted = Preprocessor.fit(records, task="classify")
    assert fitted.vocabulary == (UNKNOWN, "a", "b", "c", "d")
    assert (fitted.input_size, fitted.is_tokens) == (5, True)
    data = fitted.apply(tokens(["d zzz a", "<unk>"], labels=("y", "x"))).tensors()
    assert data.values.tolist() == [4, 0, 1, 0]
    assert data.values.dtype == torch.int64
    assert Preprocessor.fit(records, task="classify", max_vocabulary=3).vocabulary == (
        UNKNOWN,
        "a",
        "b",
    )
    assert Preprocessor.fit(records, task="classify", min_count=2).vocabulary == (
        UNKNOWN,
        "a",
        "b",
    )


def test_tags_become_one_target_an_element() -> None:
    words = tokens(["a b", "", "c"], tags=np.array(["N", "V", "N"], dtype=object))
    data = Preprocessor.fit(words, task="tag").apply(words)
    assert data.tensors().per_element
    assert [item["target"].tolist() for item in (data[0], data[1], data[2])] == [[0, 1], [], [0]]


def test_an_unseen_label_is_named() -> None:
    fitted = Preprocessor.fit(features(1), task="classify")
    other = changed(features(2), labels=("1",) * 23 + ("7",))
    refused(["'1', '2', '10', got the label '7' in row 23"], fitted.apply, other)
    assert fitted.apply(other, require_targets=False).tensors().targets is None
    words = tokens(["a b", "c"], tags=np.array(["N", "V", "N"], dtype=object))
    fitted = Preprocessor.fit(words, task="tag")
    with pytest.raises(DataError, match="the label 'X' in row 0, step 1"):
        fitted.apply(changed(words, tags=np.array(["N", "X", "N"], dtype=object)))


def test_channels_are_matched_by_name() -> None:
    records = features()
    fitted = Preprocessor.fit(records, task="classify")
    moved = changed(records, values=records.values[:, [2, 0, 1]], channels=("c", "a", "b"))
    assert torch.equal(fitted.apply(moved).tensors().values, fitted.apply(records).tensors().values)
    more = changed(records, values=records.values[:, [0, 0, 1, 2]], channels=("z", "a", "b", "c"))
    assert torch.equal(fitted.apply(more).tensors().values, fitted.apply(records).tensors().values)
    fewer = changed(records, values=records.values[:, :2], channels=("a", "b"))
    refused(
        ["channels 'a', 'b', 'c', as in training, got the channels 'a', 'b'."], fitted.apply, fewer
    )
    one, two = (
        changed(records, values=records.values[:, :n], channels=("x0", "x1")[:n]) for n in (1, 2)
    )
    fitted = Preprocessor.fit(one, task="classify")
    refused(["channels 'x0', as in training, got the channels 'x0', 'x1'."], fitted.apply, two)


def test_tokens_and_features_are_not_mixed_up() -> None:
    words = tokens(["a b"], labels=("1",))
    numbers = features()
    refused(
        ["must be tokens, as in training"], Preprocessor.fit(words, task="classify").apply, numbers
    )
    refused(["got tokens"], Preprocessor.fit(numbers, task="classify").apply, words)


def test_data_that_a_preprocessor_cannot_learn_from() -> None:
    empty = dataset(
        np.empty((0, 1), np.float32), offsets_of([0, 0]), labels=("a", "b"), channels=("x",)
    )
    refused(["2 sequences without an element"], Preprocessor.fit, empty, task="classify")
    refused(["no labels"], Preprocessor.fit, tokens(["a"]), task="classify")
    refused(["no label for each element"], Preprocessor.fit, tokens(["a"]), task="tag")
    with pytest.raises(
        ArgumentError, match=r"missing must be .*raise, zero, forward.*, got 'mean'"
    ):
        Preprocessor.fit(features(), task="classify", missing="mean")
    refused(
        ["task must be ", "got 'guess'"],
        Preprocessor.fit,
        features(),
        task="guess",
        error=ArgumentError,
    )
    with pytest.raises(ArgumentError, match=r"max_vocabulary must be .*got 1"):
        Preprocessor.fit(tokens(["a"]), task="forecast", max_vocabulary=1)


@pytest.mark.parametrize("kind", ["features", "tokens", "tags"])
def test_json_round_trip(kind: str) -> None:
    records, task = features(), "classify"
    if kind == "tokens":
        records = tokens(["a é", "\U0001f642"], labels=("x", "y"))
    elif kind == "tags":
        records, task = tokens(["a b"], tags=np.array(["N", "V"], dtype=object)), "tag"
    fitted = Preprocessor.fit(records, task=task, missing="raise" if kind == "tags" else "zero")
    again = Preprocessor.from_config(json.loads(json.dumps(fitted.to_config(), allow_nan=False)))
    assert again == fitted
    assert torch.equal(
        again.apply(records).tensors().values, fitted.apply(records).tensors().values
    )


@pytest.mark.parametrize("missing", ["raise", "zero"])
def test_sequences_of_length_0_go_with_every_kind(missing: str) -> None:
    nothing = [
        dataset(np.zeros((0, 1), np.float32), offsets_of([0, 0]), channels=("other",)),
        dataset(np.zeros(0, object), offsets_of([0, 0])),
    ]
    for trained in (features(), tokens(["a"], labels=("x",))):
        fitted = Preprocessor.fit(trained, task="classify", missing=missing)
        like = fitted.apply(trained).tensors().values
        for records in nothing:
            data = fitted.apply(records, require_targets=False).tensors()
            assert (data.values.dtype, data.values.shape) == (like.dtype, (0, *like.shape[1:]))
            assert data.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "'colour'"),
        ({"labels": [1, 2]}, "labels"),
        ({"labels": None}, "labels = None for the task 'classify'"),
        ({"std": "1"}, "std"),
        ({"mean": [1.0]}, "mean"),
        ({"missing": "perhaps"}, "'perhaps'"),
    ],
)
def test_a_configuration_that_cannot_be_read(change: dict[str, Any], words: str) -> None:
    config = Preprocessor.fit(features(), task="classify").to_config()
    with pytest.raises(CheckpointError, match=words):
        Preprocessor.from_config({**config, **change})
    del config["mean"]
    refused(["'mean'"], Preprocessor.from_config, config, error=CheckpointError)


def test_observations_are_cut_where_sequences_begin() -> None:
    chance = np.random.default_rng(11)
    for lengths in ([3, 0, 1, 4], [1, 1, 1], [0, 5, 0, 0, 2], [0], [7], [1, 6, 1]):
        values = chance.normal(size=(sum(lengths), 3)).astype(np.float32)
        values[chance.random(values.shape) < 0.5] = np.nan
        gaps = chance.random(len(values)) + 0.5
        batch = Ragged.from_flat(torch.from_numpy(values), lengths=torch.tensor(lengths))
        for times in (gaps, np.ones(len(values))):
            given = None if times is not gaps else batch.with_values(torch.from_numpy(gaps))
            found = mark_missing(batch, given)
            assert found.lengths.tolist() == lengths
            wanted = np.array(_slow_observations(values, lengths, times)).reshape(-1, 9)
            np.testing.assert_allclose(found.values.double().numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_times_are_in_means_of_the_training_part() -> None:
    gaps = [0.0, 4.0, 2.0, 0.0, 6.0]
    values = np.array([[1.0, np.nan, 3.0, np.nan, 5.0], gaps], np.float32).T
    records = dataset(
        np.ascontiguousarray(values),
        offsets_of([3, 2]),
        labels=("a", "b"),
        channels=("x", "time_gap"),
    )
    for standardize in (True, False):
        fitted = Preprocessor.fit(
            records, task="classify", missing="elapsed", standardize=standardize
        )
        usual = float(np.mean(gaps)) if standardize else 1.0
        found = fitted.apply(records).tensors().values[:, 4].double().numpy()
        np.testing.assert_allclose(found, np.array([0.0, 4.0, 6.0, 0.0, 6.0]) / usual, rtol=1e-6)


def test_times_have_the_same_bits_in_any_batch() -> None:
    random = np.random.default_rng(0)
    offsets = offsets_of([*random.integers(0, 60, 2000)])
    values = np.where(random.random((offsets[-1], 2)) < 0.5, np.nan, 1).astype(np.float32)
    gaps = random.exponential(size=len(values))
    parts = [slice(*ends) for ends in pairwise(offsets)]
    alone = [
        fill_missing(values[part], offsets_of([part.stop - part.start]), "elapsed", gaps[part])
        for part in parts
    ]
    np.testing.assert_array_equal(
        fill_missing(values, offsets, "elapsed", gaps), np.concatenate(alone)
    )


def test_numbers_to_learn_are_scaled_and_sets_are_marked_by_hand() -> None:
    records = dataset(np.zeros((3, 1), np.float32), offsets_of([2, 0, 1]), channels=("x",))
    for per_element in (False, True):
        numbers = np.array([[1.0, 1e6], [2.0, 1e6 + 4], [6.0, 1e6 + 2]])
        given = changed(
            records, targets=Targets(numbers, per_element=per_element, names=("u", "v"))
        )
        fitted = Preprocessor.fit(given, task="regress")
        wanted = (numbers - numbers.mean(axis=0)) / numbers.std(axis=0)
        found: Any = fitted.apply(given).tensors().targets
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-6, atol=1e-6)
        sets = np.empty(3, dtype=object)
        sets[:] = [("b", "a"), (), ("c",)]
        given = changed(given, targets=Targets(sets, per_element=per_element))
        fitted = Preprocessor.fit(given, task="multilabel")
        marked: Any = fitted.apply(given).tensors().targets
        assert (fitted.labels, marked.tolist()) == (
            ("a", "b", "c"),
            [[1, 1, 0], [0, 0, 0], [0, 0, 1]],
        )


def test_a_set_with_a_label_that_training_has_not_seen_is_refused() -> None:
    def records(*sets: tuple[str, ...]) -> Dataset:
        targets = Targets(np.array([*sets, None], dtype=object)[:-1])
        values = np.ones((len(sets), 1), np.float32)
        return dataset(values, offsets_of([1] * len(sets)), channels=("x",), targets=targets)

    fitted = Preprocessor.fit(records(("a",), ("a", "b"), ()), task="multilabel")
    marked: Any = fitted.apply(records(("b",), ())).tensors().targets
    assert marked.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    refused(
        ["the labels of training", "the label 'c' in ", "row 1"],
        fitted.apply,
        records(("b",), ("a", "c")),
    )
    # A program writes 1 as 1.0 if an entry of the column is missing.
    numbers: Any = Preprocessor.fit(records(("1",), ("2.0",)), task="multilabel").apply(
        records(("1.0",), ("2",))
    )
    assert numbers.tensors().targets.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    # Another spelling of a truth value is found, unless it may be one of two classes.
    truths: Any = Preprocessor.fit(records(("True",), ("False",)), task="multilabel").apply(
        records(("true",))
    )
    assert truths.tensors().targets.tolist() == [[0.0, 1.0]]
    fitted = Preprocessor.fit(records(("True",), ("TRUE",)), task="multilabel")
    refused(["the labels of training", "the label 'true' in "], fitted.apply, records(("true",)))
