"""Small tables as their owners write them, whose wrong reading would be plausible too."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from raglane.data import Columns
from raglane.errors import DataError

_TEXTS = [f"message {row} of {'many' if row % 2 else 'a few'} words" for row in range(8)]
_PEPTIDES = ["MKTAYIAK"[: 3 + row % 5] + "GA"[row % 2] for row in range(8)]
_HOURS = [datetime(2024, 3, 1) + timedelta(hours=hour) for hour in range(12)]


@dataclass
class _Table:
    text: str
    # The lengths of the sequences, their ids, and the channels; () of tokens.
    lengths: list[int]
    ids: list[Any] | None
    channels: tuple[str, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)


def _lines(header: str, rows: list[str]) -> str:
    return "\n".join([header, *rows]) + "\n"


_TABLES = {
    "messages with ids": _Table(
        _lines("id,text,label", [f"m{row},{text},{row % 2}" for row, text in enumerate(_TEXTS)]),
        [len(text.split()) for text in _TEXTS],
        [f"m{row}" for row in range(8)],
    ),
    "peptides": _Table(
        _lines("sequence,activity", [f"{word},{row % 2}" for row, word in enumerate(_PEPTIDES)]),
        [len(word) for word in _PEPTIDES],
        None,
        columns={"split": "characters"},
    ),
    "proteins with ids": _Table(
        _lines(
            "id,sequence,label", [f"P{row},{word},{row % 2}" for row, word in enumerate(_PEPTIDES)]
        ),
        [len(word) for word in _PEPTIDES],
        [f"P{row}" for row in range(8)],
        columns={"split": "characters"},
    ),
    "devices in turn": _Table(
        _lines(
            "device_id,ts,temp,label",
            [f"d{row % 3},{1594512094000 + row},{row / 2},{'ab'[row % 3 == 0]}" for row in range(12)],
        ),
        [4, 4, 4],
        ["d0", "d1", "d2"],
        ("temp",),
    ),
    "items of sessions": _Table(
        _lines(
            "session_id,timestamp,item_id,category",
            [f"{row // 4},{hour:%FT%TZ},{row % 5},{row % 3}" for row, hour in enumerate(_HOURS)],
        ),
        [4, 4, 4],
        [0, 1, 2],
        ("item_id", "category"),
        {"task": "forecast"},
    ),
    "a temperature T": _Table(
        _lines("Date Time T RH", [f"{hour:%F %T} {-row % 5}.5 {row}" for row, hour in enumerate(_HOURS)]),
        [12],
        [0],
        ("T", "RH"),
        {"task": "forecast"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _TABLES)
def test_tables_are_read_as_their_owners_mean_them(name: str, tmp_path: Path) -> None:
    table = _TABLES[name]
    path = tmp_path / "table.csv"
    path.write_text(table.text.replace(" ", "\t") if name == "a temperature T" else table.text)
    records = rl.data.read(path, Columns(**table.columns)).records
    assert records.lengths.tolist() == table.lengths
    assert records.ids is None or list(records.ids) == table.ids
    assert records.channels == table.channels


def _sales() -> str:
    rows: list[str] = []
    for day in _HOURS:
        for store in (1, 2, 3):
            for family in ("BOOKS", "DAIRY"):
                rows.append(f"{len(rows)},{day:%FT%T},{store},{family},{len(rows) * 7 % 11}.5")
    return _lines("id,date,store_nbr,family,sales", rows)


def test_an_id_that_numbers_the_rows_of_a_panel_is_no_series(tmp_path: Path) -> None:
    path = tmp_path / "sales.csv"
    path.write_text(_sales())
    for task in ("classify", "forecast"):
        with pytest.raises(DataError, match="'id' for each row, but 60 of 72 rows") as caught:
            rl.data.read(path, Columns(task=task))
    assert caught.value.fixes == {"id": "store_nbr,family"}
    data = rl.data.read(path, Columns(task="forecast", id=caught.value.fixes["id"]))
    assert data.records.lengths.tolist() == [12] * 6
    assert data.channels == ("sales",)
    assert "left out, because they number the rows: id" in data.notes


def test_cycles_of_engines_are_no_steps_of_the_archive(tmp_path: Path) -> None:
    """The first column would be a label, and a row a series of 25 steps."""
    path = tmp_path / "train_FD001.txt"
    rows = [
        f"{engine} {cycle} {' '.join(str(500.5 + cycle * at % 7) for at in range(12))}  "
        for engine in range(1, 5)
        for cycle in range(1, 6 + engine)
    ]
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match="no_header=True"):
        rl.data.read(path)
    columns = Columns("forecast", no_header=True, id="c1", time="c2")
    assert rl.data.read(path, columns).records.lengths.tolist() == [6, 7, 8, 9]


def test_a_header_that_names_texts_is_used(tmp_path: Path) -> None:
    path = tmp_path / "messages.csv"
    path.write_text("\n".join(f"{'ab'[row % 2]},{text}" for row, text in enumerate(_TEXTS)) + "\n")
    data = rl.data.read(path, Columns(header="label,text"))
    assert len(data) == 8
    assert not any("not used" in note for note in data.notes)
    parquet = tmp_path / "messages.parquet"
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"text": _TEXTS, "label": list("abababab")}).to_parquet(parquet)
    notes = rl.data.read(parquet, Columns(header="label,text")).notes
    assert any("not used" in note and "header" in note for note in notes)


def test_bars_between_texts_with_commas(tmp_path: Path) -> None:
    """Commas are in all lines too, but not equally many, as in lists of recordings and texts."""
    path = tmp_path / "metadata.csv"
    texts = [f"Printing, in the{', only' * (row % 5)} sense {row}" for row in range(12)]
    path.write_text("".join(f"LJ{row}|{text}|{text}\n" for row, text in enumerate(texts)))
    records = rl.data.read(path, Columns("language", header="id,text,normalized")).records
    assert records.lengths.tolist() == [len(text.split()) for text in texts]
    assert list(records.ids or ()) == [f"LJ{row}" for row in range(12)]
