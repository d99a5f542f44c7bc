"""Files read piece by piece, against the same files read whole."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raglane.data import FORMATS, Columns, read
from raglane.data.formats import csv, ipc, pick, pieces
from raglane.data.formats.pieces import sift
from raglane.data.records import Skipped
from raglane.errors import DataError
from small_files import ROWS, WRITERS, asked, joined, same


@pytest.fixture(params=list(FORMATS))
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small file of each format."""
    name: str = request.param
    path = tmp_path / f"data{(*FORMATS[name].suffixes, '')[0]}"
    WRITERS[name](path)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows."""
    for module in (pieces, ipc, csv):
        monkeypatch.setattr(module, "ROWS", 4)


@pytest.mark.usefixtures("small")
def test_pieces_are_the_whole_from_wherever_they_begin(file: Path) -> None:
    wanted = asked(pick(file).name)
    whole = read(file, wanted)
    found = list(pick(file).pieces(file, wanted, ()))
    assert len(found) > 3
    parts = [records for piece in found for records in sift(piece, None)]
    same(joined(parts), whole)
    columns = parts[0].columns
    for number, piece in enumerate(found[:-1], start=1):
        rest = [records for later in pick(file).pieces(file, columns, piece.end) for records in sift(later, None)]
        same(joined(rest), joined([records for later in found[number:] for records in sift(later, None)]))
    assert list(pick(file).pieces(file, columns, found[-1].end)) == []


def test_ids_that_are_words_from_some_row_on_are_words_in_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "ROWS", 3)
    path = tmp_path / "a.csv"
    path.write_text("id,x,kind\n" + "".join(f"{name},1,a\n" for name in [1, 1, 2, 3, 4, "five"]))
    parts = [records for piece in pick(path).pieces(path, Columns(), ()) for records in sift(piece, None)]
    assert len(parts) > 1
    assert joined(parts).ids == read(path).ids == ("1", "2", "3", "4", "five")


def test_rows_that_are_not_consecutive_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv, "ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_text("id,x,kind\n" + "".join(f"{name},{row},a\n" for row, name in enumerate([1, 2, 1, 3, 3, 2])))
    (piece,) = pick(path).pieces(path, Columns(), ())
    same(joined(list(sift(piece, None))), read(path))
    assert joined([piece.read(1, 2)]).ids == (2,)


def test_what_is_wrong_in_a_later_piece_has_its_place(tmp_path: Path) -> None:
    rows = [{"x": [None if row == 7 else 1.0], "kind": "a"} for row in range(9)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    with pytest.raises(DataError, match="a null in row 7, step 0"):
        [list(sift(piece, None)) for piece in pick(path).pieces(path, Columns(), ())]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(DataError, match=r"a null in line 8, step 0"):
        [list(sift(piece, None)) for piece in pick(lines).pieces(lines, Columns(), ())]


def test_every_bad_row_is_left_out_and_no_other(tmp_path: Path) -> None:
    bad = {0, 5, 6, 20, 22}
    lines = ["{" if row in bad else json.dumps(ROWS[row]) for row in range(23)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    (piece,) = pick(path).pieces(path, Columns(), ())
    found: list[Skipped] = []
    parts = list(sift(piece, found))
    assert [row.place for row in found] == [f"line {row + 1}" for row in sorted(bad)]
    assert all("bad JSON" in row.error for row in found)
    assert joined(parts).ids == tuple(f"s{row}" for row in range(23) if row not in bad)


def test_a_line_that_is_not_utf8_has_its_number(tmp_path: Path) -> None:
    rows = b"id,x,kind\n" + b"1,2,a\n" * 30 + b"2,2,\xff\n"
    path = tmp_path / "a.csv"
    path.write_bytes(rows)
    with pytest.raises(DataError, match=r"line 32 must be .*got the byte 0xff"):
        list(pick(path).pieces(path, Columns(), ()))


def test_the_first_rows_say_whether_a_column_holds_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv, "ROWS", 3)
    path = tmp_path / "a.csv"
    path.write_text("id,x,kind\n" + "".join(f"{row},{word},a\n" for row, word in enumerate(["a", "b", "c", "1", "2"])))
    columns = read(path, Columns(label="kind")).columns
    found = list(pick(path).pieces(path, Columns(label="kind"), ()))
    assert len(found) > 1
    assert joined([records for piece in found for records in sift(piece, None)]).is_tokens
    for piece in pick(path).pieces(path, columns, found[0].end):
        assert all(records.is_tokens for records in sift(piece, None))
