"""Ranks on this machine: one process starts them, watches over them, and tells what became of them.

That process trains nothing itself. Over a pipe each rank gets its work, and is told to stop or to save; it tells how
far the training is, and how it ended. A pipe that ends tells a rank that nobody watches over it any more: it ends, too.
So whichever process is killed, none is left behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import distributed

from raglane._utils.messages import current_flags, flags
from raglane.errors import LostRankError, RaglaneError
from raglane.training.job import Job, TrainingResult
from raglane.training.machine import threads_of
from raglane.training.ranks import Ranks, Stops, lost, lost_worker
from raglane.training.state import Totals, TrainingState, Watcher
from raglane.training.trainer import Trainer

# Seconds between two reports of batches.
_REPORT = 0.1
# Seconds: between two looks at the processes; from an error until it is known whether a process has died; and until
# those that are left must have noticed that one has.
_LOOK, _SOON, _GRACE = 0.2, 1.0, 20.0


@dataclass(frozen=True)
class Place:
    """The place of a rank among the others."""

    rank: int
    count: int
    port: int
    flags: dict[str, str]
    is_watched: bool


class Process(Protocol):
    """A process that was started: what ``subprocess`` and ``multiprocessing`` have in common."""

    pid: int

    def kill(self) -> None:
        """End it at once."""


@dataclass
class _Rank:
    """A rank as the process sees it that watches over it."""

    process: Process
    exit_code: Callable[[], int | None]
    pipe: Connection
    told: Any = None
    has_told: bool = False
    code: int | None = None

    @property
    def has_failed(self) -> bool:
        """True where it has an error of its own, so that nothing more can come of the others."""
        return isinstance(self.told, (RaglaneError, OSError)) and not isinstance(self.told, LostRankError)

    def tell(self, *words: Any) -> None:
        """Send something; a rank that has gone does not hear it."""
        try:
            self.pipe.send(words)
        except OSError:
            self.code = self.exit_code()


def start_process(pipe: Connection) -> tuple[Process, Callable[[], int | None]]:
    """Start a process that waits for its work."""
    environment = os.environ | _network()
    start = f"from raglane.training.ranks import launch; launch.run_rank(launch.Connection({pipe.fileno()}))"
    command = [sys.executable, "-c", start]
    # In a session of its own: Ctrl-C reaches the process that watches over it, which passes it on.
    process = subprocess.Popen(
        command,
        pass_fds=[pipe.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return process, process.poll


def _network() -> dict[str, str]:
    """The network interface of ranks of one machine; it needs no network, and no name for the machine."""
    import socket

    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loop = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if loop is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": loop}


def launch(job: Job, watcher: Watcher | None = None) -> TrainingResult:
    """Do a training in as many processes as its settings say."""
    settings = job.settings
    # Not a choice of the run, which may go on with other ranks elsewhere.
    shared = pickle.dumps((job, threads_of(settings)), protocol=pickle.HIGHEST_PROTOCOL)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    ranks: list[_Rank] = []
    stops = Stops()
    try:
        with closing(stops):
            stops.listen()
            for _ in range(settings.ranks):
                mine, its = Pipe()
                with its:
                    process, exit_code = start_process(its)
                ranks.append(_Rank(process, exit_code, mine))
            for number, rank in enumerate(ranks):
                rank.tell(Place(number, settings.ranks, store.port, current_flags(), watcher is not None), shared)
            return _Watch(job, ranks, watcher, stops).until_the_end()
    finally:
        for rank in ranks:
            # What has ended is not hurt.
            rank.process.kill()
        for rank in ranks:
            _reap(rank)
            rank.pipe.close()
        # It has a thread, which it waits for when it ends. An error's traceback would keep it until some process that
        # was forked later collects garbage: there the thread is none, and a DataLoader's worker died of that.
        del store


def _reap(rank: _Rank) -> None:
    end = time.monotonic() + _GRACE
    while rank.exit_code() is None and time.monotonic() < end:
        time.sleep(0.01)


class _Watch:
    """Over ranks that train."""

    def __init__(self, job: Job, ranks: list[_Rank], watcher: Watcher | None, stops: Stops) -> None:
        self._job, self._ranks, self._watcher, self._stops = job, ranks, watcher, stops
        self._passed_on = False

    def until_the_end(self) -> TrainingResult:
        """Watch until the first rank has a result, or no more can come."""
        since = None
        while True:
            self._hear()
            self._pass_on()
            if isinstance(self._ranks[0].told, TrainingResult):
                return self._ranks[0].told
            if any(rank.has_failed for rank in self._ranks):
                raise self._error()
            if any(rank.code is not None or rank.has_told for rank in self._ranks):
                since = since or time.monotonic()
                is_over = all(rank.code is not None or rank.has_told for rank in self._ranks)
                told = [rank.told for rank in self._ranks]
                grace = _GRACE
                if any(isinstance(word, BaseException) and not isinstance(word, LostRankError) for word in told):
                    grace = _SOON
                if is_over or time.monotonic() - since > grace:
                    raise self._error()

    def _hear(self) -> None:
        """Receive the messages of ranks, and how they ended."""
        pipes = {rank.pipe: rank for rank in self._ranks if rank.code is None}
        for pipe in wait(list(pipes), _LOOK):
            rank = pipes[pipe]  # type: ignore[index]
            try:
                what, *said = rank.pipe.recv()
            except (EOFError, OSError):
                _reap(rank)
                rank.code = rank.exit_code()
                continue
            if what == "ended":
                rank.told, rank.has_told = said[0], True
            elif self._watcher is not None:
                getattr(self._watcher, what)(*said)
        for rank in pipes.values():
            # A rank's own children keep its end of the pipe open for a while.
            if rank.code is None and not rank.pipe.poll():
                rank.code = rank.exit_code()

    def _pass_on(self) -> None:
        """Tell the ranks to stop, where this process was told."""
        if self._stops.asked is not None and not self._passed_on:
            self._passed_on = True
            for rank in self._ranks:
                rank.tell("stop", self._stops.asked)

    def _error(self) -> BaseException:
        """Why it ended, and what to do; one of those that are left saves what was done."""
        told = [rank.told for rank in self._ranks if isinstance(rank.told, BaseException)]
        dead = [number for number, rank in enumerate(self._ranks) if rank.code is not None and not rank.has_told]
        # What PyTorch says may come of a rank that died; what Raglane and the system say does not.
        own = [error for error in told if isinstance(error, (RaglaneError, OSError)) or not dead]
        if own and not isinstance(own[0], LostRankError):
            return own[0]
        self._save()
        if own:
            return lost_worker(self._job.folder)
        got = f"rank {dead[0]}, {_words_for(self._ranks[dead[0]].code)}" if dead else "ranks that lost each other"
        return lost(got, self._job.folder)

    def _save(self) -> None:
        """Let one that is left write what all of them had done."""
        keeper = next((rank for rank in self._ranks if rank.has_told and rank.told is None and rank.code is None), None)
        if keeper is None:
            return
        keeper.tell("save")
        end = time.monotonic() + 10 * _GRACE
        while keeper.code is None and time.monotonic() < end:
            wait([keeper.pipe], _LOOK)
            keeper.code = keeper.exit_code()


def _words_for(code: int | None) -> str:
    """The end of a process in words."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"which ended with exit code {code}"


# From here on: in the process of a rank.


class _Teller:
    """Tells the watcher of another process what happens here."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told = 0.0

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        _send(self._pipe, "started", state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch is done: told a few times a second, since reading the sums waits for a GPU."""
        now = time.monotonic()
        if now - self._told >= _REPORT:
            self._told = now
            _send(self._pipe, "batch_done", epoch, batch, Totals(**totals.to_config()))

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        _send(self._pipe, "epoch_done", row, is_best)


def _send(pipe: Connection, *words: Any) -> None:
    """Send something with the numbers of its tensors: PyTorch would send where they lie, which only a fork may ask."""
    pipe.send_bytes(pickle.dumps(words, protocol=pickle.HIGHEST_PROTOCOL))


def run_rank(pipe: Connection) -> None:
    """Do the work that comes over a pipe, and say over it how that ended."""
    # Whom to stop, the process that watches over this one knows; to stop this rank alone would stop the others, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stops = Stops()
    place, content = pipe.recv()
    words: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, stops, words), daemon=True).start()
    with flags(place.flags):
        told = _work(pipe, place, content, stops, words)
        _send(pipe, "ended", told)
        if isinstance(told, LostRankError):
            # A worker of this rank has died. The others hear of it by the end of this one, and one of them saves.
            os._exit(0)
    # Until the others have ended, who may still hear from this one.
    words.get()


def _work(pipe: Connection, place: Place, content: bytes, stops: Stops, words: SimpleQueue[str]) -> Any:
    """The result, or the error."""
    saves = False

    def is_keeper() -> bool:
        nonlocal saves
        _send(pipe, "ended", None)
        saves = words.get() == "save"
        return saves

    ranks = Ranks(place.rank, place.count, place.rank, is_keeper)
    try:
        job, threads = pickle.loads(content)
        if threads is not None:
            torch.set_num_threads(threads)
        store = distributed.TCPStore("127.0.0.1", place.port, is_master=False)  # type: ignore[attr-defined]
        ranks.join(store)
        watcher = _Teller(pipe) if place.is_watched and ranks.is_first else None
        return Trainer(job, ranks, watcher, stops).run()
    except Exception as error:
        if saves:
            # It has, or could not: the others have gone, and nothing is left to say.
            os._exit(0)
        if not isinstance(error, RaglaneError):
            error.add_note("".join(traceback.format_exception(error)))
        return None if ranks.is_lost(error) else _portable(error)


def _portable(error: Exception) -> Exception:
    """An error that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _listen(pipe: Connection, stops: Stops, words: SimpleQueue[str]) -> None:
    """Hear what the watching process has to say, until it has gone."""
    while True:
        try:
            word, *more = pipe.recv()
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
            return
        if word == "stop":
            stops.asked = more[0]
        else:
            words.put(word)
