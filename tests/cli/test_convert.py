"""``raglane convert``, and training on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from commands import FAST, Capsys, fails, prints, tree, write_steps
from raglane.cli import main


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _words(name: str, count: int = 24) -> str:
    rows = [
        {"x": ["a", "b", "cc"][: row % 4], "y": "uv"[row % 2], "id": f"s{row}"}
        for row in range(count)
    ]
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return name


def test_lines_that_a_conversion_prints(capsys: Capsys) -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words"]) == 0
    said = capsys.readouterr()
    assert (
        "words: 24 sequences of up to 3 elements, 36 in total; 3 different tokens; 2 labels"
        in said.out
    )
    assert "next: raglane train words" in said.out
    assert said.err == ""
    assert prints(["convert", "words.jsonl", "words", "--quiet"], capsys) == ""
    prints(["convert", "words.jsonl", "words"], capsys, "is already complete: nothing to do")
    with Path("words.jsonl").open("a") as file:
        file.write("\n{\n")
    fails(
        ["convert", "words.jsonl", "words"], capsys, "contains other converted data", "--overwrite"
    )
    before = tree(Path("words"))
    fails(
        ["convert", "words.jsonl", "words", "--overwrite"],
        capsys,
        "words.jsonl, line 25 must be ... got bad JSON",
    )
    assert tree(Path("words")) == before
    assert main(["convert", "words.jsonl", "words", "--overwrite", "--on-bad-row", "skip"]) == 0
    assert "rows left out: 1, listed with reasons in words/skipped.jsonl" in capsys.readouterr().out
    write_steps(Path("steps.csv"))
    prints(
        ["convert", "*.csv", "steps", "--task", "forecast", "--feature-column", "a"],
        capsys,
        "1 channel",
    )
    assert sorted(path.name for path in Path().iterdir()) == [
        "steps",
        "steps.csv",
        "words",
        "words.jsonl",
    ]


def test_mistakes_leave_nothing(capsys: Capsys) -> None:
    _words("words.jsonl")
    for arguments, pieces in (
        (["words.jsonl"], ["IN... OUT", "raglane convert words.jsonl OUT"]),
        (["words.jsonl", "out", "--on-bad-row", "drop"], ["--on-bad-row", "one of raise, skip"]),
        (["words.jsonl", "out", "--task", "sort"], ["--task"]),
        (["words.jsonl", "out", "--task", "regress"], ["label column", "--label-column"]),
        (["words.jsonl", "words.jsonl"], ["words.jsonl", "a file"]),
        (["words.jsonl", ""], ["an empty path"]),
        (["words.jsonl", "."], ["output must be the name of a folder, not of a file, got '.'"]),
        (["words.jsonl", "out", "--label-column", "z"], ["no column 'z'"]),
    ):
        fails(["convert", *arguments], capsys, *pieces)
        assert sorted(path.name for path in Path().iterdir()) == ["words.jsonl"], arguments


def _run(data: str, folder: str, *options: str) -> dict[str, bytes]:
    assert main(["train", data, *FAST, "--output", folder, "--quiet", *options]) == 0
    return {
        name: Path(folder, "best", name).read_bytes()
        for name in ("weights.safetensors", "config.json")
    }


def _same(data: str, folder: str, *options: str, named: tuple[str, ...] = ()) -> None:
    """Assert that a run on a converted folder is that on the file: its weights, and its predictions
    for the file.
    """
    wanted, found = (
        _run(data, f"{folder}-file", *options, *named),
        _run(folder, f"{folder}-run", *options),
    )
    assert found["weights.safetensors"] == wanted["weights.safetensors"], (folder, options)
    for kind in ("file", "run"):
        assert (
            main(["predict", f"{folder}-{kind}", data, "-o", f"{folder}-{kind}.jsonl", "--quiet"])
            == 0
        )
    assert Path(f"{folder}-file.jsonl").read_bytes() == Path(f"{folder}-run.jsonl").read_bytes()
    assert main(["evaluate", f"{folder}-run", folder, "--quiet"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--validation", "more.jsonl"),
        (),  # the same part is held out
        ("--class-weights", "balanced", "--validation-fraction", "0"),
        ("--batch-elements", "2", "--too-long", "chunk", "--validation-fraction", "0"),
    ],
    ids=" ".join,
)
def test_a_model_of_converted_data_is_that_of_the_data(options: tuple[str, ...]) -> None:
    _words("words.jsonl")
    _words("more.jsonl", 10)
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    _same("words.jsonl", "words", *options)
    with mock.patch("raglane.data.sources.ipc.table", None):
        _run("words", "unread", *options)


def test_converted_data_of_every_task_trains_what_the_data_does() -> None:
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
    features = ("--feature-column", "ids", "--categorical-column", "ids", "--static-column", "town")
    for task, named in (
        ("regress", ("--sequence-column", "x", "--label-column", "total", *features)),
        ("multilabel", ("--sequence-column", "x", "--label-column", "kinds")),
        ("language", ("--sequence-column", "ids")),
        ("transcribe", ("--sequence-column", "x", "--label-column", "kinds")),
        (
            "transcribe",
            ("--sequence-column", "x", "--label-column", "town", "--label-split", "words"),
        ),
        ("classify", ("--sequence-column", "ids", "--label-column", "town", "--tokens", "yes")),
    ):
        folder = f"{task}-{named[-1]}"
        assert main(["convert", "all.jsonl", folder, "--task", task, *named, "--quiet"]) == 0
        _same("all.jsonl", folder, "--task", task, "--validation-fraction", "0", named=named)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (
            [
                f"{row % 6},{9 - row // 6},{row},{'uv'[row % 2]},{'ab'[row % 6 % 2]}"
                for row in range(24)
            ],
            "--time-column hour --label-column kind --time-gaps --feature-column load --feature-column day",
        ),
        (
            [f"{['ab c', 'c b', 'aab'][row % 3]},{'uv'[row % 2]}" for row in range(24)],
            "--split characters",
        ),
    ],
    ids=["times", "texts"],
)
def test_a_run_of_a_converted_csv_file_reads_such_files(rows: list[str], named: str) -> None:
    Path("data.csv").write_text(
        "\n".join(["text,kind" if "split" in named else "id,hour,load,day,kind", *rows]) + "\n"
    )
    assert main(["convert", "data.csv", "data", *named.split(), "--quiet"]) == 0
    _same("data.csv", "data", "--validation-fraction", "0", named=tuple(named.split()))
    columns = json.loads(Path("data-run", "best", "config.json").read_text())["columns"]
    assert (columns["split"] == "characters") == ("split" in named)


def test_a_folder_is_trained_for_the_task_that_it_was_made_for(capsys: Capsys) -> None:
    rows = [{"x": list("abc"[: row % 4]), "y": list("uvw"[: row % 4])} for row in range(24)]
    Path("tags.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = ["--sequence-column", "x", "--label-column", "y"]
    assert main(["convert", "tags.jsonl", "tags", "--task", "tag", *named, "--quiet"]) == 0
    prints(["train", "tags", *FAST, "--output", "run"], capsys, "task: tag")
    for task in ("multilabel", "regress", "classify", "transcribe"):
        fails(
            ["train", "tags", "--task", task],
            capsys,
            "--task",
            "tag, for which 'tags' was converted",
        )
    assert sorted(path.name for path in Path().iterdir()) == ["run", "tags", "tags.jsonl"]
    balanced = ["--task", "tag", "--class-weights", "balanced", "--validation-fraction", "0"]
    _same("tags.jsonl", "tags", *balanced, named=tuple(named))


def test_converted_data_is_seen_to_be_binary(capsys: Capsys) -> None:
    rows = [
        {"x": [[row % 2, step % 2] for step in range(row % 5)], "y": "uv"[row % 2]}
        for row in range(24)
    ]
    for name, content in (("rolls", rows), ("half", [*rows[:-1], {"x": [[0.5, 1]], "y": "u"}])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
        assert main(["convert", f"{name}.jsonl", name, "--task", "forecast", "--quiet"]) == 0
    prints(
        ["train", "rolls", *FAST, "--output", "run"],
        capsys,
        "loss: bce, because all channels are 0 or 1",
    )
    assert "bce" not in prints(["train", "half", *FAST, "--output", "half-run"], capsys)
    chunked = ["--task", "forecast", "--bptt-steps", "2", "--validation-fraction", "0"]
    wanted = _run("half.jsonl", "chunks", *chunked)
    assert (
        _run("half", "folder-chunks", *chunked)["weights.safetensors"]
        == wanted["weights.safetensors"]
    )
    asked = ["train", "half", "--task", "forecast", "--loss", "bce", "--output", "other"]
    fails(asked, capsys, "0 or 1 for the loss bce", "--loss mse")


def test_a_run_on_converted_data_goes_on_to_the_same_bits() -> None:
    _words("words.jsonl")
    assert main(["convert", "words.jsonl", "words", "--quiet"]) == 0
    wanted = _run("words", "whole", "--epochs", "3")
    _run("words", "parts", "--epochs", "1")
    assert main(["train", "--resume", "--output", "parts", "--epochs", "3", "--quiet"]) == 0
    assert (
        Path("parts", "best", "weights.safetensors").read_bytes() == wanted["weights.safetensors"]
    )
