"""Commands that fail, data for commands, and the content of folders."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from raglane.cli import main

Capsys = pytest.CaptureFixture[str]
"""The type of the fixture ``capsys``."""

CARD_PICTURES = ("curve_svg", "lengths_svg", "rows_svg", "points")
"""Functions that draw the pictures of a card. Only the tests of the card run them."""

FAST = ["--epochs", "2", "--hidden-size", "4", "--threads", "1"]


def undraw(patch: pytest.MonkeyPatch) -> None:
    """Let a picture file contain what is drawn as text: drawing takes four fifths of a small
    training.
    """

    def text(rows: Any, *more: Any) -> bytes:
        # Times, which differ from run to run, are not drawn.
        shown = [
            [it for it in row.items() if "second" not in it[0]] if isinstance(row, dict) else row
            for row in rows
        ]
        return b"\x89PNG" + repr((shown, more)).encode()

    for place in ("report.figures.confusion_png", "runs.training.curves"):
        patch.setattr(f"raglane.{place}", text)
    for name in CARD_PICTURES:
        patch.setattr(f"raglane.runs.card.{name}", lambda *_, **__: b"<svg></svg>")


def fails(
    arguments: list[str],
    capsys: Capsys,
    *pieces: str,
    code: int = 2,
    run: Callable[[list[str]], int] = main,
    name: str = "raglane",
) -> None:
    """Assert that a command ends with a code and one line that contains the pieces; "..." is any
    text.
    """
    capsys.readouterr()
    assert run(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{name}: error: ")
    for piece in pieces:
        assert re.search(".*".join(map(re.escape, piece.split("..."))), lines[0]), (piece, lines[0])


def prints(arguments: list[str], capsys: Capsys, *pieces: str) -> str:
    """Assert that a command succeeds and prints the pieces; return its output."""
    capsys.readouterr()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for piece in pieces:
        assert piece in printed, (piece, printed)
    return printed


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(path: Path, count: int = 12, cells: Mapping[str, str] | None = None) -> Path:
    """Write a CSV file with sequences of 1 to 4 rows; ``cells`` replaces cells of the third row, by
    column.
    """
    names = ["id", "t", "a", "b", "label"]
    rows: list[list[Any]] = [
        [f"s{n}", step, step * 0.5, -n, "xy"[n % 2]]
        for n in range(count)
        for step in range(n % 4 + 1)
    ]
    rows[2] = [(cells or {}).get(name, value) for name, value in zip(names, rows[2], strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in [names, *rows]))
    return path
