"""The ranks of a training: processes with a copy of the model, each computing its share of every
batch.

This file has the communication of ranks and their signals. ``launch.py`` starts and monitors ranks
on this machine, ``ray_workers.py`` on a Ray cluster. All ranks run the same
:class:`~raglane.training.job.Job`; ranks of torchrun receive it from the first one (``run.py``).
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from raglane._utils.files import whole_folder
from raglane._utils.messages import argument, count_of, quote
from raglane.errors import ArgumentError, LostRankError, RaglaneError
from raglane.training.folder import LAST
from raglane.training.tasks.base import Score


class SignalHandler:
    """Stores the first Ctrl-C or SIGTERM, which stops the run after the batch; a second one stops
    it immediately.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handle the two signals; do nothing outside of the main thread, which receives all
        signals.
        """
        if threading.current_thread() is not threading.main_thread() or self.received is not None:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self.received = number
        signal.signal(number, self._before[number])

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


# The timeout of the process group: another rank may be reading data or writing a checkpoint.
_PATIENCE = timedelta(hours=2)

_NUMBERS = {"rank": "RANK", "count": "WORLD_SIZE", "local": "LOCAL_RANK"}
# The address of the process group.
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")

# Words of PyTorch's RuntimeError after the death of another rank.
_LOST = re.compile(r"gloo|nccl|peer|tcpstore|connection|timed out", re.IGNORECASE)


class Ranks:
    """This process among the ranks of a training, and their communication. With one rank, values
    are unchanged.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        local: int = 0,
        is_keeper: Callable[[], bool] | None = None,
    ) -> None:
        self.rank = rank
        self.count = count
        self.local = local
        self._is_keeper = is_keeper

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and reports progress."""
        return self.rank == 0

    def device_of(self, device: torch.device) -> torch.device:
        """Return the device of this rank: its own GPU, or the CPU."""
        if self.count == 1 or device.type != "cuda":
            return device
        available = torch.cuda.device_count()
        if self.local >= available:
            got = f"{self.local + 1} or more on a machine with {count_of(available, 'GPU')}"
            fix = f"pass {argument('ranks', available)}, or {argument('device', 'cpu')}"
            raise ArgumentError("processes", got, "at most the number of GPUs", fix)
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    def join(self, store: Any = None) -> None:
        """Initialise the process group; return when all ranks have joined."""
        # Both backends if NCCL exists: the choice must be equal on all ranks, and before the device
        # is known.
        backend = (
            "cpu:gloo,cuda:nccl"
            if torch.cuda.is_available() and distributed.is_nccl_available()
            else "gloo"
        )
        named = (
            {} if store is None else {"store": store, "rank": self.rank, "world_size": self.count}
        )
        distributed.init_process_group(backend, timeout=_PATIENCE, **named)

    def leave(self) -> None:
        """Destroy the process group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def sums(self, *numbers: Tensor | float) -> list[Tensor]:
        """Return numbers summed over all ranks, as 0-d float64 tensors with the same bits on every
        rank.
        """
        device = next(
            (number.device for number in numbers if isinstance(number, Tensor)), torch.device("cpu")
        )
        stacked = torch.stack(
            [torch.as_tensor(number, device=device).detach().double() for number in numbers]
        )
        if self.count > 1:
            distributed.all_reduce(stacked)
        return list(stacked.unbind())

    def total(self, score: Score, elements: int) -> tuple[Score, Tensor | int]:
        """Return the score and the number of elements, summed over the batches of all ranks."""
        if self.count == 1:
            return score, elements
        *whole, total = self.sums(*vars(score).values(), elements)
        return Score(*whole), total

    def gathered(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks, on every rank."""
        if self.count == 1:
            return [mine]
        objects: list[Any] = [None] * self.count
        distributed.all_gather_object(objects, mine)
        return objects

    def joined(self, mine: Tensor, rows: range, count: int) -> Tensor:
        """Return a tensor of ``count`` rows (dimension 1) on every rank; this rank has the rows
        ``rows``.
        """
        if self.count == 1:
            return mine
        whole = mine.new_zeros((mine.shape[0], count, *mine.shape[2:]))
        whole[:, rows.start :: rows.step] = mine.detach()
        # Adding zeros does not change any bits.
        distributed.all_reduce(whole)
        return whole

    def from_first(self, mine: Any) -> Any:
        """Return the object of the first rank, on every rank."""
        objects = [mine]
        distributed.broadcast_object_list(objects, src=0)
        return objects[0]

    def is_lost(self, error: BaseException) -> bool:
        """Return True if an error means that another rank died."""
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, RaglaneError)
        return self.count > 1 and is_torchs and _LOST.search(str(error)) is not None

    def is_keeper(self) -> bool:
        """Return True for the rank that saves the last step after another one died."""
        return self.is_first if self._is_keeper is None else self._is_keeper()


def lost(what: str, folder: Path | None) -> LostRankError:
    """Return the error of a training with a dead rank."""
    return _stopped(what, _how_to_resume(folder, ", with any number of ranks"))


def lost_worker(folder: Path | None) -> LostRankError:
    """Return the error of a training with a dead DataLoader worker."""
    what = "a worker of the DataLoader, possibly because no memory was available"
    return _stopped(what, f"{_how_to_resume(folder)}; fewer workers need less memory")


def _stopped(lost: str, fix: str) -> LostRankError:
    return LostRankError(f"Training stopped because it lost {lost}. {fix[:1].upper()}{fix[1:]}.")


def _how_to_resume(folder: Path | None, more: str = "") -> str:
    """Return the fix for an interrupted run; ``more`` is added if it has a checkpoint."""
    if folder is None or whole_folder(folder / LAST) is None:
        return "train again"
    return f"resume with {argument('resume', True)} and {argument('out', str(folder))}{more}"


class AgreedSignal:
    """The signal that any rank received; the ranks exchange it while a batch is computed."""

    def __init__(self, ranks: Ranks, signals: SignalHandler) -> None:
        self._ranks = ranks
        self._signals = signals
        self._number = torch.zeros((), dtype=torch.int64)
        self._work: Any = None

    def start(self) -> None:
        """Start the exchange of signals; all ranks do so at the same step."""
        if self._ranks.count > 1:
            self._number.fill_(self._signals.received or 0)
            self._work = distributed.all_reduce(
                self._number, distributed.ReduceOp.MAX, async_op=True
            )

    def result(self) -> int | None:
        """Return the number of the signal that any rank had at the last exchange, or None."""
        if self._ranks.count == 1:
            return self._signals.received
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._number) or None


SINGLE = Ranks()
"""A training in one process."""


def ranks_of(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks of torchrun according to the environment; None for a single process."""
    if any(name not in environment for name in (*_NUMBERS.values(), *_ADDRESS)):
        return None
    numbers = {}
    for name, variable in _NUMBERS.items():
        text = environment[variable]
        if not text.isdecimal():
            fix = "start the command with torchrun, or unset it"
            raise ArgumentError(variable, quote(text), "a whole number from 0", fix)
        numbers[name] = int(text)
    return (
        Ranks(numbers["rank"], numbers["count"], numbers["local"]) if numbers["count"] > 1 else None
    )
