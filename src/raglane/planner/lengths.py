"""Lists of lengths: read from a text file, drawn from another list, or made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from raglane._utils.files import read_file
from raglane.errors import DataError, message, quote

__all__ = ["draw", "lengths_of_file", "lognormal"]


def lengths_of_file(path: Path) -> list[int]:
    """Read a text file of lengths, an integer of at least 1 per line; empty lines are passed over."""
    fix = "write one length per line, and nothing else"
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        got = f"{str(path)!r}, which cannot be read ({why})"
        raise DataError(message("lengths", got, "a text file", fix)) from error
    found: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= 10**6):
            rule = "an integer from 1 to 1,000,000 per line"
            raise DataError(message("lengths", f"{quote(text)} in line {number} of {path}", rule, fix))
        found.append(int(text))
    if not found:
        raise DataError(message("lengths", f"no length in {path}", "an integer of at least 1 per line", fix))
    return found


def draw(lengths: Sequence[int], count: int) -> list[int]:
    """As many of the lengths as a batch has sequences, drawn with replacement; unchanged if it has as many.

    Example:
        >>> draw([4, 2, 8], 3), set(draw([4, 2, 8], 50)) == {2, 4, 8}
        ([4, 2, 8], True)
    """
    if count == len(lengths):
        return list(lengths)
    places = torch.randint(len(lengths), (count,), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return [lengths[place] for place in places.tolist()]


def lognormal(count: int, mean: float, seed: int) -> list[int]:
    """Lengths as text and events have them: many short ones, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.3, 0.77, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, 8 * mean)]
