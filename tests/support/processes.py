"""Commands in new processes, forked from one that has imported torch and the package, which takes
seconds.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from commands import undraw

CONTEXT = multiprocessing.get_context("forkserver")
# DistributedDataParallel imports torch._dynamo, which takes four fifths of the time of a short
# training.
CONTEXT.set_forkserver_preload(
    [
        "raglane.cli",
        "raglane.cli.train",
        "raglane.training.run",
        "raglane.training.trainer",
        "raglane.report.figures",
        "pytest",
        "safetensors.torch",
        "torch._dynamo",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
    ]
)


def _beside(folder: Path, name: str) -> Path:
    return folder.parent / f"{folder.name}.{name}"


def _run(
    arguments: list[str], folder: Path, largest_file: int, before: Callable[[], object]
) -> None:
    """Run a command in this process, without pictures: print into two files and exit with its
    code.
    """
    from raglane.cli import main

    gc.freeze()  # the garbage collector then skips what the server imported
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(_beside(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w"), line_buffering=True) for number in (1, 2)
    )
    undraw(pytest.MonkeyPatch())
    before()
    sys.exit(main(arguments))


@dataclass(frozen=True)
class Command:
    """A running or ended command. Its output is in two files next to its folder."""

    process: BaseProcess
    folder: Path

    def printed(self) -> str:
        """Return the standard output so far."""
        path = _beside(self.folder, "stdout")
        return path.read_text() if path.exists() else ""

    def errors(self) -> str:
        """Return the standard error so far."""
        return _beside(self.folder, "stderr").read_text()

    def wait_for(self, words: str, seconds: float = 120) -> None:
        """Wait until it has printed these words; raise an AssertionError if it ends before."""
        end = time.monotonic() + seconds
        while words not in " ".join(self.printed().split()):
            assert self.process.is_alive(), (words, self.printed(), self.errors())
            assert time.monotonic() < end, (words, self.printed())
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 120) -> int:
        """Wait for the end; return the exit code, or minus the number of the signal that ended
        it.
        """
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"it runs after {seconds} s: {self.printed()}"
        return self.process.exitcode


def start(
    folder: Path,
    *arguments: str,
    largest_file: int = resource.RLIM_INFINITY,
    before: Callable[[], object] = bool,
) -> Command:
    """Start a command in a folder, with a limit to the bytes of a file; its process first calls
    ``before``.
    """
    _beside(folder, "stdout").unlink(missing_ok=True)
    process = CONTEXT.Process(
        target=_run, args=(list(arguments), folder, largest_file, before), daemon=True
    )
    process.start()
    return Command(process, folder)


def run(
    folder: Path, *arguments: str, largest_file: int = resource.RLIM_INFINITY
) -> tuple[int, str, str]:
    """Run a command in a folder; return its exit code, standard output and standard error."""
    command = start(folder, *arguments, largest_file=largest_file)
    return command.end(), command.printed(), command.errors()
