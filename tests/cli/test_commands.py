"""The commands called as a user would, good and bad input: what is printed, written, and left alone."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from commands import FAST, fails, tree, undrawn_pictures  # noqa: F401
from looped import looped
from raglane.cli import main


def _write_csv(path: Path, rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def _steps(count: int = 20, *, label: bool = True, order: list[int] | None = None) -> list[list[Any]]:
    """Sequences of 1 to 5 steps that rise or fall; the id tells nothing of the row's place."""
    rows: list[list[Any]] = [["id", "hour", "x", "y", *(["kind"] if label else [])]]
    for number in order or list(range(count)):
        kind, slope = ("up", 1) if number % 2 else ("down", -1)
        for hour in range(number % 5 + 1):
            values = [slope * hour + math.sin(number), math.cos(number + hour)]
            rows.append([f"s{number}", hour, *values, *([kind] if label else [])])
    return rows


def _write_tokens(path: Path, count: int = 20) -> Path:
    with path.open("w") as file:
        for number in range(count):
            words = ["the", "dog", "sees", "a", "cat"][: number % 6]
            tags = [{"the": "D", "a": "D", "sees": "V"}.get(word, "N") for word in words]
            file.write(json.dumps({"words": words, "tags": tags}) + "\n")
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a run of each task."""
    folder = tmp_path_factory.mktemp("work")
    data = _write_csv(folder / "steps.csv", _steps())
    words = _write_tokens(folder / "words.jsonl")
    named = ["--sequence-column", "words", "--label-column", "tags"]
    commands = [
        [str(data), "--time-column", "hour", "--out", str(folder / "classify")],
        [str(words), "--task", "tag", *named, "--bidirectional", "--out", str(folder / "tag")],
        [str(data), "--task", "forecast", "--feature-column", "x", "--out", str(folder / "forecast")],
    ]
    for command in commands:
        assert main(["train", *command, *FAST, "--quiet"]) == 0
    return folder


def test_train_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _write_csv(tmp_path / "steps.csv", _steps())
    test = _write_csv(tmp_path / "later.csv", _steps(6))
    out = tmp_path / "deep" / "run"
    assert main(["train", str(data), "--out", str(out), "--test", str(test), "--seed", "3", *FAST]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for piece in (
        "label column: 'kind' (the only candidate)",
        "validation: 2 sequences, 10 % of the training sequences, stratified by label, seed 3",
        "epoch 2/2  loss ",
        " elements/s",
        "best: epoch ",
        "test: accuracy ",
        "(6 sequences of later.csv)",
        f"next: raglane predict {out}",
    ):
        assert piece in printed.out
    expected = {
        "best",
        "last",
        "run.json",
        "run.toml",
        "card.md",
        "report.html",
        "curves.csv",
        "curves.png",
        "evaluation.json",
        "confusion.png",
        "confusion.txt",
    }
    assert {path.name for path in out.iterdir()} == expected
    assert len((out / "curves.csv").read_text().splitlines()) == 3


def test_predict_in_every_format(work: Path, tmp_path: Path) -> None:
    tables = []
    for suffix in ("csv", "jsonl", "parquet"):
        output = tmp_path / f"p.{suffix}"
        command = ["predict", str(work / "classify"), str(work / "steps.csv"), "-o", str(output), "--probabilities"]
        assert main([*command, "--quiet"]) == 0
        if suffix == "csv":
            with output.open() as file:
                tables.append([dict(row) for row in csv.DictReader(file)])
        elif suffix == "jsonl":
            tables.append([json.loads(line) for line in output.read_text().splitlines()])
        else:
            tables.append(pyarrow.parquet.read_table(output).to_pylist())
    for table in tables:
        assert list(table[0]) == ["id", "prediction", "probability", "p_down", "p_up"]
        assert [row["id"] for row in table] == [f"s{number}" for number in range(20)]
        for row, other in zip(table, tables[0], strict=True):
            assert row["prediction"] == other["prediction"]
            assert (
                float(row["probability"])
                == float(other["probability"])
                == max(float(row["p_down"]), float(row["p_up"]))
            )
            assert float(row["p_down"]) + float(row["p_up"]) == pytest.approx(1)


def test_texts_that_a_spreadsheet_executes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _steps()
    for row in rows[1:]:
        row[0], row[-1] = {"s1": "=1+1", "s2": "+1", "s3": "@a", "s4": "-1"}.get(row[0], row[0]), f"={row[-1]}"
    data, run = str(_write_csv(tmp_path / "steps.csv", rows)), str(tmp_path / "run")
    assert main(["train", data, "--out", run, *FAST, "--quiet"]) == 0
    found = {}
    for name, more in (("plain", []), ("escaped", ["--escape-formulas"])):
        command = ["predict", run, data, "-o", str(tmp_path / f"{name}.csv"), "--probabilities", "--quiet", *more]
        assert main(command) == 0
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            found[name] = list(csv.reader(file))
    assert {row[0] for row in found["plain"]} >= {"=1+1", "+1", "@a", "-1", "s5"}
    assert {row[0] for row in found["escaped"]} >= {"'=1+1", "'+1", "'@a", "'-1", "s5"}
    assert {row[1] for row in found["escaped"][1:]} <= {"'=up", "'=down"}
    for plain, escaped in zip(found["plain"], found["escaped"], strict=True):
        assert [entry.removeprefix("'") for entry in escaped] == plain
    for output in ("p.jsonl", "p.parquet"):
        command = ["predict", run, data, "-o", str(tmp_path / output), "--escape-formulas"]
        fails(command, capsys, "--escape-formulas", "except for .csv")
        assert not (tmp_path / output).exists()


def test_predict_needs_no_label_and_keeps_the_order(work: Path, tmp_path: Path) -> None:
    order = [7, 3, 19, 0, 12]
    data = _write_csv(tmp_path / "new.csv", _steps(label=False, order=order))
    both = [(work / "steps.csv", tmp_path / "all.jsonl"), (data, tmp_path / "few.jsonl")]
    for source, output in both:
        assert main(["predict", str(work / "classify"), str(source), "-o", str(output), "--batch-size", "3"]) == 0
    complete, few = ([json.loads(line) for line in output.read_text().splitlines()] for _, output in both)
    assert [row["id"] for row in few] == [f"s{number}" for number in order]
    for row, number in zip(few, order, strict=True):
        assert row["prediction"] == complete[number]["prediction"]
        assert row["probability"] == pytest.approx(complete[number]["probability"], rel=1e-5)


def test_predict_reads_the_columns_that_training_found(tmp_path: Path) -> None:
    """What was guessed once is not guessed again: another text column, or no label, changes nothing."""
    rows = [{"text": ["a", "b"][: 1 + n % 2], "kind": str(n % 2)} for n in range(20)]
    trained = tmp_path / "train.jsonl"
    trained.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, output = tmp_path / "run", tmp_path / "p.csv"
    assert main(["train", str(trained), "--out", str(run), *FAST, "--quiet"]) == 0
    later = tmp_path / "later.jsonl"
    later.write_text("".join(json.dumps({"note": ["x"], "text": row["text"]}) + "\n" for row in rows))
    assert main(["predict", str(run), str(later), "-o", str(output), "--quiet"]) == 0
    assert len(output.read_text().splitlines()) == 21


def test_tag_predicts_a_list_a_sequence(work: Path, tmp_path: Path) -> None:
    for suffix in ("jsonl", "csv", "parquet"):
        output = tmp_path / f"p.{suffix}"
        assert main(["predict", str(work / "tag"), str(work / "words.jsonl"), "-o", str(output)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [len(row["prediction"]) for row in rows] == [number % 6 for number in range(20)]
    assert [row["id"] for row in rows] == list(range(20))
    assert pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist() == rows
    with (tmp_path / "p.csv").open() as file:
        assert [json.loads(row["prediction"]) for row in csv.DictReader(file)] == [row["prediction"] for row in rows]


def test_forecast(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "p.parquet"
    assert main(["predict", str(work / "forecast"), str(work / "steps.csv"), "-o", str(output), "--horizon", "3"]) == 0
    rows = pyarrow.parquet.read_table(output).to_pylist()
    assert all(len(row["prediction"]) == 3 and len(row["prediction"][0]) == 1 for row in rows)
    assert main(["evaluate", str(work / "forecast"), str(work / "steps.csv")]) == 0
    assert "persistence MAE" in capsys.readouterr().out


def test_evaluate_agrees_with_predict(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "p.jsonl"
    assert main(["predict", str(work / "classify"), str(work / "steps.csv"), "-o", str(output), "--probabilities"]) == 0
    assert main(["evaluate", str(work / "classify"), str(work / "steps.csv")]) == 0
    truth = ["up" if number % 2 else "down" for number in range(20)]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    numbers = json.loads((work / "classify" / "evaluation.json").read_text())
    right = sum(row["prediction"] == label for row, label in zip(rows, truth, strict=True))
    loss = -sum(math.log(row[f"p_{label}"]) for row, label in zip(rows, truth, strict=True)) / 20
    assert numbers["accuracy"] == pytest.approx(right / 20)
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert f"accuracy {right / 20:.3f}" in capsys.readouterr().out
    table = (work / "classify" / "confusion.txt").read_text()
    assert table.splitlines()[0].split()[3:5] == ["down", "up"]


def test_resume_goes_on_and_refuses_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _write_csv(tmp_path / "steps.csv", _steps())
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", str(data), *out, *FAST, "--quiet"]) == 0
    assert main(["train", "--resume", *out, "--hidden-size", "8"]) == 2
    assert ", got 8" in capsys.readouterr().err
    assert main(["train", "--resume", *out, "--epochs", "1"]) == 2
    assert "2 are done" in capsys.readouterr().err
    assert main(["train", "--resume", *out]) == 0
    assert "training is complete at epoch 2; pass e.g. --epochs 12" in capsys.readouterr().out
    assert main(["train", "--resume", *out, "--epochs", "3"]) == 0
    assert "epoch 3/3" in capsys.readouterr().out
    assert len((tmp_path / "run" / "curves.csv").read_text().splitlines()) == 4
    assert main(["train", str(data), *out, *FAST]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["train", str(data), *out, *FAST, "--overwrite", "--quiet"]) == 0
    assert len((tmp_path / "run" / "curves.csv").read_text().splitlines()) == 3


def test_overwrite_leaves_nothing_that_was_measured_of_the_old_run(tmp_path: Path) -> None:
    data = str(_write_csv(tmp_path / "steps.csv", _steps()))
    run = tmp_path / "run"
    command = ["train", data, "--out", str(run), *FAST, "--quiet"]
    assert main([*command, "--test", data]) == 0
    measured = {"evaluation.json", "confusion.png", "confusion.txt"}
    assert measured <= {path.name for path in run.iterdir()}
    assert main([*command, "--overwrite"]) == 0
    assert measured.isdisjoint(path.name for path in run.iterdir())


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
def test_no_sequence_is_in_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    from raglane.training.run import run_job

    parts: list[Any] = []

    def watch(settings: Any, training: Any, validation: Any, *others: Any, **options: Any) -> Any:
        parts.extend([training, validation])
        return run_job(settings, training, validation, *others, **options)

    monkeypatch.setattr("raglane.runs.training.run_job", watch)
    data = str(_write_csv(tmp_path / "steps.csv", _steps(40)))
    shape = ["--task", task, "--feature-column", "x", "--validation-fraction", "0.3"]
    assert main(["train", data, *shape, "--out", str(tmp_path / "run"), *FAST, "--quiet"]) == 0
    training, validation = (set(part.ids) for part in parts)
    assert len(validation) == len(parts[1]) > 0
    assert training.isdisjoint(validation)
    assert training | validation == {f"s{number}" for number in range(40)}


_BAD_OPTIONS = [
    ["--hidden-size", "0"],
    ["--epochs", "-1"],
    ["--lr", "nan"],
    ["--lr", "-0.1"],
    ["--batch-size", "0"],
    ["--dropout", "2"],
    ["--seed", "-1"],
    ["--patience", "0"],
    ["--grad-clip", "-1"],
    ["--threads", "0"],
    ["--workers", "-1"],
    ["--embedding", "0"],
    ["--validation-fraction", "1.5"],
    ["--task", "dance"],
    ["--cell", "tram"],
    ["--optimizer", "magic"],
    ["--missing", "maybe"],
    ["--device", "abacus"],
    ["--format", "xls"],
    ["--hidden-size", "many"],
    ["--no-such-option"],
    ["--task", "forecast", "--bidirectional"],
    ["--label-column", "nobody"],
    ["--sequence-column"],
    ["--validation", "missing.csv"],
    ["--test", "missing.csv"],
    ["--resume"],
    ["one", "too", "many"],
]


@looped("options", _BAD_OPTIONS)
def test_bad_option_is_one_line(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_csv(tmp_path / "steps.csv", _steps())
    fails(["train", "steps.csv", *options], capsys)
    assert tree(tmp_path).keys() == {"steps.csv"}


def _bad_rows(change: Callable[[list[list[Any]]], None]) -> list[list[Any]]:
    rows = _steps()
    change(rows)
    return rows


def test_bad_csv_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def put(row: int, column: int, value: str) -> Callable[[list[list[Any]]], None]:
        return lambda rows: rows[row].__setitem__(column, value)

    cases: dict[str, list[str]] = {
        "nan": ["id 's1'", "--missing"],
        "inf": ["id 's1'", "--missing"],
        "word": ["id 's1'"],
    }
    for value, pieces in cases.items():
        path = _write_csv(tmp_path / "bad.csv", _bad_rows(put(3, 2, value)))
        fails(["train", str(path), "--label-column", "kind", "--out", str(tmp_path / "run")], capsys, *pieces)
    (tmp_path / "bad.csv").write_text("")
    fails(["train", str(tmp_path / "bad.csv"), "--out", str(tmp_path / "run")], capsys, "empty file")
    fails(["train", str(tmp_path / "none.csv"), "--out", str(tmp_path / "run")], capsys, "none.csv")
    (tmp_path / "data.xyz").write_text("what")
    fails(["train", str(tmp_path / "data.xyz"), "--out", str(tmp_path / "run")], capsys, ".parquet")
    assert not (tmp_path / "run").exists()


def test_bad_json_lines_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"series": [[1.0, 2.0], [3.0, 4.0]], "kind": kind} for kind in ("a", "b", "a", "b")]
    cases: list[tuple[Any, str]] = [
        ([[1.0, 2.0], None], "null"),
        ([[1.0, 2.0], [None, 1.0]], "null"),
        ([[1.0, 2.0], [3.0]], "row 4"),
        ("text", "bad.jsonl"),
    ]
    for series, piece in cases:
        rows = [*good, {"series": series, "kind": "a"}]
        (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = ["--sequence-column", "series", "--label-column", "kind"]
        fails(["train", str(tmp_path / "bad.jsonl"), *named, "--out", str(tmp_path / "run")], capsys, piece)
    assert not (tmp_path / "run").exists()


def test_bad_input_to_a_model_is_one_line(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(work)
    model, data = str(work / "classify"), str(work / "steps.csv")
    output = ["-o", str(tmp_path / "p.csv")]
    unseen = _write_csv(tmp_path / "unseen.csv", _bad_rows(lambda rows: rows.append(["z", 0, 1.0, 2.0, "sideways"])))
    narrow = _write_csv(tmp_path / "narrow.csv", [row[:3] for row in _steps()])
    gaps = _write_csv(tmp_path / "gaps.csv", _bad_rows(lambda rows: rows[3].__setitem__(2, "")))
    fails(["evaluate", model, str(unseen)], capsys, "sideways", "id 'z'")
    fails(["evaluate", model], capsys, "data must be ... got nothing")
    fails(["evaluate", str(tmp_path), data], capsys, "without a saved model")
    fails(["predict", str(work), data, *output], capsys, "without a saved model")
    fails(["predict", str(work / "no"), data, *output], capsys, "no such folder")
    fails(["predict", model, str(tmp_path / "no.csv"), *output], capsys, "no.csv")
    fails(["predict", model, str(narrow), *output], capsys, "'y'")
    fails(["predict", model, str(gaps), *output], capsys, "id 's1'")
    fails(["predict", model, str(work / "words.jsonl"), *output], capsys)
    fails(["predict", model, data, "-o", str(tmp_path / "p.xlsx")], capsys, ".parquet, .csv, .jsonl")
    fails(["predict", model, data, "-o", str(tmp_path / "no" / "p.csv")], capsys, "mkdir")
    fails(["predict", model, data], capsys, "output")
    fails(["predict", model, data, *output, "--batch-size", "0"], capsys, "--batch-size must be ... got 0")
    fails(["predict", model, data, *output, "--horizon", "2"], capsys, "horizon")
    fails(["predict", str(work / "forecast"), data, *output, "--horizon", "0"], capsys, "horizon")
    fails(["predict", str(work / "forecast"), data, *output, "--probabilities"], capsys, "probabilities")
    fails(["nonsense"], capsys, "nonsense")
    assert not (tmp_path / "p.csv").exists()
    assert tree(work) == before


def test_full_disk_is_one_line_and_leaves_nothing_half_written(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = str(work / "steps.csv"), tmp_path / "p.csv"
    output.write_text("what was there")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    fails(["predict", str(work / "classify"), data, "-o", str(output)], capsys, "No space left")
    fails(
        ["train", data, "--label-column", "kind", "--out", str(tmp_path / "run"), *FAST, "-q"], capsys, "No space left"
    )
    assert tree(tmp_path) == {"p.csv": b"what was there"}
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "none.csv"), "--debug"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.splitlines()[-1].startswith("raglane: error: ")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("raglane ")
    for command in ("train", "predict", "evaluate"):
        assert main([command, "--help"]) == 0
        printed = capsys.readouterr().out
        assert f"raglane {command}" in printed
        assert "Data" in printed
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for piece in ("Task and model", "Training", "Run and output", "[default: 0.003]", "--bucket", "For example"):
        assert piece in printed


def test_without_the_train_extra(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    data = str(work / "steps.csv")
    fails(["train", data, "--label-column", "kind", "--out", str(tmp_path / "run"), "-q"], capsys, "raglane[train]")
    assert not (tmp_path / "run").exists()
