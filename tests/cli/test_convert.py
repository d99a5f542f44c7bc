"""``raglane convert``, and training on what it wrote."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, fails, tree, undrawn_pictures, write_steps  # noqa: F401
from raglane.cli import main
from raglane.data import Dataset


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _words(name: str, count: int = 24) -> str:
    rows = [{"x": ["a", "b", "cc"][: row % 4], "y": "uv"[row % 2], "id": f"s{row}"} for row in range(count)]
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return name


def test_what_is_said_of_a_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words"]) == 0
    said = capsys.readouterr()
    assert "words: 24 sequences of up to 3 elements, 36 in total; 3 different tokens; 2 labels" in said.out
    assert "next: raglane train words" in said.out
    assert said.err == ""
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["convert", "words.jsonl", "words"]) == 0
    assert "is already complete: nothing to do" in capsys.readouterr().out
    with Path("words.jsonl").open("a") as file:
        file.write("\n{\n")
    fails(["convert", "words.jsonl", "words"], capsys, "contains other converted data", "--overwrite")
    before = tree(Path("words"))
    fails(["convert", "words.jsonl", "words", "--overwrite"], capsys, "words.jsonl, line 25 must be ... got bad JSON")
    assert tree(Path("words")) == before
    assert main(["convert", "words.jsonl", "words", "--overwrite", "--on-bad-row", "skip"]) == 0
    assert "rows left out: 1, listed with reasons in words/skipped.jsonl" in capsys.readouterr().out
    write_steps(Path("steps.csv"))
    assert main(["convert", "*.csv", "steps", "--task", "forecast", "--feature-column", "a"]) == 0
    assert "1 channel" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["steps", "steps.csv", "words", "words.jsonl"]


def test_mistakes_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _words("words.jsonl")
    for arguments, pieces in (
        (["words.jsonl"], ["IN... OUT", "raglane convert words.jsonl OUT"]),
        (["absent.csv", "out"], ["absent.csv", "no such file"]),
        (["nosuch://a.parquet", "out"], ["nosuch://a.parquet", "no valid response"]),
        (["words.jsonl", "out", "--on-bad-row", "drop"], ["--on-bad-row", "one of fail, skip"]),
        (["words.jsonl", "out", "--task", "sort"], ["--task"]),
        (["words.jsonl", "out", "--task", "regress"], ["label column", "--label-column"]),
        (["words.jsonl", "words.jsonl"], ["words.jsonl", "a file"]),
        (["words.jsonl", ""], ["an empty path"]),
        (["words.jsonl", "out", "--label-column", "z"], ["no column 'z'"]),
    ):
        fails(["convert", *arguments], capsys, *pieces)
        assert sorted(path.name for path in Path().iterdir()) == ["words.jsonl"], arguments


def _run(data: str, folder: str, *options: str) -> dict[str, bytes]:
    assert main(["train", data, *FAST, "--out", folder, "--quiet", *options]) == 0
    return {name: Path(folder, "best", name).read_bytes() for name in ("weights.safetensors", "config.json")}


def test_a_model_of_converted_data_is_that_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _words("words.jsonl")
    _words("more.jsonl", 10)
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    wanted = _run("words.jsonl", "wanted", "--validation", "more.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr("raglane.data.formats.ipc.read", None)
        assert _run("words", "found", "--validation", "more.jsonl") == wanted
        # The part that is held out is the same, too.
        found, wanted = _run("words", "held"), _run("words.jsonl", "out")
        assert found["weights.safetensors"] == wanted["weights.safetensors"]
    assert main(["evaluate", "found", "words", "--quiet"]) == 0
    assert main(["predict", "found", "words", "-o", "a.csv", "--quiet"]) == 0
    assert main(["predict", "wanted", "words.jsonl", "-o", "b.csv", "--quiet"]) == 0
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


def test_scaled_features_and_forecasts_of_converted_data() -> None:
    write_steps(Path("steps.csv"), 30)
    for task in ("classify", "forecast"):
        assert main(["convert", "steps.csv", task, "--task", task, "--feature-column", "a", "--quiet"]) == 0
        _run(task, f"{task}-run", "--task", task)
        lines = Path(f"{task}-run", "curves.csv").read_text().splitlines()
        assert len(lines) == 3
        assert "validation_loss" in lines[0]


def test_a_folder_is_trained_for_the_task_that_it_was_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"x": list("abc"[: row % 4]), "y": list("uvw"[: row % 4])} for row in range(24)]
    Path("tags.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = ["--sequence-column", "x", "--label-column", "y"]
    assert main(["convert", "tags.jsonl", "tags", "--task", "tag", *named, "--quiet"]) == 0
    assert main(["train", "tags", *FAST, "--out", "run"]) == 0
    assert "task: tag" in capsys.readouterr().out
    for task in ("multilabel", "regress", "classify"):
        fails(["train", "tags", "--task", task], capsys, "--task", "converted for the task tag")
    assert sorted(path.name for path in Path().iterdir()) == ["run", "tags", "tags.jsonl"]
    weighed = ["--task", "tag", "--class-weights", "balanced", "--validation-fraction", "0"]
    wanted = _run("tags.jsonl", "wanted", *weighed, *named)
    assert _run("tags", "found", *weighed)["weights.safetensors"] == wanted["weights.safetensors"]


def test_converted_data_of_every_task_trains_what_the_data_does() -> None:
    """Numbers, sets of labels, texts, and features beside them: the same weights from a folder as from the file."""
    rows = [
        {
            "x": [float(step) for step in range(row % 4 + 1)],
            "ids": [(row + step) % 5 for step in range(row % 4 + 1)],
            "total": row / 7,
            "kinds": ["a", "b"][: row % 3],
            "town": ["Rome", "Bonn"][row % 2],
        }
        for row in range(24)
    ]
    Path("all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    beside = ["--feature-column", "ids", "--categorical-column", "ids", "--static-column", "town"]
    for task, named in (
        ("regress", ["--sequence-column", "x", "--label-column", "total", *beside]),
        ("multilabel", ["--sequence-column", "x", "--label-column", "kinds"]),
        ("language", ["--sequence-column", "ids"]),
    ):
        assert main(["convert", "all.jsonl", task, "--task", task, *named, "--quiet"]) == 0
        options = ["--task", task, "--validation-fraction", "0"]
        wanted = _run("all.jsonl", f"{task}-wanted", *options, *named)
        found = _run(task, f"{task}-found", *options)
        assert found["weights.safetensors"] == wanted["weights.safetensors"], task
        # The run of the folder knows how to read the file.
        for run in ("found", "wanted"):
            predicted = ["predict", f"{task}-{run}", "all.jsonl", "-o", f"{task}-{run}.jsonl", "--quiet"]
            assert main(predicted) == 0
        assert Path(f"{task}-found.jsonl").read_bytes() == Path(f"{task}-wanted.jsonl").read_bytes()
        assert main(["evaluate", f"{task}-found", task, "--quiet"]) == 0
    # Whole numbers that were read as tokens are read so again.
    assert (
        main(
            ["convert", "all.jsonl", "tokens", "--sequence-column", "ids", "--label-column", "town", "--tokens", "yes"]
        )
        == 0
    )
    _run("tokens", "tokens-run")
    assert main(["predict", "tokens-run", "all.jsonl", "-o", "tokens.csv", "--quiet"]) == 0


def test_a_run_of_a_folder_that_was_a_csv_file_reads_such_files() -> None:
    """Its id, time and feature columns are those of the conversion, and times are sorted and told as they were."""
    rows = [f"{row % 6},{9 - row // 6},{row},{'uv'[row % 2]},{'ab'[row % 6 % 2]}" for row in range(24)]
    Path("long.csv").write_text("\n".join(["id,hour,load,day,kind", *rows]) + "\n")
    named = ["--time-column", "hour", "--label-column", "kind", "--time-gaps", "--feature-column", "load"]
    named += ["--feature-column", "day"]
    assert main(["convert", "long.csv", "long", *named, "--quiet"]) == 0
    wanted = _run("long.csv", "wanted", *named, "--validation-fraction", "0")
    found = _run("long", "found", "--validation-fraction", "0")
    assert found["weights.safetensors"] == wanted["weights.safetensors"]
    for run in ("found", "wanted"):
        assert main(["predict", run, "long.csv", "-o", f"{run}.jsonl", "--quiet"]) == 0
    assert Path("found.jsonl").read_bytes() == Path("wanted.jsonl").read_bytes()
    assert main(["evaluate", "found", "long", "--quiet"]) == 0


def test_texts_that_were_cut_are_cut_again_in_the_same_way() -> None:
    rows = [{"text": ["ab c", "c b", "aab"][row % 3], "kind": "uv"[row % 2]} for row in range(24)]
    Path("texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("more.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    assert main(["convert", "texts.jsonl", "texts", "--split", "characters", "--quiet"]) == 0
    wanted = _run("texts.jsonl", "wanted", "--validation", "more.jsonl", "--split", "characters")
    found = _run("texts", "found", "--validation", "more.jsonl", "--split", "characters")
    assert found == wanted
    _run("texts", "held")
    columns = json.loads(Path("held", "best", "config.json").read_text())["columns"]
    assert columns["split"] == "characters"


def test_converted_data_is_seen_to_be_binary(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"x": [[row % 2, step % 2] for step in range(row % 5)], "y": "uv"[row % 2]} for row in range(24)]
    half = [*rows[:-1], {"x": [[0.5, 1]], "y": "u"}]
    for name, content in (("rolls", rows), ("half", half)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
        assert main(["convert", f"{name}.jsonl", name, "--task", "forecast", "--quiet"]) == 0
    assert main(["train", "rolls", *FAST, "--out", "run"]) == 0
    assert "loss: bce, because all channels are 0 or 1" in capsys.readouterr().out
    assert main(["train", "half", *FAST, "--out", "half-run"]) == 0
    assert "bce" not in capsys.readouterr().out
    chunked = ["--task", "forecast", "--bptt-steps", "2", "--validation-fraction", "0"]
    wanted = _run("half.jsonl", "chunks", *chunked)
    assert _run("half", "folder-chunks", *chunked)["weights.safetensors"] == wanted["weights.safetensors"]
    asked = ["train", "half", "--task", "forecast", "--loss", "bce", "--out", "other"]
    fails(asked, capsys, "0 or 1 for the loss bce", "--loss mse")


def test_balanced_classes_and_rare_tokens_of_converted_data_are_those_of_the_data() -> None:
    rows = [{"x": ["a", "b", f"w{row}"][: row % 4], "y": "uuv"[row % 3]} for row in range(24)]
    Path("rare.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["convert", "rare.jsonl", "rare", "--quiet"]) == 0
    options = ["--class-weights", "balanced", "--validation-fraction", "0"]
    wanted = _run("rare.jsonl", "wanted", *options)
    assert _run("rare", "found", *options)["weights.safetensors"] == wanted["weights.safetensors"]
    assert _run("rare", "known", *options, "--unk-dropout", "0") != _run("rare", "again", *options)


def test_batches_of_elements_of_converted_data(capsys: pytest.CaptureFixture[str]) -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    split = ["--batch-elements", "2", "--too-long", "split", "--validation-fraction", "0"]
    wanted = _run("words.jsonl", "pieces", *split)
    assert _run("words", "folder-pieces", *split)["weights.safetensors"] == wanted["weights.safetensors"]
    limited = ["train", "words", *FAST, "--batch-elements", "2", "--too-long"]
    assert main([*limited, "drop", "--out", "run"]) == 0
    assert "longer than a batch of 2 elements: 6 sequences, left out" in capsys.readouterr().out


def test_a_run_on_converted_data_goes_on_to_the_same_bits() -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    wanted = _run("words", "whole", "--epochs", "3")
    _run("words", "parts", "--epochs", "1")
    assert main(["train", "--resume", "--out", "parts", "--epochs", "3", "--quiet"]) == 0
    assert Path("parts", "best", "weights.safetensors").read_bytes() == wanted["weights.safetensors"]


def test_a_worker_that_is_killed_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    data, here, take = tree(Path("words")), os.getpid(), Dataset.take

    def die(self: Dataset, index: Any) -> Any:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, index)

    monkeypatch.setattr(Dataset, "take", die)
    fails(["train", "words", *FAST, "--out", "run", "--workers", "1", "--quiet"], capsys, "--workers", "that died")
    assert tree(Path("words")) == data
    assert not Path("run").exists()
