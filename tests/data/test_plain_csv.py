"""Large CSV files in the plainest form have the entries of all other files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from raglane.data import Columns, convert, read
from raglane.data.assemble.errors import attempt
from raglane.data.sources import csv, plain_csv
from raglane.data.typed.column import TextColumn, Typed, numbers_in
from raglane.errors import DataError
from small_files import same

pytest.importorskip("pyarrow")

_NUMBERS = ["1", "-2.5", "1e-7", "0.1", "123456789.123456789", "1e22", ".5", "5.", "", "nan", "inf"]
_ODD = ["+1", "NA", "1_5", "x", " 7", "7 ", "nan(7)", "1e999", "?", "\u0661", "0x10", "-"]


def both(path: Path, columns: Columns) -> None:
    """Compare a file that Arrow reads with the same file that pandas reads."""
    with mock.patch.object(plain_csv, "LEAST", 1 << 60):
        expected = read(path, columns)
    with mock.patch.object(plain_csv, "LEAST", 0):
        same(read(path, columns), expected)


@pytest.mark.parametrize(
    "word",
    ["abc", "inf", "Infinity", "-inf", "NaN", "nan ", "e5", "na", "Null", "True", "x y-z", "a_1"],
)
def test_words_alone_are_what_they_are_among_numbers(word: str) -> None:
    alone, among = (
        numbers_in(np.array(words, dtype=object)) for words in ([word], [word, "1e999", "%"])
    )
    assert np.array_equal(alone[0], among[0][:1], equal_nan=True)
    assert alone[1].tolist() == among[1][:1].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_a_plain_file_is_read_as_any_other(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path / "x.csv"
    rows = [
        f"{random.integers(5)},{step},{random.choice(_NUMBERS)},{random.normal()!r},{random.choice(list('ab'))}"
        for step in range(60)
    ]
    path.write_text("id,t,x,y,word\n" + "\n".join(rows) + "\n" * (seed % 2))
    with mock.patch.object(plain_csv, "LEAST", 0):
        entries = csv.table_of(path, Columns()).columns
    assert all(isinstance(column, Typed) for column in entries.values())
    for columns in (
        Columns(task="forecast"),
        Columns(task="tag", label="word"),
        Columns(task="regress", label="y"),
        Columns(task="forecast", static=(), id="word", time="t"),
    ):
        both(path, columns)


@pytest.mark.parametrize("entry", [*_NUMBERS, *_ODD])
def test_entries_are_numbers_as_pythons(entry: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    entries = ["1.5", entry, "0.30000000000000004"]
    typed = Typed(arrow.chunked_array([entries], arrow.large_string()))
    written = TextColumn(np.array(entries, dtype=object))
    for one, other in zip(typed.numbers(), written.numbers(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert typed.words().tolist() == entries
    rows = np.array([1, 1, 0])
    np.testing.assert_array_equal(typed.same_as(rows), written.same_as(rows))
    codes, texts = typed.codes()
    assert texts[codes].tolist() == entries


_ROWS = [f"s{row // 7},{row % 7},{row / 7!r},{'ab'[row // 7 % 2]}" for row in range(60)]


@pytest.mark.parametrize("last", ["1.25", "1.50", "7", "", "NA", "nan", "x", "1e400", "-0.0"])
@pytest.mark.parametrize(
    "columns",
    [
        Columns(task="forecast"),
        Columns(task="forecast", categorical=("x",)),
        Columns(task="tag", label="x"),
        Columns(task="regress", label="x"),
    ],
)
def test_entries_after_numbers_are_read_as_before(
    tmp_path: Path, last: str, columns: Columns
) -> None:
    """The first entries decide that a column is read as numbers."""
    path = tmp_path / "x.csv"
    path.write_text("id,t,x,y\n" + "\n".join([*_ROWS, f"z,0,{last},a"]) + "\n")
    with mock.patch.object(plain_csv, "_LOOK", 256):
        expected = attempt(read, path, columns)
        with mock.patch.object(plain_csv, "LEAST", 0):
            result = attempt(read, path, columns)
    if isinstance(expected, DataError) or isinstance(result, DataError):
        assert str(result) == str(expected)
    else:
        same(result, expected)


@pytest.mark.parametrize("size", [40, 100, 1 << 20])
@pytest.mark.parametrize(
    "last", ["z,0,0.5,a", "z,0,7,a", "z,0,,a", "s0,9,0.5,a", 'z,0,"0.5",a', "z"]
)
def test_files_are_converted_in_blocks_as_in_chunks(tmp_path: Path, size: int, last: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,t,x,y\n" + "\n".join([*_ROWS, last]))
    columns = Columns(task="forecast")
    for name, least in (("chunks", 1 << 60), ("blocks", 0)):
        patches = (
            mock.patch.object(plain_csv, "LEAST", least),
            mock.patch.object(plain_csv, "BYTES", size),
        )
        with patches[0], patches[1]:
            convert(path, tmp_path / name, columns, on_bad_row="skip")
    same(read(tmp_path / "blocks", columns), read(tmp_path / "chunks", columns))


@pytest.mark.parametrize("task", ["forecast", "classify"])
def test_the_texts_of_numbers_are_not_read_again(tmp_path: Path, task: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,t,x,y\n" + "\n".join(_ROWS) + "\n")
    texts = mock.patch.object(plain_csv, "_texts", side_effect=AssertionError)
    with mock.patch.object(plain_csv, "LEAST", 0), texts:
        assert len(read(path, Columns(task=task))) == 9


def test_ids_of_a_parquet_file_are_no_objects(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = np.arange(20_000)
    table = {"id": rows // 40, "name": [f"s{row // 40}" for row in rows], "x": rows / 7}
    path = tmp_path / "x.parquet"
    arrow.parquet.write_table(arrow.table(table), path)
    columns = Columns(task="forecast", features=("x",))
    for name in ("id", "name"):
        counted = mock.patch.object(Typed, "words", autospec=True, side_effect=Typed.words)
        with counted as words:
            assert len(read(path, replace(columns, id=name))) == 500
        # Some rows are looked at, but no column as a whole.
        assert all(len(call.args[0]) <= 4096 for call in words.call_args_list)


def test_random_numbers_have_the_bits_of_python() -> None:
    arrow = pytest.importorskip("pyarrow")
    bits = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.int64)
    floats = bits.view(np.float64)
    texts = [repr(number) for number in floats[np.isfinite(floats)].tolist()]
    texts += [f"{number:.{digits}g}" for number in floats[:2000].tolist() for digits in (3, 17, 25)]
    texts = [text for text in texts if "nan" not in text]
    numbers, odd = Typed(arrow.chunked_array([texts], arrow.large_string())).numbers()
    assert not odd.any()
    expected, _ = numbers_in(np.array(texts, dtype=object))
    assert numbers.tobytes() == expected.tobytes()
    assert expected.tolist() == list(map(float, texts))


@pytest.mark.parametrize(
    "text",
    [
        'id,x\n"a",1\n',
        "id,x\na, 1\n",
        "id,x\na,1\n\nb,2\n",
        "id;x\na;1,5\n",
        "id\tx\na\t1\n",
        "id,x\r\na,1\r\n",
        "\ufeffid,x\na,1\n",
        "id,1\na,1\n",
        "id,x,\na,1,\n",
        ",id,x\n0,a,1\n",
    ],
)
def test_other_files_are_read_as_before(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode())
    both(path, Columns(task="forecast"))


@pytest.mark.parametrize("text", ["id,x\na,1\nb\n", "id,x\na,1,2\n", "id,x\nid,x\na,1\n", "id,x\n"])
def test_mistakes_of_plain_files_are_named_as_before(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(DataError) as expected:
        read(path, Columns(task="forecast"))
    with mock.patch.object(plain_csv, "LEAST", 0), pytest.raises(DataError) as error:
        read(path, Columns(task="forecast"))
    assert str(error.value) == str(expected.value)
