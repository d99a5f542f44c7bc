"""Files that a user names, opened only where they are files; and files and folders written whole or not at all.

What is new is written beside its destination under a name of its own, brought to the disk, and renamed. A rename
happens or does not, so whoever reads finds the old content or the new, never a part. A leftover of a killed
process bears a fixed name, and the next write, or :func:`settle`, removes it or brings it back. Since the name is
fixed, two processes that write one file take turns.

A FIFO makes whoever opens it wait for a writer, a device may have no end, a socket cannot be opened at all. So a path
of a user is checked before it is opened; the error is an ``OSError``, which the caller words for what it reads.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from raglane._utils.lock import turn
from raglane._utils.messages import argument, message, quote
from raglane.errors import ArgumentError, ArgumentTypeError

_OTHERS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def no_formula(entry: Any) -> Any:
    """An entry of a CSV file that spreadsheets do not execute: a text that looks like a formula, behind an apostrophe.

    Source: OWASP, CSV Injection.
    """
    return f"'{entry}" if isinstance(entry, str) and entry.startswith(("=", "+", "-", "@", "\t", "\r")) else entry


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that is at its place once all is written, and not before; after an error there is none."""
    partial = _partial(path)
    with turn(partial):
        try:
            with _naming(path), open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write files that belong together: each whole, and none, also where the disk fills, if one cannot be written."""
    partials = {path: _partial(path) for path in files}
    new = {path for path in files if not os.path.lexists(path)}
    placed: list[Path] = []
    with ExitStack() as turns:
        try:
            # In one order, so that no two processes wait for each other.
            for path in sorted(files, key=os.path.abspath):
                with _naming(path):
                    turns.enter_context(turn(partials[path]))
            for path, content in files.items():
                with _naming(path):
                    _write_to_disk(partials[path], content)
            for path in files:
                os.replace(partials[path], path)
                placed.append(path)
        except BaseException:
            for path in [*partials.values(), *new.intersection(placed)]:
                path.unlink(missing_ok=True)
            raise
    for folder in {path.parent for path in files}:
        sync_folder(folder)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of files whole or not at all.

    A folder cannot be renamed over another, so an old one steps aside for the moment between two renames;
    :func:`whole_folder` finds it there should the process die in that moment.
    """
    partial = _partial(path)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, content in files.items():
            with _naming(path / name):
                _write_to_disk(partial / name, content)
        put_folder(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_folder(whole: Path, path: Path) -> None:
    """Rename a whole folder in place of another that has its name; :func:`settle` repairs what is half done."""
    previous = _previous(path)
    try:
        sync_folder(whole)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(path, previous)
        os.rename(whole, path)
    except BaseException:
        if previous.exists() and not path.exists():
            os.rename(previous, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def whole_folder(path: Path) -> Path | None:
    """Where the folder that :func:`write_folder` last finished is, or None."""
    return next((folder for folder in (path, _previous(path)) if folder.is_dir()), None)


def settle(path: Path) -> None:
    """Finish what a killed process left of its writing: what is half goes, and what is whole stands under its name."""
    remove(_partial(path))
    previous = _previous(path)
    if previous.exists() and not path.exists():
        os.rename(previous, path)
    remove(previous)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all it holds, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def check_place(given_as: str, folder: Path) -> None:
    """Refuse a folder that nothing can be written to, before any work is done; it need not exist yet."""
    place = folder.absolute()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        rule = f"in a writable folder, which {there} is not"
        raise ArgumentError(message(given_as, repr(str(folder)), rule, f"give another {argument(given_as)}"))


def check_new_file(given_as: str, path: Path) -> None:
    """Refuse a file that nothing can be written to, before any work is done; it need not exist yet."""
    try:
        check_file(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except IsADirectoryError as error:
        raise ArgumentError(
            message(given_as, quote(str(path)), "a file, not a folder", "name a file in the folder")
        ) from error
    except NotAFileError as error:
        # A link to what is not there yet is replaced, as a link to a file is.
        if error.errno != errno.ENOENT:
            got = f"{quote(str(path))}, {error.strerror}"
            raise ArgumentError(message(given_as, got, "a file, or the name of a new one", "name a file")) from error
    if not path.parent.is_dir():
        fix = f"create the folder with mkdir -p '{path.parent}'"
        raise ArgumentError(message(given_as, quote(str(path)), "a file in a folder that exists", fix))
    check_place(given_as, path.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in an error of writing, which does not say of itself where the disk was full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _write_to_disk(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring renames in a folder to the disk; a system that cannot open folders (Windows) does without."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems refuse to sync a folder; the files in it are synced.
        return
    finally:
        os.close(descriptor)


# -- files that a user names -------------------------------------------------------------------------------------------


class NotAFileError(OSError):
    """A path that leads to no file; ``strerror`` says to what it leads."""


def as_path(path: Any) -> Path:
    """A path that a caller gives."""
    if isinstance(path, bytes) or not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(message("path", quote(path), "a str or a pathlib.Path", "pass a str or a pathlib.Path"))
    return Path(path)


def check_file(path: Path) -> None:
    """Refuse what is not a regular file, without opening it."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a zero byte, or half a surrogate pair
        raise NotAFileError(errno.EINVAL, "a name that no file can have", str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFileError(errno.ELOOP, "a link that leads back to itself", str(path)) from error
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise NotAFileError(errno.ENOENT, "a link to what is not there", str(path)) from error
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for fits, name in _OTHERS:
        if fits(mode):
            raise NotAFileError(errno.EINVAL, name, str(path))


def read_file(path: Path) -> bytes:
    """The content of a regular file."""
    check_file(path)
    return path.read_bytes()
