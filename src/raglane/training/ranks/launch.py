"""Ranks on this machine, started and monitored by a process that does not train itself.

A rank receives its job and requests to stop or to save over a pipe, and sends its progress and its
outcome. It also ends when its pipe is closed, so no process remains, whichever one is killed.
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
from raglane.training.ranks import Ranks, SignalHandler, lost, lost_worker
from raglane.training.state import Callback, Totals, TrainingState
from raglane.training.trainer import Trainer

# Seconds between two reports of batches.
_REPORT = 0.1
# Seconds between two checks of the processes.
_POLL = 0.2
# Seconds until a death is detected after an error.
_SOON = 1.0
# Seconds until the other ranks have detected a death.
_GRACE = 20.0


@dataclass(frozen=True)
class Place:
    """The number of a rank, and the parameters that it shares with the others."""

    rank: int
    count: int
    port: int
    flags: dict[str, str]
    has_callback: bool


class Process(Protocol):
    """The common interface of processes of ``subprocess`` and ``multiprocessing``."""

    pid: int

    def kill(self) -> None:
        """Kill the process."""


@dataclass
class _Rank:
    """A rank in the monitoring process."""

    process: Process
    exit_code: Callable[[], int | None]
    pipe: Connection
    # A result, an error, or None for a rank that lost the others.
    outcome: Any = None
    has_ended: bool = False
    code: int | None = None

    @property
    def has_failed(self) -> bool:
        """True for an error that is not caused by another rank, so that the training cannot
        continue.
        """
        return isinstance(self.outcome, (RaglaneError, OSError)) and not isinstance(
            self.outcome, LostRankError
        )

    def send(self, *words: Any) -> None:
        """Send words to the rank, if it is alive."""
        try:
            self.pipe.send(words)
        except OSError:
            self.code = self.exit_code()


def start_process(pipe: Connection) -> tuple[Process, Callable[[], int | None]]:
    """Start a process that waits for its job, and return it with a function for its exit code."""
    environment = os.environ | _network()
    start = f"from raglane.training.ranks import launch; launch.run_rank(launch.Connection({pipe.fileno()}))"
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # In a new session, so that Ctrl-C is sent only to the monitoring process, which forwards it.
    more: dict[str, Any] = {
        "pass_fds": [pipe.fileno()],
        "env": environment,
        "start_new_session": True,
    }
    process = subprocess.Popen([sys.executable, "-c", start], **quiet, **more)
    return process, process.poll


def _network() -> dict[str, str]:
    """Return the environment variable that selects the loopback interface, which needs no
    network.
    """
    import socket

    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loop = next((name for name in ("lo", "lo0") if name in names), None)
    return (
        {} if loop is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": loop}
    )


def launch(job: Job, callback: Callback | None = None) -> TrainingResult:
    """Run a training in ``settings.processes`` processes."""
    settings = job.settings
    # Separate from the settings, because the run may be resumed with other ranks.
    shared = pickle.dumps((job, threads_of(settings)), protocol=pickle.HIGHEST_PROTOCOL)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    ranks: list[_Rank] = []
    signals = SignalHandler()
    try:
        with closing(signals):
            signals.listen()
            for _ in range(settings.processes):
                parent, child = Pipe()
                with child:
                    process, exit_code = start_process(child)
                ranks.append(_Rank(process, exit_code, parent))
            for number, rank in enumerate(ranks):
                rank.send(
                    Place(
                        number,
                        settings.processes,
                        store.port,
                        current_flags(),
                        callback is not None,
                    ),
                    shared,
                )
            return _Monitor(job, ranks, callback, signals).run()
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            _reap(rank)
            rank.pipe.close()
        # Its destructor joins a thread. If a traceback kept the store alive until a forked process,
        # which lacks the thread, collects garbage, that process (e.g. a DataLoader worker) would
        # crash.
        del store


def _reap(rank: _Rank) -> None:
    end = time.monotonic() + _GRACE
    while rank.exit_code() is None and time.monotonic() < end:
        time.sleep(0.01)


class _Monitor:
    """Monitors ranks until the training ends."""

    def __init__(
        self, job: Job, ranks: list[_Rank], callback: Callback | None, signals: SignalHandler
    ) -> None:
        self._job = job
        self._ranks = ranks
        self._callback = callback
        self._signals = signals
        self._is_forwarded = False

    def run(self) -> TrainingResult:
        """Return the result of the first rank; raise if the training failed."""
        since = None
        while True:
            self._receive()
            self._forward()
            if isinstance(self._ranks[0].outcome, TrainingResult):
                return self._ranks[0].outcome
            if any(rank.has_failed for rank in self._ranks):
                raise self._error()
            are_over = [rank.code is not None or rank.has_ended for rank in self._ranks]
            if not any(are_over):
                continue
            since = since or time.monotonic()
            if all(are_over) or time.monotonic() - since > self._grace():
                raise self._error()

    def _grace(self) -> float:
        """Return the seconds that the other ranks have after one has ended."""
        errors = [rank.outcome for rank in self._ranks if isinstance(rank.outcome, BaseException)]
        has_own_error = any(not isinstance(error, LostRankError) for error in errors)
        return _SOON if has_own_error else _GRACE

    def _receive(self) -> None:
        """Receive messages and exit codes of the ranks."""
        pipes = {rank.pipe: rank for rank in self._ranks if rank.code is None}
        for pipe in wait(list(pipes), _POLL):
            rank = pipes[pipe]  # type: ignore[index]
            try:
                method, *arguments = rank.pipe.recv()
            except (EOFError, OSError):
                _reap(rank)
                rank.code = rank.exit_code()
                continue
            if method == "ended":
                rank.outcome = arguments[0]
                rank.has_ended = True
            elif self._callback is not None:
                getattr(self._callback, method)(*arguments)
        for rank in pipes.values():
            # Checked too, because children of a dead rank may keep its end of the pipe open.
            if rank.code is None and not rank.pipe.poll():
                rank.code = rank.exit_code()

    def _forward(self) -> None:
        """Forward a signal to the ranks."""
        if self._signals.received is not None and not self._is_forwarded:
            self._is_forwarded = True
            for rank in self._ranks:
                rank.send("stop", self._signals.received)

    def _error(self) -> BaseException:
        """Return the error of a failed training, after a surviving rank has saved the last step."""
        errors = [rank.outcome for rank in self._ranks if isinstance(rank.outcome, BaseException)]
        dead = [
            number
            for number, rank in enumerate(self._ranks)
            if rank.code is not None and not rank.has_ended
        ]
        # Errors of PyTorch may be caused by a dead rank; those of Raglane and the system are not.
        own_errors = [
            error for error in errors if isinstance(error, (RaglaneError, OSError)) or not dead
        ]
        if own_errors and not isinstance(own_errors[0], LostRankError):
            return own_errors[0]
        self._save()
        if own_errors:
            return lost_worker(self._job.folder)
        got = (
            f"rank {dead[0]}, {_words_for(self._ranks[dead[0]].code)}"
            if dead
            else "the connection between ranks"
        )
        return lost(got, self._job.folder)

    def _save(self) -> None:
        """Let a surviving rank save the last complete step."""
        alive = [
            rank
            for rank in self._ranks
            if rank.has_ended and rank.outcome is None and rank.code is None
        ]
        if not alive:
            return
        keeper = alive[0]
        keeper.send("save")
        end = time.monotonic() + 10 * _GRACE
        while keeper.code is None and time.monotonic() < end:
            wait([keeper.pipe], _POLL)
            keeper.code = keeper.exit_code()


def _words_for(code: int | None) -> str:
    """Describe an exit code."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"which ended with exit code {code}"


# The following functions run in the process of a rank.


class _Sender(Callback):
    """Sends progress to the callback in the monitoring process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sent = 0.0

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        _send(self._pipe, "started", state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """Send a few times per second, because reading the sums synchronises with a GPU."""
        now = time.monotonic()
        if now - self._sent >= _REPORT:
            self._sent = now
            _send(self._pipe, "batch_done", epoch, batch, Totals(**totals.to_config()))

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        _send(self._pipe, "epoch_done", row, is_best)


def _send(pipe: Connection, *words: Any) -> None:
    """Send words with the values of their tensors; PyTorch would send file descriptors, which only
    forks can use.
    """
    pipe.send_bytes(pickle.dumps(words, protocol=pickle.HIGHEST_PROTOCOL))


def run_rank(pipe: Connection) -> None:
    """Run the job that is received over a pipe, and send its outcome."""
    # The monitoring process signals all ranks together.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = SignalHandler()
    settings, content = pipe.recv()
    words: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, signals, words), daemon=True).start()
    with flags(settings.flags):
        outcome = _work(pipe, settings, content, signals, words)
        _send(pipe, "ended", outcome)
        if isinstance(outcome, LostRankError):
            # A DataLoader worker died. The end of this rank is detected by the others, one of which
            # saves.
            os._exit(0)
    # Stay alive for the communication of the other ranks.
    words.get()


def _work(
    pipe: Connection,
    settings: Place,
    content: bytes,
    signals: SignalHandler,
    words: SimpleQueue[str],
) -> Any:
    """Run a job and return its result or error; None if another rank died."""
    saves = False

    def is_keeper() -> bool:
        nonlocal saves
        _send(pipe, "ended", None)
        saves = words.get() == "save"
        return saves

    ranks = Ranks(settings.rank, settings.count, settings.rank, is_keeper)
    try:
        job, threads = pickle.loads(content)
        if threads is not None:
            torch.set_num_threads(threads)
        ranks.join(distributed.TCPStore("127.0.0.1", settings.port, is_master=False))  # type: ignore[attr-defined]
        callback = _Sender(pipe) if settings.has_callback and ranks.is_first else None
        return Trainer(job, ranks, callback, signals).run()
    except Exception as error:
        if saves:
            # The state is saved, or could not be; the outcome was already sent.
            os._exit(0)
        if not isinstance(error, RaglaneError):
            error.add_note("".join(traceback.format_exception(error)))
        return None if ranks.is_lost(error) else _portable(error)


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _listen(pipe: Connection, signals: SignalHandler, words: SimpleQueue[str]) -> None:
    """Receive requests of the monitoring process; kill this process when the pipe is closed."""
    while True:
        try:
            word, *more = pipe.recv()
        except (EOFError, OSError):
            os.kill(
                os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM)
            )  # Windows has only SIGTERM
            return
        if word == "stop":
            signals.received = more[0]
        else:
            words.put(word)
