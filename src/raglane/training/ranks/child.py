"""What a process does that was started to be a rank: ``python -m raglane.training.ranks.child PIPE``."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from raglane.errors import LostRankError, RaglaneError, flags
from raglane.training.ranks.group import Ranks, Stops
from raglane.training.ranks.launch import Place
from raglane.training.state import Totals, TrainingState
from raglane.training.work import perform

# Seconds between two reports of batches.
_REPORT = 0.1


class _Teller:
    """Tells the watcher of another process what happens here."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told = 0.0

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        """The loop starts."""
        _send(self._pipe, "started", state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch is done: told a few times a second, since reading the sums waits for a GPU."""
        now = time.monotonic()
        if now - self._told >= _REPORT:
            self._told = now
            _send(self._pipe, "batch_done", epoch, batch, Totals(**totals.to_config()))

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """An epoch is complete."""
        _send(self._pipe, "epoch_done", row, is_best)


def _send(pipe: Connection, *words: Any) -> None:
    """Send something with the numbers of its tensors: PyTorch would send where they lie, which only a fork may ask."""
    pipe.send_bytes(pickle.dumps(words, protocol=pickle.HIGHEST_PROTOCOL))


def run(pipe: Connection) -> None:
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
    from torch import distributed

    saves = False

    def is_keeper() -> bool:
        nonlocal saves
        _send(pipe, "ended", None)
        saves = words.get() == "save"
        return saves

    ranks = Ranks(place.rank, place.count, place.rank, is_keeper)
    try:
        work, threads = pickle.loads(content)
        if threads is not None:
            torch.set_num_threads(threads)
        store = distributed.TCPStore("127.0.0.1", place.port, is_master=False)  # type: ignore[attr-defined]
        ranks.join(store)
        watcher = _Teller(pipe) if place.is_watched and ranks.is_first else None
        return perform(work, ranks=ranks, watcher=watcher, stops=stops)
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


if __name__ == "__main__":
    run(Connection(int(sys.argv[1])))
