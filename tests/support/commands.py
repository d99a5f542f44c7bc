"""Commands that fail, data for commands, and the content of folders."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raglane.cli import main

FAST = ["--epochs", "2", "--hidden-size", "4", "--threads", "1"]


def undraw(patch: pytest.MonkeyPatch) -> None:
    """Let a picture file contain its numbers as text: drawing takes four fifths of a small training."""

    def numbers_of(figure: Any, dpi: int) -> bytes:
        drawn = [
            (line.get_label(), [list(map(float, data)) for data in line.get_data()])
            for axes in figure.axes
            for line in axes.lines
        ]
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        return b"\x89PNG" + repr((drawn, texts)).encode()

    patch.setattr("raglane.report.figures.png", numbers_of)
    patch.setattr("raglane.report.figures.svg", lambda _: b"<svg></svg>")


@pytest.fixture(scope="module", autouse=True)
def undrawn_pictures() -> Iterator[None]:
    """In files that import this fixture, pictures are not drawn; tests/plot covers that."""
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        yield


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], *pieces: str, code: int = 2) -> None:
    """Assert that a command ends with a code and one line that contains the pieces; "..." is any text."""
    capsys.readouterr()
    assert main(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("raglane: error: ")
    for piece in pieces:
        assert re.search(".*".join(map(re.escape, piece.split("..."))), lines[0]), (piece, lines[0])


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_steps(path: Path, count: int = 12, cells: Mapping[str, str] | None = None) -> Path:
    """Write a CSV file with sequences of 1 to 4 rows; ``cells`` replaces cells of the third row, by column."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["id", "t", "a", "b", "label"]
        writer.writerow(names)
        row = 0
        for number in range(count):
            for step in range(number % 4 + 1):
                values = dict(zip(names, [f"s{number}", step, step * 0.5, -number, "xy"[number % 2]], strict=True))
                writer.writerow((values | dict(cells or {} if row == 2 else {})).values())
                row += 1
    return path
