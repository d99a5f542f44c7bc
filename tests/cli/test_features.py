"""Features from the command line: several columns, of elements and of whole sequences, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from commands import FAST, fails, tree, undrawn_pictures  # noqa: F401
from raglane.cli import main

_NAMED = ["--sequence-column", "load", "--feature-column", "zone", "--static-column", "town", "--static-column", "age"]


def _meters(path: Path, count: int = 12) -> Path:
    rows = [
        {
            "load": [float(step % 3) for step in range(number % 3 + 1)],
            "zone": [step % 2 for step in range(number % 3 + 1)],
            "town": ["Rome", "Bonn"][number % 2],
            "age": number,
            "kind": "ab"[number % 2],
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_features_from_training_to_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = _meters(tmp_path / "meters.jsonl"), tmp_path / "run"
    named = [*_NAMED, "--categorical-column", "zone", "--label-column", "kind"]
    assert main(["train", str(data), "--out", str(run), *named, *FAST]) == 0
    printed = capsys.readouterr().out
    told = "of 1 channel and zone (categories per element), town (categories per sequence), age (numbers per sequence)"
    assert told in printed
    # The run knows its columns, and Python tells the same.
    assert main(["predict", str(run), str(data), "-o", str(tmp_path / "p.jsonl"), "--quiet"]) == 0
    shares = [json.loads(line)["probability"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert rl.load(run).predict(data)["probability"] == shares
    columns: dict[str, Any] = {
        "sequence": "load",
        "features": ["zone"],
        "static": ["town", "age"],
        "categorical": ["zone"],
    }
    own = rl.fit(data, out=tmp_path / "own", epochs=2, hidden_size=4, threads=1, label="kind", **columns)
    assert tree(tmp_path / "own" / "best") == tree(run / "best")
    assert own.preprocess.categories == (3, 3)
    assert main(["evaluate", str(run), str(data)]) == 0
    assert main(["train", "--resume", "--out", str(run), "--epochs", "3", "--quiet"]) == 0
