"""The commands called as a user would, good and bad input: what is printed, written, and left
alone.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from commands import FAST, Capsys, fails, prints, read_csv, read_rows, tree, write_rows
from raglane.cli import main


def _write_csv(path: Path, rows: list[list[Any]]) -> Path:
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def _steps(count: int = 20) -> list[list[Any]]:
    """Return rows of sequences of 1 to 5 steps that rise or fall."""
    rows: list[list[Any]] = [["id", "hour", "x", "y", "kind"]]
    for number in range(count):
        kind, slope = ("up", 1) if number % 2 else ("down", -1)
        rows += [
            [f"s{number}", hour, slope * hour + math.sin(number), math.cos(number + hour), kind]
            for hour in range(number % 5 + 1)
        ]
    return rows


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a run of each task."""
    folder = tmp_path_factory.mktemp("work")
    data = _write_csv(folder / "steps.csv", _steps())
    texts = [["the", "dog", "sees", "a", "cat"][: number % 6] for number in range(20)]
    rows = [{"words": text, "tags": [*"DNVDN"[: len(text)]]} for text in texts]
    words = write_rows(folder / "words.jsonl", rows)
    named = ["--sequence-column", "words", "--label-column", "tags"]
    commands = [
        [str(data), "--time-column", "hour", "--output", str(folder / "classify")],
        [str(words), "--task", "tag", *named, "--bidirectional", "--output", str(folder / "tag")],
        [
            str(data),
            "--task",
            "forecast",
            "--feature-column",
            "x",
            "--output",
            str(folder / "forecast"),
        ],
    ]
    for command in commands:
        assert main(["train", *command, *FAST, "--quiet"]) == 0
    return folder


def test_a_long_epoch_has_lines(work: Path, tmp_path: Path, capsys: Capsys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raglane.runs.progress._LINE_EVERY", 0.0)
        train = ["train", str(work / "steps.csv"), "--output", str(tmp_path / "run"), *FAST]
        assert main([*train, "--batch-size", "6", "--validation-fraction", "0"]) == 0
    lines = [
        line.partition("  loss")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("epoch 2")
    ]
    assert lines == [
        "epoch 2/2  batch 1/4",
        "epoch 2/2  batch 2/4",
        "epoch 2/2  batch 3/4",
        "epoch 2/2",
    ]


def test_train_says_what_it_does(tmp_path: Path, capsys: Capsys) -> None:
    data = _write_csv(tmp_path / "steps.csv", _steps())
    test = _write_csv(tmp_path / "later.csv", _steps(6))
    out = tmp_path / "deep" / "run"
    assert (
        main(["train", str(data), "--output", str(out), "--test", str(test), "--seed", "3", *FAST])
        == 0
    )
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
    names = "best last run.json run.toml card.md report.html curves.csv curves.png evaluation.json confusion.png"
    assert {path.name for path in out.iterdir()} == {*names.split(), "confusion.txt"}
    assert len((out / "curves.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(("task", "data"), [("classify", "steps.csv"), ("tag", "words.jsonl")])
def test_predict_writes_every_format_alike(
    work: Path, tmp_path: Path, task: str, data: str
) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        output = str(tmp_path / f"p.{suffix}")
        assert (
            main(
                [
                    "predict",
                    str(work / task),
                    str(work / data),
                    "-o",
                    output,
                    "--probabilities",
                    "-q",
                ]
            )
            == 0
        )
    rows = read_rows(tmp_path / "p.jsonl")
    assert pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist() == rows
    texts = read_csv(tmp_path / "p.csv")
    if task == "tag":
        assert [len(row["prediction"]) for row in rows] == [number % 6 for number in range(20)]
        assert [row["id"] for row in rows] == list(range(20))
        for name in ("words", "prediction", "p_D"):
            flat = [str(entry) for row in rows for entry in row[name]]
            assert [text[name] for text in texts] == flat
        return
    assert list(rows[0]) == list(texts[0]) == ["id", "prediction", "probability", "p_down", "p_up"]
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        assert (
            (row["id"], row["prediction"])
            == (text["id"], text["prediction"])
            == (f"s{number}", row["prediction"])
        )
        assert row["probability"] == float(text["probability"]) == max(row["p_down"], row["p_up"])
        assert row["p_down"] + row["p_up"] == pytest.approx(1)


def test_texts_that_a_spreadsheet_executes(tmp_path: Path, capsys: Capsys) -> None:
    rows = _steps()
    for row in rows[1:]:
        row[0], row[-1] = (
            {"s1": "=1+1", "s2": "+1", "s3": "@ü", "s4": "-1"}.get(row[0], row[0]),
            f"={row[-1]}",
        )
    data, run = str(_write_csv(tmp_path / "steps.csv", rows)), str(tmp_path / "run")
    assert main(["train", data, "--output", run, *FAST, "--quiet"]) == 0
    found = {}
    for name, more in (("plain", []), ("escaped", ["--escape-formulas"])):
        command = [
            "predict",
            run,
            data,
            "-o",
            str(tmp_path / f"{name}.csv"),
            "--probabilities",
            "--quiet",
            *more,
        ]
        assert main(command) == 0
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            found[name] = list(csv.reader(file))
    assert {row[0] for row in found["plain"]} >= {"=1+1", "+1", "@ü", "-1", "s5"}
    assert {row[0] for row in found["escaped"]} >= {"'=1+1", "'+1", "'@ü", "'-1", "s5"}
    assert {row[1] for row in found["escaped"][1:]} <= {"'=up", "'=down"}
    for plain, escaped in zip(found["plain"], found["escaped"], strict=True):
        assert [entry.removeprefix("'") for entry in escaped] == plain
    for output in ("p.jsonl", "p.parquet"):
        command = ["predict", run, data, "-o", str(tmp_path / output), "--escape-formulas"]
        fails(command, capsys, "--escape-formulas", "except for .csv")
        assert not (tmp_path / output).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
        assert main(["predict", run, data, "--probabilities"]) == 0
        assert printed.getvalue() == (tmp_path / "plain.csv").read_bytes()
        patch.setattr(sys, "stdout", None)  # closed
        assert main(["predict", run, data, "-o", str(tmp_path / "plain.csv")]) == 0
        fails(["predict", run, data, "-q"], capsys, "standard output must be open")
        sys.stdout.close()


def test_predict_reads_the_columns_that_training_found(tmp_path: Path) -> None:
    """Another text column and a missing label do not matter."""
    rows = [{"text": ["a", "b"][: 1 + n % 2], "kind": str(n % 2)} for n in range(20)]
    trained = write_rows(tmp_path / "train.jsonl", rows)
    run, output = tmp_path / "run", tmp_path / "p.csv"
    assert main(["train", str(trained), "--output", str(run), *FAST, "--quiet"]) == 0
    later = write_rows(
        tmp_path / "later.jsonl", ({"note": ["x"], "text": row["text"]} for row in rows)
    )
    assert main(["predict", str(run), str(later), "-o", str(output), "--quiet"]) == 0
    assert len(output.read_text().splitlines()) == 21


def test_resume_and_overwrite(tmp_path: Path, capsys: Capsys) -> None:
    data = _write_csv(tmp_path / "steps.csv", _steps())
    out = ["--output", str(tmp_path / "run")]
    assert main(["train", str(data), *out, *FAST, "--test", str(data), "--quiet"]) == 0
    fails(
        ["train", "--resume", *out, "--hidden-size", "8"], capsys, "--hidden-size must be ... got 8"
    )
    fails(["train", "--resume", *out, "--epochs", "1"], capsys, "2 are done")
    prints(
        ["train", "--resume", *out],
        capsys,
        "training is complete at epoch 2; pass e.g. --epochs 12",
    )
    prints(["train", "--resume", *out, "--epochs", "3"], capsys, "epoch 3/3")
    fails(["train", str(data), *out, *FAST], capsys, "--overwrite")
    assert main(["train", str(data), *out, *FAST, "--overwrite", "--quiet"]) == 0
    assert len((tmp_path / "run" / "curves.csv").read_text().splitlines()) == 3
    assert not (tmp_path / "run" / "evaluation.json").exists()


@pytest.mark.parametrize(
    "options", [["--sequence-column"], ["--resume"], ["one", "too", "many"]], ids=" ".join
)
def test_bad_options_are_one_line(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_csv(tmp_path / "steps.csv", _steps())
    fails(["train", "steps.csv", *options], capsys)
    assert tree(tmp_path).keys() == {"steps.csv"}


def test_bad_data_is_one_line(tmp_path: Path, capsys: Capsys) -> None:
    same, null = tmp_path / "same.jsonl", tmp_path / "null.jsonl"
    same.write_text('{"x": [1.0], "y": "a"}\n' * 3)
    null.write_text('{"x": [[1, 2], null], "y": "a"}\n')
    out = ["--output", str(tmp_path / "run")]
    fails(["train", str(same), *out], capsys, "same.jsonl must be ... got only the class", "'a'")
    fails(["train", str(null), *out], capsys, "null")
    assert not (tmp_path / "run").exists()


def test_bad_input_to_a_model_is_one_line(work: Path, tmp_path: Path, capsys: Capsys) -> None:
    before = tree(work)
    model, data = str(work / "classify"), str(work / "steps.csv")
    output = ["-o", str(tmp_path / "p.csv")]
    unseen = _write_csv(tmp_path / "unseen.csv", [*_steps(), ["z", 0, 1.0, 2.0, "sideways"]])
    narrow = _write_csv(tmp_path / "narrow.csv", [row[:3] for row in _steps()])
    gaps = _write_csv(tmp_path / "gaps.csv", [*_steps(), ["z", 0, "", 2.0, "up"]])
    fails(["evaluate", model, str(unseen)], capsys, "sideways", "id 'z'")
    fails(["evaluate", model], capsys, "data must be ... got nothing")
    fails(["evaluate", str(tmp_path), data], capsys, "without a saved model")
    fails(["predict", str(work), data, *output], capsys, "without a saved model")
    fails(["predict", model, str(narrow), *output], capsys, "'y'")
    fails(["predict", model, str(gaps), *output], capsys, "id 'z'")
    fails(
        ["predict", model, data, "-o", str(tmp_path / "p.xlsx")], capsys, ".parquet, .csv, .jsonl"
    )
    fails(["predict", model, data, "-o", str(tmp_path / "no" / "p.csv")], capsys, "mkdir")
    fails(
        ["predict", model, data, *output, "--batch-size", "0"],
        capsys,
        "--batch-size must be ... got 0",
    )
    fails(["predict", str(work / "forecast"), data, *output, "--horizon", "0"], capsys, "horizon")
    fails(
        ["predict", str(work / "forecast"), data, *output, "--probabilities"],
        capsys,
        "probabilities",
    )
    assert not (tmp_path / "p.csv").exists()
    assert tree(work) == before


def test_help_and_version(capsys: Capsys) -> None:
    assert prints(["--version"], capsys).startswith("raglane ")
    pieces = (
        "Task and model",
        "Training",
        "Run and output",
        "[default: 0.003]",
        "--bucket",
        "For example",
    )
    prints(["train", "--help-all"], capsys, *pieces)


def test_without_the_train_extra(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    data = str(work / "steps.csv")
    fails(
        ["train", data, "--label-column", "kind", "--output", str(tmp_path / "run"), "-q"],
        capsys,
        "raglane[train]",
    )
    assert not (tmp_path / "run").exists()


def test_results_as_json(work: Path, tmp_path: Path, capsys: Capsys) -> None:
    run, data = str(work / "classify"), str(work / "steps.csv")
    shown = json.loads(prints(["show", run, "--json", "-"], capsys))
    assert (shown["task"], shown["labels"], shown["settings"]["hidden_size"]) == (
        "classify",
        ["down", "up"],
        4,
    )
    assert "labels" in prints(["show", run], capsys, "2: down, up", "hidden size 4")
    found = json.loads(prints(["evaluate", run, data, "-o", str(tmp_path), "--json", "-"], capsys))
    assert found == json.loads((tmp_path / "evaluation.json").read_text())
    (compared,) = json.loads(prints(["compare", run, "--json", "-"], capsys))
    assert len(compared["rows"]) == 1
    target = tmp_path / "facts.json"
    train = ["train", data, "--time-column", "hour", *FAST, "--quiet", "--json", str(target)]
    assert main([*train, "--output", str(tmp_path / "run")]) == 0
    assert json.loads(target.read_text())["run"] == str(tmp_path / "run")
    bench = ["bench", "--cells", "gru", "--sizes", "3x5x4", "--modes", "infer", "--json", "-"]
    assert json.loads(prints(bench, capsys))[0]["rows"]


@pytest.mark.parametrize("command", ["train", "tune"])
@pytest.mark.parametrize("options", [[], ["--epochs", "1"], ["--quiet", "--seed", "3"]])
def test_training_without_data_names_the_demo(
    command: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
) -> None:
    monkeypatch.chdir(tmp_path)
    fails([command, *options], capsys, "data must be a file or a folder", "raglane demo trains")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("bptt", [[], ["--bptt-steps", "3"]])
def test_a_dry_run_writes_nothing(
    work: Path, bptt: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    task = ["--task", "forecast", "--feature-column", "x"] if bptt else []
    time = ["--time-column", "hour"]
    command = ["train", str(work / "steps.csv"), *time, *FAST, *task, *bptt, "--output", "run"]
    printed = prints([*command, "--dry-run"], capsys, "model: GRU, ", ", on cpu", "first batch: ")
    assert tree(tmp_path) == {}
    assert "and write run; nothing is written" in printed.splitlines()[-1]
    assert main([*command, "--quiet"]) == 0
    first = read_csv(Path("run/curves.csv"))[0]
    if not bptt:  # one batch of all sequences, before the first step
        assert f"loss {float(first['train_loss']):.4f};" in printed
    before = tree(tmp_path)
    fails([*command, "--dry-run"], capsys, "which contains a run")
    prints([*command, "--dry-run", "--overwrite"], capsys, "nothing is written")
    resume = ["train", "--resume", "--output", "run", "--dry-run"]
    fails(resume, capsys, "--dry-run must be used without --resume")
    assert tree(tmp_path) == before


def test_the_help_of_train_lists_the_common_options(capsys: Capsys) -> None:
    some = prints(["train", "--help"], capsys, "--hidden-size", "--help-all", "[DATA]")
    every = prints(["train", "--help-all"], capsys, "--hidden-size", "--warmup")
    assert "--warmup" not in some
    assert "<bool>" not in some.replace("--help", "").split("Task and model")[1]
    assert 15 < some.count("│ --") < 30
    assert every.count("│ --") > 70
    assert "--warmup" not in prints(["train", "--help"], capsys)  # once more after --help-all


def test_a_flag_can_be_undone(work: Path, tmp_path: Path) -> None:
    train = ["train", str(work / "steps.csv"), "--time-column", "hour", *FAST, "--quiet"]
    config = tmp_path / "two.toml"
    config.write_text("bidirectional = true\n")
    folder = tmp_path / "run"
    undone = ["--config", str(config), "--no-bidirectional", "--output", str(folder)]
    assert main([*train, *undone]) == 0
    assert not json.loads((folder / "run.json").read_text())["settings"]["bidirectional"]


def test_lists_are_repeated_or_have_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """A column whose name has a comma is one column."""
    monkeypatch.chdir(tmp_path)
    rows: list[list[Any]] = [["id", "a", "b", '"d,e"', "y"]]
    rows += [[f"s{n}", n, n % 3, -n, "uv"[n % 2]] for n in range(12) for _ in range(2)]
    _write_csv(Path("ok.csv"), rows)
    train = ["train", "ok.csv", "--label-column", "y", *FAST, "--dry-run"]
    for words, channels in (
        (["a,b"], 2),
        (["a", "b"], 2),
        (["a, b", "d,e"], 3),
        (["d,e"], 1),
        (["d,e,a"], None),
        (["a,c"], None),
    ):
        named = [word for name in words for word in ("--feature-column", name)]
        if channels is None:
            fails(
                [*train, *named], capsys, "no column 'd'" if "d,e,a" in words else "no column 'c'"
            )
        else:
            number = f"{channels} channel" + "s" * (channels > 1)
            prints([*train, *named], capsys, f" elements of {number}")
    convert = ["convert", "ok.csv", "made", "--label-column", "y", "--feature-column", "a,b"]
    prints(convert, capsys, "2 channels")
    quantiles = ["--task", "forecast", "--loss", "quantile", "--quantile", "0.1,0.5"]
    named = ["--feature-column", "a,b", "--output", "run"]
    command = ["train", "ok.csv", *named, *quantiles, "--quantile=0.9", *FAST, "--quiet"]
    assert main(command) == 0
    settings = json.loads(Path("run/run.json").read_text())["settings"]
    assert settings["quantile"] == [0.1, 0.5, 0.9]
    bench = ["bench", "--cells", "gru", "--cells=rnn", "--sizes", "3x5x4", "--modes", "infer"]
    table = json.loads(prints([*bench, "--json", "-"], capsys))[0]
    assert [row[0] if isinstance(row, list) else row["cell"] for row in table["rows"]] == [
        "gru",
        "rnn",
    ]
