"""Files read piece by piece or without bad rows, against the same files read whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from made_datasets import changed
from raglane.data import FORMATS, Columns, convert, read
from raglane.data.assemble.pieces import Piece, sift
from raglane.data.formats import pick
from raglane.data.records import Records, Skipped
from raglane.data.sources import csv
from raglane.errors import ArgumentError, DataError
from small_files import ROWS, asked, joined, put, refused, same, small_steps, write_table, written


def _parsed(pieces: Iterable[Piece]) -> Records:
    """All records of some pieces."""
    return joined([records for piece in pieces for records in sift(piece, None)])


# A sheet is one piece.
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "xlsx"])
def test_pieces_are_the_whole_from_wherever_they_begin(name: str, tmp_path: Path) -> None:
    file, columns = written(name, tmp_path), asked(name)
    with small_steps():
        found = list(pick(file).pieces(file, columns, ()))
        assert len(found) > 3
        same(_parsed(found), read(file, columns))
        columns = next(sift(found[0], None)).columns
        for number, piece in enumerate(found[:-1], start=1):
            same(_parsed(pick(file).pieces(file, columns, piece.end)), _parsed(found[number:]))
        assert list(pick(file).pieces(file, columns, found[-1].end)) == []


def test_ids_that_become_words_are_words_in_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "ROWS", 3)
    path = put(
        tmp_path / "a.csv",
        "id,x,kind\n" + "".join(f"{name},1,a\n" for name in [1, 1, 2, 3, 4, "five"]),
    )
    parts = list(pick(path).pieces(path, Columns(), ()))
    assert len(parts) > 1
    assert _parsed(parts).ids == read(path).ids == ("1", "2", "3", "4", "five")


def test_rows_that_are_not_consecutive_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_text(
        "id,x,kind\n" + "".join(f"{name},{row},a\n" for row, name in enumerate([1, 2, 1, 3, 3, 2]))
    )
    (piece,) = pick(path).pieces(path, Columns(), ())
    same(_parsed([piece]), read(path))
    assert joined([piece.read(1, 2)]).ids == (2,)


def test_errors_of_later_pieces_name_the_row(tmp_path: Path) -> None:
    rows = [{"x": [None if row == 7 else 1.0], "kind": "a"} for row in range(9)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    refused(["a null in row 7, step 0"], _parsed, pick(path).pieces(path, Columns(), ()))
    lines = put(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in rows))
    refused(["a null in line 8, step 0"], _parsed, pick(lines).pieces(lines, Columns(), ()))


def test_every_bad_row_is_left_out_and_no_other(tmp_path: Path) -> None:
    bad = {0, 5, 6, 20, 22}
    path = put(
        tmp_path / "a.jsonl",
        "\n".join(["{" if row in bad else json.dumps(ROWS[row]) for row in range(23)]),
    )
    (piece,) = pick(path).pieces(path, Columns(), ())
    found: list[Skipped] = []
    parts = list(sift(piece, found))
    assert [row.place for row in found] == [f"line {row + 1}" for row in sorted(bad)]
    assert all("bad JSON" in row.error for row in found)
    assert joined(parts).ids == tuple(f"s{row}" for row in range(23) if row not in bad)


def test_a_line_that_is_not_utf8_has_its_number(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", b"id,x,kind\n" + b"1,2,a\n" * 30 + b"2,2,\xff\n")
    refused(["line 32 must be ", "got the byte 0xff"], list, pick(path).pieces(path, Columns(), ()))


def test_the_first_rows_say_whether_a_column_holds_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "ROWS", 3)
    path = tmp_path / "a.csv"
    path.write_text(
        "id,x,kind\n"
        + "".join(f"{row},{word},a\n" for row, word in enumerate(["a", "b", "c", "1", "2"]))
    )
    columns = read(path, Columns(label="kind")).columns
    found = list(pick(path).pieces(path, Columns(label="kind"), ()))
    assert len(found) > 1
    assert _parsed(found).is_tokens
    for piece in pick(path).pieces(path, columns, found[0].end):
        assert all(records.is_tokens for records in sift(piece, None))


_TEXTS = {"ts": b"15.0", "csv": b"15.0", "jsonl": b"15.0", "text": b"a text", "folder": b"catyyyyy"}


def _spoil(name: str, path: Path) -> None:
    """One bad row in a small file of some format, somewhere in its middle."""
    if name in ("parquet", "arrow"):
        rows = [
            {**row, "kind": None if place == 5 else row["kind"]} for place, row in enumerate(ROWS)
        ]
        write_table(path, pa.Table.from_pylist(rows), 10)
        return
    text = path / "cat.txt" if name == "folder" else path
    before, found, after = text.read_bytes().partition(_TEXTS[name])
    assert found
    text.write_bytes(
        before + b"\xff" + after if name in ("text", "folder") else before + b'"oops"' + after
    )


# Files of these formats are damaged or whole.
_WHOLE = ("npz", "conll", "arff", "xlsx")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in _WHOLE])
def test_a_bad_row_is_left_out_in_every_format(name: str, tmp_path: Path) -> None:
    path, wanted = written(name, tmp_path), asked(name)
    with small_steps():
        whole = read(path, wanted, on_bad_row="skip")
        assert whole.skipped == ()
        assert not any("left out, because" in note for note in whole.notes)
        same(whole, read(path, wanted))
        _spoil(name, path)
        with pytest.raises(DataError):
            read(path, wanted)
        found = read(path, wanted, on_bad_row="skip")
    (row,) = found.skipped
    (gone,) = set(whole.ids) - set(found.ids)
    # The others keep their numbers.
    same(
        found,
        changed(whole, ids=whole.ids).subset(
            np.delete(np.arange(len(whole)), whole.ids.index(gone))
        ),
    )
    assert row.location == str(path)
    assert row.place in row.error or name in ("csv", "ts", "folder")
    assert any(note.endswith(f"1 of {len(whole)}; the first: {row.place}") for note in found.notes)


def test_rows_of_csv_files_that_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    # The rows of a sequence are not consecutive, and the bad entry is in the second one.
    path.write_text(
        "id,x,kind\n"
        + "".join(f"s{n},{'oops' if n == 3 == 3 * k else n},a\n" for k in (0, 1) for n in range(6))
    )
    refused(["'oops' in data row 9 (id 's3')"], read, path)
    found = read(path, on_bad_row="skip")
    assert found.ids == ("s0", "s1", "s2", "s4", "s5")
    assert found.skipped[0].place == "data row 3 (id 's3')"
    assert "'oops' in data row 9 (id 's3')" in found.skipped[0].error
    path.write_text(
        "id,t,x,kind\n" + "".join(f"s{n},{'oops' if n == 3 else n},{n},a\n" for n in range(6))
    )
    assert "'oops' in data row 3, column 't'" in read(path, on_bad_row="skip").skipped[0].error
    path.write_text(
        "text,label\n" + "".join(f"a b,{'' if n == 4 else 'xy'[n % 2]}\n" for n in range(8))
    )
    refused(["an empty label in row 4, column 'label'"], read, path)
    found = read(path, on_bad_row="skip")
    assert (found.ids, found.skipped[0].place) == ((0, 1, 2, 3, 5, 6, 7), "data row 4")


def test_errors_of_all_rows_or_of_the_file_are_raised(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", '{"x": [1.0], "y": [0.5]}\n' * 2_500)
    # Not the rows are bad, but how they are read.
    refused(
        ["list<item: double> in column 'y'"],
        read,
        path,
        Columns(sequence="x", label="y"),
        on_bad_row="skip",
    )
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    cut = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(cut[: len(cut) // 2])
    refused(["a.parquet"], read, tmp_path / "a.parquet", on_bad_row="skip")
    refused(["one of raise, skip"], read, path, on_bad_row="drop", error=ArgumentError)


@pytest.mark.parametrize("bad", [0, 7, 23])
def test_a_bad_row_of_one_series_is_left_out(tmp_path: Path, bad: int) -> None:
    values = [str(row) for row in range(24)]
    values[bad] = "O.5"
    rows = [f"2024-01-01T{row:02}:00,{value}\n" for row, value in enumerate(values)]
    path = tmp_path / "series.csv"
    path.write_text("time,load\n" + "".join(rows))
    asked = Columns(task="forecast")
    data = read(path, asked, on_bad_row="skip")
    assert data.records.values.ravel().tolist() == [row for row in range(24) if row != bad]
    assert [row.place for row in data.skipped] == [f"data row {bad}"]
    converted = convert([path], tmp_path / "converted", asked, on_bad_row="skip")
    assert (converted.statistics.sequences, converted.statistics.elements) == (1, 23)
