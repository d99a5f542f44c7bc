"""Files: opening and decoding them, and the errors about them."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from pathlib import Path, PurePath
from typing import IO

from raglane._utils.files import NotAFileError, check_file, read_file
from raglane.errors import DataError

# Maximum bytes and rows of a piece of a file: enough to amortise the calls of libraries, and small
# in comparison to a program.
BYTES, ROWS = 1 << 24, 1 << 16

# The suffix of compressed files, after that of the format.
GZIP = ".gz"


def data_error(path: Path, got: str, rule: str, fix: str, line: int | None = None) -> DataError:
    """Return the error for a file, or for one of its lines, counted from 1."""
    return DataError(f"{path}" if line is None else f"{path}, line {line}", got, rule, fix)


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
