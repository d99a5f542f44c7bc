"""A few rounds of each fuzzer, and fuzzers that find what is wrong."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz.__main__ as turns
from commands import Capsys
from fuzz import cells, malformed_files, numbers
from fuzz.odd_files import build
from raglane.errors import DataError
from random_cells import ask, naive

play = turns.play


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("malformed_files", 120), ("commands", 15), ("numbers", 12), ("streams", 6)],
)
def test_rounds(name: str, rounds: int, capsys: Capsys) -> None:
    assert play(name, rounds, 1) == 0, capsys.readouterr().out


def test_cells(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play("cells", 3, 1000) == 0, capsys.readouterr().out

    def wrong(seed: int, run: Any) -> Any:
        answer = ask(seed, run)
        return (
            answer
            if run is naive
            else answer._replace(results=[part * 1.001 for part in answer.results])
        )

    monkeypatch.setattr(cells, "ask", wrong)
    assert play("cells", 2, 1000) == 2
    assert "python -m fuzz cells --rounds 1 --seed 1001: reference " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "what", "rounds"),
    [
        (
            lambda part, layer: part * (1 + 1e-3) if layer.backend != "reference" else part,
            "is off by",
            4,
        ),
        (
            lambda part, _: part.nextafter(part + 1) if not part.requires_grad else part,
            "other bits without",
            5,
        ),
        (lambda part, _: part + 1e-6 * len(part), "has other bits in another batch", 9),
    ],
)
def test_wrong_numbers_are_found(
    wrong: Any, what: str, rounds: int, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    run = numbers.Round.run

    def other(this: numbers.Round, layer: Any, *given: Any) -> list[torch.Tensor]:
        out, *more = run(this, layer, *given)
        return [wrong(out, layer), *more]

    monkeypatch.setattr(numbers.Round, "run", other)
    assert play("numbers", rounds, 1) > 0
    found = capsys.readouterr().out
    assert what in found
    assert "python -m fuzz numbers --rounds 1 " in found


def test_fuzzers_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """A failure is printed with the command that repeats it, whether the process ends with a code
    or by a signal.
    """
    monkeypatch.setattr(turns, "ROUNDS", {"malformed_files": 2})
    arguments = ["--seconds", "0", "--seed", "7"]
    assert turns.main(arguments) == 0
    assert "1 runs in " in capsys.readouterr().out
    for end in ("import os; os.abort()", "raise SystemExit(1)"):
        monkeypatch.setattr(turns, "COMMAND", [sys.executable, "-c", end])
        assert turns.main(arguments) == 1
        found = capsys.readouterr().out
        assert "make fuzz SECONDS=0 SEED=7" in found
        assert "FAILED: python -m fuzz malformed_files --rounds 2 " in found
        assert ": exit code " in found


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        MemoryError(),
        DataError("no fix"),
        DataError("x must be y, got " + "z" * 5000),
        TimeoutError(),
    ],
)
def test_errors_that_no_reader_may_raise(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(malformed_files, "read", fail)
    assert turns.main(["malformed_files", "--rounds", "2", "--seed", "3"]) == 2
    assert "python -m fuzz malformed_files --rounds 1 --seed 3: " in capsys.readouterr().out


def test_a_round_can_be_repeated(tmp_path: Path) -> None:
    """It depends only on its number."""
    found = []
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        path, form, columns = build(random.Random(17), folder)
        found.append((path.name, path.read_bytes() if path.is_file() else b"", form, columns))
    assert found[0] == found[1]
