"""``rl.fit`` trains the model of ``raglane train``, without side effects."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import raglane as rl
from commands import FAST, Capsys, tree, write_steps
from raglane.cli import main
from raglane.errors import ArgumentError, ArgumentTypeError, DataError, DivergedError, ShapeError

_QUICK: dict[str, Any] = {"epochs": 2, "hidden_size": 4, "threads": 1}


def _sequences(count: int = 12) -> tuple[list[Any], list[str]]:
    random = np.random.default_rng(0)
    return [random.normal(size=(length, 2)) for length in random.integers(1, 5, count)], [
        "x",
        "y",
    ] * (count // 2)


def _weights(run: rl.Run) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def _same(one: rl.Run, other: rl.Run) -> bool:
    mine, theirs = _weights(one), _weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_it_is_the_command(tmp_path: Path) -> None:
    data, held = write_steps(tmp_path / "steps.csv", 16), write_steps(tmp_path / "held.csv", 4)
    shaped: dict[str, Any] = {
        "cell": "lstm",
        "seed": 3,
        "validation_fraction": 0.3,
        "features": ["b"],
    }
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (
            [
                "--cell",
                "lstm",
                "--seed",
                "3",
                "--validation-fraction",
                "0.3",
                "--feature-column",
                "b",
            ],
            shaped,
        ),
        (["--validation", str(held), "--test", str(held)], {"validation": held, "test": held}),
    ]
    for number, (flags, options) in enumerate(cases):
        told, own = tmp_path / f"told{number}", tmp_path / f"own{number}"
        assert main(["train", str(data), "--output", str(told), *FAST, *flags, "--quiet"]) == 0
        assert rl.fit(data, output=own, **_QUICK, **options).folder == own
        assert tree(told / "best") == tree(own / "best")
        assert (told / "run.json").read_bytes() == (own / "run.json").read_bytes()
        mine = {name for name in tree(own) if not name.startswith((".", "evaluation", "confusion"))}
        assert mine == {
            name for name in tree(told) if not name.startswith((".", "evaluation", "confusion"))
        }


def test_models_are_float32_for_any_default_dtype(tmp_path: Path) -> None:
    rl.fit(*_sequences(), output=tmp_path / "run", **_QUICK)
    tied: dict[str, Any] = {
        "task": "language",
        "tie_weights": True,
        "embedding": 4,
        "embedding_dropout": 0.5,
    }
    torch.set_default_dtype(torch.float64)
    try:
        runs = [
            rl.load(tmp_path / "run"),
            rl.fit(*_sequences(), **_QUICK),
            rl.fit(["ab"] * 9, **tied, **_QUICK),
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weights.dtype for run in runs for weights in _weights(run).values()} == {torch.float32}


def test_a_run_goes_on_with_its_own_parts(tmp_path: Path) -> None:
    data, held = write_steps(tmp_path / "steps.csv", 16), write_steps(tmp_path / "held.csv", 4)
    parts: dict[str, Any] = {"validation": held, "test": held}
    rl.fit(data, output=tmp_path / "run", **_QUICK, **parts)
    run = rl.fit(data, output=tmp_path / "run", resume=True, epochs=3)
    assert f"validation: 4 sequences of {held}" in run.notes
    assert _same(run, rl.fit(data, **_QUICK | {"epochs": 3}, **parts))
    with pytest.raises(ArgumentError, match=r"overwrite must be .*got True, with resume=True"):
        rl.fit(data, output=tmp_path / "run", resume=True, overwrite=True)


def test_it_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sequences, labels = _sequences()
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run: Any = rl.fit(sequences, labels, **(_QUICK | {"threads": threads + 1}))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert run.folder is None
    assert len(run.result.state.history) == 2
    # What was drawn before makes no difference.
    torch.randn(5)
    assert _same(run, rl.fit(sequences, labels, **_QUICK))


def test_given_parts_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, labels = _sequences()
    run = rl.fit(
        sequences,
        labels,
        validation=(sequences[:4], labels[:4]),
        test=(sequences[:6], labels[:6]),
        **_QUICK,
    )
    assert "validation: 4 sequences of memory" in run.notes
    assert "test: 6 of 6 sequences of memory are also in the training data" in run.notes
    assert run.evaluate().numbers == run.evaluate(sequences[:6], labels[:6]).numbers
    records = rl.data.read(sequences, labels=labels)
    assert _same(run, rl.fit(records, validation=records.subset(range(4)), **_QUICK))
    monkeypatch.setattr(
        "raglane.runs.training.plan_batches",
        lambda settings, *_: (replace(settings, batch_size=5), "Because."),
    )
    planned = rl.fit(sequences, labels, **_QUICK, batch_size="auto")
    assert "batches: 5 sequences in random order. Because." in planned.notes


def test_going_on_is_never_having_stopped(tmp_path: Path) -> None:
    sequences, labels = _sequences()
    whole = rl.fit(sequences, labels, output=tmp_path / "whole", **(_QUICK | {"epochs": 4}))
    rl.fit(sequences, labels, output=tmp_path / "parts", **_QUICK)
    going_on: dict[str, Any] = {"output": tmp_path / "parts", "resume": True}
    assert _same(rl.fit(sequences, labels, **going_on, epochs=np.int64(4)), whole)  # type: ignore[arg-type]
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: rl.fit(sequences, labels, output=tmp_path / "parts"),
            ArgumentError,
            "contains a run",
        ),
        (
            lambda: rl.fit(sequences, labels, resume=True),
            ArgumentError,
            "output must be .*got None",
        ),
        (lambda: rl.fit(sequences, labels, **going_on, lr=1), ArgumentError, "lr must be .*got 1"),
        (lambda: rl.fit(sequences[::-1], labels, **going_on), DataError, "other data"),
        (
            lambda: rl.fit(sequences, labels, output=tmp_path / "none", resume=True),
            ArgumentError,
            "the folder of a run",
        ),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()
    again: Any = rl.fit(sequences, labels, output=tmp_path / "parts", overwrite=True, **_QUICK)
    assert len(again.result.state.history) == 2


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal; processes in the background of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_stops_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, labels = _sequences()
    watcher = Mock(spec=["started", "batch_done", "epoch_done", "close"])
    watcher.epoch_done.side_effect = lambda *_: signal.raise_signal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr("raglane.runs.fit._bar", lambda *_: watcher)
        for folder in (tmp_path / "run", None):
            with pytest.raises(KeyboardInterrupt):
                rl.fit(sequences, labels, output=folder, **(_QUICK | {"epochs": 100}))
    run = rl.fit(sequences, labels, output=tmp_path / "run", resume=True, epochs=3)
    assert _same(run, rl.fit(sequences, labels, **(_QUICK | {"epochs": 3})))


def test_a_bar_appears_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    sequences, labels = _sequences()
    rl.fit(sequences, labels, progress=True, **_QUICK)
    assert "loss" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rl.fit(sequences, labels, progress=False, **_QUICK)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout", None)  # as in pythonw
    rl.fit(sequences, labels, **_QUICK)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hiden_size": 3}, ArgumentTypeError, r"'hiden_size'.*Pass hidden_size"),
        ({"layer": "gru"}, ArgumentTypeError, "'layer'"),
        *(
            ({"hidden_size": x}, ArgumentTypeError, f"hidden_size must be a whole.*, got {x!r}")
            for x in ("8", True)
        ),
        (
            {"test": ("none.csv", ["a"])},
            ArgumentTypeError,
            "labels must be .*got labels with a file as test",
        ),
        ({"features": 3}, ArgumentTypeError, "features must be .*got 3"),
        ({"time_gaps": "yes"}, ArgumentTypeError, "time_gaps must be True or False"),
        ({"device": "tpu"}, ArgumentError, "device"),
        *(
            ({name: 1}, ArgumentTypeError, f"{name} must be .*got 1")
            for name in ("resume", "overwrite")
        ),
        ({"progress": "yes"}, ArgumentTypeError, "progress must be .*got 'yes'"),
        ({"validation": ([[1.0]], ["a", "b"])}, ShapeError, "labels must be .*got 2 for 1"),
        ({"validation": ([[1.0, 2.0]], ["z"])}, DataError, "channels"),
        ({"test": "none.csv"}, DataError, "none.csv"),
        ({"lr": 1e30, "epochs": 50}, DivergedError, "lr"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], words: str) -> None:
    sequences, labels = _sequences()
    with pytest.raises(error, match=words):
        rl.fit(sequences, labels, **(_QUICK | options))
