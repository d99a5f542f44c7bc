"""The training loop on Lightning: batches in, checkpoints and a history out.

This file is imported only when something is trained: it takes as long to import as Lightning.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    # A user of Raglane can do nothing about what Lightning's own imports warn of.
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.exceptions import SIGTERMException

from raglane.data.chunks import Chunks
from raglane.data.dataset import SequenceDataset
from raglane.data.order import Batches, Limit
from raglane.data.stored_dataset import Dataset
from raglane.errors import LostRankError
from raglane.ragged import Ragged
from raglane.training.batches import Batch, ChunkedBatches, Remaining, loader, order_of_data
from raglane.training.bookkeeper import Bookkeeper, Interrupted, Watcher
from raglane.training.divergence import diverged
from raglane.training.model import SequenceModel
from raglane.training.optimizers import make_optimizer
from raglane.training.ranks.group import ALONE, Ranks
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.stops import Stops
from raglane.training.tasks import Task
from raglane.training.tasks.base import values_of
from raglane.training.unknown import RareTokens

__all__ = ["run_epochs"]


def _each_state(act: Callable[[Tensor], Tensor], states: Any) -> Any:
    """What becomes of each state of a layer, which has one or several; None of none."""
    if states is None:
        return None
    return tuple(map(act, states)) if isinstance(states, tuple) else act(states)


class _Module(pl.LightningModule):
    """What Lightning drives: it sees losses, the bookkeeper does the rest."""

    def __init__(self, book: Bookkeeper) -> None:
        super().__init__()
        self.model = book.model
        self.task = book.task
        self.settings = book.settings
        self.model.penalties = (book.settings.activation_penalty, book.settings.temporal_penalty)
        self.ranks = book.ranks
        self.book = book
        self.optimizer_state: dict[str, Any] | None = None
        # How many were counted since the last step of the optimizer, where it waits for several batches.
        self.counted: Tensor | float = 0.0
        self.rare: RareTokens | None = None
        self.train_loader: Callable[[], Any] = list
        self.validation_loader: Callable[[], Any] = list

    def train_dataloader(self) -> Any:
        return self.train_loader()

    def val_dataloader(self) -> Any:
        return self.validation_loader()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        if self.rare is not None:
            batch = self.rare.hidden_in(batch)
        running = self.book.running
        if batch.begins is None:
            output = self.model(batch.inputs)
        else:
            output, running.carried = self._go_on(batch.inputs, running.carried, batch.begins)
        score = self.task.score(output, batch, training=True)
        whole, elements = self.ranks.whole(score, batch.inputs.values.shape[0])
        running.whole = whole, elements
        loss, self.model.penalty = score.loss if self.model.penalty is None else score.loss + self.model.penalty, None
        # The ranks' gradients are averaged, and Lightning divides by the batches of a step: both are undone, so that
        # each element counts the same on whatever rank, in whatever batch it is.
        if self.settings.accumulate > 1:
            self.counted = self.counted + whole.count
            return loss * (self.ranks.count * self.settings.accumulate)
        count = whole.count.clamp(min=1).to(score.loss.dtype)
        return loss * self.ranks.count / count

    def _go_on(self, inputs: Ragged, carried: Any, begins: Tensor) -> tuple[Ragged, Any]:
        """Answers to a chunk, and the states of all streams: each rank has them all, so that any can save the run."""
        order, ranks = self.book.order, self.ranks
        if ranks.count == 1 or not isinstance(order, Chunks):
            return self.model.go_on(inputs, carried, begins)
        streams, count = order.streams, order.batch_size
        own = _each_state(lambda state: state[:, streams.start :: streams.step].contiguous(), carried)
        output, state = self.model.go_on(inputs, own, begins)
        return output, _each_state(lambda mine: ranks.joined(mine, streams, count), state)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sums become means, where several batches make a step; the gradient is clipped after this."""
        if self.settings.accumulate > 1:
            gradients = [
                weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
            ]
            torch._foreach_div_(gradients, max(float(self.counted), 1.0))
            self.counted = 0.0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        output = self.model(batch.inputs)
        self.book.running.validation.add(self.task.score(output, batch), batch.inputs.values.shape[0])
        if self.task.kept:
            self.book.running.answers.append((values_of(output).cpu(), batch))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:  # noqa: ARG002
        return batch.to(device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self.model, self.settings)
        if self.optimizer_state is not None:
            optimizer.load_state_dict(self.optimizer_state)
        return optimizer


class _OnRanks(DDPStrategy):
    """Gradients are summed over ranks that have met already, and while the backward pass still runs.

    Lightning takes the rank for the only one: it would wait for the others at every batch, and again at the end.

    Args:
        device: of this rank.
    """

    world_size = 1
    global_rank = local_rank = node_rank = 0

    def __init__(self, device: torch.device) -> None:
        # Where weights may go unused, the reducer keeps its buckets: sums have one order, and a run that goes on has
        # the bits of one that was never stopped. What a task keeps in buffers is the same everywhere.
        super().__init__(find_unused_parameters=True, broadcast_buffers=False)
        self._device = device

    @property
    def root_device(self) -> torch.device:
        return self._device

    def _configure_launcher(self) -> None:
        self._launcher = None

    def setup_distributed(self) -> None:
        """They have met."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """They meet at every batch."""


class _Told(pl.Callback):
    """Tells the bookkeeper how far Lightning is."""

    def __init__(self, book: Bookkeeper) -> None:
        self.book = book

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Again, since Lightning has come between.
        self.book.stops.listen()
        self.book.optimizer = trainer.optimizers[0]
        self.book.started(pl_module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        self.book.epoch_started()

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        self.book.batch_started()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        self.book.batch_done()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        trainer.should_stop = self.book.epoch_done()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """No tips, no banner of devices, no advice on workers."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning")
            warnings.filterwarnings("ignore", message=r"(?s).*(does not have many workers|GPU available)")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
    optimizer_state: dict[str, Any] | None = None,
    carried: tuple[Tensor, ...] = (),
    watcher: Watcher | None = None,
    ranks: Ranks = ALONE,
    stops: Stops | None = None,
) -> dict[str, bytes]:
    """Train from ``state`` to the last epoch, saving after each.

    Args:
        model: its weights are trained in place.
        task: loss and metric.
        settings: epochs, batches, optimizer.
        training: the training part, at least one sequence.
        order: its batches, at the place where the run stands.
        validation: the part that decides which epoch is best; None lets the training loss decide.
        state: where the run stands; brought forward in place.
        folder: of the run; best, last and curves.csv are written in it. None writes nothing.
        device: where to train.
        model_files: gives the files of the model as it is now.
        optimizer_state: of the run that goes on.
        carried: the layer's states after the last chunk of the run that goes on.
        watcher: told of batches and epochs.
        ranks: that train together; each is given the same, but its own order and ``ranks``.
        stops: who is told to stop; None listens to signals only.

    Returns:
        The files of the best model where there is no folder; {} where there is one.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; the run is saved.
        DivergedError: the loss or a weight is no longer finite, or the loss has grown out of all proportion.
        DataError: no batch has anything to learn from.
        LostRankError: another rank has gone; one of those that are left has saved what was done.
        OSError: a checkpoint cannot be written.
    """
    first = state.epoch
    stops = stops or Stops()
    more: dict[str, Any] = {"carried": carried, "watcher": watcher, "stops": stops, "ranks": ranks}
    book = Bookkeeper(model, task, settings, state, order, folder, model_files, **more)
    module = _Module(book)
    module.optimizer_state = optimizer_state
    module.rare = RareTokens.of(training, model.config, settings)

    def train_loader() -> Any:
        order.set_epoch(first + trainer.current_epoch)
        book.batches = len(order)
        if isinstance(order, Chunks):
            return ChunkedBatches(order)
        return loader(training, Remaining(order), settings.workers)

    module.train_loader = train_loader
    in_order: list[list[int]] = []
    if validation is not None:
        limit = Limit(sequences=settings.batch_size) if isinstance(order, Chunks) else order.limit
        # Of each batch its share; a rank that has none of any has no batches at all.
        shares = [rows[ranks.rank :: ranks.count] for rows in order_of_data(validation.lengths.cpu(), limit)]
        in_order = [rows for rows in shares if rows]
        module.validation_loader = lambda: loader(validation, in_order)
    with _quiet_lightning(), closing(stops):
        stops.listen()
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1 if device.index is None else [device.index],
            strategy=_OnRanks(device) if ranks.count > 1 else "auto",
            accumulate_grad_batches=settings.accumulate,
            max_epochs=settings.epochs - first,
            gradient_clip_val=settings.clip or None,
            callbacks=[_Told(book)],
            reload_dataloaders_every_n_epochs=1,
            limit_val_batches=1.0 if in_order else 0,
            num_sanity_val_steps=0,
            inference_mode=False,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(module)
        except SIGTERMException as stop:
            # It came before the first batch, and nothing was done that could be lost.
            raise Interrupted(signal.SIGTERM) from stop
        except RuntimeError as error:
            if ranks.is_lost(error):
                if ranks.is_keeper():
                    book.save_stepped()
                raise LostRankError from error
            # PyTorch's word for a step that numbers of 32 bits cannot hold, as some of a learning rate of 1e38 are.
            if "without overflow" not in str(error):
                raise
            raise diverged("a step that numbers of 32 bits cannot hold", state, settings) from error
        except SystemExit as stop:
            # What Lightning makes of a second Ctrl-C.
            raise KeyboardInterrupt from stop
    return book.best
