"""Atomic writes of files and folders, and checks of paths that a user passes.

New content is written to a temporary name in the same folder, synced to the disk, and renamed, so
readers find either the old or the new content. The temporary name is fixed: the next write, or
:func:`settle`, removes or restores what a killed process left, and two processes that write one
file take turns.

A path is checked before it is opened: opening a FIFO waits for a writer, a device may be endless,
and a socket cannot be opened. The check raises an ``OSError``.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from raglane._utils.lock import turn
from raglane._utils.messages import argument, quote
from raglane.errors import ArgumentError, ArgumentTypeError

_OTHERS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def no_formula(entry: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would execute as a formula (OWASP, CSV
    Injection).
    """
    return (
        f"'{entry}"
        if isinstance(entry, str) and entry.startswith(("=", "+", "-", "@", "\t", "\r"))
        else entry
    )


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is put in its place when it is complete; after an error it is removed."""
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
    """Write several files atomically; if one cannot be written, none is."""
    partials = {path: _partial(path) for path in files}
    new = {path for path in files if not os.path.lexists(path)}
    placed: list[Path] = []
    with ExitStack() as turns:
        try:
            # A fixed order avoids deadlocks.
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
    """Write a folder of files atomically.

    An old folder has a temporary name between two renames. If the process dies there,
    :func:`whole_folder` finds it.
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
    """Replace a folder by another one; :func:`settle` repairs an interrupted replacement."""
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
    """Return the path of the folder that :func:`write_folder` completed last, or None."""
    return next((folder for folder in (path, _previous(path)) if folder.is_dir()), None)


def settle(path: Path) -> None:
    """Clean up after a killed process: remove incomplete files and folders, and rename complete
    ones to ``path``.
    """
    remove(_partial(path))
    previous = _previous(path)
    if previous.exists() and not path.exists():
        os.rename(previous, path)
    remove(previous)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)


def check_writable(given_as: str, folder: Path) -> None:
    """Raise if a folder, which may not exist yet, is not writable."""
    path = folder.absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        rule = f"in a writable folder, which {there} is not"
        raise ArgumentError(given_as, repr(str(folder)), rule, f"give another {argument(given_as)}")


def check_suffix(
    given_as: str, path: Path, suffixes: Collection[str], fix: str = "change the suffix"
) -> None:
    """Raise if the name of a file has none of some suffixes, in lower or upper case."""
    if path.suffix.lower() not in suffixes:
        raise ArgumentError(
            given_as, quote(str(path)), f"a name that ends in {', '.join(suffixes)}", fix
        )


def check_new_file(given_as: str, path: Path, suffixes: Collection[str] = ()) -> None:
    """Raise if a file, which may not exist yet, is not writable, or has none of some suffixes."""
    if suffixes:
        check_suffix(given_as, path, suffixes)
    try:
        check_file(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except IsADirectoryError as error:
        raise ArgumentError(
            given_as, quote(str(path)), "a file, not a folder", "name a file in the folder"
        ) from error
    except NotAFileError as error:
        # A dangling link is replaced, like a link to a file.
        if error.errno != errno.ENOENT:
            got = f"{quote(str(path))}, {error.strerror}"
            raise ArgumentError(
                given_as, got, "a file, or the name of a new one", "name a file"
            ) from error
    if not path.parent.is_dir():
        fix = f"create the folder with mkdir -p '{path.parent}'"
        raise ArgumentError(given_as, quote(str(path)), "a file in a folder that exists", fix)
    check_writable(given_as, path.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to errors without one, such as a full disk."""
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
    """Sync renames in a folder to the disk, if the system can open folders (not Windows)."""
    # Some network file systems do not sync folders; the files are synced.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- files that a user names
# -------------------------------------------------------------------------------------------


class NotAFileError(OSError):
    """The path is not a file; ``strerror`` names what it is."""


def as_path(path: Any) -> Path:
    """Return a path argument as a Path."""
    if isinstance(path, bytes) or not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(
            "path", quote(path), "a str or a pathlib.Path", "pass a str or a pathlib.Path"
        )
    return Path(path)


def check_file(path: Path) -> None:
    """Raise if a path is not a regular file, without opening it."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a zero byte, or half a surrogate pair
        raise NotAFileError(errno.EINVAL, "a name that no file can have", str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFileError(errno.ELOOP, "a circular link", str(path)) from error
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise NotAFileError(errno.ENOENT, "a dangling link", str(path)) from error
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for fits, name in _OTHERS:
        if fits(mode):
            raise NotAFileError(errno.EINVAL, name, str(path))


def read_file(path: Path) -> bytes:
    """Return the content of a regular file."""
    check_file(path)
    return path.read_bytes()
