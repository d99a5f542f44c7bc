"""Trainings in one and two processes that are killed: a resumed one must have the bits of an
undisturbed one.

The command or one of its ranks gets SIGKILL while it starts, trains or writes. In half of the
rounds a checkpoint is written after each batch. If a rank is killed, the command must end with one
line. Then the training resumes, or starts again if nothing was written yet. All files must be
equal, byte for byte, except for measured times.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from commands import write_steps
from fuzz.crashes import contents, has_begun, same
from processes import Command
from processes import start as start_command

_RANKS = (1, 2)


def _start_rank(pipe: Connection) -> tuple[Any, Callable[[], int | None]]:
    """Replace ``launch.start_process``: fork instead of starting an interpreter."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # which may not fork
    process = multiprocessing.get_context("fork").Process(
        target=_run_rank, args=(pipe,), daemon=True
    )
    process.start()
    return process, lambda: process.exitcode


def _run_rank(pipe: Connection) -> None:
    from raglane.training.ranks import launch

    # Like a new process, the rank has none of its parent's open files.
    mine = os.dup2(pipe.fileno(), 100)
    os.closerange(3, 100)
    os.closerange(101, 4096)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    launch.run_rank(Connection(mine))
    os._exit(0)


def _patch() -> None:
    """Let this process fork its ranks."""
    from raglane.training.ranks import launch

    launch.start_process = _start_rank
    os.environ.update(launch._network())


class Track:
    """An empty folder that gets data and undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.run = folder / "work", folder / "work/run"
        self._folder.mkdir()
        self._data = write_steps(folder / "data.csv", 40)
        self.whole: dict[int, dict[str, Any]] = {}
        self.seconds: dict[int, float] = {}
        self._start(["--version"]).end()  # starts the server of processes, which takes seconds
        for ranks in _RANKS:
            shutil.rmtree(self.run, ignore_errors=True)
            start = time.monotonic()
            self._succeed(self._train(ranks))
            self.seconds[ranks] = time.monotonic() - start
            self.whole[ranks] = contents(self.run)

    def _train(self, ranks: int, *more: str) -> list[str]:
        options = (
            "--hidden-size 3 --batch-size 4 --epochs 3 --dropout 0.2 --threads 1 --quiet".split()
        )
        return [
            "train",
            str(self._data),
            "--output",
            "run",
            "--processes",
            str(ranks),
            *options,
            *more,
        ]

    def _start(self, arguments: list[str]) -> Command:
        return start_command(self._folder, *arguments, before=_patch)

    def _succeed(self, arguments: list[str]) -> None:
        command = self._start(arguments)
        assert command.end() == 0, command.errors()

    def attack(self, ranks: int, seconds: float, victim: int, saves_always: bool) -> None:
        """Kill a training, resume it, and compare.

        Args:
            ranks: of the training.
            seconds: after which it is killed.
            victim: 0 for the command; 1 and 2 for its first and second rank.
            saves_always: whether each batch has a checkpoint.

        Raises:
            AssertionError: something is lost, or the message is wrong.
        """
        shutil.rmtree(self.run, ignore_errors=True)
        command = self._start(
            self._train(ranks, "--checkpoint-minutes", "0" if saves_always else "1")
        )
        command.process.join(seconds)
        children = _children(command.process.pid)
        if victim and len(children) == ranks > 1:
            with suppress(ProcessLookupError):
                os.kill(children[victim - 1], signal.SIGKILL)
            code, lines = command.end(), command.errors().splitlines()
            assert code in (0, 2), (code, lines)
            assert len(lines) == (code == 2), lines
            assert code == 0 or f"rank {victim - 1}, killed by SIGKILL" in lines[0], lines
        else:
            command.process.kill()
            command.process.join()
        resumed = self._start(
            ["train", "--resume", "--output", "run", "--checkpoint-minutes", "1", "--quiet"]
        )
        if resumed.end() != 0:
            # It was killed before the run had a description.
            assert not has_begun(self.run), resumed.errors()
            self._succeed(self._train(ranks))
        same(contents(self.run), self.whole[ranks], f"not the run of {ranks} ranks")

    def play(self, number: int) -> None:
        draw = random.Random(number)
        ranks = _RANKS[number % 2]
        seconds, victim = draw.uniform(0.1, 1.1) * self.seconds[ranks], draw.choice((0, 1, 2))
        self.attack(ranks, seconds, victim, saves_always=number % 4 > 1)


def _children(pid: int | None) -> list[int]:
    """Return the processes that a process has started, in order."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def start(folder: Path) -> Callable[[int], None]:
    return Track(folder).play
