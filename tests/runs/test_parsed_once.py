"""A file is parsed once, whatever has to be guessed about it."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import raglane as rl
from raglane.data.sources import csv, jsonl

_ROWS = [(f"n{row}", 2 * row % 5 + 0.5, row % 4) for row in range(24)]


def test_a_csv_file_is_parsed_once(tmp_path: Path) -> None:
    names = "".join(f"{name}word,{label}\n" for name, _, label in _ROWS)
    numbers = "".join(f"{name},{t},{x},{x / 7}\n" for name, x, _ in _ROWS for t in range(3))
    options: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "threads": 1}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("text,label\n" + names, "classify", {}),  # split into characters
        ("id,t,x,y\n" + numbers, "regress", {"label": "y"}),  # numbers with a fraction
    ]
    for text, task, columns in cases:
        path = tmp_path / "data.csv"
        path.write_text(text)
        with mock.patch.object(csv, "entries_of", side_effect=csv.entries_of) as parsed:
            run = rl.fit(path, **columns, **options)
        assert (run.task, parsed.call_count) == (task, 1)


def test_the_lines_of_a_json_file_are_parsed_once(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "data.jsonl"
    rows = [{"x": [x, x + 1], "y": [label, 1 - label % 2]} for _, x, label in _ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with mock.patch.object(jsonl, "_row", side_effect=jsonl._row) as parsed:
        run = rl.fit(path, sequence="x", epochs=1, hidden_size=4, threads=1)
    assert (run.task, parsed.call_count) == ("tag", len(rows))
