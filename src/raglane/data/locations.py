"""Where data is: paths, patterns of paths, folders of files, and URLs of whatever fsspec reaches."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from raglane._utils.checks import check_kind
from raglane._utils.files import whole_file
from raglane.data.formats import FORMATS
from raglane.data.formats.base import open_error
from raglane.data.formats.ipc import is_converted
from raglane.errors import ArgumentError, DataError, message, printable, quote, require, shorten

# Bytes at each end of a file that tell it from another of the same size.
_EDGE = 1 << 20


def is_url(location: str) -> bool:
    """Whether a location is a URL rather than a path."""
    return "://" in location


def expand(locations: Any) -> list[str]:
    """The files, folders and URLs that are meant, in order."""
    many = isinstance(locations, Sequence) and not isinstance(locations, (str, bytes))
    found: list[str] = []
    for given in locations if many else [locations]:
        rule, fix = "a path, a pattern or a URL, or a list of these", "pass a str or a pathlib.Path"
        check_kind("location", given, (str, os.PathLike), rule, fix)
        found += _expand(os.fspath(given))
    if not found:
        raise ArgumentError(message("location", "an empty list", "at least one file", "name the data"))
    return found


def _expand(location: str) -> list[str]:
    has_pattern = any(sign in location for sign in "*?[")
    if is_url(location):
        if not has_pattern:
            return [location]
        with _reaching(location):
            system, path = _fsspec().url_to_fs(location)
            found = [system.unstrip_protocol(name) for name in sorted(system.glob(path))]
    elif has_pattern and not os.path.lexists(location):
        found = sorted(glob.glob(location, recursive=True))
    elif os.path.isdir(location):
        return _files_of(Path(location)) or [location]
    else:
        return [location]
    if not found:
        raise DataError(message(quote(location), "no file", "a pattern fits at least one", "check the pattern"))
    return found


def _files_of(folder: Path) -> list[str]:
    """The files of known formats in a folder; none where the folder itself is the data."""
    if is_converted(folder):
        return []
    # Texts are a format of folders, or stand beside the data and describe it.
    known = {suffix for format in FORMATS.values() if format.name != "text" for suffix in format.suffixes}
    return sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in known and path.is_file())


def _fsspec() -> Any:
    return require("fsspec.core", "data")


@contextmanager
def _reaching(location: str) -> Iterator[None]:
    """Say of whatever goes wrong at a URL that it cannot be reached: each kind of storage has errors of its own."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        detail = shorten(printable(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")), 200)
        got = f"no answer that can be used ({detail})"
        fix = "check the URL, the connection and the rights; what is done so far is kept"
        raise DataError(message(quote(location), got, "a URL leads to a file that can be read", fix)) from error


@contextmanager
def open_location(location: str) -> Iterator[IO[bytes]]:
    """A file to read from, wherever it is."""
    if is_url(location):
        with _reaching(location), _fsspec().open(location, "rb") as file:
            yield file
    else:
        try:
            with open(location, "rb") as file:
                yield file
        except OSError as error:
            raise open_error(Path(location), error) from error


@contextmanager
def local(location: str, folder: Path) -> Iterator[Path]:
    """A path where the data can be read: its own, or that of a copy of what is at a URL, removed afterwards."""
    if not is_url(location):
        yield Path(location)
        return
    copy = folder / f"copy{PurePosixPath(location.split('?')[0]).suffix}"
    try:
        with open_location(location) as source, whole_file(copy) as file:
            shutil.copyfileobj(source, file, 1 << 22)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def size_of(location: str) -> int:
    """Bytes of a file, or of the files of a folder; 0 where nobody can say."""
    if is_url(location):
        with _reaching(location):
            system, path = _fsspec().url_to_fs(location)
            return int(system.size(path) or 0)
    path = Path(location)
    files = [path] if path.is_file() else path.glob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def fingerprint(location: str) -> str:
    """A short text that differs for a file of another size, or that begins or ends in another way.

    Of a folder it is made of the files in it.
    """
    if not is_url(location) and os.path.isdir(location):
        digest = hashlib.sha256()
        for path in sorted(Path(location).iterdir()):
            if path.is_file() and not path.name.startswith("."):
                digest.update(f"{path.name}\n{fingerprint(str(path))}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]
    with open_location(location) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(f"{size}\n".encode())
        for start in (0, max(size - _EDGE, 0)):
            file.seek(start)
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]
