"""The tasks, cells and options of the model on the command line: forms of data, output and
errors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, Capsys, fails, prints, read_rows, tree, write_rows, write_steps
from raglane.cli import main
from raglane.training.settings import INITIAL_STATES, LAYERS, POOLINGS
from small_files import put


def _waves(count: int = 16) -> list[list[float]]:
    return [[math.sin(number + step) for step in range(number % 4 + 2)] for number in range(count)]


def _shape(value: Any) -> Any:
    """Return the lengths of nested lists, () for a number."""
    return (len(value), *_shape(value[0])) if isinstance(value, list) else ()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("one", sum),
        ("two", lambda wave: [sum(wave), max(wave)] if len(wave) != 2 else [0.0, 1.0]),
        ("each", lambda wave: [2 * x for x in wave]),
        ("each-two", lambda wave: [[2 * x, -x] for x in wave]),
    ],
    ids=["one", "two", "each", "each-two"],
)
def test_numbers_of_every_form(tmp_path: Path, capsys: Capsys, name: str, target: Any) -> None:
    rows = [{"values": wave, "y": target(wave)} for wave in _waves()]
    data, run = str(write_rows(tmp_path / "y.jsonl", rows)), str(tmp_path / "run")
    named = ["--sequence-column", "values", "--label-column", "y"]
    prints(["train", data, "--task", "regress", "--output", run, *named, *FAST], capsys, "(mean: ")
    printed = prints(["evaluate", run, data], capsys, "evaluation: R2 ", "MAE ", "points.png")
    assert ("y_1" in printed) == ("two" in name)
    assert main(["predict", run, data, "-o", str(tmp_path / "p.jsonl"), "--quiet"]) == 0
    assert [_shape(row["prediction"]) for row in read_rows(tmp_path / "p.jsonl")] == [
        _shape(row["y"]) for row in rows
    ]


def test_columns_of_numbers_in_csv(tmp_path: Path, capsys: Capsys) -> None:
    lines = ["id,t,x,size,mass"]
    for number, wave in enumerate(_waves()):
        lines += [f"s{number},{step},{x},{number},{number / 2}" for step, x in enumerate(wave)]
    data = put(tmp_path / "sizes.csv", "\n".join(lines) + "\n")
    before = tree(tmp_path)
    command = ["train", str(data), "--task", "regress", "--output", str(tmp_path / "run"), *FAST]
    fails(command, capsys, "no label column named", "--label-column", "'x,y'")
    fails([*command, "--label-column", "size,weight"], capsys, "no column 'weight'")
    assert tree(tmp_path) == before
    prints([*command, "--label-column", "size,mass"], capsys, "features: x\n")
    assert main(["evaluate", str(tmp_path / "run"), str(data)]) == 0
    table = (tmp_path / "run" / "table.txt").read_text().splitlines()
    assert [line.split()[0] for line in table] == ["number", "size", "mass"]
    assert (
        json.loads((tmp_path / "run" / "evaluation.json").read_text())["table"][1]["number"]
        == "mass"
    )
    data.write_text(data.read_text().replace(",7,3.5", ",7,heavy"))
    fails([*command, "--label-column", "mass", "--overwrite"], capsys, "'heavy'", "a finite number")


def _kinds(x: float) -> list[str]:
    return ["up"] * (x > 0) + ["high"] * (x > 0.5)


@pytest.mark.parametrize(
    "target",
    [
        lambda wave: _kinds(sum(wave)),
        lambda wave: "; ".join(_kinds(sum(wave))),
        lambda wave: [_kinds(x) for x in wave],
    ],
    ids=["list", "text", "each"],
)
def test_sets_of_labels_of_every_form(tmp_path: Path, capsys: Capsys, target: Any) -> None:
    rows = [{"values": wave, "kinds": target(wave)} for wave in _waves(30)]
    data, run = str(write_rows(tmp_path / "sets.jsonl", rows)), str(tmp_path / "run")
    named = ["--sequence-column", "values", "--label-column", "kinds"]
    assert (
        main(["train", data, "--task", "multilabel", "--output", run, *named, *FAST, "--quiet"])
        == 0
    )
    prints(
        ["evaluate", run, data],
        capsys,
        "micro-F1 ",
        "macro-F1 ",
        "all labels micro-F1 ",
        "threshold",
    )
    assert (
        main(["predict", run, data, "-o", str(tmp_path / "p.jsonl"), "--probabilities", "-q"]) == 0
    )
    predicted = read_rows(tmp_path / "p.jsonl")
    assert set(predicted[0]) == {"id", "prediction", "p_high", "p_up"}
    if target([1.0]) == [["up", "high"]]:
        assert [len(row["prediction"]) for row in predicted] == [len(wave) for wave in _waves(30)]


@pytest.mark.parametrize(
    ("task", "good", "wrong", "piece"),
    [
        ("regress", [1.0, 2.0], [1.0, 2.0, 3.0], "3 numbers in row 1 (line 2)"),
        ("regress", 1.0, float("nan"), "column 'y'"),
        ("multilabel", [["a"], []], [["a"]], "1 lists of labels for 2 elements"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: Capsys, task: str, good: Any, wrong: Any, piece: str
) -> None:
    data = write_rows(
        tmp_path / "y.jsonl", [{"values": [0.1, 0.2], "y": target} for target in (good, wrong)]
    )
    named = [
        "--sequence-column",
        "values",
        "--label-column",
        "y",
        "--output",
        str(tmp_path / "run"),
    ]
    fails(["train", str(data), "--task", task, *named, *FAST], capsys, piece)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abc\n")
    fails(
        ["train", str(tmp_path / "texts"), "--task", task], capsys, f"a folder for the task {task}"
    )
    assert tree(tmp_path).keys() == {"y.jsonl", "texts/a.txt"}


def test_forecasts_step_by_step_and_piano_rolls(tmp_path: Path, capsys: Capsys) -> None:
    data = write_rows(tmp_path / "waves.jsonl", [{"values": wave} for wave in _waves()])
    rolls = [{"values": [[float(x > 0), float(x <= 0)] for x in wave]} for wave in _waves()]
    notes = write_rows(tmp_path / "rolls.jsonl", rolls)
    command = ["train", "--task", "forecast", *FAST]
    prints([*command, str(data), "--output", str(tmp_path / "waves")], capsys, "(persistence: ")
    printed = prints(
        ["evaluate", str(tmp_path / "waves"), str(data), "--horizon", "2"], capsys, "mean MAE "
    )
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["step", "1", "2"]
    assert main([*command, str(notes), "--output", str(tmp_path / "rolls")]) == 0
    assert (
        "loss: bce, because all channels are 0 or 1; for squared errors: --loss mse"
        in capsys.readouterr().out
    )
    assert (
        main(["train", "--resume", "--output", str(tmp_path / "rolls"), "--epochs", "3", "--quiet"])
        == 0
    )
    prints(["evaluate", str(tmp_path / "rolls"), str(notes)], capsys, "independent nats ")
    halves = write_rows(tmp_path / "halves.jsonl", [{"values": [[0.5, 1.0], [0.5, 0.0]]}])
    fails(["evaluate", str(tmp_path / "rolls"), str(halves)], capsys, "0 or 1 for the loss bce")
    fails(
        [*command, str(data), "--loss", "bce", "--output", str(tmp_path / "no")],
        capsys,
        "--loss mse",
    )
    fails(
        ["evaluate", str(tmp_path / "waves"), str(data), "--horizon", "8"],
        capsys,
        "--horizon must be ... got 8",
    )


def test_language_models(tmp_path: Path, capsys: Capsys) -> None:
    text = put(
        tmp_path / "words.txt", "the dog sees a cat\n\na cat sees the dog\nthe cat sleeps\n" * 4
    )
    assert main(["train", str(text), "--output", str(tmp_path / "text"), *FAST]) == 0
    assert "task: language (guessed; --task chooses)" in capsys.readouterr().out
    command = ["train", str(text), "--task", "language", *FAST]
    for split in ("characters", "words", "bytes"):
        run = str(tmp_path / split)
        more = [
            "--split",
            split,
            "--bptt-steps",
            "5",
            "--tie-weights",
            "--embedding-dropout",
            "0.1",
        ]
        pieces = (
            f"a line is a sequence, split into {split}",
            "bits per token ",
            f"next: raglane sample {run}",
        )
        prints([*command, "--output", run, *more, "--cell", "lstm"], capsys, *pieces)
        prints(
            ["evaluate", run, str(text)],
            capsys,
            "perplexity ",
            "unigram perplexity ",
            "bits per character ",
        )
        lines = prints(
            ["sample", run, "--count", "3", "--prompt", "the cat", "--max-length", "4"], capsys
        ).splitlines()
        assert len(lines) == 3
        assert all(line.startswith("the cat") for line in lines)
        assert (
            main(["predict", run, str(text), "-o", str(tmp_path / "p.jsonl"), "--horizon", "3"])
            == 0
        )
        assert set(read_rows(tmp_path / "p.jsonl")[0]) == {"id", "prediction", "bits"}
    fails(
        [*command, "--task", "classify"],
        capsys,
        "with labels, for the task classify",
        "--task language",
    )
    fails([*command, "--split", "letters"], capsys, "--split must be ... got 'letters'")
    fails([*command, "--bidirectional"], capsys, "--bidirectional", "backward direction")
    fails(["sample", run, "--beam-size", "0"], capsys, "--beam-size must be at least 1, got 0")
    fails(
        ["sample", run, "--count", f"1{15 * '0'}"],
        capsys,
        "Memory is exhausted: ",
        "Reduce --count",
    )
    fails(["sample", run, "--temperature", "-1"], capsys, "--temperature must be ... got -1")
    data = write_rows(tmp_path / "waves.jsonl", [{"values": wave} for wave in _waves()])
    fails(["train", str(data), "--task", "language", *FAST], capsys, "reads tokens")
    assert (
        main(
            [
                "train",
                str(data),
                "--task",
                "forecast",
                "--output",
                str(tmp_path / "waves"),
                *FAST,
                "--quiet",
            ]
        )
        == 0
    )
    fails(["sample", str(tmp_path / "waves")], capsys, "a model of the task forecast")


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("classify", lambda wave: str(len(wave))),
        ("tag", lambda wave: ["up" if x > 0 else "down" for x in wave]),
        ("regress", sum),
        ("multilabel", lambda wave: ["long", "odd"][: len(wave) % 2]),
    ],
    ids=["classify", "tag", "regress", "multilabel"],
)
def test_the_task_is_guessed_from_the_label(
    tmp_path: Path, capsys: Capsys, task: str, label: Any
) -> None:
    data = write_rows(
        tmp_path / "data.jsonl", [{"values": wave, "label": label(wave)} for wave in _waves()]
    )
    named = [
        "--sequence-column",
        "values",
        "--label-column",
        "label",
        "--output",
        str(tmp_path / "run"),
    ]
    assert ("guessed; --task chooses" in prints(["train", str(data), *named, *FAST], capsys)) == (
        task != "classify"
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["task"] == task
    data.write_text('{"values": [1.0], "label": null}\n')
    fails(
        ["train", str(data), "--output", str(tmp_path / "no"), *FAST],
        capsys,
        "data with a label in each row",
    )


def test_a_task_is_not_guessed_against_the_label(tmp_path: Path, capsys: Capsys) -> None:
    # In a CSV file numbers are texts; several candidates are not decided by the task; an error
    # names the true reason.
    rows = [f"{number},{step},{number + 0.5}\n" for number in range(4) for step in range(3)]
    data = put(tmp_path / "cost.csv", "id,x,cost\n" + "".join(rows))
    run = ["--output", str(tmp_path / "run"), "--overwrite", *FAST]
    for more in ([], ["--on-bad-row", "skip"]):
        prints(
            ["train", str(data), "--label-column", "cost", *more, *run],
            capsys,
            "task: regress (guessed",
        )
    prints(
        ["train", str(data), "--label-column", "cost", "--task", "classify", *run],
        capsys,
        "accuracy",
    )
    assert main(["evaluate", str(tmp_path / "run"), str(put(data, "id,x,cost\n0,1,0.5\n"))]) == 0
    assert "(1 sequence of cost.csv)" in capsys.readouterr().out
    both = write_rows(
        tmp_path / "both.jsonl", [{"x": [1.0, 2.0], "place": "a", "kind": "b", "level": 1}] * 4
    )
    fails(
        ["train", str(both), *run],
        capsys,
        "got 3 candidates for the label column: 'place', 'kind', 'level'",
    )
    words = {"tokens": ["a", "b"], "text": "the cat"}
    starred = write_rows(
        tmp_path / "starred.jsonl", [words | {"stars": number} for number in range(4)]
    )
    fails(
        ["train", str(starred), *run],
        capsys,
        "got 2 candidates for the label column: 'text', 'stars'",
    )
    classes = put(
        tmp_path / "classes.ts", "@classLabel true 1.5 2\n@data\n" + "1,2,3:1.5\n3,1:2\n" * 4
    )
    prints(["train", str(classes), *run], capsys, "accuracy")
    null = write_rows(tmp_path / "null.jsonl", [{"x": [1.0], "y": 0.5}, {"x": [1.0], "y": None}])
    for named in ([], ["--label-column", "y"]):
        fails(
            ["train", str(null), *named, *run], capsys, "got a null in row 1 (line 2), column 'y'"
        )


def test_texts_and_whole_numbers(tmp_path: Path, capsys: Capsys) -> None:
    data = put(tmp_path / "texts.csv", "text,label\n" + "guten Tag,de\ngood day,en\n" * 6)
    printed = prints(
        ["train", str(data), "--output", str(tmp_path / "run"), "--split", "characters", *FAST],
        capsys,
    )
    assert "each row is a sequence, the text of 'text'" in printed
    assert "the texts of 'text' are split into characters" in printed
    assert "label column: 'label' (the only candidate)" in printed
    assert (
        main(
            [
                "predict",
                str(tmp_path / "run"),
                str(data),
                "-o",
                str(tmp_path / "p.csv"),
                "--top",
                "2",
            ]
        )
        == 0
    )
    capsys.readouterr()
    rows = [{"input_ids": [5, 7, 5][: number % 3 + 1], "label": number % 2} for number in range(12)]
    numbers = write_rows(tmp_path / "ids.jsonl", rows)
    for more, kind in (
        ([], "tokens"),
        (["--tokens", "no"], "elements of 1 channel"),
        (["--tokens", "yes"], "tokens"),
    ):
        command = [
            "train",
            str(numbers),
            "--output",
            str(tmp_path / "run"),
            "--overwrite",
            *more,
            *FAST,
        ]
        prints(command, capsys, "(--tokens chooses)", f" {kind}, from ")
        assert main(["evaluate", str(tmp_path / "run"), str(numbers), "--quiet"]) == 0
    fails(
        ["train", str(numbers), "--tokens", "perhaps", *FAST],
        capsys,
        "--tokens must be ... got 'perhaps'",
    )


def test_a_loss_says_what_the_task_is(tmp_path: Path, capsys: Capsys) -> None:
    rows = [
        {"values": wave, "y": f"{'ab'[number % 2]}", "n": number}
        for number, wave in enumerate(_waves())
    ]
    data = write_rows(tmp_path / "waves.jsonl", rows)
    values = ["--sequence-column", "values"]
    for number, (loss, label, task) in enumerate(
        (
            ("bce", "y", "multilabel"),
            ("mae", "n", "regress"),
            ("quantile", "n", "regress"),
            ("cross_entropy", "y", ""),
        )
    ):
        told = [
            "--loss",
            loss,
            "--label-column",
            label,
            *values,
            "--output",
            str(tmp_path / f"{number}"),
            *FAST,
        ]
        printed = prints(["train", str(data), *told], capsys)
        assert (f"task: {task} (guessed; --task chooses)" in printed) == bool(task)
        assert (
            json.loads((tmp_path / f"{number}" / "run.json").read_text())["settings"]["loss"]
            == loss
        )
    rolls = write_rows(
        tmp_path / "rolls.jsonl", [{"values": [step % 2 for step in range(5)]} for _ in range(8)]
    )
    for loss in ("bce", "mse"):
        assert (
            main(["train", str(rolls), "--loss", loss, "--output", str(tmp_path / loss), *FAST])
            == 0
        )
        assert "task: forecast (guessed; --task chooses)" in capsys.readouterr().out
    fails(["train", str(data), "--loss", "quantile", "--label-column", "y", *values], capsys, "'y'")
    fails(["train", str(data), "--loss", "cross", *values], capsys, "--loss")
    demo = ["demo", "--loss", "bce", "--output", str(tmp_path / "demo")]
    fails(demo, capsys, "--loss", "classify")
    claimed = tmp_path / "claimed"
    claimed.mkdir()
    (claimed / "run.json").write_text("{}")
    resumes = "raglane train --resume to resume the run"
    fails(["demo", "--output", str(claimed)], capsys, resumes)


_REGULARISATION = [
    "--input-dropout",
    "0.1",
    "--state-dropout",
    "0.2",
    "--weight-dropout",
    "0.2",
    "--zoneout",
    "0.1",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("cells") / "steps.csv")


def _train(data: Path, out: Path, *options: str) -> int:
    return main(
        [
            "train",
            str(data),
            "--output",
            str(out),
            "--label-column",
            "label",
            *FAST,
            "--quiet",
            *options,
        ]
    )


@pytest.mark.parametrize(
    "options",
    [
        *(["--cell", cell, "--bidirectional"] for cell in ("slstm", "mingru", "cfc")),
        ["--missing", "elapsed", "--cell", "grud", "--bidirectional", "--num-layers", "2"],
        *(["--pooling", pooling, "--num-layers", "2"] for pooling in POOLINGS),
        *(["--initial-state", state, "--cell", "lstm"] for state in INITIAL_STATES),
        ["--layer-norm"],
        ["--layer-norm", "--cell", "lstm", *_REGULARISATION],
    ],
    ids=" ".join,
)
def test_a_run_keeps_its_model(data: Path, tmp_path: Path, options: list[str]) -> None:
    run = tmp_path / "run"
    assert _train(data, run, *options) == 0
    settings = json.loads((run / "run.json").read_text())["settings"]
    for name, value in zip(options, [*options[1:], ""], strict=True):
        if name.startswith("--"):
            kept = settings["cell" if name == "--cell" else name[2:].replace("-", "_")]
            assert str(kept) == value or kept is True
    assert main(["predict", str(run), str(data), "-o", str(tmp_path / "found.csv")]) == 0
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 13


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (["--layer-norm", "--cell", "sru"], "--layer-norm must be ... got True"),
        (["--cell", "grud"], "Pass --missing elapsed"),
        (
            ["--cell", "grud", "--missing", "elapsed", "--task", "forecast"],
            "--cell must be ... got 'grud'",
        ),
        (["--cell", "mingru", "--state-dropout", "0.1"], "--state-dropout must be ... got 0.1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(
    data: Path, tmp_path: Path, capsys: Capsys, options: list[str], piece: str
) -> None:
    fails(
        [
            "train",
            str(data),
            "--label-column",
            "label",
            "--output",
            str(tmp_path / "run"),
            *options,
        ],
        capsys,
        piece,
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [*(["--cell", cell] for cell in LAYERS), ["--layer-norm"]], ids=" ".join
)
def test_japanese_vowels(tmp_path: Path, capsys: Capsys, options: list[str]) -> None:
    assert main(["demo", "--output", str(tmp_path / "run"), "--threads", "1", *options]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("test: accuracy")
    )
    assert float(line.split()[2].rstrip(",")) >= 0.90


def test_times_that_are_not_even(tmp_path: Path, capsys: Capsys) -> None:
    """Cells that read times predict something else for other times."""
    lines = ["id,time,x,label"]
    for number in range(12):
        lines += [
            f"s{number},{step * (1 + number % 2)},{'' if step == 1 else step},{'ab'[number % 2]}"
            for step in range(4)
        ]
    data = put(tmp_path / "uneven.csv", "\n".join(lines) + "\n")
    later = tmp_path / "later.csv"
    moved = {"1": "1.5", "2": "2.5", "3": "7"}
    cells = [line.split(",") for line in lines[1:]]
    later.write_text(
        "\n".join([lines[0], *(",".join([c[0], moved.get(c[1], c[1]), *c[2:]]) for c in cells)])
        + "\n"
    )
    for cell in ("grud", "cfc"):
        run, found = tmp_path / cell, []
        assert _train(data, run, "--cell", cell, "--missing", "elapsed", "--time-gaps") == 0
        config = json.loads((run / "best" / "config.json").read_text())["model"]
        assert (config["input_size"], config["gap_column"]) == (6, 1 if cell == "cfc" else None)
        for path in (data, later):
            assert main(["predict", str(run), str(path), "-o", str(tmp_path / "found.csv")]) == 0
            found.append((tmp_path / "found.csv").read_text())
        assert found[0] != found[1]
        assert main(["evaluate", str(run), str(data)]) == 0
    later.write_text(later.read_text().replace("id,time,", "id,position,"))
    command = ["predict", str(run), str(later), "-o", str(tmp_path / "found.csv")]
    fails(command, capsys, "no time column for --time-gaps")


def test_grud_requires_features(tmp_path: Path, capsys: Capsys) -> None:
    data = put(
        tmp_path / "words.csv",
        "id,word,kind\n" + "".join(f"s{n},w{n},{'ab'[n % 2]}\n" for n in range(12)),
    )
    options = [
        "--cell",
        "grud",
        "--missing",
        "elapsed",
        "--label-column",
        "kind",
        "--output",
        str(tmp_path / "run"),
    ]
    fails(
        ["train", str(data), *options],
        capsys,
        "--cell must be a cell other than grud for tokens",
        "got 'grud'",
    )
