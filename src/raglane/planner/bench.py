"""Raglane's layers against PyTorch's: the table of ``raglane bench``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from raglane._utils.messages import quote, shorten
from raglane._utils.table import PrintedTable
from raglane.errors import ArgumentError
from raglane.planner.probe import (
    CELLS,
    COLUMNS,
    MODES,
    Size,
    lengths_of_file,
    lognormal,
    time_layer,
)

_MOST = 2**20


def bench(lengths: Path | None, sizes: str, cells: str, modes: str) -> PrintedTable:
    """Time layers on the lengths of a file, or on lognormal ones; the other arguments are lists, as
    the command has them.
    """
    listed = lognormal(1000, 30, 1) if lengths is None else lengths_of_file(lengths)
    shapes = [size_of(text) for text in parts_of("sizes", sizes)]
    chosen = pick("cells", cells, CELLS)
    ways = pick("modes", modes, MODES)
    rows = [
        time_layer(cell, size, listed, mode) for cell in chosen for size in shapes for mode in ways
    ]
    name = "lognormal lengths" if lengths is None else f"lengths of {shorten(lengths.name, 40)}"
    return PrintedTable(f"{name}, {torch.get_num_threads()} threads", COLUMNS, rows)


def parts_of(option: str, text: str) -> list[str]:
    """Split a comma-separated list, and remove duplicates."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ArgumentError(option, quote(text), "a comma-separated list", "leave no entry empty")
    return list(dict.fromkeys(words))


def pick(option: str, text: str, valid: Collection[str]) -> list[str]:
    """Return the selected names, all of them for 'all'."""
    words = parts_of(option, text)
    if words == ["all"]:
        return list(valid)
    for word in words:
        if word not in valid:
            raise ArgumentError(
                option, quote(word), f"one of {', '.join(valid)}, or all", "pass one of these"
            )
    return words


def size_of(text: str) -> Size:
    """Parse the size of a batch and a layer, such as 64x256x80."""
    match = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", text, re.ASCII)
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or not all(1 <= number <= _MOST for number in numbers):
        rule = f"sequences x units x features, with each number from 1 to {_MOST:,}"
        raise ArgumentError("sizes", quote(text), rule, "pass e.g. 64x256x256")
    return Size(*numbers)
