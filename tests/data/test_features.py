"""Features in addition to the main column: read from every form, fitted, and appended to the
channels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from made_datasets import dataset
from raglane.data import Columns, Dataset, Feature, Preprocessor, read
from raglane.data.records import offsets_of
from raglane.errors import CheckpointError, DataError
from small_files import put, refused

_ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "load": [0.5, 1.5],
        "day": ["mon", "tue"],
        "zone": [7, 7],
        "town": "Rome",
        "age": 3.0,
        "kind": "a",
    },
    {"id": 2, "load": [2.5], "day": ["mon"], "zone": [9], "town": "Bonn", "age": None, "kind": "b"},
    {
        "id": 3,
        "load": [3.5, 4.5],
        "day": ["sun", "mon"],
        "zone": [9, 7],
        "town": "Rome",
        "age": 5.0,
        "kind": "a",
    },
]
_COLUMNS = Columns(
    label="kind", features=("load", "day", "zone"), static=("town", "age"), categorical=("zone",)
)


def _written(folder: Path, form: str) -> Any:
    frame, path = pd.DataFrame(_ROWS), folder / f"data.{form}"
    if form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif form == "parquet":
        frame.to_parquet(path)
    elif form == "csv":
        frame.explode(["load", "day", "zone"]).to_csv(path, index=False)
    return frame if form == "table" else path


def _found(records: Dataset) -> dict[str, Any]:
    return {
        "values": records.values.tolist(),
        "lengths": records.lengths.tolist(),
        "labels": records.labels,
        "features": {
            feature.name: (
                feature.kind,
                [None if entry != entry else entry for entry in feature.values.tolist()],
            )
            for feature in records.features
        },
    }


def test_every_form_gives_the_same_features(tmp_path: Path) -> None:
    wanted = {
        "values": [[0.5], [1.5], [2.5], [3.5], [4.5]],
        "lengths": [2, 1, 2],
        "labels": ("a", "b", "a"),
        "features": {
            "day": ("categories per element", ["mon", "tue", "mon", "sun", "mon"]),
            "zone": ("categories per element", ["7", "7", "9", "9", "7"]),
            "town": ("categories per sequence", ["Rome", "Bonn", "Rome"]),
            "age": ("numbers per sequence", [3.0, None, 5.0]),
        },
    }
    for form in ("jsonl", "parquet", "csv", "table"):
        data = _written(tmp_path, form)
        records = read(data, _COLUMNS)
        assert _found(records) == wanted, form
        # With the columns that were found, another file is read in the same way.
        if form != "table":
            assert _found(read(data, records.columns)) == wanted, form
        part = records.subset([2, 1])
        assert [feature.values.tolist() for feature in part.features[1:3]] == [
            ["9", "7", "9"],
            ["Rome", "Bonn"],
        ]


def test_numbers_beside_numbers_are_channels_and_beside_tokens_features(tmp_path: Path) -> None:
    path = put(
        tmp_path / "x.jsonl", '{"a": [1, 2], "b": [[3, 4], [5, 6]], "w": ["x", "y"], "k": "u"}\n'
    )
    records = read(path, Columns(label="k", features=("a", "b")))
    assert records.values.tolist() == [[1, 3, 4], [2, 5, 6]]
    assert records.channels == ("a", "b0", "b1")
    assert records.features == ()
    records = read(path, Columns(label="k", sequence="w", features=("a",)))
    assert records.values.tolist() == ["x", "y"]
    (feature,) = records.features
    assert (feature.name, feature.kind, feature.values.tolist()) == (
        "a",
        "numbers per element",
        [1.0, 2.0],
    )


def test_words_of_a_csv_file_are_guessed(tmp_path: Path) -> None:
    path = put(tmp_path / "x.csv", "id,x,day,y\n1,1,mon,a\n1,2,tue,a\n2,3,mon,b\n")
    records = read(path, Columns(label="y"))
    assert records.channels == ("x",)
    assert [feature.name for feature in records.features] == ["day"]
    assert records.columns.categorical == ("day",)
    # The first of several columns of words holds the tokens, and in a file to predict they may look
    # like numbers.
    path.write_text("id,w,day,y\n1,u,mon,a\n1,v,tue,a\n2,u,mon,b\n")
    records = read(path, Columns(label="y"))
    assert records.is_tokens
    assert [feature.name for feature in records.features] == ["day"]
    path.write_text("id,w,day\n1,5,6\n1,5,6\n")
    again = read(path, Columns(need_labels=False, features=("w", "day"), categorical=("w", "day")))
    assert again.values.tolist() == ["5", "5"]
    assert again.features[0].values.tolist() == ["6", "6"]


def test_features_become_columns_of_the_inputs_by_hand() -> None:
    features = (
        Feature("town", np.array(["Rome", "Bonn", "Rome"], dtype=object), per_sequence=True),
        Feature("age", np.array([2.0, np.nan, 6.0], np.float32), per_sequence=True),
        Feature("day", np.array(["mon", "", "mon", "tue"], dtype=object)),
    )
    values = np.array([[1.0], [3.0], [5.0], [7.0]], np.float32)
    records = dataset(
        values, offsets_of([1, 1, 2]), labels=("a", "b", "a"), channels=("x",), features=features
    )
    fitted = Preprocessor.fit(records, task="classify", missing="zero")
    # The ages of sequences have mean 4 and deviation 2, each counted once.
    assert [(encoder.name, encoder.vocabulary) for encoder in fitted.features] == [
        ("town", ("<unk>", "Rome", "Bonn")),
        ("age", None),
        ("day", ("<unk>", "mon", "tue")),
    ]
    scale = 5**0.5
    inputs = fitted.apply(records).tensors().values.numpy()
    # x and whether it was missing, age and whether it was missing, then the places of town and day.
    wanted = [
        [-3 / scale, 0, -1, 0, 1, 1],
        [-1 / scale, 0, 0, 1, 2, 0],
        [1 / scale, 0, 1, 0, 1, 1],
        [3 / scale, 0, 1, 0, 1, 2],
    ]
    np.testing.assert_allclose(inputs, wanted, rtol=1e-6)
    assert (fitted.input_size, fitted.features_size, fitted.categories) == (6, 4, (3, 3))
    assert Preprocessor.from_config(json.loads(json.dumps(fitted.to_config()))) == fitted
    # A town that training has not seen is unknown.
    other = Feature("town", np.array(["Oslo"] * 3, dtype=object), per_sequence=True)
    moved = dataset(
        values, offsets_of([1, 1, 2]), channels=("x",), features=(features[2], other, features[1])
    )
    assert fitted.apply(moved, require_targets=False).tensors().values[:, 4].tolist() == [
        0,
        0,
        0,
        0,
    ]


def test_whole_numbers_with_a_decimal_point_are_the_same_categories() -> None:
    table = pd.DataFrame(
        {"id": [0, 0, 1, 1], "x": [1.0, 2.0, 3.0, 4.0], "code": [3, 1, 3, 2], "kind": list("aabb")}
    )
    columns = Columns(label="kind", features=("x", "code"), categorical=("code",))
    one, other = (read(frame, columns) for frame in (table, table.astype({"code": float})))
    for fitted in (Preprocessor.fit(part, task="classify") for part in (one, other)):
        assert (
            fitted.apply(one).tensors().values.tolist()
            == fitted.apply(other).tensors().values.tolist()
        )
        assert fitted.apply(one).tensors().values[:, 1].tolist() == [1, 2, 1, 3]


def test_truth_values_are_the_same_categories_in_a_frame_and_in_a_csv_file(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {"id": [0, 0, 1], "x": [1.0, 2.0, 3.0], "is_on": [True, False, True], "kind": list("aab")}
    )
    columns = Columns(label="kind", features=("x", "is_on"))
    fitted = Preprocessor.fit(read(table, columns), task="classify")
    for case in (str.upper, str.lower, str.title):
        file = tmp_path / "table.csv"
        table.assign(is_on=[case(str(on)) for on in table["is_on"]]).to_csv(file, index=False)
        assert fitted.apply(read(file, columns)).tensors().values[:, 1].tolist() == [1, 2, 1]


def test_tokens_with_features_stand_last() -> None:
    words = np.array(["u", "v", "u"], dtype=object)
    feature = Feature("age", np.array([1.0, 3.0], np.float32), per_sequence=True)
    records = dataset(words, offsets_of([2, 1]), labels=("a", "b"), features=(feature,))
    fitted = Preprocessor.fit(records, task="classify")
    assert fitted.apply(records).tensors().values.tolist() == [[-1, 1], [-1, 2], [1, 1]]
    assert (fitted.input_size, fitted.categories) == (2, (3,))
    with pytest.raises(DataError, match="a language model reads only tokens"):
        Preprocessor.fit(
            dataset(words, offsets_of([3]), features=(Feature("n", words),)), task="language"
        )


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        (
            '{"x": [1, 2], "y": [1], "k": "a"}\n',
            {"features": ("x", "y")},
            ["1 elements in row 0", "2 in 'x'"],
        ),
        (
            '{"x": [1], "y": 1, "k": "a"}\n',
            {"features": ("x", "y")},
            ["column 'y'", "Columns(static=...)"],
        ),
        (
            '{"x": [1], "y": [1], "k": "a"}\n',
            {"sequence": "x", "static": ("y",)},
            ["numbers or words"],
        ),
        (
            '{"x": ["u"], "y": [1.5], "k": "a"}\n',
            {"features": ("x", "y"), "categorical": ("y",)},
            [
                "whole numbers or words as categories",
                "got list<item: double> in column 'y'",
                "Columns(categorical",
            ],
        ),
        (
            '{"x": [1], "y": 1.5, "k": "a"}\n',
            {"sequence": "x", "static": ("y",), "categorical": ("y",)},
            ["whole numbers or words as categories", "got double in column 'y'"],
        ),
        (
            '{"x": [1], "k": "a"}\n',
            {"features": ("x",), "static": ("z",)},
            ["no column 'z'", "Columns(static=...)"],
        ),
        ('{"x": [1], "k": "a"}\n', {"features": ("x",), "categorical": ("z",)}, ["no column 'z'"]),
        ('{"x": [1], "k": "a"}\n', {"sequence": "x", "static": ("k",)}, ["one role"]),
    ],
)
def test_features_that_are_refused(
    tmp_path: Path, text: str, columns: dict[str, Any], words: list[str]
) -> None:
    refused(words, read, put(tmp_path / "x.jsonl", text), Columns(label="k", **columns))


def test_features_that_are_not_there_or_missing() -> None:
    def records(*features: Feature) -> Dataset:
        ones = np.ones((2, 1), np.float32)
        return dataset(
            ones, offsets_of([1, 1]), labels=("a", "b"), channels=("x",), features=features
        )

    town = Feature("town", np.array(["Rome", "Bonn"], dtype=object), per_sequence=True)
    fitted = Preprocessor.fit(records(town), task="classify")
    gap = Feature("town", np.array(["Rome", ""], dtype=object), per_sequence=True)
    per_element = Feature("town", np.array(["Rome", "Bonn"], dtype=object))
    for other, word in (
        (None, "no such feature"),
        (gap, "sequence 1"),
        (per_element, "categories per element"),
    ):
        with pytest.raises(DataError, match=word):
            fitted.apply(records(*(() if other is None else (other,))))
    refused(["1 missing in the feature 'town'"], Preprocessor.fit, records(gap), task="classify")
    refused(["shape"], Feature, "age", np.zeros((2, 1), np.float32), per_sequence=True)


def test_a_feature_that_is_named_twice_is_one(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", '{"x": [1, 2], "w": ["a", "b"], "s": 3, "y": "u"}\n')
    found = read(path, Columns(label="y", sequence="x", features=("w", "w"), static=("s", "s")))
    assert [feature.name for feature in found.features] == ["w", "s"]


def test_stored_features_are_checked() -> None:
    town = Feature("town", np.array(["Rome"], dtype=object), per_sequence=True)
    records = dataset(
        np.ones((1, 1), np.float32),
        offsets_of([1]),
        labels=("a",),
        channels=("x",),
        features=(town,),
    )
    good = Preprocessor.fit(records, task="classify").to_config()
    [feature] = good["features"]
    changes: list[dict[str, Any]] = [
        {"std": 0},
        {"mean": np.nan},
        {"vocabulary": ["a"]},
        {"name": 5},
    ]
    wrong: list[Any] = [5, [5], [{}], *([{**feature, **change}] for change in changes)]
    for odd in wrong:
        with pytest.raises(CheckpointError):
            Preprocessor.from_config({**good, "features": odd})
