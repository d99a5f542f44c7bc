"""Unusual data: empty sequences, huge IDs, names that are not UTF-8, long labels."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from commands import undrawn_pictures  # noqa: F401
from raglane.cli import main
from raglane.data import read
from raglane.runs.training import hold_out

_FAST = ["--epochs", "1", "--hidden-size", "3", "--threads", "1"]
_NOTE = "its class follows from the initial state only"
_NOTES = "their class follows from the initial state only"


def _write(path: Path, lengths: list[int]) -> Path:
    rows = [{"x": [0.5] * length, "y": "ab"[row % 2]} for row, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _said(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "initial state" in line]


def test_empty_sequences_with_a_class_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, some = _write(tmp_path / "full.jsonl", [2] * 8), _write(tmp_path / "some.jsonl", [2, 1, 0, 3, 0, 1, 2, 1])
    one = _write(tmp_path / "one.jsonl", [0, 2, 1, 1])
    two = "2 of 8 sequences are empty (the first: row 2): " + _NOTES
    assert [note for note in read(some).notes if "initial" in note] == [two]
    run = tmp_path / "run"
    assert _said(capsys, "train", full, "--out", run, *_FAST) == []
    lines = _said(capsys, "train", some, "--validation", one, "--test", some, "--out", tmp_path / "other", *_FAST)
    assert lines == [two, f"{one}: 1 of 4 sequences is empty (row 0): {_NOTE}", f"{some}: {two}"]
    assert _said(capsys, "evaluate", run, full) == []
    assert _said(capsys, "evaluate", run, some) == [two]
    assert _said(capsys, "predict", run, some, "-o", tmp_path / "p.csv") == [two]
    assert _said(capsys, "predict", run, some, "-o", tmp_path / "p.csv", "-q") == []


def test_ids_beyond_64_bits_are_written_as_text(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    ids = [2**63, 10**30, 5, 6]
    data.write_text("id,x,y\n" + "".join(f"{name},1,{'ab'[row % 2]}\n" for row, name in enumerate(ids)))
    run = tmp_path / "run"
    assert main(["train", str(data), "--out", str(run), *_FAST, "-q", "--validation-fraction", "0"]) == 0
    for kind in ("csv", "jsonl", "parquet"):
        assert main(["predict", str(run), str(data), "-o", str(tmp_path / f"p.{kind}"), "-q"]) == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[2].startswith(f"{10**30},")


def test_a_name_that_is_not_utf8_goes_through_a_run(tmp_path: Path) -> None:
    data = tmp_path / "caf\udce9.jsonl"
    _write(data, [2] * 8)
    run = tmp_path / "\udce9$^{"
    assert main(["train", str(data), "--test", str(data), "--out", str(run), *_FAST, "-q"]) == 0
    assert main(["train", "--resume", "--out", str(run), "--epochs", "2", "-q"]) == 0
    assert main(["evaluate", str(run), "-q"]) == 0


def test_the_held_out_part_has_no_sequence_of_the_training_part(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"id": row, "x": [1.0], "y": "ab"[row % 2]}) + "\n" for row in range(40)))
    training, validation = hold_out(read(data), 0.3, 0)
    assert len(validation) == 12
    assert sorted([*(training.ids or ()), *(validation.ids or ())]) == list(range(40))


def test_a_long_label_takes_its_room_once(tmp_path: Path) -> None:
    """NumPy's arrays of strings would allocate its length for every row."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"x": [1.0], "y": label}) + "\n" for label in ["l" * 10**5, *"ab" * 500]))
    records = read(data)
    tracemalloc.start()
    training, validation = hold_out(records, 0.1, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    assert len(training) + len(validation) == 1001
