"""The training loop on Lightning: batches in, checkpoints and a history out.

This file is imported only when something is trained: it takes as long to import as Lightning.
"""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

with warnings.catch_warnings():
    # A user of Raglane can do nothing about what Lightning's own imports warn of.
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.exceptions import SIGTERMException

from raglane.data.chunks import Chunks
from raglane.data.dataset import SequenceDataset
from raglane.data.order import Batches, Limit
from raglane.data.stored_dataset import Dataset
from raglane.errors import DataError, message
from raglane.files import write_file, write_folder
from raglane.training.batches import Batch, ChunkedBatches, Remaining, loader, order_of_data
from raglane.training.divergence import check_losses, diverged
from raglane.training.folder import BEST, CURVES, LAST, drop_replaced
from raglane.training.history import curves_csv
from raglane.training.model import SequenceModel
from raglane.training.schedule import rate_of
from raglane.training.settings import Settings
from raglane.training.state import Totals, TrainingState, state_files
from raglane.training.stops import Stops
from raglane.training.tasks import Task
from raglane.training.tasks.base import values_of
from raglane.training.unknown import RareTokens

__all__ = ["Interrupted", "Watcher", "run_epochs"]


class Interrupted(Exception):  # noqa: N818
    """Ctrl-C or SIGTERM came, and the run is saved where it stood.

    Args:
        signal: the number of what came.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Watcher(Protocol):
    """Who wants to see a run while it runs: a progress bar, a log."""

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        """The loop starts, or goes on, at ``state``; an epoch has ``batches`` batches."""

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch of an epoch (both from 1) is done; reading a mean from ``totals`` waits for the device."""

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """An epoch is complete, with this row of the history."""


class _Module(pl.LightningModule):
    """What Lightning drives: it sees losses, the bookkeeper does the rest."""

    def __init__(self, model: SequenceModel, task: Task, settings: Settings) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.settings = settings
        self.optimizer_state: dict[str, Any] | None = None
        self.totals = Totals()
        self.validation_totals = Totals()
        self.rare: RareTokens | None = None
        # The layer's states after the last chunk, where sequences are cut into such.
        self.carried: Any = None
        # Of the validation part, where the task sets something by them.
        self.answers: list[tuple[Tensor, Batch]] = []
        self.train_loader: Callable[[], Any] = list
        self.validation_loader: Callable[[], Any] = list

    def train_dataloader(self) -> Any:
        return self.train_loader()

    def val_dataloader(self) -> Any:
        return self.validation_loader()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        if self.rare is not None:
            batch = self.rare.hidden_in(batch)
        if batch.begins is None:
            output = self.model(batch.inputs)
        else:
            output, self.carried = self.model.go_on(batch.inputs, self.carried, batch.begins)
        score = self.task.score(output, batch, training=True)
        self.totals.add(score, batch.inputs.values.shape[0])
        return score.mean_loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        output = self.model(batch.inputs)
        self.validation_totals.add(self.task.score(output, batch), batch.inputs.values.shape[0])
        if self.task.kept:
            self.answers.append((values_of(output).cpu(), batch))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:  # noqa: ARG002
        return batch.to(device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self.model, self.settings)
        if self.optimizer_state is not None:
            optimizer.load_state_dict(self.optimizer_state)
        return optimizer


def make_optimizer(model: SequenceModel, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that the settings name, for all weights of a model.

    Args:
        model: on the device it trains on.
        settings: name, learning rate and weight decay.
    """
    parameters, decay = model.parameters(), settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=0.9, weight_decay=decay)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }
    optimizer: torch.optim.Optimizer = kinds[settings.optimizer](parameters, lr=settings.lr, weight_decay=decay)
    return optimizer


class _Bookkeeper(pl.Callback):
    """Keeps the history, saves best and last, stops early, and stops where a signal asked."""

    def __init__(
        self,
        module: _Module,
        state: TrainingState,
        folder: Path | None,
        model_files: Callable[[], dict[str, bytes]],
        random: dict[str, Tensor],
        watcher: Watcher | None,
        order: Batches | Chunks,
        stops: Stops,
    ) -> None:
        self.module = module
        self.state = state
        self.folder = folder
        self.model_files = model_files
        self.random = random
        self.watcher = watcher
        self.order = order
        # Of the epoch that runs.
        self.batches = len(order)
        self.stops = stops
        self.since = 0.0
        # Where there is no folder to write it to.
        self.best: dict[str, bytes] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        # Again, since Lightning has come between.
        self.stops.listen()
        # Here and not before: what came until now may have drawn random numbers.
        if "cpu" in self.random:
            torch.set_rng_state(self.random["cpu"])
        if "cuda" in self.random and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.random["cuda"])
        self.module.totals = self.state.totals
        device = self.module.device
        states = tuple(self.random[name].to(device) for name in sorted(self.random) if name.startswith("carried."))
        self.module.carried = (states if len(states) > 1 else states[0]) if states else None
        if self.watcher is not None:
            self.watcher.started(self.state, self.module.settings.epochs, self.batches)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        self.since = time.perf_counter()

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        self._set_rate(trainer, rate_of(self.module.settings, self.state, self.batches))

    def _set_rate(self, trainer: pl.Trainer, rate: float) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        now = time.perf_counter()
        self.module.totals.seconds += now - self.since
        self.since = now
        self.state.batch += 1
        if self.watcher is not None:
            self.watcher.batch_done(self.state.epoch + 1, self.state.batch, self.module.totals)
        if self.state.start_loss is None and float(self.module.totals.count):
            self.state.start_loss = self.module.totals.mean_loss
        # The last batch of an epoch is saved by the end of the epoch, which comes next.
        if self.stops.asked is not None and self.state.batch < self.batches:
            if float(self.module.totals.count):
                self._refuse_divergence({"train_loss": self.module.totals.mean_loss})
            self.save_last(trainer)
            raise Interrupted(self.stops.asked)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        if not float(self.module.totals.count):
            rule = "training needs at least one to learn from"
            raise DataError(message("data", "no element with a target", rule, "give longer sequences"))
        row = self._row()
        watched = row.get("validation_loss", row["train_loss"])
        self._refuse_divergence(row)
        state = self.state
        state.epoch, state.batch = state.epoch + 1, 0
        self.module.carried = None
        state.totals = self.module.totals = Totals()
        self.module.validation_totals = Totals()
        if self.module.answers:
            answers, batches = map(list, zip(*self.module.answers, strict=True))
            self.module.task.tune(self.module.model, answers, batches)
            self.module.answers = []
        state.history.append(row)
        is_best = state.best_epoch == 0 or watched < state.best_loss
        state.waited = 0 if is_best else state.waited + 1
        if is_best:
            state.best_epoch, state.best_loss = state.epoch, watched
        # The last before the best, which can be made of it should the process die between the two.
        self.save_last(trainer)
        if is_best:
            self.save_best()
        if self.folder is not None:
            write_file(self.folder / CURVES, curves_csv(state.history))
        if self.watcher is not None:
            self.watcher.epoch_done(row, is_best)
        patience = self.module.settings.patience
        if patience is not None and state.waited >= patience:
            trainer.should_stop = True
        elif self.stops.asked is not None and state.epoch < self.module.settings.epochs:
            raise Interrupted(self.stops.asked)

    def _row(self) -> dict[str, float]:
        totals, validation = self.module.totals, self.module.validation_totals
        metric = self.module.task.metric
        row = {
            "epoch": self.state.epoch + 1,
            "train_loss": totals.mean_loss,
            f"train_{metric}": totals.mean_metric,
        }
        if float(validation.count):
            row |= {"validation_loss": validation.mean_loss, f"validation_{metric}": validation.mean_metric}
        if self.module.task.baseline is not None:
            watched = validation if float(validation.count) else totals
            row[f"{self.module.task.baseline}_{metric}"] = watched.mean_baseline
        # At the least a clock tick, so that a tiny epoch divides by something.
        seconds = max(totals.seconds, 1e-9)
        return row | {"seconds": seconds, "elements_per_second": totals.elements / seconds}

    def _refuse_divergence(self, row: dict[str, float]) -> None:
        """Raise where losses or weights say that the run has run away, so that no such model is ever saved."""
        check_losses(row, self.state, self.module.settings)
        # The last step may have been the first wrong one: without a validation part no loss tells.
        if not torch.stack([weight.isfinite().all() for weight in self.module.model.parameters()]).all():
            raise diverged("weights that are not finite", self.state, self.module.settings)

    def save_best(self) -> None:
        """Write the model as it is, or keep it where there is no folder."""
        if self.folder is None:
            self.best = self.model_files()
        else:
            write_folder(self.folder / BEST, self.model_files())

    def save_last(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint that a run goes on from."""
        if self.folder is None:
            return
        self.state.totals = self.module.totals
        # The rate of a batch follows from where the run stands: the file holds that of the settings.
        self._set_rate(trainer, self.module.settings.lr)
        # At the end of an epoch the next begins by itself.
        self.state.order = self.order.state_dict(self.state.batch) if self.state.batch else {}
        files = self.model_files() | state_files(self.state, trainer.optimizers[0], self.module.carried)
        write_folder(self.folder / LAST, files)
        drop_replaced(self.folder)


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
    random: dict[str, Tensor] | None = None,
    watcher: Watcher | None = None,
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
        random: states of the random generators of the run that goes on.
        watcher: told of batches and epochs.

    Returns:
        The files of the best model where there is no folder; {} where there is one.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; the run is saved.
        DivergedError: the loss or a weight is no longer finite, or the loss has grown out of all proportion.
        DataError: no batch has anything to learn from.
        OSError: a checkpoint cannot be written.
    """
    first = state.epoch
    module = _Module(model, task, settings)
    module.optimizer_state = optimizer_state
    module.rare = RareTokens.of(training, model.config, settings)
    stops = Stops()
    bookkeeper = _Bookkeeper(module, state, folder, model_files, random or {}, watcher, order, stops)

    def train_loader() -> Any:
        order.set_epoch(first + trainer.current_epoch)
        bookkeeper.batches = len(order)
        if isinstance(order, Chunks):
            return ChunkedBatches(order)
        return loader(training, Remaining(order), settings.workers)

    module.train_loader = train_loader
    if validation is not None:
        limit = Limit(sequences=settings.batch_size) if isinstance(order, Chunks) else order.limit
        in_order = order_of_data(validation.lengths.cpu(), limit)
        module.validation_loader = lambda: loader(validation, in_order)
    with _quiet_lightning(), closing(stops):
        stops.listen()
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=settings.epochs - first,
            gradient_clip_val=settings.clip or None,
            callbacks=[bookkeeper],
            reload_dataloaders_every_n_epochs=1,
            limit_val_batches=0 if validation is None else 1.0,
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
            # PyTorch's word for a step that numbers of 32 bits cannot hold, as some of a learning rate of 1e38 are.
            if "without overflow" not in str(error):
                raise
            raise diverged("a step that numbers of 32 bits cannot hold", state, settings) from error
        except SystemExit as stop:
            # What Lightning makes of a second Ctrl-C.
            raise KeyboardInterrupt from stop
    return bookkeeper.best
