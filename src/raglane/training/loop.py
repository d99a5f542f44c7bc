"""The training loop: batches in, checkpoints and a history out."""

from __future__ import annotations

import inspect
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from raglane.data.chunks import Chunks
from raglane.data.dataset import SequenceDataset
from raglane.data.order import Batches, Limit
from raglane.data.stored_dataset import Dataset
from raglane.errors import LostRankError
from raglane.ragged import Ragged
from raglane.training.batches import Batch, ChunkedBatches, RareTokens, Remaining, loader, order_of_data
from raglane.training.bookkeeper import Bookkeeper, Watcher
from raglane.training.model import SequenceModel
from raglane.training.ranks.group import ALONE, Ranks, Stops, lost_worker
from raglane.training.settings import Settings
from raglane.training.state import TrainingState, diverged
from raglane.training.tasks import Task
from raglane.training.tasks.base import values_of


def _each_state(act: Callable[[Tensor], Tensor], states: Any) -> Any:
    """What becomes of each state of a layer, which has one or several; None of none."""
    if states is None:
        return None
    return tuple(map(act, states)) if isinstance(states, tuple) else act(states)


class _Counted(Protocol):
    """Batches, and how many they are."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class _Learner(nn.Module):
    """A model that answers a batch with what is to become small: what ranks share is the gradient of that."""

    def __init__(self, book: Bookkeeper, rare: RareTokens | None) -> None:
        super().__init__()
        self.model, self.book, self.rare = book.model, book, rare
        self.model.penalties = (book.settings.activation_penalty, book.settings.temporal_penalty)
        # How many were counted since the last step of the optimizer, where it waits for several batches.
        self.counted: Tensor | float = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, 0-d: its mean, or its sum where several batches make a step."""
        running, ranks = self.book.running, self.book.ranks
        if self.rare is not None:
            batch = self.rare.hidden_in(batch)
        if batch.begins is None:
            output = self.model(batch.inputs)
        else:
            output, running.carried = self._go_on(batch.inputs, running.carried, batch.begins)
        score = self.book.task.score(output, batch, training=True)
        whole, elements = ranks.whole(score, batch.inputs.values.shape[0])
        running.whole = whole, elements
        loss, self.model.penalty = score.loss if self.model.penalty is None else score.loss + self.model.penalty, None
        # The ranks' gradients are averaged: this is undone, so that each element counts the same on whatever rank, in
        # whatever batch it is.
        if self.book.settings.accumulate > 1:
            self.counted = self.counted + whole.count
            return loss * ranks.count
        count = whole.count.clamp(min=1).to(score.loss.dtype)
        return loss * ranks.count / count

    def _go_on(self, inputs: Ragged, carried: Any, begins: Tensor) -> tuple[Ragged, Any]:
        """Answers to a chunk, and the states of all streams: each rank has them all, so that any can save the run."""
        order, ranks = self.book.order, self.book.ranks
        if ranks.count == 1 or not isinstance(order, Chunks):
            return self.model.go_on(inputs, carried, begins)
        streams, count = order.streams, order.batch_size
        own = _each_state(lambda state: state[:, streams.start :: streams.step].contiguous(), carried)
        output, state = self.model.go_on(inputs, own, begins)
        return output, _each_state(lambda mine: ranks.joined(mine, streams, count), state)

    def average(self) -> None:
        """Make a mean of the gradient, where several batches make a step."""
        if self.book.settings.accumulate > 1:
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            torch._foreach_div_(gradients, max(float(self.counted), 1.0))
            self.counted = 0.0


class _Loop:
    """Epochs of batches, on one device."""

    def __init__(
        self, book: Bookkeeper, rare: RareTokens | None, device: torch.device, optimizer_state: dict[str, Any] | None
    ) -> None:
        self._book, self._settings, self._device = book, book.settings, device
        book.model.to(device).train()
        self._learner = _Learner(book, rare)
        self._loss: nn.Module = self._learner
        # Within it a gradient stays on its rank.
        self._apart: Callable[[], AbstractContextManager[Any]] = nullcontext
        if book.ranks.count > 1:
            self._loss = shared = _shared(self._learner, device)
            self._apart = shared.no_sync
        self._optimizer = book.optimizer = make_optimizer(book.model, book.settings)
        if optimizer_state is not None:
            self._optimizer.load_state_dict(optimizer_state)

    def train(self, batches: _Counted) -> None:
        """Learn from batches."""
        book, every, count = self._book, self._settings.accumulate, len(batches)
        for done, batch in enumerate(batches, 1):
            book.batch_started()
            is_step = done % every == 0 or done == count
            with nullcontext() if is_step else self._apart():
                self._loss(batch.to(self._device)).backward()
            if is_step:
                self._step()
            book.batch_done()

    def _step(self) -> None:
        # PyTorch tells at any moment that a worker has gone: weights that are half stepped are not saved.
        self._book.is_stepping = True
        self._learner.average()
        if self._settings.clip:
            nn.utils.clip_grad_norm_(self._book.model.parameters(), self._settings.clip)
        self._optimizer.step()
        self._book.model.zero_grad()

    def validate(self, batches: Iterable[Batch]) -> None:
        """Measure the model."""
        book, running = self._book, self._book.running
        book.model.eval()
        with torch.no_grad():
            for batch in batches:
                moved = batch.to(self._device)
                output = book.model(moved.inputs)
                running.validation.add(book.task.score(output, moved), moved.inputs.values.shape[0])
                if book.task.kept:
                    running.answers.append((values_of(output).cpu(), moved))
        book.model.train()


def _shared(learner: _Learner, device: torch.device) -> DistributedDataParallel:
    """A learner whose gradients are averaged over the ranks, which have met, while the backward pass still runs."""
    # Its new name is not in every version of PyTorch that will do.
    warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated", category=FutureWarning)
    # Where weights may go unused, the reducer keeps its buckets: sums have one order, and a run that goes on has the
    # bits of one that was never stopped. What a task keeps in buffers is the same everywhere.
    places = None if device.index is None else [device.index]
    return DistributedDataParallel(learner, places, find_unused_parameters=True, broadcast_buffers=False)


def run_epochs(
    model: SequenceModel,
    task: Task,
    settings: Settings,
    training: SequenceDataset | Dataset,
    order: Batches | Chunks,
    validation: SequenceDataset | Dataset | None,
    *,
    state: TrainingState,
    folder: Path | None,
    device: torch.device,
    model_files: Callable[[], dict[str, bytes]],
    rare: RareTokens | None = None,
    optimizer_state: dict[str, Any] | None = None,
    carried: tuple[Tensor, ...] = (),
    watcher: Watcher | None = None,
    ranks: Ranks = ALONE,
    stops: Stops | None = None,
) -> dict[str, bytes]:
    """Train from ``state`` to the last epoch, saving after each."""
    stops = stops or Stops()
    more: dict[str, Any] = {"carried": carried, "watcher": watcher, "stops": stops, "ranks": ranks}
    book = Bookkeeper(model, task, settings, state, order, folder, model_files, **more)
    in_order = [] if validation is None else _in_order(validation, settings, order, ranks)
    # What a loop asks not to be warned of, others may want to hear.
    with closing(stops), warnings.catch_warnings():
        stops.listen()
        try:
            loop = _Loop(book, rare, device, optimizer_state)
            book.started(device)
            for epoch in range(state.epoch, settings.epochs):
                order.set_epoch(epoch)
                book.batches = len(order)
                book.epoch_started()
                loop.train(_batches(training, order, settings))
                if validation is not None and in_order:
                    loop.validate(loader(validation, in_order))
                if book.epoch_done():
                    break
        except (RuntimeError, ConnectionError, EOFError) as error:
            if settings.workers and _is_of_worker(error):
                _hear_no_more_of_workers()
                if ranks.count == 1:
                    book.save_stepped()
                raise lost_worker(folder) from error
            if ranks.is_lost(error):
                if ranks.is_keeper():
                    book.save_stepped()
                raise LostRankError from error
            # PyTorch's word for a step that numbers of 32 bits cannot hold, as some of a learning rate of 1e38 are.
            if "without overflow" not in str(error):
                raise
            raise diverged("a step that numbers of 32 bits cannot hold", state, settings) from error
    return book.best


def _is_of_worker(error: Exception) -> bool:
    """Whether an error says that a worker has gone: PyTorch's word for it, or that of the pipe to it."""
    return "DataLoader worker" in str(error) or not isinstance(error, RuntimeError)


def _hear_no_more_of_workers() -> None:
    """Without PyTorch's handler, which raises for a worker that has gone again and again, within a checkpoint, too.

    It only tells earlier what PyTorch sees when it waits for a batch, and so is not set again.
    """
    for _ in range(2):
        # It may be about to raise; and only the main thread has handlers.
        with suppress(RuntimeError, ValueError, AttributeError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _batches(training: SequenceDataset | Dataset, order: Batches | Chunks, settings: Settings) -> _Counted:
    """What is left of an epoch."""
    if isinstance(order, Chunks):
        return ChunkedBatches(order)
    return loader(training, Remaining(order), settings.workers)


def _in_order(
    validation: SequenceDataset | Dataset, settings: Settings, order: Batches | Chunks, ranks: Ranks
) -> list[list[int]]:
    """The batches of the validation part: of each this rank's share. A rank that has none of any has no batches."""
    limit = Limit(sequences=settings.batch_size) if isinstance(order, Chunks) else order.limit
    shares = [rows[ranks.rank :: ranks.count] for rows in order_of_data(validation.lengths.cpu(), limit)]
    return [rows for rows in shares if rows]


_KINDS = {"adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSprop, "sgd": optim.SGD}
# Methods that PyTorch keeps from torch.compile, which nobody calls here: to do so it imports all of torch._dynamo.
_KEPT = ("add_param_group", "load_state_dict", "state_dict", "step")


def make_optimizer(model: SequenceModel, settings: Settings) -> optim.Optimizer:
    """The optimizer that the settings name, for all weights of a model."""
    kind = _KINDS[settings.optimizer]
    plain = type(kind.__name__, (kind,), {name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in _KEPT})
    more = {"momentum": 0.9} if settings.optimizer == "sgd" else {}
    optimizer: optim.Optimizer = plain(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **more)
    return optimizer
