"""What is kept of a run while it trains: its history, its best model and its last, and when it is to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from raglane._utils.files import write_file, write_folder
from raglane.data.chunks import Chunks
from raglane.data.order import Batches
from raglane.data.order.permutation import key_of
from raglane.errors import DataError, message
from raglane.training.batches import Batch
from raglane.training.folder import BEST, CURVES, LAST, drop_replaced
from raglane.training.model import SequenceModel
from raglane.training.ranks.group import ALONE, Ranks, Stop, Stops
from raglane.training.settings import Settings
from raglane.training.state import Totals, TrainingState, check_losses, curves_csv, diverged, rate_of, state_files
from raglane.training.tasks import Score, Task

# Seconds after which a checkpoint is written within an epoch.
SAVED_EVERY = 600.0


class Interrupted(Exception):  # noqa: N818
    """Ctrl-C or SIGTERM came, and the run is saved where it stood."""

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


@dataclass
class Running:
    """What changes from batch to batch while an epoch runs, beside the weights."""

    totals: Totals = field(default_factory=Totals)
    validation: Totals = field(default_factory=Totals)
    whole: tuple[Score, Tensor | int] | None = None
    carried: Any = None
    answers: list[tuple[Tensor, Batch]] = field(default_factory=list)


class Bookkeeper:
    """Keeps the history, saves best and last, stops early, and stops where a signal asked."""

    def __init__(
        self,
        model: SequenceModel,
        task: Task,
        settings: Settings,
        state: TrainingState,
        order: Batches | Chunks,
        folder: Path | None,
        model_files: Callable[[], dict[str, bytes]],
        *,
        carried: tuple[Tensor, ...],
        watcher: Watcher | None,
        stops: Stops,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.task, self.settings = model, task, settings
        self.state, self.order, self.ranks, self.stops = state, order, ranks, stops
        self.running = Running(state.totals)
        self.optimizer: torch.optim.Optimizer | None = None
        self.batches = len(order)
        self.best: dict[str, bytes] = {}
        # Whether the weights may be between two steps.
        self.is_stepping = False
        self._folder, self._model_files, self._carried = folder, model_files, carried
        self._watcher = watcher
        self._stop = Stop(ranks, stops)
        self._since = 0.0
        self._saved = time.monotonic()
        # Where the weights are those of now: before the batches of a step that is not done.
        self._stepped = replace(state, totals=replace(state.totals))
        self._stepped_carried: Any = None

    def started(self, device: torch.device) -> None:
        """The loop begins."""
        states = tuple(state.to(device) for state in self._carried)
        self.running.carried = (states if len(states) > 1 else states[0]) if states else None
        self._stepped_carried = self.running.carried
        if self._watcher is not None:
            self._watcher.started(self.state, self.settings.epochs, self.batches)

    def epoch_started(self) -> None:
        """An epoch begins, or goes on."""
        self._since = time.perf_counter()

    def batch_started(self) -> None:
        """A batch is about to be run."""
        self._set_rate(rate_of(self.settings, self.state, self.batches))
        # What is dropped or hidden in a batch follows from where it is, so that a run that goes on has the same.
        seed = key_of(self.settings.seed, self.state.epoch, self.state.batch, self.ranks.rank)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        self._stop.ask()

    def _set_rate(self, rate: float) -> None:
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def batch_done(self) -> None:
        """A batch has been run."""
        now = time.perf_counter()
        state, totals = self.state, self.running.totals
        if self.running.whole is not None:
            totals.add(*self.running.whole)
        totals.seconds += now - self._since
        self._since = now
        state.batch += 1
        if self._watcher is not None:
            self._watcher.batch_done(state.epoch + 1, state.batch, totals)
        if state.start_loss is None and float(totals.count):
            state.start_loss = totals.mean_loss
        is_step = state.batch % self.settings.accumulate == 0
        if is_step:
            self._stepped, self._stepped_carried = replace(state, totals=replace(totals)), self.running.carried
            self.is_stepping = False
        asked = self._stop.answer()
        # The last batch of an epoch is saved by the end of the epoch, which comes next.
        if is_step and state.batch < self.batches:
            if asked is not None or time.monotonic() - self._saved > SAVED_EVERY:
                self._save_within()
            if asked is not None:
                raise Interrupted(asked)

    def epoch_done(self) -> bool:
        """An epoch is complete."""
        if not float(self.running.totals.count):
            rule = "training needs at least one to learn from"
            raise DataError(message("data", "no element with a target", rule, "give longer sequences"))
        self._stop.ask()
        self._join_validation()
        row = self._row()
        watched = row.get("validation_loss", row["train_loss"])
        self._refuse_divergence(row)
        self._tune()
        state = self.state
        state.epoch, state.batch = state.epoch + 1, 0
        self.running = Running()
        state.totals = self.running.totals
        state.history.append(row)
        is_best = state.best_epoch == 0 or watched < state.best_loss
        state.waited = 0 if is_best else state.waited + 1
        if is_best:
            state.best_epoch, state.best_loss = state.epoch, watched
        self._stepped = replace(state, totals=Totals())
        self.is_stepping = False
        if self.ranks.is_first:
            self._save_epoch(is_best)
        if self._watcher is not None:
            self._watcher.epoch_done(row, is_best)
        patience = self.settings.patience
        asked = self._stop.answer()
        if patience is not None and state.waited >= patience:
            return True
        if asked is not None and state.epoch < self.settings.epochs:
            raise Interrupted(asked)
        return False

    def _join_validation(self) -> None:
        """Put together what the ranks found of their parts of the validation."""
        totals = self.running.validation
        if self.ranks.count > 1:
            loss, metric, baseline, count = self.ranks.sums(totals.loss, totals.metric, totals.baseline, totals.count)
            self.running.validation = Totals(loss, metric, baseline, count)

    def _tune(self) -> None:
        """Let the task set what it sets by the answers to the whole validation part."""
        if not self.task.kept:
            return
        # The batches went round the ranks.
        parts = self.ranks.gathered(self.running.answers)
        found = [part[place] for place in range(len(parts[0])) for part in parts if place < len(part)]
        if found:
            answers, batches = map(list, zip(*found, strict=True))
            self.task.tune(self.model, answers, batches)

    def _row(self) -> dict[str, float]:
        totals, validation = self.running.totals, self.running.validation
        metric = self.task.metric
        row = {
            "epoch": self.state.epoch + 1,
            "train_loss": totals.mean_loss,
            f"train_{metric}": totals.mean_metric,
        }
        if float(validation.count):
            row |= {"validation_loss": validation.mean_loss, f"validation_{metric}": validation.mean_metric}
        if self.task.baseline is not None:
            watched = validation if float(validation.count) else totals
            row[f"{self.task.baseline}_{metric}"] = watched.mean_baseline
        # At the least a clock tick, so that a tiny epoch divides by something.
        return row | {"seconds": max(totals.seconds, 1e-9), "elements_per_second": totals.speed}

    def _refuse_divergence(self, row: dict[str, float]) -> None:
        """Raise where losses or weights say that the run has run away, so that no such model is ever saved."""
        check_losses(row, self.state, self.settings)
        # The last step may have been the first wrong one: without a validation part no loss tells.
        if not torch.stack([weight.isfinite().all() for weight in self.model.parameters()]).all():
            raise diverged("weights that are not finite", self.state, self.settings)

    def save_stepped(self) -> None:
        """Write the checkpoint of the last step that all ranks have done, where a rank or a worker has gone since."""
        if 0 < self._stepped.batch < self.batches and not self.is_stepping:
            self.state, self.running.totals = self._stepped, self._stepped.totals
            self.running.carried = self._stepped_carried
            self._write_within()

    def _save_within(self) -> None:
        """Write the checkpoint of an epoch that is not complete, on the first rank."""
        if self.ranks.is_first:
            self._write_within()

    def _write_within(self) -> None:
        if float(self.running.totals.count):
            self._refuse_divergence({"train_loss": self.running.totals.mean_loss})
        self._save_last()

    def _save_epoch(self, is_best: bool) -> None:
        """Write the checkpoint of a complete epoch, and its model where it is the best."""
        # The last before the best, which can be made of it should the process die between the two.
        self._save_last()
        if self._folder is None:
            self.best = self._model_files() if is_best else self.best
            return
        if is_best:
            write_folder(self._folder / BEST, self._model_files())
        write_file(self._folder / CURVES, curves_csv(self.state.history))

    def _save_last(self) -> None:
        """Write the checkpoint that a run goes on from."""
        if self._folder is None or self.optimizer is None:
            return
        self.state.totals = self.running.totals
        # The rate of a batch follows from where the run stands: the file holds that of the settings.
        self._set_rate(self.settings.lr)
        # At the end of an epoch the next begins by itself.
        self.state.order = self.order.state_dict(self.state.batch) if self.state.batch else {}
        files = self._model_files() | state_files(self.state, self.optimizer, self.running.carried)
        write_folder(self._folder / LAST, files)
        drop_replaced(self._folder)
        self._saved = time.monotonic()
