"""Formats of Weka and of spreadsheets, and files that are not read, with the way that works."""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raglane as rl
from raglane.cli import main
from raglane.data import Columns, Dataset
from raglane.data.assemble.pieces import sift
from raglane.data.formats import pick
from raglane.data.sources.folder import _SOUNDS
from raglane.data.sources.others import _WAYS
from raglane.errors import DataError, MissingExtraError

_UCR = """% a comment
@RELATION GunPoint
@ATTRIBUTE att0 NUMERIC
@attribute 'att1' numeric
@attribute att2 real
@attribute target {1,2}

@data
0.5,1.5,2.5,1

% another
0.25, ?, 1.25, 2
1,2,?,1
"""

_UEA = r"""@relation Basic
@attribute relationalAtt relational
@attribute att0 numeric
@attribute att1 numeric
@end relationalAtt
@attribute classAttribute {'a b',b}
@data
'0.5,1.5,2.5\n2.5,3.5,4.5','a b'
"4.5,?,6.5\n5.5,7.5,?",b
"""


def _read(tmp_path: Path, text: str, name: str = "a.arff", **columns: Any) -> Dataset:
    (tmp_path / name).write_text(text)
    return rl.data.read(tmp_path / name, Columns(**columns))


def test_series_of_the_ucr_archive(tmp_path: Path) -> None:
    data = _read(tmp_path, _UCR)
    assert data.labels == ("1", "2", "1")
    assert data.lengths.tolist() == [3, 3, 2]
    values = data.records.values[:, 0]
    assert np.array_equal(values, [0.5, 1.5, 2.5, 0.25, np.nan, 1.25, 1, 2], equal_nan=True)


def test_series_of_the_uea_archive(tmp_path: Path) -> None:
    data = _read(tmp_path, _UEA)
    assert data.labels == ("a b", "b")
    expected = [[0.5, 2.5], [1.5, 3.5], [2.5, 4.5], [4.5, 5.5], [np.nan, 7.5], [6.5, np.nan]]
    assert np.array_equal(data.records.values, expected, equal_nan=True)
    pieces = list(pick(tmp_path / "a.arff").pieces(tmp_path / "a.arff", Columns(), ()))
    parts = [part for piece in pieces for part in sift(piece, None)]
    assert [label for part in parts for label in part.labels or ()] == ["a b", "b"]


def test_rows_of_attributes(tmp_path: Path) -> None:
    text = "@relation r\n@attribute id string\n@attribute x numeric\n@attribute kind {p,'q r'}\n"
    data = _read(tmp_path, text + "@data\na,1,p\na,2,p\nb,3,'q r'\n")
    assert (data.ids, data.labels, data.lengths.tolist()) == (("a", "b"), ("p", "q r"), [2, 1])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (_UCR.replace("@data", "data"), "no line @data"),
        (_UCR.split("0.5")[0], "no row after @data"),
        (_UCR + "1,2,3\n", "line 14.*3 values for 4 attributes"),
        (_UCR + "{0 1, 3 2}\n", "line 14.*a sparse row"),
        (_UEA.replace("6.5", "x"), "'x' in a series"),
        (_UEA.replace("7.5,?", "7.5"), "channels of 3 and 2 steps"),
    ],
)
def test_bad_arff(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        _read(tmp_path, text)


def _sheets(path: Path) -> None:
    xlsxwriter = pytest.importorskip("xlsxwriter")
    book = xlsxwriter.Workbook(str(path))
    rows: list[list[Any]] = [
        ["id", "day", "x", "kind"],
        ["a", 45292, 1.5, "p"],
        ["a", 45293, 2, "p"],
        ["b", 45292, "", "q"],
    ]
    day = book.add_format({"num_format": "yyyy-mm-dd"})
    for name in ("empty", "one", "two"):
        sheet = book.add_worksheet(name)
        for place, row in enumerate(rows if name != "empty" else []):
            for at, cell in enumerate(row):
                sheet.write(place + 1, at, cell, *([day] if at == 1 and place else []))
    book.close()


def test_spreadsheets(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    path = tmp_path / "a.xlsx"
    _sheets(path)
    data = rl.data.read(path)
    assert (data.ids, data.labels, data.lengths.tolist()) == (("a", "b"), ("p", "q"), [2, 1])
    assert np.array_equal(data.records.values[:, 0], [1.5, 2, np.nan], equal_nan=True)
    assert "left out: the sheets 'two'" in data.notes
    assert "time column: 'day' (by its name)" in data.notes
    pieces = pick(path).pieces(path, Columns(), ())
    assert sum(len(part) for piece in pieces for part in sift(piece, None)) == 2
    path.write_bytes(b"no sheet")
    with pytest.raises(DataError, match="no readable spreadsheet"):
        rl.data.read(path)


def test_spreadsheets_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "python_calamine", None)
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    with pytest.raises(MissingExtraError, match=r"raglane\[excel\]"):
        rl.data.read(tmp_path / "a.xlsx")


@pytest.mark.parametrize("suffix", list(_WAYS))
def test_files_that_are_not_read_name_the_way(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"\x80\x04 anything")
    with pytest.raises(DataError) as error:
        rl.data.read(path)
    assert _WAYS[suffix][0] in str(error.value)


@pytest.mark.parametrize("suffix", _SOUNDS)
def test_a_recording_alone_names_the_folder(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"got one recording\. Pass the folder"):
        rl.data.read(path)


def test_content_decides_without_a_suffix(tmp_path: Path) -> None:
    table = pa.table({"x": [[1.0], [2.0]], "kind": ["a", "b"]})
    pq.write_table(table, tmp_path / "part-0")
    assert rl.data.read(tmp_path / "part-0").labels == ("a", "b")
    with sqlite3.connect(tmp_path / "base") as base:
        base.execute("create table t (a)")
    base.close()
    (tmp_path / "object").write_bytes(pickle.dumps(1, protocol=4))
    for name, match in (("base", "a database.*read_sql"), ("object", "a pickle.*code")):
        with pytest.raises(DataError, match=match):
            rl.data.read(tmp_path / name)
    (tmp_path / "prose").write_text("some words\n")
    with pytest.raises(DataError, match=r"no suffix.*format"):
        rl.data.read(tmp_path / "prose")
    assert len(rl.data.read(tmp_path / "prose", Columns(task="language"), "text")) == 1


def test_standard_input_is_refused_with_the_way(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-"]) == 2
    assert "standard input" in capfd.readouterr().err
