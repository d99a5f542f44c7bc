"""The attacks in small: each runs longer by hand, as its file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attacks import commands, malformed_files
from raglane.data import Columns
from raglane.errors import DataError


def test_malformed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert malformed_files.main(400, 1) == 0, capsys.readouterr().out


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(40, 1) == 0, capsys.readouterr().out


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
    assert "python -m attacks.malformed_files 1 1 1\n" in capsys.readouterr().out


def test_a_round_can_be_repeated(tmp_path: Path) -> None:
    """It follows from the seed and its number alone."""
    found = []
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        _, path, form, columns = malformed_files.attack(3, 17, folder)
        found.append((path.name, path.read_bytes() if path.is_file() else b"", form, columns))
    assert found[0] == found[1]
