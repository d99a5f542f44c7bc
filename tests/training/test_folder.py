"""--overwrite keeps the old run until the new one has a checkpoint; --resume completes a killed
run.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, Capsys, fails, prints, tree, write_steps
from raglane._utils import files
from raglane.cli import main
from raglane.errors import ArgumentError
from raglane.training import trainer
from raglane.training.folder import RUN_FILES as ALL_FILES
from raglane.training.folder import at_work, check_folder, find, tidy

# The files of a run that classifies, which has no table and no plot of numbers.
RUN_FILES = tuple(
    name for name in ALL_FILES if name not in ("table.txt", "points.png", "skipped.jsonl")
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with data, and with a run that contains a file of the user."""
    data = write_steps(tmp_path / "ok.csv")
    command = [
        "train",
        str(data),
        "--test",
        str(data),
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "--quiet",
    ]
    assert main(command) == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    return tmp_path


def _overwrite(work: Path, *options: str) -> list[str]:
    data = str(work / "ok.csv")
    return [
        "train",
        data,
        "--test",
        data,
        "--output",
        str(work / "run"),
        *FAST,
        "--quiet",
        "--overwrite",
        *options,
    ]


def test_a_run_that_fails_before_its_first_checkpoint_puts_the_old_one_back(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    before = tree(work)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    fails(_overwrite(work, "--label-column", "nobody"), capsys, "nobody")
    assert tree(work) == before
    for name, error, code in (("full", full, 2), ("stopped", stopped, 130)):
        with monkeypatch.context() as patched:
            patched.setattr(trainer, "write_folder", error)
            capsys.readouterr()
            assert main(_overwrite(work)) == code, name
            assert len(capsys.readouterr().err.splitlines()) == 1
        assert tree(work) == before


def test_the_old_run_waits_for_the_first_checkpoint_of_the_new_one(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    write, run = files.write_folder, work / "run"
    old = (run / "best" / "weights.safetensors").read_bytes()

    def watched(path: Path, files: dict[str, bytes]) -> None:
        seen.append((path.name, (run / ".run.previous" / "best" / "weights.safetensors").exists()))
        if seen[-1][1]:
            # Other commands still read the old run.
            assert (find(run, "best") / "weights.safetensors").read_bytes() == old
            assert json.loads(find(run, "run.json").read_text())["settings"]["seed"] == 0
            names = {path.name for path in run.iterdir()}
            assert names == {".lock", ".run.previous", "notes.txt", "run.json", "run.toml"}
        write(path, files)

    monkeypatch.setattr(trainer, "write_folder", watched)
    assert main(_overwrite(work, "--seed", "5")) == 0
    assert seen[:2] == [("last", True), ("best", False)]
    assert not any(waits for _, waits in seen[1:])
    assert (run / "notes.txt").read_text() == "mine"
    assert json.loads((run / "run.json").read_text())["settings"]["seed"] == 5
    assert (run / "best" / "weights.safetensors").read_bytes() != old
    assert {path.name for path in run.iterdir()} == {*RUN_FILES, "best", "last", "notes.txt"}


def _kill_while_replacing(run: Path) -> None:
    """Leave the files of a run that was killed before its first checkpoint, with --overwrite."""
    waiting = run / ".run.previous"
    waiting.mkdir()
    for name in ("last", "best", *RUN_FILES):
        os.rename(run / name, waiting / name)
    content = json.loads((waiting / "run.json").read_text())
    content["settings"]["seed"] = 5
    (run / "run.json").write_text(json.dumps(content))
    (run / ".last.partial").mkdir()
    (run / ".last.partial" / "weights.safetensors").write_bytes(b"half")


@pytest.mark.parametrize("command", ["resume", "evaluate", "predict", "overwrite"])
def test_the_next_command_restores_the_old_run(work: Path, command: str, capsys: Capsys) -> None:
    run, data = work / "run", str(work / "ok.csv")
    before = tree(work)
    _kill_while_replacing(run)
    commands = {
        "resume": ["train", "--resume", "--output", str(run)],
        "evaluate": ["evaluate", str(run), data],
        "predict": ["predict", str(run), data, "-o", str(work / "p.csv")],
        "overwrite": _overwrite(work),
    }
    fails(["train", data, "--output", str(run)], capsys, "which contains a run")
    assert main(commands[command]) == 0
    said = (
        "the run that --overwrite was replacing is restored, because the new one had no checkpoint"
    )
    assert (said in capsys.readouterr().out) == (command in ("resume", "evaluate"))
    found = tree(work)
    if command == "predict":
        del found["p.csv"]
    if command == "overwrite":
        assert found.keys() == before.keys()
        return
    assert found == before


def test_reading_cleans_up_where_it_can(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = work / "run"
    _kill_while_replacing(run)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", _closed)
        tidy(run)
        assert (run / ".run.previous").exists()
        assert (
            main(["predict", str(run), str(work / "ok.csv"), "-o", str(work / "p.csv"), "--quiet"])
            == 0
        )
    tidy(run)
    assert not list(run.glob(".*"))
    # Without anything to clean up, nothing is locked.
    monkeypatch.setattr("raglane.training.folder.locked", _closed)
    tidy(run)
    tidy(work / "none")


def _closed(*_: Any) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_folder_without_a_run_is_not_touched(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for rules in ({}, {"overwrite": True}):
        with pytest.raises(ArgumentError, match="a new folder, or that of a run"):
            check_folder(mine, **rules)
    with pytest.raises(ArgumentError, match="the folder of a run"):
        check_folder(mine, resume=True)
    with at_work(mine) as is_back:
        assert not is_back
    assert tree(mine) == {"thesis.txt": b"years of work"}
    # A run that was killed before it wrote run.json.
    (tmp_path / "new").mkdir()
    for name in (".lock", ".run.json.partial"):
        (tmp_path / "new" / name).write_text("")
    check_folder(tmp_path / "new")


def test_resume_writes_the_missing_files_of_a_complete_run(work: Path, capsys: Capsys) -> None:
    run = work / "run"
    before = tree(run)
    for gone in (
        ["curves.png"],
        ["evaluation.json"],
        [*RUN_FILES[3:]],
        ["curves.csv", *RUN_FILES[3:]],
    ):
        for name in gone:
            (run / name).unlink()
        (run / ".evaluation.json.partial").write_text("{")
        printed = prints(["train", "--resume", "--output", str(run)], capsys)
        assert "training is complete at epoch 2; pass e.g. --epochs 12 to continue" in printed
        assert "best: epoch " in printed
        assert "test: accuracy " in printed
        assert tree(run) == before


def test_a_run_that_stopped_early_is_complete(work: Path, capsys: Capsys) -> None:
    run = work / "early"
    command = [
        "train",
        str(work / "ok.csv"),
        "--output",
        str(run),
        *FAST[2:],
        "--epochs",
        "60",
        "--lr",
        "0.3",
    ]
    assert main([*command, "--patience", "2", "--quiet"]) == 0
    before = tree(run)
    rows = len((run / "curves.csv").read_text().splitlines())
    assert rows < 60
    assert main(["train", "--resume", "--output", str(run)]) == 0
    assert tree(run) == before
    assert "training is complete" in capsys.readouterr().out
    assert main(["train", "--resume", "--output", str(run), "--patience", "4", "--quiet"]) == 0
    assert len((run / "curves.csv").read_text().splitlines()) > rows
