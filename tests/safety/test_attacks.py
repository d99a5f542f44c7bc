"""The attacks in small: each runs longer by hand, as its file says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz.__main__ as turns
from commands import undrawn_pictures  # noqa: F401
from fuzz import cells, commands, malformed_files, numbers
from raglane.data import Columns
from raglane.errors import DataError
from random_cells import ask, naive


def test_malformed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert malformed_files.main(400, 1) == 0, capsys.readouterr().out


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(40, 1) == 0, capsys.readouterr().out


def test_cells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cells.main(3, 1000) == 0, capsys.readouterr().out

    def wrong(seed: int, run: Any) -> Any:
        answer = ask(seed, run)
        return answer if run is naive else answer._replace(results=[part * 1.001 for part in answer.results])

    monkeypatch.setattr(cells, "ask", wrong)
    assert cells.main(2, 1000) == 2
    assert "python -m fuzz.cells 1 1001: program auto: result 0" in capsys.readouterr().out


def test_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers.main(30, 1) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "what", "rounds"),
    [
        (lambda part, layer: part * (1 + 1e-3) if layer.backend != "reference" else part, "is off by", 4),
        (
            lambda part, _: part.nextafter(part + 1) if not part.requires_grad else part,
            "other bits where no gradient",
            5,
        ),
        (lambda part, _: part + 1e-6 * len(part), "has other bits in another batch", 9),
    ],
)
def test_numbers_that_are_wrong_are_found(
    wrong: Callable[..., torch.Tensor],
    what: str,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = numbers.Round.run

    def other(this: numbers.Round, layer: Any, *given: Any) -> list[torch.Tensor]:
        out, *more = run(this, layer, *given)
        return [wrong(out, layer), *more]

    monkeypatch.setattr(numbers.Round, "run", other)
    assert numbers.main(rounds, 1) > 0
    found = capsys.readouterr().out
    assert what in found
    assert "python -m fuzz.numbers 1 " in found


def test_attacks_in_turn_say_what_they_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that repeats it, whether it ended with a code or by a signal."""
    monkeypatch.setattr(turns, "ROUNDS", {"malformed_files": 2})
    assert turns.main(0, 7) == 0
    assert "1 attacks" in capsys.readouterr().out
    for end in ("import os; os.abort()", "raise SystemExit(1)"):
        monkeypatch.setattr(turns, "COMMAND", [sys.executable, "-c", end])
        assert turns.main(0, 7) == 1
        found = capsys.readouterr().out
        assert "make fuzz SECONDS=0 SEED=7" in found
        assert "FAULT: python -m fuzz.malformed_files 2 " in found
        assert ": exit code " in found


@pytest.mark.parametrize(
    "error", [ValueError("x"), MemoryError(), DataError("no fix"), DataError("Fix: " + "x" * 5000), TimeoutError()]
)
def test_an_attack_finds_what_should_not_be(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(malformed_files, "read", fail)
    assert malformed_files.fault_of(tmp_path, None, Columns()) is not None
    assert malformed_files.main(2, 1) == 2
    assert "python -m fuzz.malformed_files 1 1 1\n" in capsys.readouterr().out


def test_a_round_can_be_repeated(tmp_path: Path) -> None:
    """It follows from the seed and its number alone."""
    found = []
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        _, path, form, columns = malformed_files.attack(3, 17, folder)
        found.append((path.name, path.read_bytes() if path.is_file() else b"", form, columns))
    assert found[0] == found[1]
