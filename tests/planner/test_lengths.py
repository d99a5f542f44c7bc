"""Lists of lengths: their file, and what a batch draws of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raglane.errors import DataError
from raglane.planner.probe import draw, lengths_of_file


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("9\n\n 1 \n4\n")
    assert lengths_of_file(path) == [9, 1, 4]


def test_a_batch_of_another_size_draws() -> None:
    assert draw([9, 1, 4], 3) == [9, 1, 4]
    many = draw([9, 1, 4], 300)
    assert set(many) == {1, 4, 9}
    assert draw([9, 1, 4], 300) == many


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        ("", "no length"),
        ("\n\n", "no length"),
        ("3\n0\n", "'0' in line 2"),
        ("3\n-4\n", "'-4' in line 2"),
        ("2.5\n", "'2.5' in line 1"),
        ("3 4\n", "'3 4' in line 1"),
        ("１\n", "in line 1"),
        ("9" * 5000, "in line 1"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_lengths_is_refused(tmp_path: Path, content: str | bytes, piece: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=piece):
        lengths_of_file(path)
