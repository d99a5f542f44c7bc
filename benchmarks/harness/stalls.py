"""``raglane serve`` with a trace of its stalls, written to a file: pauses of its event loop, and what
the thread did in them.

    python -m harness.stalls FILE serve ...
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import resource
import sys
import tempfile
import time
from typing import Any, NamedTuple

from raglane.cli import main
from raglane.serve.rounds import Rounds

_BEAT = 0.005  # seconds between looks at the clock
_LEAST = 0.02  # seconds of a pause that is a stall


class Stall(NamedTuple):
    """A pause of the event loop."""

    wall: float  # seconds
    cpu: float  # of these, seconds of a processor
    queue: float  # seconds for which the thread was ready to run, and another one did
    collections: float  # seconds in collections of garbage
    faults: int  # pages of memory that it waited for
    where: str  # the innermost functions in the pause

    def text(self) -> str:
        """Return a row of the table with :data:`HEAD`."""
        times = [f"{1e3 * seconds:.1f}" for seconds in self[:4]]
        return f"| {' | '.join([*times, str(self.faults), self.where])} |"


HEAD = (
    "| pause, ms | processor | ready, other work ran | garbage | page faults | where |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


class _Clocks(NamedTuple):
    """Counters of the thread of the event loop."""

    wall: float
    cpu: float
    queue: float
    collections: float
    faults: int


class Trace:
    """Watches an event loop from inside, and from a thread that needs no GIL."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._in_collections = 0.0
        self._began = 0.0
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self._last = self._clocks()
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._in_collections += time.perf_counter() - self._began

    def _clocks(self) -> _Clocks:
        with open("/proc/thread-self/schedstat") as file:
            queue = int(file.read().split()[1]) / 1e9
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return _Clocks(
            time.perf_counter(),
            time.thread_time(),
            queue,
            self._in_collections,
            usage.ru_majflt + usage.ru_minflt,
        )

    def beat(self) -> None:
        """Look at the clocks, and note a stall since the last look."""
        faulthandler.cancel_dump_traceback_later()
        now = self._clocks()
        passed = [after - before for after, before in zip(now, self._last, strict=True)]
        if passed[0] > _BEAT + _LEAST:
            self._stacks.seek(0)
            # The stack of the main thread is the last one.
            lines = self._stacks.read().rpartition("Thread ")[2].splitlines()[1:4]
            where = [line.rpartition("/")[2].replace('", line ', ":") for line in lines]
            with open(self._path, "a") as file:
                file.write(json.dumps([*passed, " < ".join(where)]) + "\n")
        self._stacks.seek(0)
        self._stacks.truncate()
        self._last = self._clocks()
        faulthandler.dump_traceback_later(_BEAT + _LEAST, file=self._stacks)
        asyncio.get_running_loop().call_later(_BEAT, self.beat)


def read(path: str) -> list[Stall]:
    """Return the stalls in a file."""
    with open(path) as file:
        return [Stall(*json.loads(line)) for line in file]


def _run() -> None:
    start = Rounds.start

    def traced(rounds: Rounds) -> None:
        start(rounds)
        Trace(sys.argv[1]).beat()

    Rounds.start = traced  # type: ignore[method-assign]
    raise SystemExit(main(sys.argv[2:]))


if __name__ == "__main__":
    _run()
