"""Trainings in one and two processes that get SIGKILL: what goes on has the bits of what nobody disturbed.

Killed is the command or one of its ranks, while it begins, trains, or writes. In every other round a checkpoint is
written after each batch. If a rank was killed, the command ends by itself, in one line. Then it goes on with
``--resume``, or begins again where nothing was written yet, and all files are compared, byte for byte, without the
seconds that things took.

    python -m fuzz.killed_ranks 100 1
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz.runs import contents, has_begun, same, write_data
from processes import CONTEXT

__all__ = ["Track", "main"]

_RANKS = (1, 2)
_LONGEST = 120.0


class _Forked:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _start_rank(pipe: Connection) -> tuple[_Forked, Callable[[], int | None]]:
    """What ``launch.start_process`` does, without an interpreter that starts anew."""
    from raglane.training.ranks import launch

    pid = os.fork()
    if pid == 0:
        # As of a process that starts anew: nothing of its parent's is open.
        mine = os.dup2(pipe.fileno(), 100)
        os.closerange(3, 100)
        os.closerange(101, 4096)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        launch.run_rank(Connection(mine))
        os._exit(0)
    process = _Forked(pid)
    return process, process.exit_code


def _command(arguments: list[str], errors: Path, saves_always: bool) -> None:
    """What the process of a command does."""
    from raglane.cli import main as raglane
    from raglane.training import trainer
    from raglane.training.ranks import launch

    launch.start_process = _start_rank
    os.environ.update(launch._network())
    if saves_always:
        trainer.SAVED_EVERY = 0.0
    for number, path in ((1, Path(os.devnull)), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os._exit(raglane(arguments))


class Track:
    """A folder with data, and with the runs that nobody disturbs.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.run, self._errors, self._data = folder / "run", folder / "errors", folder / "data.csv"
        write_data(self._data, 40)
        self.whole: dict[int, dict[str, Any]] = {}
        self.seconds: dict[int, float] = {}
        for ranks in _RANKS:
            self.clear()
            start = time.monotonic()
            assert self.end(self.start(self.train(ranks))) == 0, self.errors()
            self.seconds[ranks] = time.monotonic() - start
            self.whole[ranks] = contents(self.run)

    def clear(self) -> None:
        """No run."""
        shutil.rmtree(self.run, ignore_errors=True)

    def train(self, ranks: int) -> list[str]:
        """The command."""
        options = "--hidden 3 --batch-size 4 --epochs 3 --dropout 0.2 --threads 1 --quiet".split()
        return ["train", str(self._data), "--out", str(self.run), "--ranks", str(ranks), *options]

    def start(self, arguments: list[str], saves_always: bool = False) -> Any:
        """A process that runs a command."""
        process = CONTEXT.Process(target=_command, args=(arguments, self._errors, saves_always))
        process.start()
        return process

    def end(self, process: Any) -> int:
        """How a process ends."""
        process.join(_LONGEST)
        assert process.exitcode is not None, f"it does not end: {self.errors()}"
        return int(process.exitcode)

    def errors(self) -> str:
        """What the last command printed of errors."""
        return self._errors.read_text() if self._errors.exists() else ""

    def attack(self, ranks: int, seconds: float, victim: int, saves_always: bool) -> None:
        """Kill a training, go on, and compare.

        Args:
            ranks: of the training.
            seconds: after which it is killed.
            victim: 0 for the command; 1 and 2 for its first and second rank.
            saves_always: whether each batch has a checkpoint.

        Raises:
            AssertionError: something was lost, or said wrongly.
        """
        self.clear()
        process = self.start(self.train(ranks), saves_always)
        process.join(seconds)
        children = _children(process.pid)
        if victim and len(children) == ranks > 1:
            with suppress(ProcessLookupError):
                os.kill(children[victim - 1], signal.SIGKILL)
            code = self.end(process)
            assert code in (0, 2), (code, self.errors())
            lines = self.errors().splitlines()
            assert len(lines) == (code == 2), lines
            assert code == 0 or f"rank {victim - 1}, killed by SIGKILL" in lines[0], lines
        else:
            process.kill()
            process.join()
        resume = ["train", "--resume", "--out", str(self.run), "--quiet"]
        if self.end(self.start(resume)) != 0:
            # It was killed before it had written what it is.
            assert not has_begun(self.run), self.errors()
            assert self.end(self.start(self.train(ranks))) == 0, self.errors()
        same(contents(self.run), self.whole[ranks], f"not the run of {ranks} ranks")


def _children(pid: int) -> list[int]:
    """The processes that a process has started, in their order."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main(rounds: int = 100, seed: int = 1) -> int:
    """Attack so often, with what a seed draws, until something is lost, and print that.

    Args:
        rounds: how many trainings are killed.
        seed: of ranks, victim and moment.

    Returns:
        1 where something was lost, else 0.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        track = Track(Path(folder).resolve())
        for number in range(rounds):
            ranks, saves_always = _RANKS[number % 2], number % 4 > 1
            seconds, victim = draw.uniform(0.1, 1.1) * track.seconds[ranks], draw.choice((0, 1, 2))
            try:
                track.attack(ranks, seconds, victim, saves_always)
            except AssertionError as error:
                what = f"{ranks} ranks, {victim} killed after {seconds:.3f} s, {saves_always}"
                print(f"python -m fuzz.killed_ranks {number + 1} {seed}: {what}: {error}")
                return 1
    print(f"killed_ranks: {rounds} rounds of seed {seed}, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
