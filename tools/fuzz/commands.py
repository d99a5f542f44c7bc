"""Commands with malformed files and odd options.

A round takes a file of :mod:`fuzz.odd_files`, or a valid one, and a random command with random
options. It must end with code 0; with 2, one line of printable characters on stderr and no new
file; or with 3 and one line, if a training diverged.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fuzz.odd_files import build
from raglane.cli import main as raglane

_ODD = ["", " ", "-1", "0", "1", "2", "nan", "inf", "1e999", "x", "9" * 30, "9" * 5000, "\x1b[31m", "[red]", "0.5",
        "\u202e", "a,b", "--", "None", "true", "..", "/", "/dev/null", "~", "*", "%s"]  # fmt: skip
_MODEL = {
    "--task": ["classify", "tag", "regress", "multilabel", "forecast", "language", "transcribe"],
    "--cell": ["gru", "lstm", "rnn", "sru", "indrnn", "minlstm"],
    "--pooling": ["final", "last", "mean", "attention"],
    "--initial-state": ["learned", "lengths"],
    "--dropout": ["0.5", "1"],
    "--zoneout": ["0.1"],
    "--num-layers": ["2"],
    "--embedding": ["3"],
    "--batch-size": ["1", "3"],
    "--lr": ["0.1", "1e30"],
    "--optimizer": ["sgd"],
    "--grad-clip": ["1"],
    "--patience": ["1"],
    "--seed": ["7"],
    "--validation-fraction": ["0", "0.5", "0.9"],
    "--missing": ["zero", "forward"],
    "--weight-decay": ["0.1"],
    "--loss": ["mse", "mae", "huber", "quantile", "bce", "cross_entropy"],
    "--quantile": ["0.9"],
    "--bptt-steps": ["1", "3"],
    "--lr-schedule": ["cosine", "plateau"],
    "--warmup": ["1"],
    "--class-weights": ["balanced"],
    "--label-smoothing": ["0.1"],
    "--unk-dropout": ["0", "1"],
    "--embedding-dropout": ["0.5"],
}
_COLUMNS = {
    "--sequence-column": ["x"],
    "--label-column": ["y", "label"],
    "--id-column": ["id"],
    "--time-column": ["t"],
    "--feature-column": ["x", "t"],
    "--format": ["csv", "jsonl", "parquet", "ts", "text", "folder"],
    "--split": ["words", "characters", "bytes"],
    "--tokens": ["yes", "no"],
}
_BENCH = {
    "--suites": ["grid", "tiny"],
    "--cells": ["lstm", "gru"],
    "--sizes": ["2x2x2", "0x1x1", "2x2"],
    "--modes": ["infer"],
    "--dtypes": ["float32"],
    "--threads": ["1", "0"],
    "--competitors": ["torch-padded", "torch-none"],
    "--rounds": ["0", "1"],
}
# Added to random words that happen to be a valid command, which would otherwise run for minutes.
_SHORT = {"bench": ["--competitors", "nobody"], "train": ["--epochs", "1"]}
_FAST = ["--epochs", "1", "--hidden-size", "3", "--threads", "1"]
_MODELS = {
    "features": ["ok.csv"],
    "words": ["words.csv"],
    "forecast": ["ok.csv", "--task", "forecast", "--feature-column", "x"],
    "language": ["words.csv", "--task", "language", "--feature-column", "word"],
}


def _options(chance: random.Random, known: dict[str, list[str]], most: int) -> list[str]:
    """Draw options, each with a usual value or an odd one."""
    chosen = chance.sample(sorted(known), chance.randint(0, most))
    return [
        part
        for name in chosen
        for part in (name, chance.choice(known[name] if chance.random() < 0.8 else _ODD))
    ]


def _command(chance: random.Random, ready: Path, folder: Path) -> list[str]:
    """Draw a command line."""
    data, form, _ = build(chance, folder)
    if chance.random() < 0.4:
        data, form = ready / chance.choice(["ok.csv", "words.csv"]), None
    shape = [str(data)] if form is None else [str(data), "--format", form]
    run = str(ready / chance.choice(list(_MODELS)) if chance.random() < 0.9 else data)
    match chance.choice(
        ["train", "train", "train", "evaluate", "predict", "predict", "sample", "bench", "none"]
    ):
        case "train":
            test = ["--test", str(data)] if chance.random() < 0.1 else []
            options = [*_options(chance, _MODEL, 3), *_options(chance, _COLUMNS, 2)]
            return ["train", *shape, *_FAST, "--output", str(folder / "new"), *test, *options]
        case "evaluate":
            more = chance.choice([[], ["--top", "2"], ["--horizon", "2"]])
            return ["evaluate", run, *shape, *more, *_options(chance, _COLUMNS, 2)]
        case "sample":
            odd = _options(
                chance, {"--prompt": ["a b"], "--temperature": ["0", "2"], "--count": ["2"]}, 2
            )
            return ["sample", run, "--length", "3", *odd]
        case "predict":
            output = folder / chance.choice(
                ["p.csv", "p.parquet", "p.jsonl", "p.csv", "p", "no/p.csv"]
            )
            more = chance.choice(
                [[], ["--probabilities"], ["--horizon", chance.choice(["2", "0", "-1"])]]
            )
            return [
                "predict",
                run,
                *shape,
                "-o",
                str(output),
                *more,
                *_options(chance, _COLUMNS, 2),
            ]
        case "bench":
            # The last option is always wrong, so nothing is measured.
            lengths = ["--lengths", str(data)] if chance.random() < 0.5 else []
            return [
                "bench",
                "--output",
                str(folder / "bench"),
                *_options(chance, _BENCH, 2),
                *lengths,
                *_SHORT["bench"],
            ]
    words = [
        "train",
        "evaluate",
        "predict",
        "bench",
        "--help",
        "--version",
        *_ODD,
        *_MODEL,
        str(data),
    ]
    typed = [chance.choice(words) for _ in range(chance.randint(1, 4))]
    return [*typed, *(part for name in _SHORT if name in typed for part in _SHORT[name])]


def play(ready: Path, number: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, home = Path(name), Path.cwd()
        command = _command(random.Random(number), ready, folder)
        before = set(folder.rglob("*"))
        printed, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
        ):
            code = raglane(command)
        os.chdir(home)
        lines = errors.getvalue().splitlines()
        left = sorted(path.name for path in set(folder.rglob("*")) - before)
    told = f"{command!a} ends with {code}: {errors.getvalue()[:500]!a}"
    assert code in (0, 2, 3), told
    assert len(lines) == (code != 0), f"not one line: {told}"
    assert all(line.isprintable() and len(line) <= 2500 for line in lines), (
        f"not one clear line: {told}"
    )
    assert code != 2 or not left, f"new files {left}: {told}"
    assert all(line.isprintable() for line in printed.getvalue().split("\n")), (
        f"control codes {told}"
    )


def start(folder: Path) -> Callable[[int], None]:
    """Train models of features and of tokens, one that forecasts and a language model."""
    rows = [
        (f"s{number}", step, number * step, "uv"[number % 2])
        for number in range(12)
        for step in range(3)
    ]
    (folder / "ok.csv").write_text(
        "id,t,x,y\n" + "".join(f"{a},{b},{c},{d}\n" for a, b, c, d in rows)
    )
    (folder / "words.csv").write_text(
        "id,word,y\n" + "".join(f"{a},w{c},{d}\n" for a, b, c, d in rows)
    )
    for name, (data, *options) in _MODELS.items():
        assert (
            raglane(
                [
                    "train",
                    str(folder / data),
                    "--output",
                    str(folder / name),
                    *_FAST,
                    "--quiet",
                    *options,
                ]
            )
            == 0
        )
    return partial(play, folder)
