"""The folder of a run: its files, its lock, and how a new run replaces an old one.

An old run is moved into a subfolder, and is removed when the new run has written a checkpoint.
Until then it can be moved back. Its folder ``last`` is moved away first and back last, so a
``last`` in its place always belongs to the other files. A new run without a checkpoint has written
only its description, which the old one replaces. So after the death of a process, :func:`repair`
can always decide which run is valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raglane._utils.files import check_writable, remove, settle, sync_folder, whole_folder
from raglane._utils.lock import LOCK, locked
from raglane._utils.messages import argument
from raglane.errors import ArgumentError

DESCRIPTION = "run.json"
CONFIG = "run.toml"
CURVES = "curves.csv"
# The skipped rows of the data.
SKIPPED = "skipped.jsonl"
EVALUATION = "evaluation.json"
CARD = "card.md"
REPORT = "report.html"
# The folders of the last and the best state.
LAST = "last"
BEST = "best"
# The files of a logger.
LOGS = "logs"

# All files of a run; --overwrite replaces only these.
_EVALUATED = (EVALUATION, "confusion.png", "confusion.txt", "table.txt", "points.png")
RUN_FILES = (DESCRIPTION, CONFIG, SKIPPED, CURVES, "curves.png", CARD, REPORT, *_EVALUATED)
RUN_FOLDERS = (BEST, LAST, LOGS)

# Printed if an interrupted replacement was undone.
IS_BACK = (
    "the run that --overwrite was replacing is restored, because the new one had no checkpoint"
)

# The subfolder of an old run while it is replaced, and the order in which its files are moved
# there.
_REPLACED = ".run.previous"
_MOVED = (LAST, BEST, LOGS, *reversed(RUN_FILES))


def check_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise if a run must not be written to a folder."""
    is_run = find(folder, DESCRIPTION).is_file()
    if resume:
        if not is_run:
            fix = f"pass its {argument('folder')}, or leave {argument('resume')} out"
            raise ArgumentError("resume", repr(str(folder)), "the folder of a run", fix)
        return
    # Left by a run that was killed while it wrote its first file.
    scraps = (f".{DESCRIPTION}.partial", LOCK)
    # lexists, because a dangling link exists too.
    if not os.path.lexists(folder) or (
        folder.is_dir() and all(path.name in scraps for path in folder.iterdir())
    ):
        check_writable("folder", folder)
        return
    if not is_run:
        fix = f"pass another {argument('folder')}"
        raise ArgumentError("folder", repr(str(folder)), "a new folder, or that of a run", fix)
    if not overwrite:
        resumes = argument("resume", True)
        replaces = argument("overwrite", True)
        fix = f"pass another {argument('folder')}, {resumes} to resume the run, or {replaces} to replace it"
        raise ArgumentError(
            "folder", f"{str(folder)!r}, which contains a run", "a folder without a run", fix
        )


@contextmanager
def at_work(folder: Path, given_as: str = "folder") -> Iterator[bool]:
    """Lock the folder of a run or of a model and repair it; yield whether an old run was
    restored.
    """
    with locked(folder, given_as):
        yield repair(folder)


def to_resume(folder: Path | None) -> Path:
    """Return the folder of a run to resume; raise if it is None."""
    if folder is None:
        raise ArgumentError(
            "output", "None", "the folder of the run to resume", f"pass {argument('output')}"
        )
    return folder


@contextmanager
def claimed(
    folder: Path | None, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False
) -> Iterator[bool]:
    """Check and lock the folder of a run, if any; yield whether an old run was restored. A dry run
    only checks.
    """
    if folder is None:
        yield False
        return
    check_folder(folder, resume=resume, overwrite=overwrite)
    if dry_run:
        yield False
        return
    with at_work(folder) as is_back:
        # Checked again under the lock.
        check_folder(folder, resume=resume, overwrite=overwrite)
        yield is_back


def tidy(folder: Path) -> None:
    """Repair the folder of a run for reading, unless it is locked."""
    left = [path for path in folder.glob(".*") if path.suffix in (".partial", ".previous")]
    if left:
        with suppress(ArgumentError, OSError), at_work(folder):
            pass


def find(folder: Path, name: str) -> Path:
    """Return the path of a file or folder of a run, also while the run is replaced, or after its
    process was killed.
    """
    waiting = folder / _REPLACED / name
    if waiting.exists() and not _has_checkpoint(folder):
        return waiting
    return whole_folder(folder / name) or folder / name


def repair(folder: Path) -> bool:
    """Repair a locked folder after the death of a process; return True if an old run was
    restored.
    """
    for name in (*RUN_FOLDERS, *RUN_FILES):
        settle(folder / name)
    if not (folder / _REPLACED).is_dir():
        return False
    if _has_checkpoint(folder):
        drop_replaced(folder)
        return False
    waiting = folder / _REPLACED
    for name in reversed(_MOVED):
        if (waiting / name).exists():
            remove(folder / name)
            os.rename(waiting / name, folder / name)
    sync_folder(folder)
    remove(waiting)
    return True


@contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Move an old run away while a new one starts; if the new one fails before its first
    checkpoint, restore the old.

    After the first checkpoint, :func:`drop_replaced` must be called.
    """
    try:
        if (folder / DESCRIPTION).exists():
            _move_aside(folder)
        yield
    except BaseException:
        if not _has_checkpoint(folder) and not (folder / _REPLACED).exists():
            for name in (*RUN_FOLDERS, *RUN_FILES):
                remove(folder / name)
        repair(folder)
        raise


def drop_replaced(folder: Path) -> None:
    """Remove the old run; the new one has a checkpoint."""
    remove(folder / _REPLACED)


def _has_checkpoint(folder: Path) -> bool:
    return whole_folder(folder / LAST) is not None


def _move_aside(folder: Path) -> None:
    waiting = folder / _REPLACED
    waiting.mkdir()
    for name in _MOVED:
        if (folder / name).exists():
            os.rename(folder / name, waiting / name)
    sync_folder(waiting)
    sync_folder(folder)
