"""Searches: the search space, resumption, errors and the best run."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raglane as rl
from commands import FAST, Capsys, fails, tree, write_steps
from processes import start
from raglane.cli import main
from raglane.errors import ArgumentError
from raglane.runs import tuning
from raglane.runs.card import DataParts
from raglane.runs.tuning import SEARCHED, Range, Search, default_space, read_space
from raglane.tasks import TASKS
from raglane.training.run import load_description
from raglane.training.settings import Settings

optuna = pytest.importorskip("optuna", reason="the extra tune is not installed")
NullPool = pytest.importorskip("sqlalchemy.pool").NullPool  # so that no connection stays open

_FIXED = [
    "--epochs",
    "2",
    "--threads",
    "1",
    "--num-layers",
    "1",
    "--batch-size",
    "8",
    "--dropout",
    "0",
]


def _trials(study: Path) -> list[Any]:
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{study / 'study.db'}", engine_kwargs={"poolclass": NullPool}
    )
    return list(optuna.load_study(study_name="raglane", storage=storage).trials)


def _ended(study: Path) -> list[Any]:
    return [trial for trial in _trials(study) if trial.state.name in ("COMPLETE", "PRUNED")]


def test_the_best_trial_becomes_a_run_and_the_study_goes_on(tmp_path: Path, capsys: Capsys) -> None:
    data, other = write_steps(tmp_path / "steps.csv"), write_steps(tmp_path / "other.csv", 9)
    out = tmp_path / "study"
    search = tmp_path / "search.toml"
    search.write_text(
        'hidden-size = 4\n[search]\ncell = ["gru", "rnn"]\nlr = {low = 0.001, high = 0.1, log = true}\n'
    )
    command = [
        "tune",
        str(data),
        "--output",
        str(out),
        "--config",
        str(search),
        "--test",
        str(data),
        *_FIXED,
    ]
    assert main([*command, "--trials", "2"]) == 0
    first = _ended(out)
    assert len(first) == 2
    for trial in first:
        assert set(trial.params) == {"cell", "lr", "bidirectional", "pooling"}
        assert 0.001 <= trial.params["lr"] <= 0.1
        run = out / "trials" / trial.user_attrs["folder"]
        # The test part is not touched by a trial.
        assert not (run / "evaluation.json").exists()
        settings = load_description(run).settings
        assert (settings.hidden_size, settings.epochs, settings.cell) == (
            4,
            2,
            trial.params["cell"],
        )
    assert main([*command, "--trials", "3"]) == 0
    assert [trial.number for trial in _ended(out)] == [0, 1, 2]
    # A study that goes on tries other things.
    assert len({trial.params["lr"] for trial in _ended(out)}) == 3
    before = tree(out / "trials")
    assert main([*command, "--trials", "3"]) == 0
    assert tree(out / "trials") == before
    best = min(
        (trial for trial in _ended(out) if trial.state.name == "COMPLETE"),
        key=lambda trial: trial.value,
    )
    run = rl.load(out / "run")
    chosen = out / "trials" / best.user_attrs["folder"]
    assert (out / "run/best/weights.safetensors").read_bytes() == (
        chosen / "best/weights.safetensors"
    ).read_bytes()
    assert (
        json.loads((out / "run/evaluation.json").read_text())["accuracy"]
        == run.evaluate()["accuracy"]
    )
    assert "test" in (out / "run/card.md").read_text()
    assert f"| {'validation loss'[11:]} " in (out / "run/card.md").read_text()
    capsys.readouterr()
    # A study is one of its data, its settings and its ranges.
    whole = tree(out)
    fails(
        ["tune", str(other), *command[2:]],
        capsys,
        "--output must be the folder of a study of the same sequences",
        "a study of other data",
    )
    fails(
        [*command, "--hidden-size", "5"],
        capsys,
        "--hidden-size must be ... got 5",
        "was started with 4",
    )
    fails(
        [*command, "--optimizer", "sgd"],
        capsys,
        "--optimizer must be ... got 'sgd'",
        "was started with",
    )
    fails(
        [*command, "--grad-clip", "2"], capsys, "--grad-clip must be ... got 2", "was started with"
    )
    fails([*command, "--epochs", "3"], capsys, "--epochs must be ... got 3", "was started with 2")
    search.write_text(search.read_text().replace('"rnn"', '"lstm"'))
    fails(command, capsys, "--cell must be the search space of the study, got ")
    assert tree(out) == whole


def test_searched_settings() -> None:
    for task in TASKS:
        space = default_space(Settings(task=task), [])
        assert set(space) <= set(SEARCHED)
        for name, values in space.items():
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                Settings(**{"task": task, name: value})
    assert "batch_size" not in default_space(Settings(batch_elements=100), ["lr"])
    assert "lr" not in default_space(Settings(), ["lr"])
    for table, piece in (
        ({"hiden-size": [1]}, "Write hidden-size"),
        ({"seed": [1, 2]}, "options that can be searched"),
        ({"hidden_size": 8}, "a list of values, or {low, high}"),
        ({"hidden_size": []}, "a list of values"),
        ({"hidden_size": [8, 8]}, "distinct values"),
        ({"hidden_size": ["8"]}, "a whole number"),
        ({"hidden_size": [0, 1]}, "at least 1"),
        ({"cell": ["gru", "foo"]}, "one of lstm"),
        ({"cell": {"low": "gru", "high": "lstm"}}, "two numbers"),
        ({"lr": {"low": 0.1, "high": 0.01}}, "the lower first"),
        ({"dropout": {"low": 0, "high": 0.5, "log": True}}, "above 0 if log is true"),
        ({"lr": {"low": 0.1, "top": 0.2}}, "{low, high}"),
        ([1], "a table of options"),
    ):
        with pytest.raises(ArgumentError) as error:
            read_space(table, "[search] in a.toml")
        assert piece in str(error.value), table
    assert read_space({"hidden_size": {"low": 2, "high": 8}}, "a.toml") == {
        "hidden_size": Range(2, 8, whole=True)
    }
    assert read_space({"dropout": {"low": 0, "high": 0.5}}, "a.toml") == {"dropout": Range(0, 0.5)}


def test_mistakes_end_in_one_line(tmp_path: Path, capsys: Capsys) -> None:
    data = str(write_steps(tmp_path / "steps.csv"))
    full, broken, out = tmp_path / "full", tmp_path / "broken", tmp_path / "out"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    (broken / "trials").mkdir(parents=True)
    (broken / "study.db").write_bytes(b"no study" * 1000)
    # Trials of a study that is lost would be taken for others.
    for lost in (tmp_path / "lost", tmp_path / "empty"):
        (lost / "trials" / "0000").mkdir(parents=True)
        (lost / "trials" / "0000" / "run.json").write_text("{}")
    (tmp_path / "empty" / "study.db").touch()
    before = tree(tmp_path)
    fails(
        ["tune", data, "--output", str(full), *_FIXED],
        capsys,
        "--output must be a new folder",
        "which contains other files",
    )
    fails(
        ["tune", data, "--output", f"{data}/below", *_FIXED],
        capsys,
        "--output must be in a writable folder",
    )
    fails(
        ["tune", data, "--output", str(broken), *_FIXED],
        capsys,
        "study.db must be ",
        "a complete study that Raglane wrote",
    )
    fails(
        ["tune", data, "--output", str(tmp_path / "lost"), *_FIXED],
        capsys,
        "study.db must be ",
        "but a folder trials",
    )
    fails(
        ["tune", data, "--output", str(tmp_path / "empty"), *_FIXED],
        capsys,
        "study.db must be ",
        "no study in it",
    )
    for more, piece in (
        (["--trials", "0"], "--trials must be ... got 0"),
        (["--minutes", "-1"], "--minutes must be ... got -1"),
        (["--minutes", "nan"], "--minutes must be ... got nan"),
        (["--validation-fraction", "0"], "losses a search can compare"),
        (["--batch-size", "auto"], "a number in a search"),
    ):
        fails(["tune", data, "--output", str(out), *more], capsys, piece)
    after = {
        name: content for name, content in tree(tmp_path).items() if not name.endswith(".turn")
    }
    del before["empty/study.db"], after["empty/study.db"]
    assert after == before
    assert not out.exists()


def test_a_validation_part_without_a_target_is_an_error(tmp_path: Path, capsys: Capsys) -> None:
    for name, rows in (("long", [[1.5, 2.5]] * 3), ("short", [[1.5]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"sequence": {row}}}\n' for row in rows))
    long, short = (str(tmp_path / f"{name}.jsonl") for name in ("long", "short"))
    command = [
        "tune",
        long,
        "--task",
        "forecast",
        "--validation",
        short,
        "--output",
        str(tmp_path / "study"),
        *_FIXED,
    ]
    fails(
        command,
        capsys,
        "--validation must be a part whose losses a search can compare, got data without a target",
    )


def test_a_search_without_a_result_ends_with_the_reason(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "one.jsonl").write_text('{"x": [1.5, 2], "y": "only"}\n' * 9)
    command = [
        "tune",
        str(tmp_path / "one.jsonl"),
        "--output",
        str(tmp_path / "study"),
        "--trials",
        "2",
        *_FIXED,
    ]
    fails(
        [*command, "--quiet"],
        capsys,
        "one.jsonl must be ... at least two classes, got only the class 'only'",
    )


def test_ranks_of_torchrun_do_not_search(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would choose other trials than the rank that it trains with."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    command = [
        "tune",
        str(write_steps(tmp_path / "steps.csv")),
        "--output",
        str(tmp_path / "study"),
        *_FIXED,
    ]
    fails(
        command,
        capsys,
        "--processes must be processes on this machine in a search, got those of torchrun",
    )


def test_a_study_goes_on_with_other_hardware(tmp_path: Path) -> None:
    command = [
        "tune",
        str(write_steps(tmp_path / "steps.csv")),
        "--output",
        str(tmp_path / "study"),
        *_FIXED,
    ]
    command += ["--lr", "0.01", "--hidden-size", "4", "--trials", "1", "--quiet"]
    assert main([*command, "--device", "cpu"]) == 0
    assert main([*command, "--device", "auto", "--threads", "2", "--workers", "1"]) == 0


def _search(folder: Path, study: Any, settings: Settings | None = None) -> Search:
    nothing: Any = None
    search = Search(
        folder,
        settings or Settings(),
        {},
        DataParts(nothing, None, None),
        {},
        {},
        1,
        lambda _: None,
    )
    search.study = study
    return search


class _Study:
    def __init__(self, complete: int) -> None:
        self.complete = complete
        self.told: dict[str, Any] = {}

    def get_trials(self, **_: Any) -> list[None]:
        return [None] * self.complete

    def tell(self, _: Any, **told: Any) -> None:
        self.told = told


@pytest.mark.parametrize(
    ("complete", "is_late", "told"),
    [
        # Out of time: the best loss so far counts only without complete trials.
        (0, True, {"values": 0.5}),
        (1, True, {"state": "PRUNED"}),
        (0, False, {"state": "PRUNED"}),
        (1, False, {"state": "PRUNED"}),
    ],
)
def test_the_result_of_a_trial_that_ends_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    complete: int,
    is_late: bool,
    told: dict[str, Any],
) -> None:
    reported: list[tuple[float, int]] = []
    trial = SimpleNamespace(
        number=0, report=lambda *words: reported.append(words), should_prune=lambda: not is_late
    )

    def train(*_: Any, callback: Any, **__: Any) -> None:
        for epoch, loss in enumerate((0.5, 0.75), 1):
            callback.started(SimpleNamespace(history=[]), 9, 1)
            callback.until = 0.0 if is_late and epoch == 2 else math.inf
            trial.should_prune = lambda now=epoch: not is_late and now == 2
            callback.epoch_done({"epoch": epoch, "validation_loss": loss}, False)
        raise AssertionError("the trial went on")

    monkeypatch.setattr(tuning, "train", train)
    study: Any = _Study(complete)
    assert _search(tmp_path, study)._try(trial, {"lr": 0.1}, tmp_path / "0", math.inf) is None
    assert reported == [(0.5, 1), (0.75, 2)]
    assert {name: getattr(value, "name", value) for name, value in study.told.items()} == told


def test_the_result_is_that_of_the_best_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study()
    for number, value in enumerate((0.7, 0.4, 0.9)):
        trial = study.ask({"lr": optuna.distributions.FloatDistribution(0.001, 0.1)})
        trial.set_user_attr("folder", f"{number:04}")
        if number < 2:
            study.tell(trial, value)

    def locked(_: Path) -> None:
        raise ArgumentError("another process is at work")

    monkeypatch.setattr(tuning, "locked", locked)
    found = _search(tmp_path, study, Settings(hidden_size=5))._result(None)
    assert (found.best, found.value, found.done, found.others) == (
        tmp_path / "trials" / "0001",
        0.4,
        2,
        1,
    )
    assert found.settings == Settings(hidden_size=5, lr=study.best_params["lr"])


def test_trials_of_other_processes_count() -> None:
    study = optuna.create_study()
    first, _ = study.ask(), study.ask()
    study.tell(first, 1.0)
    assert _search(Path(), study)._begun == 2


def test_a_killed_trial_goes_on_and_time_ends_a_search(tmp_path: Path, capsys: Capsys) -> None:
    data, out = write_steps(tmp_path / "steps.csv"), tmp_path / "study"
    command = ["tune", str(data), "--output", str(out), *FAST, "--lr", "0.01", "--epochs", "100000"]
    (folder := tmp_path / "here").mkdir()
    process = start(folder, *command, "--quiet")
    checkpoint = out / "trials" / "0000" / "last" / "training.json"
    until = time.monotonic() + 60
    while not checkpoint.exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.signal(signal.SIGKILL)
    process.end()
    done = json.loads(checkpoint.read_text())["state"]["epoch"]
    assert [trial.state.name for trial in _trials(out)] == ["RUNNING"]
    assert main([*command, "--minutes", "0.02", "--trials", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\ntrial 0: " in printed
    assert "best: trial 0," in printed
    first, second = _trials(out)
    assert first.state.name == "FAIL"
    assert second.state.name == "COMPLETE"
    assert second.params == first.params
    # It went on in the folder of the one that died, with what that had done.
    assert second.user_attrs["folder"] == "0000"
    state = json.loads(checkpoint.read_text())["state"]
    assert state["epoch"] > done
    assert len(second.intermediate_values) == state["epoch"]
    assert second.value == min(row["validation_loss"] for row in state["history"])
    assert (out / "run" / "card.md").exists()


def test_without_optuna_one_line_names_the_extra(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    data = str(write_steps(tmp_path / "steps.csv"))
    fails(
        ["tune", data, "--output", str(tmp_path / "out")],
        capsys,
        "optuna is not installed",
        "raglane[tune]",
    )
    assert not (tmp_path / "out").exists()
