"""The layout of tables of texts: separators, lines above and below the header, no header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from raglane.data import Columns, Dataset
from raglane.data.assemble.pieces import sift
from raglane.data.formats import pick
from raglane.data.sources.layout import is_table
from raglane.errors import DataError

_LONG = "id,t,x,y,kind\na,0,0.5,1,p\na,1,0.25,2,p\nb,0,0.75,3,q\nb,1,1.5,4,q\n"
_VALUES = [[0.5, 1.0], [0.25, 2.0], [0.75, 3.0], [1.5, 4.0]]


def _read(tmp_path: Path, text: str | bytes, name: str = "a.csv", **columns: Any) -> Dataset:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return rl.data.read(path, Columns(**columns))


def _check(data: Dataset) -> None:
    records = data.records
    assert records.values.tolist() == _VALUES
    assert (records.ids, records.labels) == (("a", "b"), ("p", "q"))


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.dat", "a.data", "a.psv", "a.tsv", "a"])
@pytest.mark.parametrize("mark", [",", "\t", ";", "|", "  "])
def test_the_first_lines_decide_the_separator(tmp_path: Path, name: str, mark: str) -> None:
    _check(_read(tmp_path, _LONG.replace(",", mark), name))


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "above",
    [
        "Report of 2024\n",
        "Report of 2024\n\n",
        "\n\n",
        "Report;;\n",
        '"Sales, all"\n"Source: us"\n',
        "# made by hand\n# id, t, x, y, kind, more\n",
    ],
)
def test_lines_above_the_table_are_left_out(tmp_path: Path, above: str, ends: str) -> None:
    mark = ";" if ";" in above else ","
    text = above + _LONG.replace(",", mark)
    data = _read(tmp_path, text.replace("\n", ends))
    _check(data)
    assert ("left out above the table" in " ".join(data.notes)) == bool(above.strip())


@pytest.mark.parametrize("below", [",,m,°C,\n", "-,-,[m/s2],[-],-\n", "name,s,m,K,kind of walk\n"])
def test_units_are_left_out(tmp_path: Path, below: str) -> None:
    header, rest = _LONG.split("\n", 1)
    data = _read(tmp_path, f"{header}\n{below}{rest}")
    _check(data)
    assert "left out below the header: 1 line" in " ".join(data.notes)


@pytest.mark.parametrize("row", ["c,,bad,bad,p", "a,-1,O.1,x,p", "id,t,x,y,kind"])
def test_a_row_with_errors_is_no_header(tmp_path: Path, row: str) -> None:
    header, rest = _LONG.split("\n", 1)
    with pytest.raises(DataError, match="in data row 0"):
        _read(tmp_path, f"{header}\n{row}\n{rest}")


@pytest.mark.parametrize("row", ["a,-1,NA,NA,p", "a,-1,?,nan,p", "a,-1,,,p"])
def test_a_row_of_missing_numbers_is_no_header(tmp_path: Path, row: str) -> None:
    header, rest = _LONG.split("\n", 1)
    assert _read(tmp_path, f"{header}\n{row}\n{rest}").lengths.tolist() == [3, 2]


_LEVELS = (
    "Price,Close,Close,Volume\nTicker,AA,BB,AA\nDate,,,\n2024-01-01,1.5,2,3\n2024-01-02,2.5,3,4\n"
)


def test_levels_of_names_are_joined(tmp_path: Path) -> None:
    data = _read(tmp_path, _LEVELS, task="forecast")
    assert data.channels == ("Close_AA", "Close_BB", "Volume_AA")
    assert data.records.values.tolist() == [[1.5, 2, 3], [2.5, 3, 4]]
    assert data.columns.time is None
    assert any("Date" in note for note in data.notes)
    text = _LEVELS.replace("Close,Close", "Open,Close")
    assert _read(tmp_path, text, task="forecast").channels == ("Open", "Close", "Volume")


def test_a_header_may_begin_with_a_hash(tmp_path: Path) -> None:
    for mark in (" ", ","):
        text = f"# t{mark}x\n0{mark}1.5\n1{mark}2.5\n"
        data = _read(tmp_path, text, task="forecast")
        assert data.channels == ("x",), mark


_ROWS = "a,0,0.5,1,p\na,1,0.25,2,p\nb,0,0.75,3,q\nb,1,1.5,4,q\n"


def test_names_for_a_table_without_a_header(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no header, but 'a', '0'.*no_header=True"):
        _read(tmp_path, _ROWS)
    _check(_read(tmp_path, _ROWS, header="id, t, x, y, kind"))
    _check(_read(tmp_path, _ROWS.replace(",", " "), "a.txt", header="id,t,x,y,kind"))
    _check(_read(tmp_path, "# by hand\n" + _ROWS, header="id,t,x,y,kind"))
    data = _read(tmp_path, _ROWS, no_header=True, id="c1", time="c2", label="c5")
    assert data.channels == ("c3", "c4")
    with pytest.raises(DataError, match="2 names for 5 columns"):
        _read(tmp_path, _ROWS, header="id,x")


def test_a_column_of_numbers_is_a_table(tmp_path: Path) -> None:
    text = "".join(f"{number}.5\n" for number in range(9))
    assert is_table(text)
    data = _read(tmp_path, text, "a.txt", no_header=True, task="forecast")
    assert data.records.values[:, 0].tolist() == [number + 0.5 for number in range(9)]


@pytest.mark.parametrize("mark", ["\t", "   "])
def test_the_archive_of_ucr(tmp_path: Path, mark: str) -> None:
    rows = [[row % 2 + 1, *(row / 8 + step + 0.25 for step in range(12))] for row in range(6)]
    for form in ("{}", "{:.7e}"):
        text = "".join(mark.join(map(form.format, row)) + "\n" for row in rows)
        data = _read(tmp_path, text, "a_TRAIN.tsv" if mark == "\t" else "a_TRAIN.txt")
        assert data.lengths.tolist() == [12] * 6
        assert list(map(float, data.labels or ())) == [1, 2, 1, 2, 1, 2]
        assert data.records.values[:, 0].tolist() == [x for row in rows for x in row[1:]]
        with pytest.raises(DataError, match="no header"):
            _read(tmp_path, text, "a.txt", task="forecast")


def test_columns_of_whole_numbers_are_no_archive(tmp_path: Path) -> None:
    header = "\t".join(map(str, range(13)))
    rows = [f"{row % 2}\t" + "\t".join(f"{row + step}.5" for step in range(12)) for row in range(6)]
    data = _read(tmp_path, "\n".join([header, *rows]), label="0", wide=True)
    assert data.lengths.tolist() == [12] * 6


def test_utf_16_of_spreadsheets(tmp_path: Path) -> None:
    for code in ("utf-16", "utf-16-be"):
        text = ("" if code == "utf-16" else "\ufeff") + _LONG.replace(",", "\t").replace(".", ",")
        for name in ("a.csv", "a.txt"):
            data = _read(tmp_path, text.encode(code), name)
            _check(data)
            assert "the text is UTF-16" in data.notes
    with pytest.raises(DataError, match="damaged text in UTF-16"):
        _read(tmp_path, "\ufeff".encode("utf-16-le") + b"\x00\xd8")


def test_pieces_have_the_same_layout(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in (_LONG.replace(",", " "), "Report\n" + _LONG, ",,m,K,\n".join(_LONG.split("@"))):
        path.write_text(text)
        columns = Columns()
        pieces = list(pick(path).pieces(path, columns, ()))
        parts = [part for piece in pieces for part in sift(piece, None)]
        assert sum(map(len, parts)) == 2
        assert [row for part in parts for row in part.values.tolist()] == _VALUES


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    for above, columns in (("", {}), ("Report\n\n", {}), ("", {"header": "id,t,x,y,kind"})):
        text = _ROWS if columns else _LONG
        lines = (above + text).count("\n")
        with pytest.raises(DataError, match=f"line {lines + 1} must"):
            _read(tmp_path, above + text + "b,2\n", **columns)
        with pytest.raises(DataError, match=f"line {lines + 1} must.*0xff"):
            _read(tmp_path, (above + text).encode() + b"b,2,\xff\n", **columns)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_LONG, True),
        (_LONG.replace(",", "  "), True),
        ("sep=;\na;b\n", True),
        ("The cat sat, on the mat,\nand so on, it went,\nfor ever, and ever,\nx,y,z\n", False),
        ("one two three\nfour five six\n", False),
        ("ham\tgo\nspam\twin\n", False),
        ("1\n2\n", False),
        ("1812 was a year\n1813 was a year\n1814 was a year\n", False),
        ("", False),
    ],
)
def test_tables_are_mostly_numbers(text: str, expected: bool) -> None:
    assert is_table(text) == expected
