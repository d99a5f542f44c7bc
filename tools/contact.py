"""The mistakes and questions of a newcomer to the command line, and the answers: ``make contact``.

A case is a command on small files that :func:`make_files` writes, its exit code, and patterns of
its output; a pattern after ``not`` must be absent. ``python -m contact WORD`` plays the cases whose
title or command contains a word.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raglane.cli import main as raglane

_FAST = "--epochs 2 --hidden-size 4 --threads 1"


@dataclass(frozen=True)
class Case:
    """A command, its exit code, and the patterns of its output."""

    title: str
    command: str
    code: int
    patterns: tuple[str, ...]


def case(title: str, command: str, code: int, *patterns: str) -> Case:
    return Case(title, command, code, patterns)


CASES = [
    # What the sequences are, and what the model is worth.
    case(
        "names", "train names.csv --sequence-column name", 0, "words? .*are split into characters"
    ),
    case(
        "texts to texts",
        "train names.csv --task transcribe --sequence-column name",
        0,
        "token error rate",
    ),
    case(
        "names as words",
        "train names.csv --sequence-column name --split words",
        0,
        "pass --split characters",
    ),
    case("columns as steps", "train wide.csv", 0, "whose steps are the columns t0 to t5"),
    case(
        "a model that has learned little",
        "train wide.csv",
        0,
        "^note: .*try --epochs",
    ),
    case(
        "a series by months",
        "train months.csv --task forecast",
        0,
        "all rows are one series",
        "the end of the seq",
    ),
    case(
        "one series without its task",
        "train months.csv",
        2,
        "if all rows are one series, pass --task forecast",
    ),
    case(
        "its seasons",
        "evaluate months months.csv --horizon 12 --backtests 3",
        0,
        "season 12 MAE",
        r"^all 12 steps: MAE [\d.]+, persistence MAE .*season 12 MAE [\d.]+\n\Z",
    ),
    case(
        "the dates of a forecast",
        "predict months months.csv --horizon 2",
        0,
        r"^id,step,month,prediction$",
        r"^0,2,\d{4}-\d\d-01,\d",
    ),
    case(
        "a season that is chosen",
        "train months.csv --task forecast --epochs 2",
        0,
        "^season: 12 steps, because the held-out part repeats it; --season 0 for none$",
    ),
    case(
        "none",
        "train months.csv --task forecast --epochs 2 --season 0",
        0,
        "not season: ",
    ),
    case(
        "a season that drowns in noise",
        "train noisy.csv --task forecast",
        0,
        "the end of the seq",
        "not season: ",
    ),
    case("its dropout", "train months.csv --task forecast", 0, "^dropout: 0.3, because of the sea"),
    case("another one", "train months.csv --task forecast --dropout 0.1", 0, "not ^dropout: "),
    case(
        "advice that was followed",
        "train wide.csv --epochs 4 --dropout 0.3",
        0,
        "^note: ",
        "not try .*--dropout 0.3",
        "not try --epochs 4 ",
    ),
    case(
        "a column with a value per row",
        "train batches.csv --epochs 4",
        0,
        "^note: the model is not better than a simple rule",
        "first, column batch has 54 values in 54 elements, as times and IDs have",
    ),
    case(
        "many epochs in a pipe",
        "train batches.csv --epochs 100 --lr 0.1",
        0,
        "^epoch +100/100",
        r"not (^epoch .*\n){40}",
    ),
    case(
        "words and their tags", "predict tags tags.jsonl", 0, "^id,step,words,p", "^0,2,cat,[DNV],"
    ),
    case(
        "tags that may depend on what follows", "train tags.jsonl", 0, "^directions: 2, .*--no-bid"
    ),
    case("tags of a stream", "train tags.jsonl --no-bidirectional", 0, "not ^directions: "),
    case(
        "the next weekdays of several shops",
        "predict shops shops.csv --horizon 2",
        0,
        r"^shop,step,day,prediction\nnorth,1,2024-03-25,.*\nnorth,2,2024-03-26,.*\nsouth,1,2024-03-25,",
    ),
    case(
        "the end of each shop",
        "train shops.csv --task forecast",
        0,
        "^validation: the ends of 2 sequences, 10 % of their elements$",
    ),
    case(
        "a run of another version",
        "predict newer steps.csv",
        2,
        "at most .*, got format version 99",
    ),
    case("a season of one step", "train months.csv --task forecast --season 1", 2, "at least 2"),
    case(
        "a season of classes",
        "train steps.csv --season 7",
        2,
        "unset for all tasks except forecast",
    ),
    # Options before the task is known.
    case("an option of another task", "train lines.txt --bptt-steps 5", 0, "task: language"),
    case("tied weights of a text", "train lines.txt --tie-weights", 0, "task: language"),
    case("a penalty of a text", "train lines.txt --activation-penalty 1", 0, "task: language"),
    case(
        "tied weights of numbers", "train steps.csv --tie-weights", 2, "all tasks except language"
    ),
    # Suggestions.
    *(
        case(f"{given} for {near}", f"train steps.csv {given}", 2, rf"Pass {near}\.$")
        for given, near in [
            ("--task regres", "regress"),
            ("--cell gruu", "gru"),
            ("--pooling avg", "mean"),
            ("--learning-rate 1", "--lr"),
            ("--batch 3", "--batch-size"),
            ("--bi-directional", "--bidirectional"),
            ("--layers 2", "--num-layers"),
            ("--n-epochs 3", "--epochs"),
            ("--label kind", "--label-column"),
            ("--early-stopping", "--patience"),
        ]
    ),
    # Fixes that work.
    case(
        "a renamed column",
        "predict run renamed.csv",
        2,
        "name all 2 columns in their order.*--feature-column",
    ),
    case(
        "its fix",
        "predict run renamed.csv --feature-column x --feature-column z",
        0,
        r"^s0,(up|down),0\.\d+$",
    ),
    case(
        "evaluation without labels",
        "evaluate run unlabelled.csv",
        2,
        "data without labels only to predict",
    ),
    case("rows that are texts", "train names.csv", 2, "if each row is a text.*--sequence-column"),
    case("rolls without labels", "train rolls.jsonl", 2, "without labels, pass --task forecast"),
    case("their fix", "train rolls.jsonl --task forecast", 0, "loss: bce"),
    case("tabs", "train steps.tsv", 0, "features: x, y"),
    case("tabs in a .csv", "train tabs.csv", 0, "features: x, y"),
    case("decimal commas", "train commas.csv", 0, "features: x, y"),
    case("quoted decimal commas", "train quoted.csv", 2, "decimal points"),
    # Predictions.
    case(
        "predictions on standard output",
        "predict run steps.csv",
        0,
        r"^id,prediction,probability$",
        r"^s0,",
    ),
    case("no run", "predict no-run steps.csv", 2, "no-run must be the folder of a run"),
    *(
        case(f"a {name}", f"train {name}", 0, "training: 22 sequences")
        for name in ("steps.json", "steps.csv.gz", "steps.jsonl.gz", "steps.npz")
    ),
    case(
        "sets of numbers as labels", "train chords.jsonl --sequence-column x", 0, "task: multilabel"
    ),
    case("numbers as labels", "train numbers.csv", 2, "40 different whole numbers.*--task regress"),
    case("whole labels", "predict whole whole.jsonl -o whole.out.jsonl", 0, "24 sequences"),
    case("ids that repeat", "train repeated.jsonl", 0, "3 sequences repeat the id"),
    case(
        "a test of training data",
        "train steps.csv --test steps.csv",
        0,
        "24 of 24 sequences of steps.csv are also",
    ),
    # Comparisons and URLs.
    case(
        "runs without a model",
        "compare run whole empty",
        0,
        "left out: empty, which has no saved model",
    ),
    case("data at a URL", "train file://{here}/steps.csv", 0, "training: 22 sequences"),
    case("a run at a URL", "predict file://{here}/run file://{here}/steps.csv", 0, "^s0,"),
    case("a folder at a URL", "convert file://{here}/parts parts.out", 0, "48 sequences"),
    case("a bucket without its package", "convert s3://bucket/folder out", 2, "Install s3fs"),
    case(
        "no such URL",
        "train http://127.0.0.1:9/steps.csv",
        2,
        "http://127.0.0.1:9/steps.csv.*no valid response",
    ),
    # Long runs.
    case("checkpoints in an epoch", "train steps.csv --checkpoint-minutes 0", 0, "best: epoch"),
]


def make_files(folder: Path) -> None:
    """Write the data of all cases, and train a model."""
    rows = [
        [
            f"s{n}",
            step,
            round((-step, step)[n % 2] + math.sin(n), 3),
            step / 2,
            ("down", "up")[n % 2],
        ]
        for n in range(24)
        for step in range(n % 3 + 2)
    ]
    names = ["id", "t", "x", "y", "kind"]
    _write(folder / "steps.csv", names, rows)
    _write(folder / "renamed.csv", ["id", "t", "x", "z", "kind"], rows)
    _write(folder / "unlabelled.csv", names[:4], [row[:4] for row in rows])
    for name in ("steps.tsv", "tabs.csv"):
        _write(folder / name, names, rows, "\t")
    commas: list[list[Any]] = [
        [*row[:2], *(str(n).replace(".", ",") for n in row[2:4]), row[4]] for row in rows
    ]
    _write(folder / "commas.csv", names, commas, ";")
    _write(folder / "quoted.csv", names, commas)
    (folder / "steps.csv.gz").write_bytes(gzip.compress((folder / "steps.csv").read_bytes()))
    sequences: list[dict[str, Any]] = [
        {
            "x": [[row[2], row[3]] for row in rows if row[0] == f"s{number}"],
            "kind": ["down", "up"][number % 2],
        }
        for number in range(24)
    ]
    (folder / "steps.json").write_text(json.dumps(sequences, indent=1))
    (folder / "steps.jsonl.gz").write_bytes(gzip.compress(_lines(sequences).encode()))
    steps, kinds = (
        np.array([row[2:4] for row in rows]),
        np.array([row["kind"] for row in sequences]),
    )
    np.savez(
        folder / "steps.npz", x=steps, lengths=[len(row["x"]) for row in sequences], kind=kinds
    )
    words = ["anna", "emma", "otto", "hanna"]
    _write(
        folder / "names.csv",
        ["name", "language"],
        [[words[n % 4], ["de", "en"][n % 2]] for n in range(24)],
    )
    wide = [
        [f"s{n}", *((7 * n + 3 * step) % 11 for step in range(6)), "ab"[n % 2]] for n in range(24)
    ]
    _write(folder / "wide.csv", ["id", *(f"t{step}" for step in range(6)), "label"], wide)
    months = [
        [f"{1949 + n // 12}-{n % 12 + 1:02}", round(n + 20 * math.sin(n * math.pi / 6))]
        for n in range(96)
    ]
    _write(folder / "months.csv", ["month", "passengers"], months)
    random = np.random.default_rng(1)
    noisy = np.sin(np.arange(300) * math.pi / 12) + 0.5 * random.normal(size=300)
    _write(
        folder / "noisy.csv",
        ["hour", "level"],
        [[hour, level] for hour, level in enumerate(noisy.round(3))],
    )
    batches = [[n, f"b{n}", round(random.normal(), 2), "ab"[random.integers(2)]] for n in range(60)]
    _write(folder / "batches.csv", ["id", "batch", "x", "label"], batches)
    days = np.arange("2024-01-01", "2024-03-23", dtype="datetime64[D]")
    shops = [
        [shop, day, 10 + n % 5]
        for shop in ("north", "south")
        for n, day in enumerate(days[np.is_busday(days)])
    ]
    _write(folder / "shops.csv", ["shop", "day", "sales"], shops)
    tags = {"words": ["the", "cat", "sat"], "tags": ["D", "N", "V"]}
    (folder / "tags.jsonl").write_text(_lines([tags] * 24))
    (folder / "lines.txt").write_text("\n".join([*words, "a longer line"] * 6))
    rolls = [
        [[60 + (number + step) % 5, 67][: step % 3] for step in range(6)] for number in range(24)
    ]
    (folder / "rolls.jsonl").write_text(_lines([{"roll": roll} for roll in rolls]))
    chords = [{"x": [float(len(chord)) for chord in roll], "chord": roll} for roll in rolls]
    (folder / "chords.jsonl").write_text(_lines(chords))
    _write(
        folder / "numbers.csv",
        ["id", "x", "size"],
        [[n, n / 7 + step, n] for n in range(40) for step in range(2)],
    )
    whole = [{"x": row["x"], "kind": number % 2} for number, row in enumerate(sequences)]
    (folder / "whole.jsonl").write_text(_lines(whole))
    (folder / "repeated.jsonl").write_text(
        _lines([{"id": min(n, 20), **row} for n, row in enumerate(sequences)])
    )
    (folder / "empty").mkdir()
    (folder / "parts").mkdir()
    for name in ("a.csv", "b.csv"):
        _write(folder / "parts" / name, names, rows)
    for data, run in (
        ("steps.csv", "run"),
        ("whole.jsonl", "whole"),
        ("months.csv --task forecast", "months"),
        ("shops.csv --task forecast", "shops"),
        ("tags.jsonl", "tags"),
    ):
        code, printed = play(f"train {data} --output {run}", folder)
        assert code == 0, printed
    shutil.copytree(folder / "run", folder / "newer")
    config = folder / "newer" / "best" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format_version": 99}))


def _write(path: Path, names: list[str], rows: list[list[Any]], separator: str = ",") -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([names, *rows])


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def play(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and its output."""
    words = shlex.split(command.format(here=folder))
    if words[0] == "train":
        words[1:1] = _FAST.split()
        if "--output" not in words:
            words += ["--output", f"runs/{len(list(folder.glob('runs/*')))}"]
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        code = raglane(words)
    return code, printed.getvalue()


def wrong(case: Case, folder: Path) -> str:
    """Play a case; return its output if the answer is wrong, else an empty text."""
    code, printed = play(case.command, folder)
    absent = [
        pattern
        for pattern in case.patterns
        if pattern.startswith("not ")
        == bool(re.search(pattern.removeprefix("not "), printed, re.MULTILINE))
    ]
    if code == case.code and not absent and "Traceback" not in printed:
        return ""
    return f"exit code {code} where {case.code} is right; patterns that fail: {absent}\n{printed}"


def main(chosen: list[str]) -> int:
    """Play the cases that contain a word; return the number of wrong answers."""
    count = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        for each in CASES:
            if all(word in f"{each.title} {each.command}" for word in chosen):
                count += bool(told := wrong(each, folder))
                print(
                    f"{'WRONG' if told else 'right'}  {each.title}: raglane {each.command}\n{told}".rstrip()
                )
    print(f"{count} answers are wrong")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
