"""Large CSV files in the plainest form have the entries of all other files."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from raglane.data import Columns, read
from raglane.data.sources import csv, plain_csv
from raglane.data.typed.column import Typed, Written, numbers_in
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
        entries, _ = csv.entries_of(path, Columns())
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
    written = Written(np.array(entries, dtype=object))
    for one, other in zip(typed.numbers(), written.numbers(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert typed.words().tolist() == entries
    rows = np.array([1, 1, 0])
    np.testing.assert_array_equal(typed.same_as(rows), written.same_as(rows))
    codes, texts = typed.codes()
    assert texts[codes].tolist() == entries


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
