"""A cell in a user's file: trained from the command line, and run again only while it is the same file."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import raglane as rl
from commands import FAST, fails, undrawn_pictures, write_steps  # noqa: F401
from raglane.cli import main
from raglane.errors import ArgumentError, CheckpointError
from raglane.training.own_cell import is_own, label_of, load_cell, pinned

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_cell.py"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a cell and a run of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "cells" / "mine.py")
    write_steps(tmp_path / "ok.csv")
    cell = ["--cell", "cells/mine.py:TwoSpeeds", "--layers", "2", "--bidirectional"]
    assert main(["train", "ok.csv", *cell, *FAST, "--quiet", "--out", "run"]) == 0
    return tmp_path


def test_a_run_keeps_the_path_and_the_digest_and_no_code(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads((work / "run" / "run.json").read_text())["settings"]
    assert settings["layer"] == pinned(str(work / "cells" / "mine.py:TwoSpeeds"))
    assert len(settings["layer"].partition("@")[2]) == 64
    assert not list((work / "run").rglob("*.py"))
    assert all(b"sigmoid" not in path.read_bytes() for path in (work / "run").rglob("*") if path.is_file())
    monkeypatch.chdir(work / "cells")  # the path is whole
    run = rl.load(work / "run")
    recurrent: Any = run.model.encoder.recurrent
    assert type(recurrent.cells[0]).__name__ == "TwoSpeeds"
    found = run.predict(work / "ok.csv")
    again = pickle.loads(pickle.dumps(run)).predict(work / "ok.csv")
    assert found.columns == again.columns
    assert main(["evaluate", str(work / "run"), str(work / "ok.csv")]) == 0
    assert main(["train", "--resume", "--out", str(work / "run"), "--epochs", "3", "--quiet"]) == 0


def test_a_file_that_is_not_what_it_was(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = work / "cells" / "mine.py"
    commands = [
        ["predict", "run", "ok.csv", "-o", "p.csv"],
        ["evaluate", "run", "ok.csv"],
        ["train", "--resume", "--out", "run", "--epochs", "3"],
        ["train", "--config", "run/run.toml", "--out", "other"],
    ]
    spy = work / "ran"
    cell.write_text(f"open({str(spy)!r}, 'w')\n" + cell.read_text())
    for command in commands:
        fails(command, capsys, f"'{cell}' with the SHA-256", "Fix: put the file back as it was, or train anew.")
    with pytest.raises(CheckpointError, match=r"cell TwoSpeeds: .*in training it had"):
        rl.load("run")
    cell.unlink()
    for command in commands:
        fails(command, capsys, f"'{cell}': No such file", "Fix: put it there, or name another.")
    assert not spy.exists()  # no line of the changed file was run
    assert not (work / "p.csv").exists()
    assert not (work / "other").exists()


@pytest.mark.parametrize("place", ["run/cell.py", "run/best/cell.py", "run/deep/cell.py", "run/link.py"])
def test_no_code_of_a_runs_folder_is_run(work: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even where the run's files name it, with the digest that it has."""
    evil = work / place
    evil.parent.mkdir(exist_ok=True)
    code = f"open({str(work / 'ran')!r}, 'w')\n" + EXAMPLE.read_text()
    evil.write_text(code)
    if place.endswith("link.py"):  # a path elsewhere that leads into the folder
        (work / "cells" / "link.py").symlink_to(evil)
        evil = work / "cells" / "link.py"
    for name in ("run.json", "best/config.json"):
        path = work / "run" / name
        known = json.loads(path.read_text())
        known["settings" if name == "run.json" else "model"]["layer"] = pinned(f"{evil}:TwoSpeeds")
        path.write_text(json.dumps(known))
    for command in (
        ["predict", "run", "ok.csv", "-o", "p.csv"],
        ["train", "--resume", "--out", "run", "--epochs", "3"],
    ):
        fails(command, capsys, "no code is run that lies in the folder of a run or of a model")
    assert not (work / "ran").exists()


@pytest.mark.parametrize(
    "layer", ["cells/mine.py:TwoSpeeds", "{}/cells/mine.py:TwoSpeeds", "cells/mine.py:TwoSpeeds@{0:064d}"]
)
def test_a_model_that_does_not_say_which_file_it_was(
    work: Path, layer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = work / "run" / "best" / "config.json"
    known = json.loads(path.read_text())
    known["model"]["layer"] = layer.format(0) if "@" in layer else layer.format(work)
    path.write_text(json.dumps(known))
    fails(["predict", "run", "ok.csv", "-o", "p.csv"], capsys, "an absolute path, and the SHA-256 of the file")


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        (None, "A", "No such file or directory; the rule: a file that can be read"),
        ("def (", "A", "line 1: SyntaxError: invalid syntax; the rule: a file that Python can run"),
        ("x = 1\nimport nothing_there", "A", "line 2: ModuleNotFoundError: No module named 'nothing_there'"),
        ("raise SystemExit(0)", "A", "line 1: SystemExit: 0"),
        ("\0", "A", "SyntaxError"),
        ("class B:\n    def step(self): ...", "A", "a class with step(x_t, state), and 'mine.py' has B"),
        ("A = 3", "A", "has none. Fix: name one that is there"),
        ("class A: ...", "A", "cell"),
    ],
)
def test_a_file_without_such_a_cell(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str | None,
    name: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / "ok.csv")
    if code is not None:
        Path("mine.py").write_text(code)
    before = sorted(tmp_path.iterdir())
    fails(["train", "ok.csv", "--cell", f"mine.py:{name}", *FAST, "--out", "run"], capsys, says)
    assert sorted(tmp_path.iterdir()) == before


def test_a_step_that_fails_is_shown_with_its_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = EXAMPLE.read_text().replace("fast, slow = state\n", "fast, slow = state\n        x_t @ slow\n")
    (work / "cells" / "broken.py").write_text(broken)
    line = broken.splitlines().index("        x_t @ slow") + 1
    command = ["train", "ok.csv", "--cell", "cells/broken.py:TwoSpeeds", *FAST, "--quiet", "--out", "other"]
    fails(command, capsys, f"broken.py, line {line}: RuntimeError", "Fix: correct it; --debug shows the trace.")
    assert not (work / "other").exists()


def test_a_file_in_the_folder_of_its_run(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(EXAMPLE, work / "run" / "cell.py")
    command = ["train", "ok.csv", "--cell", "run/cell.py:TwoSpeeds", *FAST, "--quiet", "--out", "run", "--overwrite"]
    fails(command, capsys, "keep the file elsewhere")


def test_from_python(tmp_path: Path) -> None:
    batch = [torch.randn(length, 2) for length in (3, 1, 4, 2) * 3]
    run = rl.fit(batch, ["a", "b", "b", "a"] * 3, layer=f"{EXAMPLE}:TwoSpeeds", epochs=1, hidden=4, progress=False)
    run.save(tmp_path / "model")
    again = rl.load(tmp_path / "model").predict(batch)
    assert again.columns == run.predict(batch).columns
    with pytest.raises(ArgumentError, match="zoneout"):
        rl.fit(batch, ["a", "b", "b", "a"] * 3, layer=f"{EXAMPLE}:TwoSpeeds", zoneout=0.1, progress=False)


def test_names() -> None:
    assert [
        is_own(name) for name in ("a.py:B", "/x y/a.py:B", "gru", "a.py", "a.py:", ":B", "a.py:1", "a:B", "\0.py:B")
    ] == [
        *(True, True),
        *(False,) * 7,
    ]
    assert label_of("/c:/d.py:Cell@" + "0" * 64) == "Cell"
    assert pinned("gru") == "gru"
    with pytest.raises(ArgumentError, match="unchanged"):
        load_cell(f"{EXAMPLE}:TwoSpeeds@" + "0" * 64)
    layer = load_cell(f"{EXAMPLE}:TwoSpeeds")(3, 4, num_layers=2)
    assert layer(rl.Ragged([torch.randn(2, 3)]))[0].values.shape == (2, 4)
