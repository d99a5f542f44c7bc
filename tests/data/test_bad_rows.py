"""Skipping of bad rows in every format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from made_datasets import changed
from raglane.data import FORMATS, Columns, read
from raglane.errors import ArgumentError, DataError
from small_files import ROWS, asked, same, small_steps, write_table, written

_TEXTS = {"ts": b"15.0", "csv": b"15.0", "jsonl": b"15.0", "text": b"a text", "folder": b"catyyyyy"}


def _spoil(name: str, path: Path) -> None:
    """One bad row in a small file of some format, somewhere in its middle."""
    if name in ("parquet", "arrow"):
        rows = [{**row, "kind": None if place == 5 else row["kind"]} for place, row in enumerate(ROWS)]
        write_table(path, pa.Table.from_pylist(rows), 10)
        return
    text = path / "cat.txt" if name == "folder" else path
    before, found, after = text.read_bytes().partition(_TEXTS[name])
    assert found
    text.write_bytes(before + b"\xff" + after if name in ("text", "folder") else before + b'"oops"' + after)


@pytest.mark.parametrize("name", list(FORMATS))
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
    others = np.delete(np.arange(len(whole)), whole.ids.index(gone))
    same(found, changed(whole, ids=whole.ids).subset(others))
    assert row.location == str(path)
    assert row.place in row.error or name in ("csv", "ts", "folder")
    assert any(note.endswith(f"1 of {len(whole)}; the first: {row.place}") for note in found.notes)


def test_rows_of_csv_files_that_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    # The rows of a sequence are not consecutive, and the bad entry is in the second one.
    path.write_text(
        "id,x,kind\n" + "".join(f"s{n},{'oops' if n == 3 == 3 * k else n},a\n" for k in (0, 1) for n in range(6))
    )
    with pytest.raises(DataError, match=r"'oops' in data row 9 \(id 's3'\)"):
        read(path)
    found = read(path, on_bad_row="skip")
    assert found.ids == ("s0", "s1", "s2", "s4", "s5")
    assert found.skipped[0].place == "data row 3 (id 's3')"
    assert "'oops' in data row 9 (id 's3')" in found.skipped[0].error
    path.write_text("text,label\n" + "".join(f"a b,{'' if n == 4 else 'xy'[n % 2]}\n" for n in range(8)))
    with pytest.raises(DataError, match="an empty entry in data row 4, column 'label'"):
        read(path)
    found = read(path, on_bad_row="skip")
    assert (found.ids, found.skipped[0].place) == ((0, 1, 2, 3, 5, 6, 7), "data row 4")


def test_what_is_wrong_with_all_rows_or_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": [1.0], "y": [0.5]}\n' * 2_500)
    # Not the rows are bad, but how they are read.
    with pytest.raises(DataError, match="list<item: double> in column 'y'"):
        read(path, Columns(sequence="x", label="y"), on_bad_row="skip")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    cut = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(DataError, match=r"a\.parquet"):
        read(tmp_path / "a.parquet", on_bad_row="skip")
    with pytest.raises(ArgumentError, match="one of fail, skip"):
        read(path, on_bad_row="drop")
