"""What the commands say of data that is odd: of empty sequences, of times, of models by their names."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from commands import undrawn_pictures  # noqa: F401
from raglane.cli import main
from raglane.data import read
from raglane.errors import ArgumentTypeError, RaglaneError
from raglane.runs.training import hold_out
from raglane.training.checkpoint import load_model
from raglane.training.inference import Predictions, predict
from raglane.training.predictions import write_predictions
from raglane.training.run import load_description, train
from raglane.training.settings import Settings

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


def test_empty_sequences_without_a_class_are_nothing_to_speak_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": [1, 2], "y": ["a", "b"]}\n{"x": [], "y": []}\n' * 4)
    for task in ("tag", "forecast"):
        run = tmp_path / task
        columns = ["--sequence-column", "x", "--label-column", "y"]
        assert _said(capsys, "train", data, "--task", task, *columns, "--out", run, *_FAST) == []
        assert _said(capsys, "predict", run, data, "-o", tmp_path / "p.jsonl") == []


def test_a_model_is_found_by_a_str_as_by_a_path(tmp_path: Path) -> None:
    data = _write(tmp_path / "data.jsonl", [2] * 8)
    assert main(["train", str(data), "--out", str(tmp_path / "run"), *_FAST, "-q"]) == 0
    for path in (tmp_path / "run", str(tmp_path / "run"), str(tmp_path / "run" / "best")):
        assert load_model(path).task == "classify"
    records, out = read(str(data)), str(tmp_path / "again")
    train(Settings(epochs=1, hidden_size=3, threads=1), records, None, out)
    assert load_description(out).settings.hidden_size == 3
    write_predictions(str(tmp_path / "p.csv"), predict(load_model(out), records))
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 9
    for use in (load_model, load_description, lambda path: write_predictions(path, Predictions({"id": []}))):
        with pytest.raises(ArgumentTypeError, match=r"path must be a path.*, got 3"):
            use(3)  # type: ignore[arg-type]
    for wrong in ("x", 0, 2.5, None):
        with pytest.raises(RaglaneError, match="batch_size must be "):
            predict(load_model(out), records, batch_size=wrong)  # type: ignore[arg-type]


def test_rows_that_no_time_orders_are_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were, in whatever order they stood, where one date could not be read."""
    data = tmp_path / "data.csv"
    data.write_text("id,date,x,y\na,2024-01-02,1,p\na,2024-02-30,2,p\nb,2024-01-01,3,q\n")
    assert main(["train", str(data), "--out", str(tmp_path / "run"), *_FAST]) == 2
    error = capsys.readouterr().err
    assert "got '2024-02-30' in data row 1, column 'date'" in error
    assert not (tmp_path / "run").exists()


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


def test_labels_that_are_odd_are_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = ["\x1b[31m", "$x^{$", "a\nb"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"x": [1.0], "y": label}) + "\n" for label in labels * 3))
    run = tmp_path / "run"
    assert main(["train", str(data), "--out", str(run), *_FAST, "--validation-fraction", "0"]) == 0
    assert main(["evaluate", str(run), str(data)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))
    assert main(["predict", str(run), str(data), "-o", str(tmp_path / "p.jsonl"), "-q"]) == 0
    written = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert {row["prediction"] for row in written} <= set(labels)


def test_a_long_label_takes_its_room_once(tmp_path: Path) -> None:
    """NumPy's own strings would take it for every row."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"x": [1.0], "y": label}) + "\n" for label in ["l" * 10**5, *"ab" * 500]))
    records = read(data)
    tracemalloc.start()
    training, validation = hold_out(records, 0.1, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    assert len(training) + len(validation) == 1001
