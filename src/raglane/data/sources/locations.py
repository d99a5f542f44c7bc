"""Paths and URLs: opening them, and copies of those that are far."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any

from raglane._utils import caches
from raglane._utils.files import put_folder, whole_file
from raglane._utils.messages import printable, quote, require, shorten
from raglane.data.sources.files import open_error
from raglane.errors import DataError, MissingExtraError

# Bytes at each end of a file that are part of its fingerprint.
_EDGE = 1 << 20
# The days after which a copy of a URL is removed.
_LIFETIME = 30
# The most bytes of all copies.
_ROOM = 50 << 30
# The first days of a copy, when a command may use it.
_IN_USE = 2


def is_url(location: str) -> bool:
    """Return True if a location is a URL rather than a path."""
    return "://" in location


def path_in(url: str) -> PurePosixPath:
    """Return the path of a URL."""
    return PurePosixPath(url.split("?")[0])


def fsspec() -> Any:
    """Return the core of fsspec."""
    return require("fsspec.core", "data")


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Raise a DataError for any error at a URL, because each kind of storage has its own
    exceptions.
    """
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        rule = "a URL whose package is installed"
        raise MissingExtraError(quote(location), "one without it", rule, f"{error}") from error
    except Exception as error:
        detail = shorten(
            printable(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")), 200
        )
        got = f"no valid response ({detail})"
        fix = "check the URL, the connection and the permissions; finished work is kept"
        raise DataError(quote(location), got, "the URL of a readable file", fix) from error


@contextmanager
def open_location(location: str) -> Iterator[IO[bytes]]:
    """Open a file at a path or URL for reading."""
    if is_url(location):
        with reaching(location), fsspec().open(location, "rb") as file:
            yield file
    else:
        try:
            with open(location, "rb") as file:
                yield file
        except OSError as error:
            raise open_error(Path(location), error) from error


@contextmanager
def local(location: str, folder: Path) -> Iterator[Path]:
    """Yield a local path of the data: its own, or that of a temporary copy of a URL."""
    if not is_url(location):
        yield Path(location)
        return
    copy = folder / ("copy" + "".join(path_in(location).suffixes[-2:]))
    try:
        with open_location(location) as source, whole_file(copy) as file:
            shutil.copyfileobj(source, file, 1 << 22)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def fetched(url: str) -> Path:
    """Copy a file or a folder at a URL to the user's cache folder, in place of an earlier copy;
    return the copy.
    """
    folder = copies() / hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / (path_in(url).name or "data")
    with reaching(url), tempfile.TemporaryDirectory(dir=folder) as partial:
        system, path = fsspec().url_to_fs(url)
        whole = Path(partial, "whole")
        is_file = url.startswith("http") or system.info(path)["type"] != "directory"
        for name in [path] if is_file else system.find(path):
            inner = PurePath(name[len(path) :].lstrip("/"))
            if ".." in inner.parts:
                raise DataError(
                    quote(url), f"the file {quote(name)}", "a folder of plain names", "rename it"
                )
            target = whole / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(target))
        if is_file:
            os.replace(whole, copy)
        else:
            put_folder(whole, copy)
    _remove_old(folder)
    return copy


def copies() -> Path:
    """Return the folder of the copies of URLs."""
    return caches.folder("urls")


def _remove_old(newest: Path) -> None:
    """Remove the copies that were made long ago, and the oldest of those that are too large
    together.
    """
    now = time.time()
    total = 0
    ages = {}
    for folder in newest.parent.iterdir():
        with suppress(OSError):
            ages[folder] = (now - folder.stat().st_mtime) / 86400
    for folder in sorted(ages, key=ages.__getitem__):
        with suppress(OSError):
            total += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if folder != newest and (
            ages[folder] > _LIFETIME or (total > _ROOM and ages[folder] > _IN_USE)
        ):
            shutil.rmtree(folder, ignore_errors=True)


def size_of(location: str) -> int:
    """Return the bytes of a file, or of the files of a folder; 0 if unknown."""
    if is_url(location):
        with reaching(location):
            system, path = fsspec().url_to_fs(location)
            return int(system.size(path) or 0)
    path = Path(location)
    files = [path] if path.is_file() else path.glob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def fingerprint(location: str) -> str:
    """Return a hash of the size, the beginning and the end of a file, or of all files of a
    folder.
    """
    if not is_url(location) and os.path.isdir(location):
        digest = hashlib.sha256()
        for path in sorted(Path(location).iterdir()):
            if path.is_file() and not path.name.startswith("."):
                digest.update(
                    f"{path.name}\n{fingerprint(str(path))}\n".encode(errors="surrogateescape")
                )
        return digest.hexdigest()[:16]
    with open_location(location) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(f"{size}\n".encode())
        for start in (0, max(size - _EDGE, 0)):
            file.seek(start)
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]
