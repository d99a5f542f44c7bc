"""Commands that end at any point: the next command must give the bits of an undisturbed one.

A round draws a command (``STORIES``), how it ends (``WAYS``) and when. Then the next command
repairs what is left: ``--resume`` if there is a run, else the same command. All files of the run
must be equal to those of an undisturbed run, byte for byte, except for measured times, and nothing
else may be left. A round takes about a second.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from commands import write_steps
from fuzz.crashes import contents, ended, has_begun, kill_after, same
from raglane.cli import main as raglane
from raglane.training.checkpoint import read_tensors, to_safetensors

# ``die`` and ``fail`` are those of ``ended``; after ``die twice`` the repairing command dies too;
# ``kill`` is SIGKILL.
WAYS = {"die": 4, "die twice": 4, "fail": 3, "kill": 1}
_SMALL = [
    "--hidden-size",
    "3",
    "--batch-size",
    "5",
    "--epochs",
    "3",
    "--dropout",
    "0.2",
    "--threads",
    "1",
    "--quiet",
]


class Story(NamedTuple):
    """The run before a command, and the one after the repair: that of before, if the command was to
    replace it and has not written a checkpoint.
    """

    before: str | None
    end: str = "new"
    replaces: bool = False


STORIES = {
    "train": Story(None),
    "overwrite": Story("old", replaces=True),
    "resume": Story("half", "longer"),
    "evaluate": Story("new"),
    "predict": Story("new"),
}


class Workshop:
    """An empty folder that gets data and the results of undisturbed commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.output = folder, folder / "run", folder / "p.csv"
        data = str(write_steps(folder / "data.csv", 20))
        self._kept = folder / "kept"
        self._kept.mkdir()
        train = ["train", data, "--test", data, "--output", str(self.run), *_SMALL]
        self._resume = ["train", "--resume", "--output", str(self.run), "--quiet"]
        self._commands = {
            "train": train,
            "overwrite": [*train, "--overwrite"],
            "resume": [*self._resume, "--epochs", "3"],
            "evaluate": ["evaluate", str(self.run), "--quiet"],
            "predict": ["predict", str(self.run), data, "-o", str(self.output), "--quiet"],
        }
        self._keep("old", [*train, "--seed", "7", "--epochs", "2"], self._alter, self._resume)
        self._keep("half", [*train, "--epochs", "1"], self._alter, self._resume)
        self._keep("longer", [*train, "--epochs", "1"], self._alter, self._commands["resume"])
        self._keep("new", train)
        assert raglane(self._commands["predict"]) == 0
        self.predictions = self.output.read_bytes()
        self.whole = {path.name: contents(path) for path in self._kept.iterdir()}
        self.calls = {name: self._count_calls(name) for name in STORIES}

    def _keep(self, name: str, *steps: list[str] | Callable[[], None]) -> None:
        """Keep the run that some undisturbed commands make."""
        self.put(None)
        for step in steps:
            if callable(step):
                step()
            else:
                assert raglane(step) == 0
        shutil.copytree(self.run, self._kept / name)

    def _alter(self) -> None:
        """Replace the weights by others that no training makes, so that lost ones are noticed."""
        for path in self.run.glob("*/weights.safetensors"):
            weights = {name: 1.01 * weight for name, weight in read_tensors(path).items()}
            path.write_bytes(to_safetensors(weights))

    def _count_calls(self, name: str) -> int:
        self.put(STORIES[name].before)
        with ended(self.folder, 0, "die") as calls:
            assert raglane(self._commands[name]) == 0
        return calls()

    def put(self, name: str | None) -> None:
        """Remove all results, and put back the run of a name."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.output.unlink(missing_ok=True)
        if name is not None:
            shutil.copytree(self._kept / name, self.run)

    def attack(self, name: str, way: str, moment: float, again: int = 0) -> None:
        """End a command at a moment, repair what it leaves, and compare.

        Args:
            name: of the command.
            way: one of ``WAYS``.
            moment: the number of the call, or for ``kill`` seconds.
            again: the number of the call at which the repairing command dies, for ``die twice``.

        Raises:
            AssertionError: something is lost or left.
        """
        story, command = STORIES[name], self._commands[name]
        self.put(story.before)
        if way == "kill":
            kill_after(moment, _run, command)
        else:
            errors, code = io.StringIO(), None
            with (
                ended(self.folder, int(moment), way.split()[0]),
                contextlib.redirect_stderr(errors),
            ):
                code = raglane(command)
            if way == "fail":
                assert (code, len(errors.getvalue().splitlines())) in ((0, 0), (2, 1)), (
                    code,
                    errors.getvalue(),
                )
        end = story.end if not story.replaces or self._has_new_checkpoint(story) else story.before
        if way == "die twice":
            with ended(self.folder, again, "die"):
                raglane(self._next(name))
        if raglane(self._next(name)) != 0:
            # It ended before the run had a description.
            assert name == "train"
            assert not has_begun(self.run), sorted(self.run.rglob("*"))
            assert raglane(command) == 0
        same(contents(self.run), self.whole[str(end)], f"not the run {end!r}")
        if story.replaces:
            assert raglane(command) == 0
            same(contents(self.run), self.whole[story.end], f"not the run {story.end!r}")
        if name == "predict":
            assert self.output.read_bytes() == self.predictions
        left = sorted(path.name for path in self.folder.iterdir())
        assert set(left) <= {"data.csv", "kept", "run", "p.csv"}, left

    def _has_new_checkpoint(self, story: Story) -> bool:
        # Between two renames the last checkpoint has another name.
        places = [self.run / name / "weights.safetensors" for name in ("last", ".last.previous")]
        old = self.whole[str(story.before)]["last/weights.safetensors"]
        return any(place.exists() and place.read_bytes() != old for place in places)

    def _next(self, name: str) -> list[str]:
        """Return the command that repairs."""
        return self._resume if name in ("train", "overwrite") else self._commands[name]

    def play(self, number: int) -> None:
        draw = random.Random(number)
        name, way = draw.choice(list(STORIES)), draw.choices(list(WAYS), list(WAYS.values()))[0]
        moment: float = draw.randint(1, self.calls[name])
        again = draw.randint(1, self.calls[name])
        with contextlib.redirect_stderr(io.StringIO()):
            if way == "kill":
                moment = draw.random() * self._seconds(name)
            self.attack(name, way, moment, again)

    def _seconds(self, name: str) -> float:
        """Return the time that an undisturbed process takes."""
        self.put(STORIES[name].before)
        start = time.monotonic()
        kill_after(600, _run, self._commands[name])
        return time.monotonic() - start


def _run(command: list[str]) -> None:
    """Run a command in this process, and print nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    sys.exit(raglane(command))


def start(folder: Path) -> Callable[[int], None]:
    return Workshop(folder).play
