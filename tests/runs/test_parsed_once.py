"""A file is parsed once, whatever has to be guessed about it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import raglane as rl
from raglane.data.sources import arff, conll, csv, folder, ipc, jsonl, npz, text, ts

_ROWS = [(f"n{row}", 2 * row % 5 + 0.5, row % 4) for row in range(24)]
_OPTIONS: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "threads": 1}

_opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_listen)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Yield the names of the files that are opened."""
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


_NAMES = "".join(f"{name}word,{label}\n" for name, _, label in _ROWS)
_NUMBERS = "".join(f"{name},{t},{x},{x / 7}\n" for name, x, _ in _ROWS for t in range(3))
_TAGGED = "".join(
    json.dumps({"x": [x, x + 1], "y": [label, 1 - label % 2]}) + "\n" for _, x, label in _ROWS
)
_WORDS = "".join(f"{name} O\n{name} B-X\n\n" for name, _, _ in _ROWS)
_SERIES = "@classLabel true a b\n@data\n" + "".join(
    f"{x},{x + 1}:{'ab'[label % 2]}\n" for _, x, label in _ROWS
)
_ARFF = "@relation r\n@attribute text string\n@attribute label {a,b}\n@data\n" + "".join(
    f"'{name} word',{'ab'[label % 2]}\n" for name, _, label in _ROWS
)


@pytest.mark.parametrize(
    ("name", "content", "parse", "columns", "task"),
    [
        # Texts of one word are split into characters.
        ("a.csv", "text,label\n" + _NAMES, (csv, "table_of"), {}, "classify"),
        # Numbers with a fraction are no classes.
        ("b.csv", "id,t,x,y\n" + _NUMBERS, (csv, "table_of"), {"label": "y"}, "regress"),
        ("c.jsonl", _TAGGED, (jsonl, "table_of_lines"), {"sequence": "x"}, "tag"),
        ("d.conll", _WORDS, (conll, "words_of"), {}, "tag"),
        ("e.ts", _SERIES, (ts, "series_of"), {}, "classify"),
        ("f.arff", _ARFF, (arff, "table"), {}, "classify"),
        ("g.txt", "one line\ntwo lines\n" * 9, (text, "lines_in"), {}, "language"),
    ],
)
def test_a_text_is_opened_for_a_look_and_parsed_once(
    tmp_path: Path,
    name: str,
    content: str,
    parse: tuple[Any, str],
    columns: dict[str, Any],
    task: str,
) -> None:
    path = tmp_path / name
    path.write_text(content)
    module, function = parse
    original = getattr(module, function)
    with mock.patch.object(module, function, side_effect=original) as parsed, opened() as names:
        run = rl.fit(path, **columns, **_OPTIONS)
    assert (run.task, parsed.call_count) == (task, 1)
    # The look tells a table, or words with labels, from another text.
    assert names.count(str(path)) <= 1 + 2 * (path.suffix == ".txt")


def test_files_of_arrays_and_tables_are_parsed_once(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    lengths = np.array([2] * len(_ROWS))
    values = np.repeat([x for _, x, _ in _ROWS], 2)
    np.savez(tmp_path / "a.npz", x=values, lengths=lengths, y=[x for _, x, _ in _ROWS])
    rows = {"x": [[x, x + 1] for _, x, _ in _ROWS], "y": [x / 7 for _, x, _ in _ROWS]}
    arrow.parquet.write_table(arrow.table(rows), tmp_path / "b.parquet")
    (tmp_path / "c").mkdir()
    for name, x, label in _ROWS:
        (tmp_path / "c" / f"{name}-{label}.csv").write_text(f"x\n{x}\n{x + 1}\n")
    for name, module, function, task in (
        ("a.npz", npz, "table", "regress"),
        ("b.parquet", ipc, "parquet_file", "regress"),
        ("c", folder, "table", "classify"),
    ):
        columns: dict[str, Any] = {"label_from_name": r"-(\d)"} if name == "c" else {}
        original = getattr(module, function)
        with mock.patch.object(module, function, side_effect=original) as parsed:
            run = rl.fit(tmp_path / name, **columns, **_OPTIONS)
        assert (run.task, parsed.call_count) == (task, 1)
