"""Commands that die wherever they can, and what the next command makes of it: the bits of one that nobody disturbed.

A round takes about a second. It ends where something was lost, and says the
round.

What is attacked (``STORIES``): a new run; a run that replaces another; a run that goes on; an evaluation; predictions.

How it ends (``WAYS``), each at a moment that is drawn:

- ``die``: a call of the file system, and each one after it, never happens, as where the process is killed; of a file
  that was to be brought to the disk there is half. It runs in this process, so that every call can be tried.
- ``die twice``: the command that is to repair it dies as well.
- ``fail``: a call of the file system fails once, as on a full disk, and the command ends in one line.
- ``kill``: a process of its own gets SIGKILL.

Then the next command repairs what it finds: ``--resume`` where a run is, else the command itself. Compared are all
files of the run, byte for byte, without the seconds that things took; nothing else may be left.

    python -m fuzz.kill_points 200 1
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.runs import contents, has_begun, same, write_data
from processes import CONTEXT
from raglane._utils import files
from raglane.cli import main as raglane
from raglane.training.checkpoint import read_tensors, to_safetensors

__all__ = ["STORIES", "WAYS", "Story", "Workshop", "attack", "count_calls", "main"]

WAYS = ("die", "die twice", "fail", "kill")
_SMALL = ["--hidden", "3", "--batch-size", "5", "--epochs", "3", "--dropout", "0.2", "--threads", "1", "--quiet"]
# The calls by which files.py, lock.py and shutil.rmtree change a folder.
_CALLS = ("open", "replace", "rename", "mkdir", "unlink", "rmdir", "fsync", "ftruncate", "write")


class Died(BaseException):
    """The process is no more, so nothing may handle this."""


class Workshop:
    """A folder with data and with the results of commands that nobody disturbed.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.output = folder, folder / "run", folder / "p.csv"
        self.data = folder / "data.csv"
        write_data(self.data, 20)
        self._kept = folder / "kept"
        self._kept.mkdir()
        self.train = ["train", str(self.data), "--test", str(self.data), "--out", str(self.run), *_SMALL]
        self.resume = ["train", "--resume", "--out", str(self.run), "--quiet"]
        self.longer = [*self.resume, "--epochs", "3"]
        self.evaluate = ["evaluate", str(self.run), "--quiet"]
        self.predict = ["predict", str(self.run), str(self.data), "-o", str(self.output), "--quiet"]
        self._keep("old", [*self.train, "--seed", "7", "--epochs", "2"], self._alter, self.resume)
        self._keep("half", [*self.train, "--epochs", "1"], self._alter, self.resume)
        self._keep("longer", [*self.train, "--epochs", "1"], self._alter, self.longer)
        self._keep("new", self.train)
        assert raglane(self.predict) == 0
        self.predictions = self.output.read_bytes()
        self.whole = {path.name: contents(path) for path in self._kept.iterdir()}

    def _keep(self, name: str, *steps: list[str] | Callable[[], None]) -> None:
        """Keep what some commands make that nobody disturbs."""
        self.clear()
        for step in steps:
            if callable(step):
                step()
            else:
                assert raglane(step) == 0
        shutil.copytree(self.run, self._kept / name)

    def _alter(self) -> None:
        """Weights that no training gives, so that none can stand in for them once they are lost."""
        for path in self.run.glob("*/weights.safetensors"):
            weights = {name: 1.01 * weight for name, weight in read_tensors(path).items()}
            path.write_bytes(to_safetensors(weights))

    def clear(self) -> None:
        """An empty workshop."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.output.unlink(missing_ok=True)

    def put(self, name: str) -> None:
        """A run that is complete, for the command to come."""
        shutil.copytree(self._kept / name, self.run)


@dataclass(frozen=True)
class Story:
    """A command to attack.

    Args:
        prepare: what stands in the workshop before.
        command: the attacked one.
        end: the name of the complete run that must stand there once it has been repaired.
        before: the same where the command had written no checkpoint of its own yet.
    """

    prepare: Callable[[Workshop], None]
    command: Callable[[Workshop], list[str]]
    end: str = "new"
    before: str | None = None


STORIES = {
    "train": Story(Workshop.clear, lambda shop: shop.train),
    "overwrite": Story(lambda shop: shop.put("old"), lambda shop: [*shop.train, "--overwrite"], before="old"),
    "resume": Story(lambda shop: shop.put("half"), lambda shop: shop.longer, "longer"),
    "evaluate": Story(lambda shop: shop.put("new"), lambda shop: shop.evaluate),
    "predict": Story(lambda shop: shop.put("new"), lambda shop: shop.predict),
}


@contextlib.contextmanager
def ended(folder: Path, moment: int, way: str) -> Iterator[Callable[[], int]]:
    """Let the calls of the file system below a folder end at one of them; gives how many there were.

    Args:
        folder: where calls count.
        moment: which call it is, from 1; 0 for none.
        way: one of ``WAYS``, but ``kill``.
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
            # What is opened to be read changes nothing.
            if (name == "open" and not _writes(arguments[0])) or not counts(target, options):
                return call(target, *arguments, **options)
            calls += 1
            if moment and calls >= moment:
                if way.startswith("die"):
                    if name == "fsync" and calls == moment:
                        real["ftruncate"](target, os.fstat(target).st_size // 2)
                    raise Died
                if calls == moment:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(target, *arguments, **options)

        return guarded

    for name, call in real.items():
        setattr(os, name, guard(name, call))
    files.open = guard("open", builtins.open)  # type: ignore[attr-defined]
    try:
        with contextlib.suppress(Died):
            yield lambda: calls
    finally:
        del files.open  # type: ignore[attr-defined]
        for name, call in real.items():
            setattr(os, name, call)


def _writes(mode: int | str) -> bool:
    return "w" in mode if isinstance(mode, str) else bool(mode & (os.O_WRONLY | os.O_RDWR))


def count_calls(shop: Workshop, story: Story) -> int:
    """How many moments there are to die at."""
    _prepare(shop, story)
    with ended(shop.folder, 0, "die") as calls:
        assert raglane(story.command(shop)) == 0
    return calls()


def _prepare(shop: Workshop, story: Story) -> None:
    shop.clear()
    story.prepare(shop)


def attack(shop: Workshop, story: Story, way: str, moment: float, again: int = 0) -> None:
    """Let a command end at a moment, repair what it left, and compare.

    Args:
        shop: where.
        story: which command.
        way: one of ``WAYS``.
        moment: the number of the call, or for ``kill`` seconds.
        again: the number of the call at which the next command dies, for ``die twice``.

    Raises:
        AssertionError: something was lost, or is left.
    """
    _prepare(shop, story)
    command = story.command(shop)
    if way == "kill":
        _kill(command, moment)
        end = _end(shop, story)
    else:
        errors, code = io.StringIO(), None
        with ended(shop.folder, int(moment), way), contextlib.redirect_stderr(errors):
            code = raglane(command)
        end = _end(shop, story)
        if way == "die twice":
            with ended(shop.folder, again, way):
                raglane(_next(shop, command))
        if way == "fail":
            assert (code, len(errors.getvalue().splitlines())) in ((0, 0), (2, 1)), (code, errors.getvalue())
    _repair(shop, command)
    _compare(shop, end)
    if story.before is not None:
        # Whichever of the two it was, the new one can still come about.
        assert raglane(command) == 0
        _compare(shop, story.end)
    if command == shop.predict:
        assert shop.output.read_bytes() == shop.predictions
    left = sorted(path.name for path in shop.folder.iterdir())
    assert set(left) <= {"data.csv", "kept", "run", "p.csv"}, left


def _next(shop: Workshop, command: list[str]) -> list[str]:
    """The next command: the same, or go on with a run."""
    return command if command[0] != "train" or command == shop.longer else shop.resume


def _repair(shop: Workshop, command: list[str]) -> None:
    if raglane(_next(shop, command)) != 0:
        # It was killed before it had written what it is.
        assert command == shop.train
        assert not has_begun(shop.run), sorted(shop.run.rglob("*"))
        assert raglane(command) == 0


def _kill(command: list[str], seconds: float) -> None:
    process = CONTEXT.Process(target=_run, args=(command,), daemon=True)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()


def _run(command: list[str]) -> None:
    """What that process does."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    sys.exit(raglane(command))


def _end(shop: Workshop, story: Story) -> str:
    """Which run must come of what an ended command has left."""
    if story.before is None:
        return story.end
    # Between two renames the last checkpoint bears another name.
    places = [shop.run / name / "weights.safetensors" for name in ("last", ".last.previous")]
    old = shop.whole[story.before]["last/weights.safetensors"]
    is_new = any(place.exists() and place.read_bytes() != old for place in places)
    return story.end if is_new else story.before


def _compare(shop: Workshop, end: str) -> None:
    same(contents(shop.run), shop.whole[end], f"not the run {end!r}")


def _duration(shop: Workshop, name: str) -> float:
    """The seconds that a process of its own takes for a story."""
    _prepare(shop, STORIES[name])
    start = time.monotonic()
    _kill(STORIES[name].command(shop), 600)
    return time.monotonic() - start


def main(rounds: int = 200, seed: int = 1) -> int:
    """Attack so often, with what a seed draws, until something is lost, and print that.

    Args:
        rounds: how many commands are ended.
        seed: of story, way and moment.

    Returns:
        1 where something was lost, else 0.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        shop = Workshop(Path(folder).resolve())
        calls = {name: count_calls(shop, story) for name, story in STORIES.items()}
        for number in range(rounds):
            name, way = draw.choice(list(STORIES)), draw.choices(WAYS, (4, 4, 3, 1))[0]
            moment = draw.random() * _duration(shop, name) if way == "kill" else draw.randint(1, calls[name])
            again = draw.randint(1, calls[name])
            try:
                attack(shop, STORIES[name], way, moment, again)
            except AssertionError as error:
                print(f"python -m fuzz.kill_points {number + 1} {seed}: {name}, {way} at {moment}, {again}: {error}")
                return 1
    print(f"kill_points: {rounds} rounds of seed {seed}, {sum(calls.values())} moments, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
