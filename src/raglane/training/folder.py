"""The folder of a run: what stands in it, who may write there, and how one run takes the place of another.

A run that is to be replaced moves into a folder within the folder, and is removed only once the new run has a
checkpoint. Until then it can come back: its last checkpoint moves aside first and comes back last, so that a ``last``
in its place always belongs to what stands around it. A new run without a checkpoint has written its description
alone, which the old one takes the place of. So wherever a process dies, :func:`repair` knows which of the two counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raglane._utils.files import check_place, remove, settle, sync_folder, whole_folder
from raglane._utils.lock import LOCK, locked
from raglane._utils.messages import argument, message
from raglane.errors import ArgumentError

DESCRIPTION = "run.json"
CONFIG = "run.toml"
CURVES = "curves.csv"
# The rows of the data that were left out.
SKIPPED = "skipped.jsonl"
EVALUATION = "evaluation.json"
CARD, REPORT = "card.md", "report.html"
LAST, BEST = "last", "best"
# Where a logger keeps its files.
LOGS = "logs"

# Everything that a run leaves in its folder; --overwrite replaces these and touches nothing else.
_EVALUATED = (EVALUATION, "confusion.png", "confusion.txt", "table.txt", "points.png")
RUN_FILES = (DESCRIPTION, CONFIG, SKIPPED, CURVES, "curves.png", CARD, REPORT, *_EVALUATED)
RUN_FOLDERS = (BEST, LAST, LOGS)

# A command says so of a run that it has found half replaced.
IS_BACK = "the run that --overwrite was to replace is back, since the new one had no checkpoint"

# Where a run that is to be replaced waits, and the order in which it moves there.
_REPLACED = ".run.previous"
_MOVED = (LAST, BEST, LOGS, *reversed(RUN_FILES))


def check_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a folder that a run must not be written to, before any work is done."""
    is_run = find(folder, DESCRIPTION).is_file()
    if resume:
        if not is_run:
            fix = f"give its {argument('folder')}, or leave {argument('resume')} out"
            raise ArgumentError(message("resume", repr(str(folder)), "the folder of a run", fix))
        return
    # A run that was killed before it had written its first file left no more than a part of it, and its lock.
    scraps = (f".{DESCRIPTION}.partial", LOCK)
    # A link that leads nowhere is there, too.
    if not os.path.lexists(folder) or (folder.is_dir() and all(path.name in scraps for path in folder.iterdir())):
        check_place("folder", folder)
        return
    if not is_run:
        fix = f"give another {argument('folder')}"
        raise ArgumentError(message("folder", repr(str(folder)), "a new folder, or that of a run", fix))
    if not overwrite:
        go_on, anew = argument("resume", True), argument("overwrite", True)
        fix = f"give another {argument('folder')}, {go_on} to resume it, or {anew} to replace it"
        got = f"{str(folder)!r}, which contains a run"
        raise ArgumentError(message("folder", got, "a new folder", fix))


@contextmanager
def at_work(folder: Path, given_as: str = "folder") -> Iterator[bool]:
    """Lock the folder of a run or of a model, and clear what killed processes left there."""
    with locked(folder, given_as):
        yield repair(folder)


def to_resume(folder: Path | None) -> Path:
    """The folder of a run to go on with."""
    if folder is None:
        rule = "the folder of a run, for resume"
        raise ArgumentError(message("out", "None", rule, f"give {argument('out')}"))
    return folder


@contextmanager
def claimed(folder: Path | None, *, resume: bool = False, overwrite: bool = False) -> Iterator[bool]:
    """Check and lock the folder of a run, if any; gives whether it has put back a run that was to be replaced."""
    if folder is None:
        yield False
        return
    check_folder(folder, resume=resume, overwrite=overwrite)
    with at_work(folder) as is_back:
        # Again, now that nobody else can change it.
        check_folder(folder, resume=resume, overwrite=overwrite)
        yield is_back


def tidy(folder: Path) -> None:
    """Clean up what killed processes left in the folder of a run, where nobody is at work; reading needs no more."""
    left = [path for path in folder.glob(".*") if path.suffix in (".partial", ".previous")]
    if left:
        with suppress(ArgumentError, OSError), at_work(folder):
            pass


def find(folder: Path, name: str) -> Path:
    """The place of a file or folder of a run, also of one that waits to be replaced, or whose process was killed."""
    waiting = folder / _REPLACED / name
    if waiting.exists() and not _has_checkpoint(folder):
        return waiting
    return whole_folder(folder / name) or folder / name


def repair(folder: Path) -> bool:
    """Bring the folder of a run into order after a process that was killed; for those who have locked it."""
    for name in (*RUN_FOLDERS, *RUN_FILES):
        settle(folder / name)
    if not (folder / _REPLACED).is_dir():
        return False
    if _has_checkpoint(folder):
        drop_replaced(folder)
        return False
    _put_back(folder)
    return True


@contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Start a run where one may be: without a checkpoint at the end it leaves nothing, and the old one is back.

    Who writes the first checkpoint calls :func:`drop_replaced`.
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
    """Remove the run that waits to be replaced, now that the new one has a checkpoint."""
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


def _put_back(folder: Path) -> None:
    waiting = folder / _REPLACED
    for name in reversed(_MOVED):
        if (waiting / name).exists():
            remove(folder / name)
            os.rename(waiting / name, folder / name)
    sync_folder(folder)
    remove(waiting)
