"""The commands, given malformed files and odd options: they end with 0, or with 2 and one clear line.

A round takes a file of :mod:`fuzz.malformed_files`, or one that can be read, and a random command with random
options. What may come of it is exit code 0; or 2, one line of printable characters on the standard error, and nothing
new in the folder; or 3 and one line of a training that ran away. A fault prints how to repeat it::

    cd tests
    python -m fuzz.commands 500 1          # 500 rounds from seed 1
    python -m fuzz.commands 1 1 4711       # round 4711 of seed 1 alone
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path

from fuzz.malformed_files import build
from raglane.cli import main as raglane

__all__ = ["attack", "main", "prepare"]

_ODD = ["", " ", "-1", "0", "1", "2", "nan", "inf", "1e999", "x", "9" * 30, "9" * 5000, "\x1b[31m", "[red]", "0.5",
        "\u202e", "a,b", "--", "None", "true", "..", "/", "/dev/null", "~", "*", "%s"]  # fmt: skip
_MODEL = {
    "--task": ["classify", "tag", "regress", "multilabel", "forecast", "language"],
    "--cell": ["gru", "lstm", "rnn", "sru", "indrnn", "minlstm"],
    "--pooling": ["summary", "last", "mean", "attention"],
    "--initial-state": ["learned", "lengths"],
    "--dropout": ["0.5", "1"],
    "--zoneout": ["0.1"],
    "--layers": ["2"],
    "--embedding": ["3"],
    "--batch-size": ["1", "3"],
    "--lr": ["0.1", "1e30"],
    "--optimizer": ["sgd"],
    "--clip": ["1"],
    "--patience": ["1"],
    "--seed": ["7"],
    "--validation-fraction": ["0", "0.5", "0.9"],
    "--missing": ["zero", "forward"],
    "--weight-decay": ["0.1"],
    "--loss": ["mse", "mae", "huber", "quantile", "bce", "cross_entropy"],
    "--quantile": ["0.9"],
    "--steps": ["1", "3"],
    "--schedule": ["cosine", "plateau"],
    "--warmup": ["1"],
    "--class-weights": ["balanced"],
    "--label-smoothing": ["0.1"],
    "--unknown-rate": ["0", "1"],
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
# What keeps a command that happens to be right from working for minutes.
_NEVER = {"bench": ["--competitors", "nobody"], "train": ["--epochs", "1"]}
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


def prepare(folder: Path) -> Path:
    """A folder with a model of features, one of tokens and one that forecasts, for the commands that need one."""
    rows = [(f"s{number}", step, number * step, "uv"[number % 2]) for number in range(12) for step in range(3)]
    (folder / "ok.csv").write_text("id,t,x,y\n" + "".join(f"{a},{b},{c},{d}\n" for a, b, c, d in rows))
    (folder / "words.csv").write_text("id,word,y\n" + "".join(f"{a},w{c},{d}\n" for a, b, c, d in rows))
    fast = ["--epochs", "1", "--hidden", "3", "--threads", "1", "--quiet"]
    for name, data, more in (
        ("features", "ok.csv", []),
        ("words", "words.csv", []),
        ("forecast", "ok.csv", ["--task", "forecast", "--feature-column", "x"]),
        ("language", "words.csv", ["--task", "language", "--feature-column", "word"]),
    ):
        if raglane(["train", str(folder / data), "--out", str(folder / name), *fast, *more]) != 0:
            raise AssertionError("the models to attack cannot be trained")
    return folder


def _options(chance: random.Random, known: dict[str, list[str]], most: int) -> list[str]:
    """Some options, each with a usual value or an odd one."""
    chosen = chance.sample(sorted(known), chance.randint(0, most))
    return [part for name in chosen for part in (name, chance.choice(known[name] if chance.random() < 0.8 else _ODD))]


def _command(chance: random.Random, ready: Path, folder: Path) -> list[str]:
    """A command line."""
    data, form, _ = build(chance, folder)
    if chance.random() < 0.4:
        data, form = ready / chance.choice(["ok.csv", "words.csv"]), None
    shape = [str(data)] if form is None else [str(data), "--format", form]
    run = str(ready / chance.choice(["features", "words", "forecast", "language"]) if chance.random() < 0.9 else data)
    match chance.choice(["train", "train", "train", "evaluate", "predict", "predict", "sample", "bench", "none"]):
        case "train":
            fast = ["--epochs", "1", "--hidden", "3", "--threads", "1", "--out", str(folder / "new")]
            beside = ["--test", str(data)] if chance.random() < 0.1 else []
            return ["train", *shape, *fast, *beside, *_options(chance, _MODEL, 3), *_options(chance, _COLUMNS, 2)]
        case "evaluate":
            more = chance.choice([[], ["--top", "2"], ["--horizon", "2"]])
            return ["evaluate", run, *shape, *more, *_options(chance, _COLUMNS, 2)]
        case "sample":
            odd = _options(chance, {"--prompt": ["a b"], "--temperature": ["0", "2"], "--count": ["2"]}, 2)
            return ["sample", run, "--length", "3", *odd]
        case "predict":
            output = folder / chance.choice(["p.csv", "p.parquet", "p.jsonl", "p.csv", "p", "no/p.csv"])
            more = chance.choice([[], ["--probabilities"], ["--horizon", chance.choice(["2", "0", "-1"])]])
            return ["predict", run, *shape, "-o", str(output), *more, *_options(chance, _COLUMNS, 2)]
        case "bench":
            # Never a measurement: the option that is read last is wrong.
            beside = ["--lengths", str(data)] if chance.random() < 0.5 else []
            return ["bench", "--out", str(folder / "bench"), *_options(chance, _BENCH, 2), *beside, *_NEVER["bench"]]
    words = ["train", "evaluate", "predict", "bench", "--help", "--version", *_ODD, *_MODEL, str(data)]
    typed = [chance.choice(words) for _ in range(chance.randint(1, 4))]
    return [*typed, *(part for name in _NEVER if name in typed for part in _NEVER[name])]


def attack(seed: int, number: int, ready: Path, folder: Path) -> tuple[str | None, list[str]]:
    """Round ``number`` of ``seed``: what is wrong, or None; and the command."""
    command = _command(random.Random(f"{seed}/{number}"), ready, folder)
    before, home = set(folder.rglob("*")), Path.cwd()
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = raglane(command)
    os.chdir(home)
    lines = errors.getvalue().splitlines()
    left = sorted(path.name for path in set(folder.rglob("*")) - before)
    if code not in (0, 2, 3):
        return f"exit code {code}: {errors.getvalue()[-300:]}", command
    if code != 0 and (len(lines) != 1 or not lines[0].isprintable() or len(lines[0]) > 2500):
        return f"not one clear line: {errors.getvalue()[:500]!a}", command
    if code == 0 and lines:
        return f"errors of a command that ended well: {errors.getvalue()[:300]!a}", command
    if code == 2 and left:
        return f"left behind: {left}", command
    if not all(line.isprintable() for line in printed.getvalue().split("\n")):
        return f"what is printed controls the terminal: {printed.getvalue()[:500]!a}", command
    return None, command


def main(rounds: int, seed: int, first: int = 0) -> int:
    """Run rounds ``first`` to ``first + rounds - 1``, print their faults and how to repeat them, and count them."""
    print(f"commands: {rounds} rounds from {first}, seed {seed}", flush=True)
    faults = 0
    with tempfile.TemporaryDirectory() as work:
        ready = prepare(Path(work))
        for number in range(first, first + rounds):
            with tempfile.TemporaryDirectory() as folder:
                fault, command = attack(seed, number, ready, Path(folder))
                if fault is not None or rounds == 1:
                    print(
                        f"{fault}\n  {command!a}\n  repeat: cd tools && python -m fuzz.commands 1 {seed} {number}",
                        flush=True,
                    )
                faults += fault is not None
    print(f"{faults} faults", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
