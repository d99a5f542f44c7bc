"""A cell in a Python file of the user: runs, and the rules that protect from code that a run
names.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import raglane as rl
from commands import FAST, Capsys, fails, write_steps
from raglane.cli import main
from raglane.errors import ArgumentError, ArgumentTypeError, CheckpointError
from raglane.runs import tables
from raglane.training import own_cell
from raglane.training.own_cell import name_cell
from ranks import fork_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_cell.py"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a file with a cell, and a run of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "cells" / "mine.py")
    write_steps(tmp_path / "ok.csv")
    cell = ["--cell", "cells/mine.py:TwoSpeeds", "--num-layers", "2", "--bidirectional"]
    assert main(["train", "ok.csv", *cell, *FAST, "--quiet", "--output", "run"]) == 0
    start_afresh(monkeypatch)
    return tmp_path


CELL = ["--cell", "cells/mine.py:TwoSpeeds"]
NAMELESS = "a file that you named in this process, so that no code is run unasked"


def start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the files that were named, as in a new process."""
    monkeypatch.setattr(own_cell, "_NAMED", {})
    monkeypatch.setattr(own_cell, "_MODULES", {})


def commands_of(run: str) -> list[list[str]]:
    """Return every command that reads a run, without --cell."""
    return [
        ["predict", run, "ok.csv", "-o", "p.csv"],
        ["predict", run, "ok.csv", "-o", "p", "--engine", "ray"],
        ["evaluate", run, "ok.csv"],
        ["sample", run],
        ["export", run, "-o", "model.onnx"],
        ["train", "--resume", "--output", run, "--epochs", "3"],
    ]


def test_a_run_keeps_the_path_and_the_digest_and_no_code(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = json.loads((work / "run" / "run.json").read_text())["settings"]
    assert settings["cell"] == name_cell(str(work / "cells" / "mine.py:TwoSpeeds"))
    assert len(settings["cell"].partition("@")[2]) == 64
    assert not list((work / "run").rglob("*.py"))
    assert all(
        b"sigmoid" not in path.read_bytes() for path in (work / "run").rglob("*") if path.is_file()
    )
    monkeypatch.chdir(work / "cells")
    start_afresh(monkeypatch)
    run = rl.load(work / "run", cell="mine.py:TwoSpeeds")
    recurrent: Any = run.model.encoder.recurrent
    assert type(recurrent.cells[0]).__name__ == "TwoSpeeds"
    found, kept = run.predict(work / "ok.csv"), pickle.dumps(run)
    start_afresh(monkeypatch)
    assert pickle.loads(kept).predict(work / "ok.csv").columns == found.columns
    monkeypatch.chdir(work)
    start_afresh(monkeypatch)
    assert main(["evaluate", "run", "ok.csv", *CELL]) == 0
    start_afresh(monkeypatch)
    assert main(["train", "--resume", "--output", "run", "--epochs", "3", "--quiet", *CELL]) == 0


def test_no_command_runs_the_cell_of_a_run(work: Path, capsys: Capsys) -> None:
    for command in commands_of("run"):
        fails(command, capsys, NAMELESS, f"--cell {work / 'cells' / 'mine.py'}:TwoSpeeds")
    with pytest.raises(CheckpointError, match=NAMELESS):
        rl.load("run")
    with pytest.raises(CheckpointError, match=NAMELESS):
        rl.fit("ok.csv", output="run", resume=True, progress=False)
    command = ["train", "--config", "run/run.toml", "--output", "other"]
    fails(command, capsys, "so that no code is run unasked")
    (work / "search.toml").write_text(
        f'[search]\ncell = ["{work}/cells/mine.py:TwoSpeeds", "gru"]\n'
    )
    command = ["tune", "ok.csv", "--config", "search.toml", "--output", "study", "--trials", "1"]
    fails(command, capsys, "so that no code is run unasked")
    assert not (work / "other").exists()
    assert not (work / "study").exists()


@pytest.mark.parametrize("given", ["file", "class"])
def test_a_cell_that_is_named_again(
    work: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.syspath_prepend(work / "cells")
    cell: Any = (
        importlib.import_module("mine").TwoSpeeds if given == "class" else "cells/mine.py:TwoSpeeds"
    )
    found = rl.load("run", cell=cell).predict("ok.csv")
    sys.modules.pop("mine", None)
    assert len(found) == len(rl.load("run").predict("ok.csv"))  # the same code, named before


def test_a_config_file_and_a_search_with_a_cell_that_the_command_names(work: Path) -> None:
    named = ["--cell", str(work / "cells" / "mine.py:TwoSpeeds")]
    assert main(["train", "--config", "run/run.toml", *named, "--output", "other", "--quiet"]) == 0
    (work / "search.toml").write_text(f'[search]\ncell = ["{work}/cells/mine.py:TwoSpeeds"]\n')
    search = [
        "tune",
        "ok.csv",
        *FAST,
        "--config",
        "search.toml",
        *named,
        "--output",
        "study",
        "--trials",
        "1",
        "--quiet",
    ]
    assert main(search) == 0
    kept = json.loads((work / "study" / "run" / "run.json").read_text())["settings"]["cell"]
    assert kept == name_cell(named[1])


def test_a_file_that_has_changed(work: Path, capsys: Capsys) -> None:
    cell = work / "cells" / "mine.py"
    spy = work / "ran"
    cell.write_text(f"open({str(spy)!r}, 'w')\n" + cell.read_text())
    for command in commands_of("run"):
        fails(
            [*command, *CELL],
            capsys,
            "mine.py' with the SHA-256",
            "Restore the file, or train again",
        )
    with pytest.raises(CheckpointError, match=r"cell TwoSpeeds: .*in training it had"):
        rl.load("run", cell="cells/mine.py:TwoSpeeds")
    cell.unlink()
    for command in commands_of("run"):
        fails(
            [*command, *CELL], capsys, "mine.py': No such file", "Pass the path of a readable file."
        )
    assert not spy.exists()  # no line of the changed file was run
    assert not (work / "p.csv").exists()


def test_a_cell_for_a_model_that_has_another(work: Path, capsys: Capsys) -> None:
    assert main(["train", "ok.csv", *FAST, "--quiet", "--output", "plain"]) == 0
    fails(
        ["evaluate", "plain", "ok.csv", *CELL],
        capsys,
        "the cell gru of the library",
        "Leave --cell out",
    )
    fails(
        ["evaluate", "run", "ok.csv", "--cell", "gru"],
        capsys,
        "a Python file and its class TwoSpeeds",
    )
    fails(
        ["evaluate", "run", "ok.csv", "--cell", "cells/mine.py:Other"],
        capsys,
        "the class TwoSpeeds",
    )
    with pytest.raises(ArgumentTypeError, match="a class of a Python file"):
        rl.load("run", cell=int)
    with pytest.raises(ArgumentTypeError, match="a class, or a Python file and a class in it"):
        rl.load("run", cell=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "place",
    [
        "run/cell.py",
        "/proc/self/cwd/lib/cell.py",
        "{}/lib/cell.py",
        "lib/../lib/cell.py",
        "link.py",
    ],
)
def test_no_code_is_run_because_a_run_names_it(
    work: Path, place: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the run contains the SHA-256 of the file, and another file was named."""
    code = f"open({str(work / 'ran')!r}, 'w')\n" + EXAMPLE.read_text()
    for path in (work / "run" / "cell.py", work / "lib" / "cell.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    (work / "link.py").symlink_to(work / "lib" / "cell.py")
    cell = f"{place.format(work)}:TwoSpeeds@{hashlib.sha256(code.encode()).hexdigest()}"
    for name in ("run.json", "best/config.json"):
        path = work / "run" / name
        content = json.loads(path.read_text())
        content["settings" if name == "run.json" else "model"]["cell"] = cell
        path.write_text(json.dumps(content))
    text = (work / "run" / "run.toml").read_text()
    text = "".join(
        f"cell = {json.dumps(cell)}\n" if line[:4] == "cell" else f"{line}\n"
        for line in text.splitlines()
    )
    (work / "run" / "run.toml").write_text(text)
    for named, piece in ([], NAMELESS), (CELL, "with the SHA-256"):
        for command in commands_of("run"):
            start_afresh(monkeypatch)
            fails([*command, *named], capsys, piece)
    fails(
        ["train", "--config", "run/run.toml", "--output", "other"],
        capsys,
        "so that no code is run unasked",
    )
    assert main(["compare", "run"]) == 0
    assert not (work / "ran").exists()


def test_a_model_without_the_digest_of_its_file(work: Path, capsys: Capsys) -> None:
    path = work / "run" / "best" / "config.json"
    content = json.loads(path.read_text())
    content["model"]["cell"] = f"{work}/cells/mine.py:TwoSpeeds"
    path.write_text(json.dumps(content))
    fails(
        ["predict", "run", "ok.csv", "-o", "p.csv", *CELL],
        capsys,
        "a name with the SHA-256 of its file",
    )


def test_other_processes_receive_the_code(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    both = ["--processes", "2", "--threads", "1"]
    assert main(["train", "ok.csv", *CELL, *FAST, *both, "--quiet", "--output", "two"]) == 0
    kept = pickle.dumps(rl.load("two", cell=CELL[1]).predictor())
    start_afresh(monkeypatch)
    monkeypatch.setattr(tables, "_RUNS", {})
    table = {"a": [[0.1, 0.2], [0.3]], "b": [[0.1, 0.2], [0.3]]}
    assert len(pickle.loads(kept)(table)["prediction"]) == 2


@pytest.mark.parametrize(
    ("code", "piece"),
    [
        (None, "a readable file, got ... No such file or directory"),
        ("def (", "a file that Python can run, got ... line 1: SyntaxError: invalid syntax"),
        (
            "x = 1\nimport nothing_there",
            "line 2: ModuleNotFoundError: No module named 'nothing_there'",
        ),
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        ("class B:\n    def step(self): ...", "a class with step(x_t, state), and '"),
        ("A = 3", "has none, got ... Name one of the classes"),
        ("class A: ...", "cell"),
    ],
)
def test_a_file_without_such_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, code: str | None, piece: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / "ok.csv")
    if code is not None:
        Path("mine.py").write_text(code)
    before = sorted(tmp_path.iterdir())
    fails(["train", "ok.csv", "--cell", "mine.py:A", *FAST, "--output", "run"], capsys, piece)
    assert sorted(tmp_path.iterdir()) == before


def test_a_step_that_fails_is_shown_with_its_line(work: Path, capsys: Capsys) -> None:
    broken = EXAMPLE.read_text().replace(
        "fast, slow = state\n", "fast, slow = state\n        x_t @ slow\n"
    )
    (work / "cells" / "broken.py").write_text(broken)
    line = broken.splitlines().index("        x_t @ slow") + 1
    command = [
        "train",
        "ok.csv",
        "--cell",
        "cells/broken.py:TwoSpeeds",
        *FAST,
        "--quiet",
        "--output",
        "other",
    ]
    fails(
        command,
        capsys,
        f"broken.py, line {line}: RuntimeError",
        "Correct it; --debug shows the traceback.",
    )
    assert not (work / "other").exists()


def test_a_file_in_the_folder_of_its_run(work: Path, capsys: Capsys) -> None:
    shutil.copy(EXAMPLE, work / "run" / "cell.py")
    command = [
        "train",
        "ok.csv",
        "--cell",
        "run/cell.py:TwoSpeeds",
        *FAST,
        "--quiet",
        "--output",
        "run",
        "--overwrite",
    ]
    fails(command, capsys, "Move the file elsewhere")


def test_from_python(tmp_path: Path) -> None:
    batch = [torch.randn(length, 2) for length in (3, 1, 4, 2) * 3]
    run = rl.fit(
        batch,
        ["a", "b", "b", "a"] * 3,
        cell=f"{EXAMPLE}:TwoSpeeds",
        epochs=1,
        hidden_size=4,
        progress=False,
    )
    run.save(tmp_path / "model")
    again = rl.load(tmp_path / "model", cell=f"{EXAMPLE}:TwoSpeeds").predict(batch)
    assert again.columns == run.predict(batch).columns
    with pytest.raises(ArgumentError, match="zoneout"):
        rl.fit(
            batch,
            ["a", "b", "b", "a"] * 3,
            cell=f"{EXAMPLE}:TwoSpeeds",
            zoneout=0.1,
            progress=False,
        )


def test_a_name_with_another_digest() -> None:
    with pytest.raises(ArgumentError, match="unchanged"):
        rl.fit(
            [torch.randn(3, 2)] * 4,
            ["a", "b"] * 2,
            cell=f"{EXAMPLE}:TwoSpeeds@{'0' * 64}",
            progress=False,
        )
