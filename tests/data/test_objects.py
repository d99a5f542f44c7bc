"""Objects of a program give the datasets of the same data in a file, or made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import raglane as rl
from raglane.data import Columns, Dataset, read
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    RaglaneError,
    ShapeError,
)
from small_files import refused, same

_NONE = Columns(need_labels=False)
_TIMES = pd.to_timedelta([0, 9], unit="s"), pd.PeriodIndex(["2024-01", "2024-02"], freq="M")


def _split(records: Dataset) -> list[list[Any]]:
    return [records.values[start:end].tolist() for start, end in pairwise(records.offsets)]


def test_sequences_of_numbers_in_every_form() -> None:
    random = np.random.default_rng(0)
    for lengths, shape in (([3, 1, 4], ()), ([3, 1, 4], (2,)), ([2, 2], (3,)), ([4], ())):
        arrays = [random.normal(size=(length, *shape)).astype(np.float32) for length in lengths]
        expected = [array.reshape(len(array), -1).tolist() for array in arrays]
        objects = np.empty(len(arrays), dtype=object)
        objects[:] = arrays
        forms: list[Any] = [
            arrays,
            tuple(arrays),
            [array.tolist() for array in arrays],
            [torch.from_numpy(array).requires_grad_() for array in arrays],
            rl.Ragged([torch.from_numpy(array) for array in arrays]),
            [array.astype(np.float64) for array in arrays],
            pd.Series(arrays),
        ]
        forms += (
            [objects]
            if len(set(lengths)) > 1
            else [np.stack(arrays), torch.from_numpy(np.stack(arrays))]
        )
        for form in forms:
            found = read(form, _NONE)
            assert (_split(found), str(found.source)) == (expected, "data")
            assert found.channels == tuple(f"x{place}" for place in range(max(1, *shape, 1)))


def test_empty_sequences_and_missing_values() -> None:
    found = read([[], [1, float("nan"), 2], np.zeros((0,))], _NONE)
    assert found.lengths.tolist() == [0, 3, 0]
    assert np.isnan(found.values).ravel().tolist() == [False, True, False]
    for shape in ((0,), (0, 3)):
        assert read([np.zeros(shape), np.ones((2, 3))], _NONE).channels == ("x0", "x1", "x2")
    assert read([torch.ones(2, dtype=torch.bfloat16)], _NONE).values.tolist() == [[1], [1]]
    assert read([[1e300]], _NONE).values.tolist() == [[float("inf")]]


def test_texts_are_tokens_cut_as_asked() -> None:
    for data in (
        ["the cat", "", " a  b "],
        [["the", "cat"], [], ["a", "b"]],
        pd.Series(["the cat", "", "a b"]),
        pl.Series(["the cat", "", "a b"]),
    ):
        found = read(data, _NONE)
        assert (_split(found), found.channels) == ([["the", "cat"], [], ["a", "b"]], ())
    for split, tokens in ((None, ["to", "be"]), ("characters", ["t", "o", " ", "b", "e"])):
        records = read(["to be"], Columns(need_labels=False, split=split))
        assert (records.values.tolist(), records.columns.split) == (tokens, split or "words")
    for option, given in (("on_bad_row", "skip"), ("format", "csv")):
        refused(
            [f"{option} must be", f"got '{given}'"],
            read,
            ["to be"],
            **{option: given},
            error=ArgumentError,
        )


def test_labels_are_read_as_in_a_file() -> None:
    data = [[0.1, 0.2], [0.3]]
    for labels, words in (
        (["a", "b"], ("a", "b")),
        ([1, 0], ("1", "0")),
        (np.array([True, False]), ("true", "false")),
        (pd.Series(["a", "b"]), ("a", "b")),
        (torch.tensor([2, 3]), ("2", "3")),
    ):
        assert read(data, labels=labels).labels == words
    tags: Any = read(data, Columns("tag"), labels=[["x", "y"], ["z"]]).tags
    assert tags.tolist() == ["x", "y", "z"]
    for task, given, values in (
        ("regress", [1.5, 2], [[1.5], [2]]),
        ("regress", np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("multilabel", [["p", "q"], []], [("p", "q"), ()]),
    ):
        targets: Any = read(data, Columns(task), labels=given).targets
        assert targets.values.tolist() == values
    spoken: Any = read(data, Columns("transcribe", label_split="words"), labels=["ab c", "d"])
    assert (spoken.targets.values.tolist(), spoken.columns.label_split) == (
        [("ab", "c"), ("d",)],
        "words",
    )


def test_tables_are_read_as_their_files(tmp_path: Path) -> None:
    wide: dict[str, list[Any]] = {
        "name": ["a", "b", "c"],
        "x": [[1.5, 2.0], [], [3.25]],
        "kind": ["up", "down", "up"],
    }
    long: dict[str, list[Any]] = {
        "id": [7, 7, 9],
        "t": [1, 0, 0],
        "h": [0.1, 0.25, 1e-7],
        "kind": ["up", "up", "down"],
    }
    makes = (
        pd.DataFrame,
        pl.DataFrame,
        pa.table,
        lambda rows: pd.DataFrame(rows).set_index(next(iter(rows))),
    )
    texts: dict[str, list[Any]] = {"id": [1, 2], "text": ["the cat", "a dog"], "label": [0, 1]}
    words: dict[str, list[Any]] = {"id": [1, 1, 2], "word": ["the", "cat", "a"], "label": [0, 0, 1]}
    for table, columns in ((wide, Columns(label="kind", id="name")), (texts, None)):
        path = tmp_path / "table.parquet"
        pd.DataFrame(table).to_parquet(path)
        for make in makes:
            same(read(make(table), columns), read(path, columns))
    steps: dict[str, list[Any]] = {
        "id": ["u", "v"],
        "t0": [0.5, 1],
        "t1": [2.5, 1],
        "t2": [3.5, 1],
        "kind": ["a", "b"],
    }
    for table in (long, words, steps):
        pd.DataFrame(table).to_csv(csv := tmp_path / "table.csv", index=False)
        for make in makes:
            same(read(make(table)), read(csv))


def test_a_table_with_labels_beside_it() -> None:
    frame = pd.DataFrame({"x": [[1.0, 2.0], [3.0]], "kind": ["up", "down"]})
    assert read(frame, labels=["p", "q"]).labels == ("p", "q")
    assert read(frame[["x"]], labels=["p", "q"]).labels == ("p", "q")
    kinds = pl.Series(["u", "v"], dtype=pl.Categorical)
    categories = pl.DataFrame({"Unnamed: 0": [0, 1], "x": [[1.0], [2.0]], "kind": kinds})
    assert read(categories).labels == ("u", "v")
    numbered = pd.DataFrame({"x": [[np.nan, 1.0], [2.0]], "id": [9, 4], "kind": [True, False]})
    found = read(
        numbered.astype({"id": "category", "kind": "category"}),
        labels=pd.Series(["p", "q"], [9, 4]),
    )
    assert (found.ids, found.labels, np.isnan(found.values).sum()) == ((9, 4), ("p", "q"), 1)
    assert read(numbered.astype({"kind": "category"})).labels == ("true", "false")
    assert read(
        pd.DataFrame({0: [np.ones((2, 3)), np.zeros((1, 3))], 1: ["up", "down"]})
    ).lengths.tolist() == [2, 1]


def test_a_column_that_data_in_memory_has_not_is_not_passed_over_in_silence() -> None:
    columns = Columns(need_labels=False, id="x", time_gaps=True)
    unused = (
        "not used, since data in memory has no such column: Columns(id=...), Columns(time_gaps=...)"
    )
    for source in ([[1.0, 2.0]], np.zeros((2, 3)), rl.Ragged([torch.zeros(2)]), ["a text"]):
        assert unused in read(source, columns).notes
    rows = pd.DataFrame({"x": [0, 0, 1], "time": [1, 3, 5], "y": [0.5, 1.5, 2.5]})
    assert not any("not used" in note for note in read(rows, columns).notes)
    timed = rows.assign(time=pd.to_timedelta(rows["time"], unit="s"))
    assert (
        read(timed, columns).values.tolist()
        == read(rows, columns).values.tolist()
        == [[0.5, 0], [1.5, 2], [2.5, 0]]
    )
    lists = pd.DataFrame({"x": ["a", "b"], "y": [[1.0], [2.0, 3.0]]})
    assert "table of this kind has no such column: Columns(time_gaps" in "".join(
        read(lists, columns).notes
    )


def test_panels() -> None:
    expected = [[[1, 10], [2, 20]], [[3, 30]]]
    channels = (
        [pd.Series([1.0, 2.0]), pd.Series([3.0])],
        [pd.Series([10.0, 20.0]), pd.Series([30.0])],
    )
    nested = pd.DataFrame(dict(zip("ab", channels, strict=True)))
    flat = pd.DataFrame({"a": [2, 3, 1], "b": [20, 30, 10]}, dtype=float)
    # The rows of a sequence may be apart, and in another order than their steps.
    flat.index = pd.MultiIndex.from_tuples([("s", 1), ("t", 0), ("s", 0)])
    listed = [
        pd.DataFrame({"a": [1.0, 2.0], "b": [10.0, 20.0]}),
        pd.DataFrame({"a": [3.0], "b": [30.0]}),
    ]
    words = flat.sort_index()
    words.index = pd.MultiIndex.from_tuples([("s", "t2"), ("s", "t10"), ("t", "t2")])
    timed, dated = (flat.set_index(flat.index.set_levels(times, level=1)) for times in _TIMES)
    for panel in (nested, flat, timed, dated, listed, words):
        found = read(panel, labels=["up", "down"])
        assert (_split(found), found.channels) == (expected, ("a", "b"))
    assert read(flat, _NONE).ids == ("s", "t")
    gap = flat.astype({"b": "Int64"})
    gap.iloc[1, 1] = pd.NA
    assert np.array_equal(
        read(gap, _NONE).values, np.array([[1, 10], [2, 20], [3, np.nan]]), equal_nan=True
    )
    assert read([table.set_axis(["a", "a"], axis=1) for table in listed], _NONE).channels == (
        "x0",
        "x1",
    )


@pytest.mark.parametrize(
    ("data", "labels", "error", "words"),
    [
        (
            3,
            None,
            ArgumentTypeError,
            ["data must be", "got 3", "a list or a generator of sequences"],
        ),
        ({"x": [1]}, None, ArgumentTypeError, ["a dict"]),
        ([], None, DataError, ["no sequences"]),
        ([np.ones((2, 3)), np.ones((5, 0))], None, ShapeError, ["data[1]", "(5, 0)"]),
        ([[1], "a"], None, ArgumentTypeError, ["data[1]", "real numbers"]),
        (["a", [1]], None, ArgumentTypeError, ["data", "of several kinds"]),
        (
            [np.ones((2, 3)), np.ones((2, 4))],
            None,
            ShapeError,
            ["data[1]", "(2, 4)", "C = 3", "transpose"],
        ),
        (
            [np.ma.array([1.0, 2.0], mask=[False, True])],
            None,
            ArgumentTypeError,
            ["data[0]", ".filled(numpy.nan)"],
        ),
        (
            np.ma.array(np.ones((2, 3)), mask=np.eye(2, 3) > 0),
            None,
            ArgumentTypeError,
            ["data must be", "masked"],
        ),
        (np.ones((2, 3, 0)), None, ShapeError, ["elements of shape (0,)"]),
        (["a", "\ud800"], None, ArgumentTypeError, ["data", "of several kinds"]),
        ([[[10**400, 1]]], None, ArgumentTypeError, ["data[0]", "array of numbers"]),
        ([1j * np.ones(2)], None, ArgumentTypeError, ["data[0]", "complex"]),
        (
            np.array([["2024-01-31"]], "M8[D]"),
            None,
            ArgumentTypeError,
            ["data must be", "datetime64"],
        ),
        (np.ones(3), None, ShapeError, ["(3,)", "(sequences, steps)"]),
        (
            [np.ones((4, 21, 3))],
            None,
            ShapeError,
            ["data[0]", "(4, 21, 3)", "Reshape it to (L, 63)."],
        ),
        (
            pd.DataFrame({"x": ["u"]}, [[0], [0]]),
            None,
            ArgumentTypeError,
            ["or pass data.reset_index()"],
        ),
        ([1.0, 2.0], None, ShapeError, ["data[0]", "Wrap the numbers of a sequence in a list."]),
        ([np.ones(())], None, ShapeError, ["data[0]", "Wrap the numbers of a sequence in a list."]),
        (rl.Ragged([torch.ones(2, 3, 4)]), None, ShapeError, ["(3, 4)"]),
        (torch.ones(2, 3, device="meta"), None, ArgumentTypeError, ["data", "Tensor"]),
        (
            pd.DataFrame([[[1.0], "a"]], columns=[1, "1"]),
            None,
            DataError,
            ["Duplicate column names"],
        ),
        (
            pa.table({"x": [[1.0]], "y": pa.array([None], "str").dictionary_encode("encode")}),
            None,
            DataError,
            ["null"],
        ),
        (
            [pd.DataFrame({"a": [1.0], "b": [2.0]}), pd.DataFrame({"b": [1], "a": [2]})],
            None,
            DataError,
            ["data[1]"],
        ),
        (
            [pd.DataFrame({"a": [1.0]}), np.ones(2)],
            None,
            DataError,
            ["data[1] must be a table", "got a ndarray"],
        ),
        (
            pd.DataFrame({"id": [1], "x": [1], "kind": [b"u"]}),
            None,
            DataError,
            ["bytes in the column 'kind'"],
        ),
        (
            pd.DataFrame({"x": [1.0, 2.0]}, [["a", None], [0, 0]]),
            None,
            DataError,
            ["missing entry in row 1 of the"],
        ),
        (
            pd.DataFrame({"x": [1.0, 2.0]}, [["a", "a"], [3, 3]]),
            None,
            DataError,
            ["the index (a, 3) again in row 1"],
        ),
        (
            datasets.DatasetDict({"a": datasets.Dataset.from_dict({})}),
            None,
            ArgumentTypeError,
            ["data", "Dict"],
        ),
        (pd.DataFrame({"x": [1, "a"]}), None, DataError, ["Arrow", "one kind"]),
        (
            pd.DataFrame({"a": [pd.Series([1, 2])], "b": [pd.Series([1])]}),
            None,
            ShapeError,
            ["row 0", "2, 1 steps"],
        ),
        ([[1.0]], None, DataError, ["labels must be", "got none", "classify"]),
        ([[1.0]], ["a", "b"], ShapeError, ["got 2 for 1 sequences"]),
        ([[1.0]], "a", ArgumentTypeError, ["labels must be", "got 'a'"]),
        (
            pd.DataFrame({"id": ["b", "a", "b"], "x": [0.5, 1.5, 2.5]}),
            pd.Series({"a": "up", "b": "down"}),
            DataError,
            [
                "labels must be in the order of the sequences, 'b', 'a'",
                "got an index in another order, 'a', 'b'",
            ],
        ),
        ([[1.0]], np.array(1), ArgumentTypeError, ["labels must be", "got a ndarray"]),
        (
            [[1.0]],
            pd.DataFrame({"label": ["a"]}),
            ArgumentTypeError,
            ["labels must be", "one column of a table"],
        ),
        ([[1.0], [2.0]], ["a", 1], ArgumentTypeError, ["labels", "of several kinds"]),
        ([[1.0], [2.0]], pd.Series(["a", np.nan]), DataError, ["labels", "a null in row 1"]),
    ],
)
def test_other_values_than_data_are_refused(
    data: Any, labels: Any, error: type[Exception], words: list[str]
) -> None:
    refused(words, partial(read, labels=labels), data, error=error)


def _all_kinds() -> dict[str, Any]:
    """Return four sequences in every kind of data in memory."""
    numbers = [[0.5, 1.5], [2.5], [3.5, 4.5], [5.5]]
    ids = [[1, 2], [3], [4, 1], [2]]
    table = pd.DataFrame({"x": numbers})
    rows = pd.DataFrame({"id": [0, 0, 1, 2, 2, 3], "x": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]})
    series = pd.DataFrame({"x": [pd.Series(row) for row in numbers]})
    return {
        "lists": numbers,
        "lists of whole numbers": ids,
        "texts": ["a b", "c", "d e", "f"],
        "lists of texts": [["a b", "c"], ["d"], ["e", "f"], ["g"]],
        "arrays": [np.array(row) for row in numbers],
        "tensors": [torch.tensor(row) for row in ids],
        "array": np.arange(8.0).reshape(4, 2),
        "array of whole numbers": np.arange(8).reshape(4, 2),
        "tensor": torch.zeros(4, 2, 3),
        "array of objects": np.array([*map(np.array, numbers), 0], dtype=object)[:4],
        "Ragged": rl.Ragged([torch.tensor(row) for row in numbers]),
        "Ragged of whole numbers": rl.Ragged([torch.tensor(row) for row in ids]),
        "column": table["x"],
        "table of lists": table,
        "table of texts": pd.DataFrame({"x": ["a b", "c", "d e", "f"]}),
        "table of rows": rows,
        "Arrow": pa.table({"x": ids}),
        "index": rows.assign(step=[0, 1, 0, 0, 1, 0]).set_index(["id", "step"]),
        "series": series,
        "tables": [pd.DataFrame({"x": row}) for row in numbers],
        "Dataset": read(numbers, labels=list("pqpq")),
    }


_OPTIONS: dict[str, Any] = {
    "task": "regress",
    "sequence": "absent",
    "label": "absent",
    "id": "absent",
    "time": "absent",
    "features": ("absent",),
    "static": ("absent",),
    "categorical": ("absent",),
    "split": "characters",
    "label_split": "words",
    "tokens": True,
    "time_gaps": True,
    "wide": True,
    "time_format": "%d/%m/%Y",
    "duplicate_times": "mean",
}


def _contents(data: Any) -> str:
    records = data.records
    targets = None if records.targets is None else records.targets.values.tolist()
    features = [(feature.name, feature.values.tolist()) for feature in records.features]
    parts = (records.offsets.tolist(), records.labels, records.tags, targets, features)
    return repr((records.values.tolist(), *parts, records.channels, records.ids))


def test_all_options_of_columns_are_listed() -> None:
    # These have tests of their own.
    others = {"need_labels", "keep_trailing", "header", "no_header", "label_from_name"}
    assert {*_OPTIONS, *others} == {field.name for field in fields(Columns)}


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("kind", _all_kinds())
def test_an_option_of_data_in_memory_acts_or_is_named(kind: str, name: str) -> None:
    source, labels = _all_kinds()[kind], None if kind == "Dataset" else [0, 1, 0, 1]
    if (kind, name) == ("Dataset", "task"):
        pytest.skip("the labels of a Dataset are read already; training checks its task")
    plain = read(source, Columns(), labels=labels)
    try:
        chosen = read(source, Columns(**{name: _OPTIONS[name]}), labels=labels)
    except RaglaneError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert name in message
        return
    is_named = any(f"Columns({name}=...)" in note for note in chosen.notes)
    is_tokens = name == "tokens" and chosen.records.is_tokens
    assert is_named or is_tokens or _contents(chosen) != _contents(plain)


@pytest.mark.parametrize("kind", _all_kinds())
def test_labels_of_data_in_memory_are_required(kind: str) -> None:
    source = _all_kinds()[kind]
    if kind == "Dataset":
        pytest.skip("it has labels")
    with pytest.raises(DataError, match="label"):
        read(source, Columns())
    assert len(read(source, Columns(need_labels=False))) == 4


@pytest.mark.parametrize(
    "kind",
    ["lists of whole numbers", "tensors", "array of whole numbers", "Ragged of whole numbers"],
)
def test_whole_numbers_in_memory_are_tokens(kind: str) -> None:
    source = _all_kinds()[kind]
    expected = [str(number) for row in source for number in np.asarray(row).tolist()]
    tokens = read(source, Columns(tokens=True), labels=[0, 1, 0, 1])
    assert (tokens.values.tolist(), tokens.labels) == (expected, ("0", "1", "0", "1"))
    assert tokens.lengths.tolist() == [len(row) for row in source]
    # A language model reads them as tokens, unless ``tokens`` is False.
    language = read(source, Columns(task="language"))
    assert language.values.tolist() == expected
    assert not read(source, Columns(task="language", tokens=False)).records.is_tokens
    assert not read(source, Columns(task="forecast")).records.is_tokens
    # New data is read in the same way.
    assert read(source, replace(tokens.columns, need_labels=False)).values.tolist() == expected


def test_tokens_of_other_numbers_are_not_passed_over_in_silence() -> None:
    sources: list[Any] = [[[1.5, 2.0]], [[[1, 2]]], [[1, 2], [True]], [["a"]], [[]]]
    for source in sources:
        chosen = read(source, Columns(need_labels=False, tokens=True))
        unused = any("Columns(tokens=...)" in note for note in chosen.notes)
        assert unused != chosen.records.is_tokens


@pytest.mark.parametrize("kind", ["generator", "map", "iterator", "zip"])
def test_generators_are_lists(kind: str) -> None:
    """Also of labels; data is read several times, e.g. to guess its task."""
    rows, labels = [[0.1, 0.5], [0.9], [0.2, 0.3]], ["up", "down", "up"]
    sequences: dict[str, Callable[[], Any]] = {
        "generator": lambda: (row for row in rows),
        "map": lambda: map(np.array, rows),
        "iterator": lambda: iter(rows),
        "zip": lambda: zip(*[(1.0, 2.0, 3.0)] * 2, strict=True),
    }
    expected = read([list(row) for row in sequences[kind]()], labels=labels)
    found = read(sequences[kind](), labels=iter(labels))
    assert np.array_equal(found.values, expected.values)
    assert (found.lengths.tolist(), found.labels) == (expected.lengths.tolist(), expected.labels)
    options: dict[str, Any] = {
        "epochs": 1,
        "hidden_size": 4,
        "validation_fraction": 0,
        "threads": 1,
    }
    run = rl.fit(sequences[kind](), (label for label in labels), **options)
    walks = list(sequences[kind]())
    again = rl.fit(walks, labels, **options)
    predicted = again.predict(walks, probabilities=True).columns
    assert run.predict(sequences[kind](), probabilities=True).columns == predicted
    score = run.evaluate(sequences[kind](), iter(labels))["accuracy"]
    assert score == again.evaluate(walks, labels)["accuracy"]


def test_files_and_readers_are_no_lists(tmp_path: Path) -> None:
    """Their parts are lines, or rows of several sequences."""
    (path := tmp_path / "x.csv").write_text("x\n1\n2\n")
    with path.open() as file, pd.read_csv(path, chunksize=1) as chunks:
        for source in (file, chunks):
            with pytest.raises(
                ArgumentTypeError, match="data must be a path, a list or a generator"
            ):
                read(source, labels=["a", "b"])


def test_groups_of_a_table_are_read_as_the_table() -> None:
    frame = pd.DataFrame({"id": [1, 1, 2, 2], "x": [1.0, 2, 3, 4], "kind": ["a", "a", "b", "b"]})
    groups = [group for _, group in frame.groupby("id")]
    plain = [group[["x"]] for group in groups]
    polars = pl.DataFrame(frame.to_dict("list")).partition_by("id")
    words = r"[Pp]ass the whole table, as rl\.fit\(df\): rows with the same id are one sequence"
    for data in (
        groups,
        iter(groups),
        frame.groupby("id"),
        list(frame.groupby("id")),
        plain,
        polars,
    ):
        with pytest.raises((ArgumentTypeError, DataError), match=words):
            rl.fit(data)
    assert read(plain, labels=["a", "b"]).lengths.tolist() == [2, 2]
    assert read(frame).lengths.tolist() == [2, 2]


def test_a_pack_is_converted_first() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    with pytest.raises(ArgumentTypeError, match=r"data must be .*Ragged\.from_packed\(packed\)"):
        read(packed, labels=["a", "b"])
