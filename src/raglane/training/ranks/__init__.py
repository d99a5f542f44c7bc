"""The ranks of a training: several processes, each with the whole model and its share of every step.

Here are the ranks, sums over all of them, and signals that all obey. ``launch.py`` starts ranks on this machine and
watches over them; ``on_ray.py`` is for those of a Ray cluster. All of them do the same
:class:`~raglane.training.job.Job`; ranks that torchrun started get it from the first one (``run.py``).
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from raglane._utils.files import whole_folder
from raglane._utils.messages import argument, count_of, message, quote
from raglane.errors import ArgumentError, LostRankError, RaglaneError
from raglane.training.folder import LAST
from raglane.training.tasks.base import Score


class Stops:
    """The first Ctrl-C or SIGTERM asks the run to stop at the next batch; a second one stops it at once."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take the two signals; in a thread that is not the main one, which gets none, do nothing."""
        if threading.current_thread() is not threading.main_thread() or self.asked is not None:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self.asked = number
        signal.signal(number, self._before[number])

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


# How long a rank waits for the others: one may read data or write a checkpoint meanwhile.
_PATIENCE = timedelta(hours=2)

_NUMBERS = {"rank": "RANK", "count": "WORLD_SIZE", "local": "LOCAL_RANK"}
# Where they meet.
_MEET = ("MASTER_ADDR", "MASTER_PORT")

# What PyTorch says in a RuntimeError where another rank has gone.
_LOST = re.compile(r"gloo|nccl|peer|tcpstore|connection|timed out", re.IGNORECASE)


class Ranks:
    """The processes that train together. With one alone, sums are what they are of."""

    def __init__(
        self, rank: int = 0, count: int = 1, local: int = 0, is_keeper: Callable[[], bool] | None = None
    ) -> None:
        self.rank, self.count, self.local = rank, count, local
        self._is_keeper = is_keeper

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and reports."""
        return self.rank == 0

    def device_of(self, device: torch.device) -> torch.device:
        """The device of this rank: each has a GPU of its own."""
        if self.count == 1 or device.type != "cuda":
            return device
        there = torch.cuda.device_count()
        if self.local >= there:
            got = f"{self.local + 1} or more on a machine with {count_of(there, 'GPU')}"
            fix = f"pass {argument('ranks', there)}, or {argument('device', 'cpu')}"
            raise ArgumentError(message("ranks", got, "at most the number of GPUs, for one GPU per rank", fix))
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    def join(self, store: Any = None) -> None:
        """Meet the other ranks; returns when all are there."""
        # What is on a GPU is summed there, if anything is; the same on every rank, whatever it will be told.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
        named = {} if store is None else {"store": store, "rank": self.rank, "world_size": self.count}
        distributed.init_process_group(backend, timeout=_PATIENCE, **named)

    def leave(self) -> None:
        """Part from the other ranks."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def sums(self, *numbers: Tensor | float) -> list[Tensor]:
        """Numbers summed over all ranks, each a 0-d float64 tensor, the same bits on every rank."""
        device = next((number.device for number in numbers if isinstance(number, Tensor)), torch.device("cpu"))
        stacked = torch.stack([torch.as_tensor(number, device=device).detach().double() for number in numbers])
        if self.count > 1:
            distributed.all_reduce(stacked)
        return list(stacked.unbind())

    def whole(self, score: Score, elements: int) -> tuple[Score, Tensor | int]:
        """The score of the batches of all ranks, and how many elements they have."""
        if self.count == 1:
            return score, elements
        loss, metric, count, baseline, total = self.sums(
            score.loss, score.metric, score.count, score.baseline, elements
        )
        return replace(score, loss=loss, metric=metric, count=count, baseline=baseline), total

    def gathered(self, mine: Any) -> list[Any]:
        """The objects of all ranks, in their order, on every rank."""
        if self.count == 1:
            return [mine]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, mine)
        return found

    def joined(self, mine: Tensor, rows: range, count: int) -> Tensor:
        """A tensor of which each rank has some rows, whole on every rank."""
        if self.count == 1:
            return mine
        whole = mine.new_zeros((mine.shape[0], count, *mine.shape[2:]))
        whole[:, rows.start :: rows.step] = mine.detach()
        # Zeros are added to each number, which leaves it as it is.
        distributed.all_reduce(whole)
        return whole

    def from_first(self, mine: Any) -> Any:
        """The object of the first rank, on every rank."""
        found = [mine]
        distributed.broadcast_object_list(found, src=0)
        return found[0]

    def is_lost(self, error: BaseException) -> bool:
        """True for an error that tells of another rank that has gone."""
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, RaglaneError)
        return self.count > 1 and is_torchs and _LOST.search(str(error)) is not None

    def is_keeper(self) -> bool:
        """True for the rank that saves what was done until another one went."""
        return self.is_first if self._is_keeper is None else self._is_keeper()


def lost(what: str, folder: Path | None) -> LostRankError:
    """The error of a training of which a rank has gone."""
    goes_on = _how_to_go_on(folder)
    fix = "train again" if goes_on is None else f"{goes_on}, with any number of ranks"
    return LostRankError(message("ranks", what, "processes that run until the end", fix))


def lost_worker(folder: Path | None) -> LostRankError:
    """The error of a training of which a process that prepares batches has gone."""
    what = "a worker that died, possibly for lack of memory"
    fix = f"{_how_to_go_on(folder) or 'train again'}; fewer workers need less memory"
    return LostRankError(message("workers", what, "processes that run until the end", fix))


def _how_to_go_on(folder: Path | None) -> str | None:
    """The fix for a run that has ended too early; None where it has no checkpoint."""
    if folder is None or whole_folder(folder / LAST) is None:
        return None
    return f"resume with {argument('resume', True)} and {argument('out', str(folder))}"


class Stop:
    """The signal to stop that any rank has got: the ranks agree on it while a batch is computed."""

    def __init__(self, ranks: Ranks, stops: Stops) -> None:
        self._ranks, self._stops = ranks, stops
        self._asked = torch.zeros((), dtype=torch.int64)
        self._work: Any = None

    def ask(self) -> None:
        """Tell the others what this rank was asked; all do so at the same moment of a training."""
        if self._ranks.count > 1:
            self._asked.fill_(self._stops.asked or 0)
            self._work = distributed.all_reduce(self._asked, distributed.ReduceOp.MAX, async_op=True)

    def answer(self) -> int | None:
        """The number of the signal that one of the ranks had when they told each other last; None for none."""
        if self._ranks.count == 1:
            return self._stops.asked
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._asked) or None


ALONE = Ranks()
"""A training in one process."""


def ranks_of(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that this process is one of, as its environment says; None where it says of no others."""
    if any(name not in environment for name in (*_NUMBERS.values(), *_MEET)):
        return None
    numbers = {}
    for name, variable in _NUMBERS.items():
        text = environment[variable]
        if not text.isdecimal():
            fix = "start the command with torchrun, or unset it"
            raise ArgumentError(message(variable, quote(text), "a whole number of at least 0", fix))
        numbers[name] = int(text)
    return Ranks(numbers["rank"], numbers["count"], numbers["local"]) if numbers["count"] > 1 else None
