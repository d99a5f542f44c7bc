"""Small functions of the data room, on the cases that say what they are for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas

from raglane.data.fragments import Fragment, Layout
from raglane.data.reading import is_panel, is_text
from raglane.data.records import (
    Columns,
    Feature,
    Records,
    Targets,
    check_features,
    joined,
    kinds_of,
    note_empty,
    offsets_of,
    place_of,
)
from raglane.data.statistics import Channel, FeatureCounts
from raglane.data.stores import expand, is_url


def test_joined() -> None:
    ages = [(Feature("age", np.array([age], np.float32), per_sequence=True),) for age in (31, 58)]
    assert (joined(ages)[0].values.tolist()) == [31.0, 58.0]


def test_check_features() -> None:
    check_features((Feature("age", np.zeros(2, np.float32), per_sequence=True),), 2, 7)


def test_layout_names() -> None:
    assert (Layout(True, (), "texts", True, False).names(Columns(label="kind"))) == {
        "label": "kind",
        "id": "id",
        "sequence": "sequence",
    }


def test_layout_serves() -> None:
    assert (
        Layout(True, (), "none", False, True).serves("tag"),
        Layout(True, (), "none", True, False).serves("tag"),
    ) == (True, False)


def test_expand() -> None:
    assert (expand(["b.parquet", Path("a.csv")])) == ["b.parquet", "a.csv"]


def test_is_url() -> None:
    assert (is_url("s3://bucket/names.parquet"), is_url("data/names.parquet")) == (True, False)


def test_is_panel() -> None:
    assert (
        is_panel(pandas.DataFrame({"a": [pandas.Series([1.0, 2.0])]})),
        is_panel(pandas.DataFrame({"a": [1.0]})),
    ) == (True, False)


def test_is_text() -> None:
    assert (is_text(["the cat"]), is_text([[], ["the", "cat"]]), is_text([[1.0]])) == (True, True, False)


def test_fragment() -> None:
    words = Records(np.array(["a", "b", "a"], dtype=object), offsets_of([2, 1]), labels=("x", "y"))
    fragment = Fragment.of(words)
    assert fragment.labels is not None
    assert (fragment.words, fragment.values.tolist(), fragment.labels.tolist()) == (("a", "b"), [0, 1, 0], [0, 1])


def test_note_empty() -> None:
    assert (
        note_empty(Records(np.zeros((2, 1), np.float32), offsets_of([0, 2]), channels=("x0",)))
    ) == "1 of 2 sequences is empty (row 0): its class follows from the initial state alone"
    assert note_empty(Records(np.zeros((2, 1), np.float32), offsets_of([2]), channels=("x0",))) is None


def test_place_of() -> None:
    assert (place_of(np.array([0, 2, 2, 5]), 3)) == (2, 1)


def test_offsets_of() -> None:
    assert (offsets_of([4, 0, 2]).tolist()) == [0, 4, 4, 6]


def test_featurecounts() -> None:
    city = Feature("city", np.array(["Rome", "", "Rome"], dtype=object), per_sequence=True)
    counts = FeatureCounts.of(city)
    assert (counts.words["Rome"], counts.missing, counts.categories) == (2, 1, 1)


def test_channel() -> None:
    assert (
        repr(Channel.of(np.array([1.0, np.nan, 3.0], np.float32)) + Channel.of(np.array([5.0], np.float32)))
        == "Channel(count=3, mean=3.0, squares=8.0, low=1.0, high=5.0, missing=1)"
    )


def test_kinds_of() -> None:
    assert (kinds_of(["2", "1.0", "2"]), kinds_of(["true", "1.0a"]), kinds_of([])) == (
        ("fractions", "whole numbers"),
        ("texts", "truth values"),
        (),
    )


def test_targets() -> None:
    assert Targets(np.array([[1.5], [2.0]]), names=("height",)).is_numbers
