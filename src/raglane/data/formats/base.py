"""What every format shares: the format itself, the opening of a file, errors, and the choice of a column."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raglane._utils.files import NotAFileError, check_file, read_file
from raglane._utils.messages import argument, message, quote, quote_all
from raglane.data.records import Columns, Records
from raglane.errors import DataError

# A column of one of these names, in any case, holds the ids when none is named; the first that is there.
ID_NAMES = (
    *("id", "sequence_id", "series_id", "case_id", "sample_id", "uid"),
    *("patient_id", "subject_id", "meter_id", "user_id", "session_id", "patient", "subject", "meter"),
)

# Of several candidates for the sequence or the label, the one that alone is called so is taken.
ROLE_NAMES = {
    "sequence": ("sequence", "input_ids", "token_ids", "tokens", "words", "text", "sentence"),
    "label": ("label", "labels", "class", "target", "tags"),
}

# Columns of whole numbers of these names hold tokens.
TOKEN_NAMES = ("input_ids", "token_ids", "tokens")

# The same for the column that orders the rows of a sequence, where a file has rows.
TIME_NAMES = ("time", "timestamp", "datetime", "date", "step", "timestep", "time_step", "t")


@dataclass(frozen=True)
class Format:
    """One way that sequences are stored.

    Attributes:
        name: what ``format=`` takes, and the key in ``FORMATS``.
        suffixes: the file suffixes that mean this format, in lower case; () for a folder.
        reader: from a path that exists and the columns asked for to the records.
        pieces: the same piece by piece, from where one begins.
        roles: which columns it has, of ``ROLES``.
    """

    name: str
    suffixes: tuple[str, ...]
    reader: Callable[[Path, Columns], Records]
    pieces: Callable[[Path, Columns, tuple[int, ...]], Iterator[Any]]
    roles: tuple[str, ...] = ()

    def read(self, path: Path, columns: Columns) -> Records:
        """Read ``path``; raises :class:`~raglane.errors.DataError` for everything that is wrong with it."""
        return self.reader(path, columns)


def data_error(path: Path, got: str, rule: str, fix: str, line: int | None = None) -> DataError:
    """The error of a file, and of a line of it (counted from 1)."""
    return DataError(message(f"{path}" if line is None else f"{path}, line {line}", got, rule, fix))


def has_utf8(text: str) -> bool:
    """Whether a text can be written in UTF-8: half a surrogate pair, which JSON can spell, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_error(path: Path, error: OSError) -> DataError:
    """The one clear line for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return data_error(path, "no such file or folder", "an existing file or folder", "check the path")
    if isinstance(error, PermissionError):
        return data_error(path, "permission denied", "readable", f"run chmod u+r '{path}'")
    if isinstance(error, IsADirectoryError):
        return data_error(path, "a folder", "one file, in this format", "pass the file inside it")
    if isinstance(error, NotAFileError):
        fix = "save the output of the program in a file, and pass that"
        return data_error(path, f"{error.strerror}", "a file or a folder", fix)
    return data_error(path, f"{error.strerror or error}", "readable", "check the file")


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        content = read_file(path)
    except OSError as error:
        raise open_error(path, error) from error
    if not content or content.isspace():
        raise data_error(path, "an empty file", "a file with at least one sequence", "check the file")
    return content


def check_readable(path: Path) -> None:
    """Raise a :class:`~raglane.errors.DataError` where a file for a library to open is missing, empty or not a file."""
    try:
        check_file(path)
        with path.open("rb") as content:
            first = content.read(1)
    except OSError as error:
        raise open_error(path, error) from error
    if not first:
        raise data_error(path, "an empty file", "a file with at least one sequence", "check the file")


def check_text(path: Path, content: bytes, first: int = 1) -> None:
    """Refuse what cannot be text in UTF-8, whatever the bytes of its characters are."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        fix = "convert it, e.g. with iconv -f UTF-16 -t UTF-8"
        raise data_error(path, "a text in UTF-16", "text in UTF-8", fix)
    if (place := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, place) + first
        fix = "check that it is text in UTF-8, and remove the byte"
        raise data_error(path, "a zero byte", "text without zero bytes", fix, line)


def decode(path: Path, content: bytes, first: int = 1) -> str:
    """The text of a file in UTF-8, with or without a byte order mark."""
    check_text(path, content, first)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Python counts from behind the mark.
        place = error.start + len(content) - len(content.removeprefix(codecs.BOM_UTF8))
        line = content.count(b"\n", 0, place) + first
        got = f"the byte 0x{content[place]:02x}, which is not UTF-8"
        raise data_error(path, got, "text in UTF-8", "convert it, or remove the line", line) from error


def columns_argument(name: str, value: str | None = None) -> str:
    """How to tell a reader a column or the task, for messages."""
    return argument(name, value, of="Columns")


def takes_tokens(columns: Columns, name: str) -> tuple[bool, str]:
    """Whether the whole numbers of a column are tokens, and the note that says so."""
    is_tokens = columns.tokens
    if is_tokens is None:
        is_tokens = columns.task == "language" or name.lower() in TOKEN_NAMES or name in (columns.categorical or ())
    one = "tokens" if is_tokens else "numbers"
    return is_tokens, f"the whole numbers of {quote(name)} are {one} ({argument('tokens', of='Columns')} chooses)"


def named_column(path: Path, role: str, name: str, present: Iterable[str]) -> str:
    """``name``, if the file has it."""
    names = list(present)
    if name not in names:
        there = f"a file with the column, but its columns are {quote_all(names)}"
        raise data_error(path, f"no column {quote(name)}", there, f"pass one of them as {columns_argument(role)}")
    return name


def choose_column(path: Path, role: str, candidates: list[str], kind: str, present: Iterable[str]) -> tuple[str, str]:
    """The candidate for a column that the user did not name, and the note that says so.

    It is the only one, or the only one that is called as such columns are.
    """
    if len(candidates) == 1:
        return candidates[0], f"{role} column: {quote(candidates[0])} (the only candidate)"
    called = [name for name in candidates if name.lower() in ROLE_NAMES[role]]
    if len(called) == 1:
        return called[0], f"{role} column: {quote(called[0])} (by its name)"
    if candidates:
        got = f"{len(candidates)}: {quote_all(candidates)}"
        raise data_error(
            path, got, "a file with one candidate for the {role} column", f"name one with {columns_argument(role)}"
        )
    there = quote_all(present) or "none"
    got = f"no such column ({there})"
    raise data_error(
        path, got, f"a file with a {kind} for the {role} column", f"add one, or name it with {columns_argument(role)}"
    )


def id_column(
    path: Path, columns: Columns, present: Iterable[str], eligible: Iterable[str], names: Iterable[str] = ID_NAMES
) -> tuple[str | None, tuple[str, ...]]:
    """The id column: the one named, else one whose name says so, else None; and the note that says so."""
    if columns.id is not None:
        return named_column(path, "id", columns.id, present), ()
    taken = {columns.sequence, columns.label, columns.time, *(columns.features or ()), *(columns.static or ())}
    free = [name for name in eligible if name not in taken]
    found = next((name for known in names for name in free if name.lower() == known), None)
    return found, () if found is None else (f"id column: {quote(found)} (by its name)",)
