"""Decimal commas in CSV files whose separator is another character, and marks of thousands.

The first decimal number of a column decides its mark; a column of numbers such as 1.562, which may
be thousands, has the mark of the others. Which columns are numbers follows later, from the whole
table, so entries keep their text until then: in an id, a label or a word, a comma is a character.
"""

from __future__ import annotations

import re

import numpy as np

from raglane.data.typed.arrays import Entries

_is_decimal = re.compile(r"\s*[+-]?\d*[.,]\d+(?:[eE][+-]?\d+)?\s*").fullmatch
_has_groups = re.compile(
    r"(?!(?:\d+\.){3}\d+$)\s*[+-]?\d{1,3}(?:([.,])\d{3})(?:\1\d{3})*(?:[.,]\d+)?\s*"
).fullmatch
_may_be_thousands = re.compile(r"\s*[+-]?[1-9]\d{0,2}\.\d{3}\s*").fullmatch
# As spreadsheets write percentages, sums of money, and numbers below 0.
_has_sign = re.compile(r"(?=.*[%$€£¥(\u2212])[\s$€£¥(+\u2212-]*\d[\d.,' ]*[\s%$€£¥)]*").fullmatch
_EXCHANGED = str.maketrans(",.", ".,")


class _Marked(str):
    """A decimal number, with a comma or a point, in a column whose decimal mark is the comma."""

    __slots__ = ()


class CommaColumns:
    """The columns of a file with decimal commas; the file is read in chunks, the header first."""

    def __init__(self) -> None:
        self._found: dict[int, bool] = {}  # by the place of a column
        self._begin = 1  # of the numbers in the next chunk

    def mark(self, rows: Entries) -> Entries:
        """Mark the decimal numbers of these columns."""
        marked = rows.copy()
        begin = self._begin
        self._begin = 0
        for place in range(rows.shape[1]):
            words: list[str] = [] if place in self._found else rows[begin:, place].tolist()
            first = next(
                (word for word in words if _is_decimal(word) and not _may_be_thousands(word)), None
            )
            if first is not None:
                self._found[place] = "," in first
        for place in range(rows.shape[1]):
            if self._found.get(place, any(self._found.values())):
                words = rows[begin:, place].tolist()
                marked[begin:, place] = [
                    _Marked(word) if _is_decimal(word) else word for word in words
                ]
        return marked


def with_points(entries: Entries) -> Entries:
    """Exchange commas and points in marked entries, so that a number with the other mark is
    none.
    """
    if not _has_marks(entries):
        return entries
    words = [
        word.translate(_EXCHANGED) if isinstance(word, _Marked) else word
        for word in entries.tolist()
    ]
    return np.array(words, dtype=object)


def without_marks(entries: Entries) -> Entries:
    """Return entries as they are written, as str."""
    return (
        np.array(list(map(str, entries.tolist())), dtype=object) if _has_marks(entries) else entries
    )


def with_ends(entries: Entries) -> Entries:
    """Return entries with decimal marks, but without the marks of missing ends of rows."""
    if not _has_marks(entries):
        return entries
    words = [word if isinstance(word, _Marked) else str(word) for word in entries.tolist()]
    return np.array(words, dtype=object)


def have_other_marks(entries: list[str]) -> bool:
    """Return True if the first is a number with the decimal mark of another column, or with marks
    of thousands.

    Also if it and most others are numbers with another sign, such as that of percent.
    """
    first = entries[0]
    if isinstance(first, _Marked) or _has_groups(first) or ("," in first and _is_decimal(first)):
        return True
    return bool(_has_sign(first)) and 2 * sum(map(bool, map(_has_sign, entries))) > len(entries)


def without_groups(entries: Entries) -> Entries | None:
    """Return numbers without marks of thousands, with decimal points; None for other entries.

    The whole column decides: all entries are numbers with one of two pairs of marks, and one of them
    has both marks or several of thousands, because 1,234 may have a decimal comma.
    """
    words = [word.strip() for word in map(str, entries.tolist())]
    for mark, point in ((",", "."), (".", ",")):
        number = rf"[+-]?(?:\d+|\d{{1,3}}(?:\{mark}\d{{3}})+)(?:\{point}\d+)?(?:[eE][+-]?\d+)?"
        is_number = re.compile(number).fullmatch
        proves = re.compile(rf"\{mark}\d{{3}}\{point}\d|\{mark}\d{{3}}\{mark}").search
        if any(map(proves, words)) and all(not word or is_number(word) for word in words):
            plain = [word.replace(mark, "").replace(point, ".") for word in words]
            return np.array(plain, dtype=object)
    return None


def _has_marks(entries: Entries) -> bool:
    return not set(map(type, entries.tolist())) <= {str}
