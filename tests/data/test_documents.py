"""JSON files of one object: columns, rows in a list, and the tables of pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import raglane as rl
from raglane.data import Columns, Dataset
from raglane.data.assemble.pieces import sift
from raglane.data.formats import pick
from raglane.errors import DataError

_FRAME = pd.DataFrame({"text": ["guten Tag", "good day", "hallo"], "label": ["de", "en", "de"]})
_ROWS = _FRAME.to_dict("records")


def _read(tmp_path: Path, document: Any, name: str = "a.json", **columns: Any) -> Dataset:
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return rl.data.read(path, Columns(**columns))


def _check(data: Dataset) -> None:
    assert data.labels == ("de", "en", "de")
    assert data.records.values.tolist() == ["guten", "Tag", "good", "day", "hallo"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "document",
    [
        _FRAME.to_dict("list"),
        {"data": _ROWS},
        {"version": 1, "meta": {"by": "us"}, "rows": _ROWS},
        {"dataset": {"data": _ROWS}},
        {"data": _FRAME.to_dict("list")},
    ],
)
def test_one_object(tmp_path: Path, document: Any, indent: int | None) -> None:
    _check(_read(tmp_path, json.dumps(document, indent=indent)))


@pytest.mark.parametrize("orient", ["columns", "index", "split", "records", "table"])
def test_every_orient_of_pandas(tmp_path: Path, orient: str) -> None:
    for indent in (None, 1):
        _check(_read(tmp_path, _FRAME.to_json(orient=orient, indent=indent)))
    frame = pd.DataFrame({"id": ["a", "a", "b"], "x": [1.5, 2.5, 3.5], "kind": ["p", "p", "q"]})
    data = _read(tmp_path, frame.to_json(orient=orient))
    assert (data.ids, data.channels) == (("a", "b"), ("x",))
    assert data.records.values.tolist() == [[1.5], [2.5], [3.5]]


def test_values_have_no_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a JSON list of string.*\"values\""):
        _read(tmp_path, _FRAME.to_json(orient="values"))


def test_keys_of_neither_rows_nor_columns(tmp_path: Path) -> None:
    frame = _FRAME.set_index(pd.Index(["x", "y", "z"]))
    with pytest.raises(DataError, match=r"an object of objects, by 'text' and 'x'.*records"):
        _read(tmp_path, frame.to_json())


def test_rows_of_other_sizes_than_their_names(tmp_path: Path) -> None:
    for row in ([1], {"a": 1}, 3):
        with pytest.raises(DataError, match=r"for 2 columns"):
            _read(tmp_path, {"columns": ["text", "label"], "data": [["a", "b"], row]})


def test_columns_of_lists(tmp_path: Path) -> None:
    document = {"tokens": [["a", "b"], ["c"]], "tags": [["X", "Y"], ["X"]]}
    data = _read(tmp_path, document, task="tag", label="tags", sequence="tokens")
    assert data.lengths.tolist() == [2, 1]


def test_an_object_may_be_a_row(tmp_path: Path) -> None:
    row = {"values": [1.5, 2.5, 3.5], "kind": "p"}
    assert _read(tmp_path, row).lengths.tolist() == [3]
    assert _read(
        tmp_path,
        {"tokens": ["a", "b"], "kind": ["p", "q"]},
        "a.jsonl",
        task="tag",
        sequence="tokens",
        label="kind",
    ).lengths.tolist() == [2]
    data = _read(tmp_path, {"values": [1.5, 2.5]}, sequence="values", need_labels=False)
    assert data.lengths.tolist() == [2]


def test_damaged_objects_have_a_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1.*bad JSON"):
        _read(tmp_path, '{"text": ["a"],\n "label": [}')


def test_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for document in (_FRAME.to_dict("list"), {"data": _ROWS}):
        path.write_text(json.dumps(document, indent=1))
        pieces = pick(path).pieces(path, Columns(), ())
        labels = [part.labels for piece in pieces for part in sift(piece, None)]
        assert labels == [("de", "en", "de")]
