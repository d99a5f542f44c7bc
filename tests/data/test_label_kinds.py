"""Labels of several files are of one kind, or refused: 1, "1" and 1.0 would be three labels, or
silently one.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.ipc
import pytest

from raglane.data import Columns, Dataset, convert, read
from raglane.data.assemble import pieces
from raglane.errors import DataError
from small_files import refused, write_table

_X = [[1.0, 2.0], [3.0], [4.0]]
_COLUMNS = Columns(sequence="x", label="y")


def _written(path: Path, labels: list[Any]) -> Path:
    """A small file of three sequences, in the format of its suffix."""
    if path.suffix in (".parquet", ".arrow"):
        write_table(path, pa.table({"x": _X, "y": labels}))
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in zip(_X, labels, strict=True))
        )
    else:
        rows = [
            f"{row},{value},{labels[row]}\n" for row, values in enumerate(_X) for value in values
        ]
        path.write_text("id,x,y\n" + "".join(rows))
    return path


def _refused(files: list[Path], columns: Columns, kinds: tuple[str, str], out: Path) -> None:
    """Both ways to read several files name both, and both kinds."""
    before, after = (re.escape(str(file)) for file in files)
    words = rf"{after}.* must be .*, got labels that are {kinds[1]}.*, after {kinds[0]} in {before}"
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(DataError, match=words):
            convert(files, out, columns, on_bad_row=on_bad_row, overwrite=True)
    with pytest.raises(DataError, match=words):
        Dataset(files, columns)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
def test_labels_of_other_types_are_refused(tmp_path: Path, suffix: str) -> None:
    kinds_of = (
        ("whole numbers", [1, 2, 1]),
        ("texts", ["a", "b", "a"]),
        ("truth values", [True, False, True]),
    )
    files = {
        kind: _written(tmp_path / f"{kind}{suffix}", list(labels)) for kind, labels in kinds_of
    }
    for kinds in itertools.permutations(files, 2):
        _refused([files[kind] for kind in kinds], _COLUMNS, kinds, tmp_path / "out")
        assert Dataset(files[kinds[0]], _COLUMNS).records.label_kinds == kinds[:1]
    # Even where they are the same words.
    same = _written(tmp_path / f"same{suffix}", ["1", "2", "1"])
    _refused([files["whole numbers"], same], _COLUMNS, ("whole numbers", "texts"), tmp_path / "out")


def test_labels_of_csv_files_are_what_they_look_like(tmp_path: Path) -> None:
    columns = Columns(label="y")
    kinds: dict[str, list[Any]] = {
        "whole numbers": ["1", "-2", "+1"],
        "fractions": ["1.0", "2e5", "1."],
        "texts": ["a", "1b", "nan"],
        "truth values with a capital": [True, False, True],
    }
    files = {kind: _written(tmp_path / f"{kind}.csv", labels) for kind, labels in kinds.items()}
    for pair in itertools.permutations(files, 2):
        _refused([files[kind] for kind in pair], columns, pair, tmp_path / "out")
    # Labels of several kinds go with each of these.
    mixed = _written(tmp_path / "mixed.csv", ["1", "1.5", "a"])
    for name, labels in (("whole numbers", ["1"]), ("fractions", ["1.0"]), ("texts", ["a"])):
        for both in ([mixed, files[name]], [files[name], mixed]):
            found = Dataset(both, columns).statistics.labels
            assert (
                convert(both, tmp_path / "out", columns, overwrite=True).statistics.labels == found
            )
            assert found[labels[0]] >= 1
    assert (
        len(Dataset([mixed, files["texts"], files["fractions"]], columns)) == 9
    )  # the kinds of all files before
    both = [mixed, files["truth values with a capital"]]
    _refused(both, columns, ("fractions and texts and whole numbers", "truth"), tmp_path / "out")


def test_a_type_and_what_is_written_without_one_go_together(tmp_path: Path) -> None:
    typed = write_table(tmp_path / "a.parquet", pa.table({"text": ["a b", "b"], "y": [1, 2]}))
    whole, fractions = tmp_path / "b.csv", tmp_path / "c.csv"
    whole.write_text("text,y\na,2\nb,3\n")
    fractions.write_text("text,y\na,2.0\nb,3.0\n")
    columns = Columns(sequence="text", label="y")
    for both in ([typed, whole], [whole, typed]):
        assert Dataset(both, columns).statistics.labels == {"1": 1, "2": 2, "3": 1}
        assert convert(both, tmp_path / "out", columns, overwrite=True).statistics.labels == {
            "1": 1,
            "2": 2,
            "3": 1,
        }
    _refused([typed, fractions], columns, ("whole numbers", "fractions"), tmp_path / "out")


def test_converted_data_keeps_the_kind_of_its_labels(tmp_path: Path) -> None:
    numbers, texts = (
        _written(tmp_path / "a.parquet", [1, 2, 1]),
        _written(tmp_path / "b.parquet", ["1"] * 3),
    )
    folders = [convert(file, tmp_path / file.stem, _COLUMNS).folder for file in (numbers, texts)]
    _refused(folders, Columns(), ("whole numbers", "texts"), tmp_path / "out")
    _refused([folders[0], texts], Columns(), ("whole numbers", "texts"), tmp_path / "out")
    assert convert([folders[0], numbers], tmp_path / "both", _COLUMNS).statistics.labels == {
        "1": 4,
        "2": 2,
    }
    assert read(folders[0]).records.label_kinds == ("whole numbers",)


def test_tags_and_sets_are_labels_too(tmp_path: Path) -> None:
    for task, texts, numbers in (
        ("tag", [["a", "b"], ["a"], ["b"]], [[1, 2], [1], [2]]),
        ("multilabel", [["a"], [], ["a", "b"]], [[1], [], [2]]),
        ("multilabel", ["a;b", "", "b"], [[1], [], [2]]),
    ):
        files = [
            _written(tmp_path / f"{name}.jsonl", labels)
            for name, labels in (("a", texts), ("b", numbers))
        ]
        _refused(
            files,
            Columns(task=task, sequence="x", label="y"),
            ("texts", "whole numbers"),
            tmp_path / "out",
        )
        # A prediction reads no labels.
        assert (
            len(Dataset(files, Columns(task=task, sequence="x", label="y", need_labels=False))) == 6
        )
    # Numbers to learn are numbers, whole or not.
    files = [
        _written(tmp_path / "a.jsonl", [1, 2, 3]),
        _written(tmp_path / "b.jsonl", [0.5, 1.5, 2.5]),
    ]
    assert len(Dataset(files, Columns(task="regress", sequence="x", label="y"))) == 6


def test_a_row_whose_label_is_of_another_type_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "ROWS", 2)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"x": [1.0], "y": label}) + "\n" for label in [1, 2, 3, 1, "1"])
    )
    refused(
        ["labels that are texts, after whole numbers"], convert, path, tmp_path / "out", _COLUMNS
    )
    done = convert(path, tmp_path / "other", _COLUMNS, on_bad_row="skip")
    assert (done.skipped, dict(done.statistics.labels)) == (1, {"1": 2, "2": 1, "3": 1})
    kept = read(path, _COLUMNS, on_bad_row="skip")
    assert kept.labels == ("1", "2", "3", "1")
    assert [row.place for row in kept.skipped] == ["line 5"]


def test_lists_of_labels_that_are_all_empty(tmp_path: Path) -> None:
    columns = Columns(task="multilabel", sequence="x", label="y")
    for depth in (1, 2):
        labels: list[Any] = [[[]] * len(x) if depth == 2 else [] for x in _X]
        assert not any(
            cast(Any, read(_written(tmp_path / "a.jsonl", labels), columns).records.targets).values
        )
    path = tmp_path / "a.jsonl"
    skip: dict[str, Any] = {"columns": columns, "on_bad_row": "skip"}
    _written(path, [["a"], [], [None]])  # bad rows on both sides
    assert convert(path, tmp_path / "out", **skip).skipped == len(read(path, **skip).skipped) == 1
    _written(path, [[1.5], [], [2.5]])  # the column is wrong, not its rows
    refused(["list<item: double> in column 'y'"], read, path, **skip)
    refused(["list<item: double> in column 'y'"], convert, path, tmp_path / "other", **skip)


def test_a_label_is_in_a_set_once(tmp_path: Path) -> None:
    for labels in ([["b", "a", "b"], [], ["a", "a"]], ["b; a;b", "", "a;a"]):
        path = _written(tmp_path / "a.jsonl", labels)
        targets: Any = read(path, Columns(task="multilabel", sequence="x", label="y")).targets
        assert targets.values.tolist() == [("b", "a"), (), ("a",)]
