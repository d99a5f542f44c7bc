"""The class of a format, and functions that all formats share: opening files, errors, choosing
columns.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

from raglane._utils.files import NotAFileError, check_file, read_file
from raglane._utils.messages import argument, quote, quote_all
from raglane.data.records import LISTS, ROLES, Columns, Records
from raglane.data.roles import Refusal
from raglane.data.roles.rules import ID_NAMES, ROLE_NAMES, taken
from raglane.errors import DataError, UnfitColumnError

# The suffix of compressed files, after that of the format.
GZIP = ".gz"

# Whole numbers in columns of these names are tokens.
TOKEN_NAMES = ("input_ids", "token_ids", "tokens")


Parsed = Callable[[Columns], Records]
"""A parsed file: returns its records for the requested columns."""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: the value of ``format=``, and the key in ``FORMATS``.
        suffixes: the file suffixes of the format, in lower case; () for a folder.
        read: returns the records of an existing path, given the requested columns, or raises a
            DataError.
        pieces: yields the same in pieces, from a position on.
        roles: the arguments of Columns that the format uses, a subset of ``ROLES``.
        parse: parses a file once, and returns a function from requested columns to its records; None
            for a format that reads only what is requested.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Columns], Records]
    pieces: Callable[[Path, Columns, tuple[int, ...]], Iterator[Any]]
    roles: tuple[str, ...] = ()
    parse: Callable[[Path, Columns], Parsed] | None = None


def data_error(path: Path, got: str, rule: str, fix: str, line: int | None = None) -> DataError:
    """Return the error for a file, or for one of its lines, counted from 1."""
    return DataError(f"{path}" if line is None else f"{path}, line {line}", got, rule, fix)


def empty_label(path: Path, name: str) -> DataError:
    """Return the error for a column with the name of a label that is empty in all rows."""
    got = f"the column {quote(name)}, which is empty in all rows"
    fix = f"fill it, or name another one with {columns_argument('label')}"
    forecast = argument("task", "forecast")
    fix = f"{fix}; without labels, pass {forecast} to predict the next element"
    return data_error(path, got, "data with a label in each row", fix)


def refused(path: Path, refusal: Refusal) -> DataError:
    """Return the error for a file whose columns have no role, or several."""
    rows = (f"{path}", refusal.got, refusal.rule, refusal.fix)
    error = UnfitColumnError(*rows) if refusal.candidates else DataError(*rows)
    error.fixes = dict(refusal.fixes)
    if isinstance(error, UnfitColumnError):
        error.candidates = refusal.candidates
    return error


def has_utf8(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8, i.e. has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_error(path: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return data_error(
            path, "no such file or folder", "an existing file or folder", "check the path"
        )
    if isinstance(error, PermissionError):
        return data_error(path, "permission denied", "readable", f"run chmod u+r '{path}'")
    if isinstance(error, IsADirectoryError):
        return data_error(path, "a folder", "a file, for this format", "pass the file inside it")
    if isinstance(error, NotAFileError):
        fix = "pass a file; save the output of a program in one"
        return data_error(path, f"{error.strerror}", "a file or a folder", fix)
    return data_error(path, f"{error.strerror or error}", "readable", "check the file")


def _empty_error(path: Path) -> DataError:
    return data_error(path, "an empty file", "a file with at least one sequence", "check the file")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raise a DataError if it is missing or blank."""
    try:
        content = read_file(path)
    except OSError as error:
        raise open_error(path, error) from error
    if path.suffix.lower() == GZIP:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            got = f"a damaged gzip file ({' '.join(str(error).split())})"
            raise data_error(path, got, "a whole gzip file", "write it again") from error
    if not content or content.isspace():
        raise _empty_error(path)
    return content


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading; one with the suffix .gz is decompressed into memory."""
    return io.BytesIO(read_bytes(path)) if path.suffix.lower() == GZIP else path.open("rb")


def suffix_of(path: PurePath) -> str:
    """Return the suffix of a file in lower case, without the .gz of a compressed one."""
    return (path.with_suffix("") if path.suffix.lower() == GZIP else path).suffix.lower()


def check_readable(path: Path) -> None:
    """Raise a DataError unless ``path`` is a file that is readable and not empty."""
    try:
        check_file(path)
        with path.open("rb") as content:
            first = content.read(1)
    except OSError as error:
        raise open_error(path, error) from error
    if not first:
        raise _empty_error(path)


def check_text(path: Path, content: bytes, first: int = 1) -> None:
    """Raise a DataError for UTF-16 and zero bytes; ``first`` is the number of the first line."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        fix = "convert it, e.g. with iconv -f UTF-16 -t UTF-8"
        raise data_error(path, "a text in UTF-16", "a text in UTF-8", fix)
    if (place := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, place) + first
        fix = "check that it is a text in UTF-8, and remove the byte"
        raise data_error(path, "a zero byte", "a text without zero bytes", fix, line)


def decode(path: Path, content: bytes, first: int = 1) -> str:
    """Decode UTF-8 with or without a byte order mark; raise a DataError with the line of an invalid
    byte.
    """
    check_text(path, content, first)
    # Only the first line may begin with the mark.
    body = content.removeprefix(codecs.BOM_UTF8) if first == 1 else content
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        place = error.start + len(content) - len(body)
        line = content.count(b"\n", 0, place) + first
        got = f"the byte 0x{content[place]:02x}, which is not UTF-8"
        raise data_error(
            path, got, "a text in UTF-8", "convert it, or remove the line", line
        ) from error


def columns_argument(name: str, value: str | None = None) -> str:
    """Write an argument of Columns, or its option, for a message."""
    return argument(name, value, of="Columns")


def unused_notes(
    columns: Columns, roles: Iterable[str], source: str, records: Records
) -> list[str]:
    """Return the notes about options that do nothing for these records, whose source has columns of
    some roles.
    """
    if roles and records.columns.sequence is not None:
        roles = ("sequence", "label", "id", *LISTS)
        source = "a table of this kind"
    unused = [
        role for role in ROLES if getattr(columns, role) not in (None, False) and role not in roles
    ]
    is_sequence = records.targets is not None and records.targets.ordered
    texts = {
        "split": records.is_tokens and records.columns.split is not None,
        # Data to predict has no labels.
        "label_split": not columns.need_labels or is_sequence,
        "tokens": records.is_tokens or not columns.tokens,
    }
    idle = [name for name, acts in texts.items() if getattr(columns, name) and not acts]
    reasons = {f"{source} has no such column": unused, "no texts or whole numbers fit": idle}
    return [
        f"not used, since {reason}: {', '.join(map(columns_argument, names))}"
        for reason, names in reasons.items()
        if names
    ]


def takes_tokens(columns: Columns, name: str) -> tuple[bool, str]:
    """Return True if the whole numbers of a column are tokens, and the note about it."""
    is_tokens = columns.tokens
    if is_tokens is None:
        is_tokens = (
            columns.task == "language"
            or name.lower() in TOKEN_NAMES
            or name in (columns.categorical or ())
        )
    kind = "tokens" if is_tokens else "numbers"
    return (
        is_tokens,
        f"the whole numbers of {quote(name)} are {kind} ({columns_argument('tokens')} chooses)",
    )


def is_named(name: str, columns: Columns) -> bool:
    """Return False for the name that pandas gives to a column without one, unless a role was given
    to it.
    """
    return name in {columns.sequence, columns.time, *taken(columns)} or not re.fullmatch(
        r"Unnamed: \d+(\.\d+)*", name
    )


def check_named(path: Path, role: str, name: str, present: Iterable[str], count: int = 1) -> str:
    """Return ``name``, one of ``count`` columns of a role, or raise a DataError if the file lacks
    it.
    """
    names = list(present)
    if name not in names:
        rule = f"a file with this column, but its columns are {quote_all(names)}"
        fix = "pass one of them as"
        if role == "label":
            fix = "add it, use data without labels only to predict, or name another with"
        elif count > 1:
            fix = f"rename one, or name all {count} columns in their order, each with"
        raise data_error(path, f"no column {quote(name)}", rule, f"{fix} {columns_argument(role)}")
    return name


def choose_column(
    path: Path, role: str, candidates: list[str], kind: str, present: Iterable[str]
) -> tuple[str, str]:
    """Return the only candidate for a column, or the only one with a usual name, and the note about
    it.
    """
    if len(candidates) == 1:
        return candidates[0], f"{role} column: {quote(candidates[0])} (the only candidate)"
    usual = [name for name in candidates if name.lower() in ROLE_NAMES[role]]
    if len(usual) == 1:
        return usual[0], f"{role} column: {quote(usual[0])} (by its name)"
    if candidates:
        got = f"{len(candidates)} candidates for the {role} column: {quote_all(candidates)}"
        rule = f"a file with one candidate for the {role} column"
        fix = f"name one with {columns_argument(role)}"
        error = UnfitColumnError(f"{path}", got, rule, fix)
        error.candidates = tuple(candidates)
        error.fixes = {role: candidates[0]}
        raise error
    got = f"no candidate for the {role} column among its columns ({quote_all(present) or 'none'})"
    names = f"{columns_argument('id')} and {columns_argument('features')}"
    more = {"sequence": f"bytes and objects are no sequences; if rows are elements, pass {names}"}
    more["label"] = (
        f"without labels, pass {argument('task', 'forecast')} to predict the next element"
    )
    fix = f"add one, or name it with {columns_argument(role)}; {more[role]}"
    error = UnfitColumnError(f"{path}", got, f"data with a {kind}", fix)
    error.fixes = {"task": "forecast"} if role == "label" else {}
    raise error


def id_column(
    path: Path,
    columns: Columns,
    present: Iterable[str],
    eligible: Iterable[str],
    names: Iterable[str] = ID_NAMES,
) -> tuple[str | None, tuple[str, ...]]:
    """Return the id column and the notes about it: the named column, else the first with a usual
    name, else None.
    """
    if columns.id is not None:
        return check_named(path, "id", columns.id, present), ()
    taken = {
        columns.sequence,
        columns.label,
        columns.time,
        *(columns.features or ()),
        *(columns.static or ()),
    }
    free = [name for name in eligible if name not in taken]
    guess = next((name for usual in names for name in free if name.lower() == usual), None)
    return guess, () if guess is None else (f"id column: {quote(guess)} (by its name)",)
