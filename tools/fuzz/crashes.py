"""Processes that end at a call of the file system or after some seconds, and the files that they
leave.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from commands import tree
from processes import CONTEXT
from raglane._utils import files

# The calls by which files.py, lock.py and shutil.rmtree change a folder.
_CALLS = ("open", "replace", "rename", "mkdir", "unlink", "rmdir", "fsync", "ftruncate", "write")
_TIMES = ("seconds", "elements_per_second")


class _Died(BaseException):
    """Stands for the end of the process, so no handler of Exceptions may catch it."""


@contextmanager
def ended(folder: Path, moment: int, way: str) -> Iterator[Callable[[], int]]:
    """End the block at a call of the file system below a folder.

    Args:
        folder: only calls that change it count.
        moment: the number of the call, from 1; 0 for none.
        way: ``kill``: this process gets SIGKILL in place of the call; a file that was to be flushed
            is cut in half. ``die``: the same without a process: neither this call nor a later one
            is made. ``fail``: this call raises as on a full disk.

    Yields:
        A function that returns the number of calls so far.
    """
    calls = 0
    real = {name: getattr(os, name) for name in _CALLS}

    def counts(target: Any, options: dict[str, Any]) -> bool:
        if isinstance(target, int):
            path = Path(f"/proc/self/fd/{target}")
            target = os.readlink(path) if path.exists() else ""
        elif options.get("dir_fd") is not None:
            target = Path(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), target)
        return folder in Path(target).parents

    def guard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if (name == "open" and not _writes(arguments[0])) or not counts(target, options):
                return call(target, *arguments, **options)
            calls += 1
            if moment and calls >= moment:
                if way != "fail":
                    if name == "fsync" and calls == moment:
                        real["ftruncate"](target, os.fstat(target).st_size // 2)
                    if way == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise _Died
                if calls == moment:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(target, *arguments, **options)

        return guarded

    for name, call in real.items():
        setattr(os, name, guard(name, call))
    files.open = guard("open", builtins.open)  # type: ignore[attr-defined]
    try:
        with suppress(_Died):
            yield lambda: calls
    finally:
        del files.open  # type: ignore[attr-defined]
        for name, call in real.items():
            setattr(os, name, call)


def _writes(mode: int | str) -> bool:
    return "w" in mode if isinstance(mode, str) else bool(mode & (os.O_WRONLY | os.O_RDWR))


def kill_after(seconds: float, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a new process, and kill the process if it runs longer."""
    process = CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()


def contents(run: Path) -> dict[str, Any]:
    """Return the content of every file and folder of a run, without the measured times."""
    found: dict[str, Any] = {
        str(path.relative_to(run)): "a folder" for path in run.rglob("*") if path.is_dir()
    }
    for name, content in tree(run).items():
        match name:
            case "curves.csv":
                rows = [line.split(",") for line in content.decode().splitlines()]
                kept = [place for place, column in enumerate(rows[0]) if column not in _TIMES]
                found[name] = [[row[place] for place in kept] for row in rows]
            case "card.md" | "report.html":  # pages with measured times
                found[name] = "a page"
            case "last/training.json":
                found[name] = _without_times(json.loads(content))
            case _:
                found[name] = content
    return found


def _without_times(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_times(value) for key, value in content.items() if key not in _TIMES}
    return [_without_times(value) for value in content] if isinstance(content, list) else content


def has_begun(run: Path) -> bool:
    """Return True if a run has a description, so that it can resume."""
    return any(run.rglob("*.json"))


def same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raise an AssertionError with the names of the files that differ."""
    names = sorted(found.keys() | wanted.keys())
    others = [name for name in names if found.get(name) != wanted.get(name)]
    assert not others, f"{what}: {', '.join(others)}"
