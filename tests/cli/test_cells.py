"""Every cell, pooling and option of the model, from the command line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from commands import fails, undrawn_pictures  # noqa: F401
from raglane.cli import main
from raglane.training.settings import INITIAL_STATES, LAYERS, POOLINGS

_FAST = ["--epochs", "1", "--hidden-size", "4", "--threads", "1", "--quiet"]
_REGULARISATION = ["--input-dropout", "0.1", "--state-dropout", "0.2", "--weight-dropout", "0.2", "--zoneout", "0.1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cells") / "waves.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "x", "y", "kind"])
        for number in range(24):
            for step in range(number % 4 + 1):
                writer.writerow([f"s{number}", math.sin(number + step), math.cos(step), "ab"[number % 2]])
    return path


def _train(data: Path, out: Path, *options: str) -> int:
    return main(
        ["train", str(data), "--out", str(out), "--id-column", "id", "--label-column", "kind", *_FAST, *options]
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
    assert main(["predict", str(run), str(data), "-o", str(tmp_path / "found.csv"), "--id-column", "id"]) == 0
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 25


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (["--layer-norm", "--cell", "sru"], "--layer-norm must be ... got True"),
        (["--cell", "grud"], "Pass --missing elapsed"),
        (["--cell", "grud", "--missing", "elapsed", "--task", "forecast"], "--cell must be ... got 'grud'"),
        (["--cell", "mingru", "--state-dropout", "0.1"], "--state-dropout must be ... got 0.1"),
        (["--task", "forecast", "--initial-state", "lengths"], "--initial-state must be ... got 'lengths'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], piece: str
) -> None:
    fails(["train", str(data), "--label-column", "kind", "--out", str(tmp_path / "run"), *options], capsys, piece)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [*(["--cell", cell] for cell in LAYERS), ["--layer-norm"]], ids=" ".join)
def test_japanese_vowels(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--threads", "1", *options]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("test: accuracy"))
    assert float(line.split()[2].rstrip(",")) >= 0.90


def test_times_that_are_not_even(tmp_path: Path) -> None:
    """Cells that read times predict something else for other times."""
    lines = ["id,time,x,kind"]
    for number in range(12):
        lines += [
            f"s{number},{step * (1 + number % 2)},{'' if step == 1 else step},{'ab'[number % 2]}" for step in range(4)
        ]
    data = tmp_path / "uneven.csv"
    data.write_text("\n".join(lines) + "\n")
    later = tmp_path / "later.csv"
    moved = {"1": "1.5", "2": "2.5", "3": "7"}
    cells = [line.split(",") for line in lines[1:]]
    later.write_text("\n".join([lines[0], *(",".join([c[0], moved.get(c[1], c[1]), *c[2:]]) for c in cells)]) + "\n")
    for cell in ("grud", "cfc"):
        run, found = tmp_path / cell, []
        assert _train(data, run, "--cell", cell, "--missing", "elapsed", "--time-gaps") == 0
        config = json.loads((run / "best" / "config.json").read_text())["model"]
        assert (config["input_size"], config["gap_column"]) == (6, 1 if cell == "cfc" else None)
        for path in (data, later):
            assert main(["predict", str(run), str(path), "-o", str(tmp_path / "found.csv")]) == 0
            found.append((tmp_path / "found.csv").read_text())
        assert found[0] != found[1]


def test_grud_requires_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "words.csv"
    data.write_text("id,word,kind\n" + "".join(f"s{n},w{n},{'ab'[n % 2]}\n" for n in range(12)))
    options = ["--cell", "grud", "--missing", "elapsed", "--label-column", "kind", "--out", str(tmp_path / "run")]
    fails(["train", str(data), *options], capsys, "--cell must be a cell other than grud for tokens", "got 'grud'")
