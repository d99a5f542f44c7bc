"""The training loop of a rank, with checkpoints, history and best model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from raglane._utils.files import write_file, write_folder
from raglane._utils.json import reading
from raglane._utils.messages import argument
from raglane.data.dataset import Dataset
from raglane.data.order.order import key_of
from raglane.data.order.tbptt import TBPTTSampler
from raglane.errors import ArgumentError, DataError, DivergedError, LostRankError
from raglane.ragged import Ragged
from raglane.training.batches import (
    Batch,
    ChunkedBatches,
    RareTokens,
    Remaining,
    is_of_worker,
    loader,
    remove_worker_handler,
    training_batches,
    validation_shares,
)
from raglane.training.checkpoint import WEIGHTS, load_weights, model_files, read_tensors
from raglane.training.folder import BEST, CURVES, LAST, drop_replaced
from raglane.training.inference import pick_device
from raglane.training.job import Job, TrainingResult
from raglane.training.learner import Learner, make_optimizer, shared
from raglane.training.machine import check_size
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.ranks import SINGLE, AgreedSignal, Ranks, SignalHandler, lost_worker
from raglane.training.state import (
    Callback,
    Totals,
    TrainingState,
    check_losses,
    check_optimizer,
    curves_csv,
    diverged,
    load_state,
    rate_of,
    state_files,
)
from raglane.training.tasks import fit, make_task
from raglane.training.tasks.base import values_of


class Interrupted(Exception):  # noqa: N818
    """Raised with the number of Ctrl-C or SIGTERM, when the run is saved."""


class Trainer:
    """Trains a model as one rank: model, data, state, and the loop over epochs. The first rank
    writes the files.
    """

    def __init__(
        self,
        job: Job,
        ranks: Ranks = SINGLE,
        callback: Callback | None = None,
        signals: SignalHandler | None = None,
    ) -> None:
        settings = self.settings = job.settings
        self.job = job
        self.folder = job.folder
        self.ranks = ranks
        self.callback = Callback() if callback is None else callback
        self.signals = signals or SignalHandler()
        self.device = ranks.device_of(pick_device(settings.device))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.preprocessor = fit(job.training, settings)
        self.task = make_task(self.preprocessor, settings)
        training = self._applied(job.training)
        self.validation = None if job.validation is None else self._applied(job.validation)
        if job.test is not None:
            self._applied(job.test)
        if settings.class_weights != "none":
            targets = training.targets_of_all()
            self.task.class_weights = None if targets is None else self.task.weigh(targets)
        config = ModelConfig.of(settings, self.preprocessor)
        # Counted before sequences are split, because each piece repeats the features of its
        # sequence.
        self.rare = RareTokens.of(training, self.preprocessor, settings)
        self.training, self.order, elements = training_batches(
            training, settings, ranks.rank, ranks.count
        )
        check_size(config, settings, self.device, elements)
        self.model = self.task.model = SequenceModel(config)
        self.state = TrainingState()
        # 1 if the settings leave it to the data, which `settle` prevents.
        self.epochs = settings.epochs or 1
        self.carried: tuple[Tensor, ...] = ()
        # The files of the best model of a training without a folder.
        self.best: dict[str, bytes] = {}

    def _applied(self, records: Dataset) -> Dataset:
        dataset = self.preprocessor.apply(records)
        self.task.check(records)
        return dataset

    def run(self) -> TrainingResult:
        """Train until all epochs are complete, or a signal stops the training."""
        self.model.to(self.device).train()
        self.optimizer = make_optimizer(self.model, self.settings)
        if self.job.resume and self.folder is not None and (self.folder / LAST).exists():
            self._resume(self.folder / LAST)
        if self.folder is not None and self.ranks.is_first:
            self.job.write(self.folder)
            for name, content in self.job.files.items():
                write_file(self.folder / name, content)
        is_complete = self._is_complete()
        stopped_by = None
        if is_complete and self.folder is not None:
            if self.ranks.is_first:
                write_file(self.folder / CURVES, curves_csv(self.state.history))
        else:
            try:
                self._train()
            except Interrupted as stop:
                stopped_by = stop.args[0]
            except DivergedError as error:
                if (
                    self.folder is not None
                    and (self.folder / LAST).exists()
                    and self.ranks.is_first
                ):
                    replace(self.job, diverged=error.symptom).write(self.folder)
                raise
        return TrainingResult(
            self.folder, self.task.metric, self.state, stopped_by, is_complete, self.best
        )

    def try_batch(self) -> tuple[Ragged, float]:
        """Return the inputs and the loss of the first batch, after its backward pass."""
        self.model.to(self.device).train()
        learner = Learner(self.model, self.task, self.settings, self.ranks, self.order, self.rare)
        batch = next(iter(self._batches_left())).to(self.device)
        loss = learner(batch)
        loss.backward()
        return batch.inputs, float(loss)

    def _batches_left(self) -> ChunkedBatches | DataLoader[Batch]:
        """Return the remaining batches of an epoch."""
        if isinstance(self.order, TBPTTSampler):
            return ChunkedBatches(self.order)
        return loader(self.training, Remaining(self.order), self.settings.workers)

    def _resume(self, last: Path) -> None:
        """Load the last checkpoint, and write the best model if it is missing."""
        state, optimizer, self.carried = load_state(last)
        load_weights(self.model, read_tensors(last / WEIGHTS), last / WEIGHTS)
        check_optimizer(optimizer, self.optimizer, last)
        with reading(last):
            self.order.set_epoch(state.epoch)
            # At the end of an epoch no order is stored.
            self.order.load_state_dict(state.order or self.order.state_dict(state.batch))
            if self.order.epoch != state.epoch:
                raise ValueError(f"all {state.batch} batches of an epoch that is not complete")
        if self.epochs < state.epoch:
            got = f"{self.epochs}, and {state.epoch} are done"
            fix = f"pass e.g. {argument('epochs', state.epoch + 10)}"
            raise ArgumentError("epochs", got, "at least the number of complete epochs", fix)
        self.optimizer.load_state_dict(optimizer)
        self.state = state
        if state.best_epoch == state.epoch > 0 and state.batch == 0 and self.ranks.is_first:
            # The process may have been killed after `last` and before `best` was written.
            write_folder(last.parent / BEST, self._model_files())

    def _is_complete(self) -> bool:
        """Return True if no epoch is left to train; the files after the last one may still be
        missing.
        """
        state = self.state
        patience = self.settings.patience
        is_patient = patience is None or state.waited < patience or state.batch > 0
        return state.epoch >= self.epochs or not is_patient

    def _model_files(self) -> dict[str, bytes]:
        return model_files(self.model, self.preprocessor, self.job.columns)

    def _train(self) -> None:
        """Train to the last epoch, saving after each."""
        in_order: list[list[int]] = []
        if self.validation is not None:
            in_order = validation_shares(
                self.validation, self.settings, self.order, self.ranks.rank, self.ranks.count
            )
        # The loop changes warning filters, which are restored.
        with closing(self.signals), warnings.catch_warnings():
            self.signals.listen()
            try:
                self._begin()
                for epoch in range(self.state.epoch, self.epochs):
                    self.order.set_epoch(epoch)
                    self._batches = len(self.order)
                    self._since = time.perf_counter()
                    self._train_epoch()
                    if self.validation is not None and in_order:
                        self._validate(loader(self.validation, in_order))
                    if self._epoch_done():
                        break
            except (RuntimeError, ConnectionError, EOFError) as error:
                explained = self._explained(error)
                if explained is None:
                    raise
                raise explained from error

    def _begin(self) -> None:
        self._learner = Learner(
            self.model, self.task, self.settings, self.ranks, self.order, self.rare
        )
        self._loss: nn.Module = self._learner
        # A context in which gradients are not averaged over the ranks.
        self._apart: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.ranks.count > 1:
            self._loss = together = shared(self._learner, self.device)
            self._apart = together.no_sync
        states = tuple(state.to(self.device) for state in self.carried)
        self._learner.carried = states if len(states) > 1 else next(iter(states), None)
        self._stop = AgreedSignal(self.ranks, self.signals)
        self._saved = time.monotonic()
        # The state at the last optimizer step, and whether a step is in progress.
        self._mark_step()
        # The validation sums of this rank; and its outputs, if the task chooses thresholds by them.
        self._validated = Totals()
        self._answers: list[tuple[Tensor, Batch]] = []
        self._batches = len(self.order)
        self.callback.started(self.state, self.epochs, self._batches)

    def _mark_step(self) -> None:
        self._stepped = replace(self.state, totals=replace(self.state.totals))
        self._stepped_carried = self._learner.carried
        self._is_stepping = False

    def _explained(self, error: Exception) -> Exception | None:
        """Save the last step and return an error that explains the death of a process; None for
        other errors.
        """
        if self.settings.workers and is_of_worker(error):
            remove_worker_handler()
            if self.ranks.count == 1:
                self._save_stepped()
            return lost_worker(self.folder)
        if self.ranks.is_lost(error):
            if self.ranks.is_keeper():
                self._save_stepped()
            return LostRankError()
        # Raised by PyTorch if a step is too large for float32, e.g. with a learning rate of 1e38.
        if "without overflow" in str(error):
            return diverged("a step beyond the range of float32", self.state, self.settings)
        return None

    def _train_epoch(self) -> None:
        """Train on the remaining batches of an epoch."""
        batches = self._batches_left()
        count = len(batches)
        for done, batch in enumerate(batches, 1):
            self._batch_started()
            is_step = done % self.settings.accumulate == 0 or done == count
            with nullcontext() if is_step else self._apart():
                self._loss(batch.to(self.device)).backward()
            if is_step:
                self._step()
            self._batch_done()

    def _step(self) -> None:
        # PyTorch may raise for a dead worker at any time; a partial step must not be saved.
        self._is_stepping = True
        self._learner.average()
        if self.settings.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.model.zero_grad()

    def _validate(self, batches: Iterable[Batch]) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                moved = batch.to(self.device)
                output = self.model(moved.inputs)
                self._validated.add(self.task.score(output, moved), moved.inputs.values.shape[0])
                if self.task.kept:
                    self._answers.append((values_of(output).cpu(), moved))
        self.model.train()

    def _batch_started(self) -> None:
        self._set_rate(rate_of(self.settings, self.state, self._batches))
        # The seed depends only on the position, so a resumed run draws the same numbers.
        seed = key_of(self.settings.seed, self.state.epoch, self.state.batch, self.ranks.rank)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        self._stop.start()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _batch_done(self) -> None:
        now = time.perf_counter()
        state = self.state
        if self._learner.whole is not None:
            state.totals.add(*self._learner.whole)
        state.totals.seconds += now - self._since
        self._since = now
        state.batch += 1
        self.callback.batch_done(state.epoch + 1, state.batch, state.totals)
        if state.start_loss is None and float(state.totals.count):
            state.start_loss = state.totals.mean_loss
        is_step = state.batch % self.settings.accumulate == 0
        if is_step:
            self._mark_step()
        signal = self._stop.result()
        # The last batch of an epoch is saved with the epoch.
        if is_step and state.batch < self._batches:
            is_due = time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes
            if (signal is not None or is_due) and self.ranks.is_first:
                self._save_within()
            if signal is not None:
                raise Interrupted(signal)

    def _epoch_done(self) -> bool:
        """Record and save an epoch; return True if early stopping ends the training."""
        state = self.state
        if not float(state.totals.count):
            raise DataError("data", "no target", "at least one target", "pass longer sequences")
        self._stop.start()
        row = self._row()
        watched = row.get("validation_loss", row["train_loss"])
        self._refuse_divergence(row)
        self._tune()
        state.epoch += 1
        state.batch = 0
        state.totals = Totals()
        self._validated = Totals()
        self._answers = []
        self._learner.carried = self._learner.whole = None
        state.history.append(row)
        is_best = state.best_epoch == 0 or watched < state.best_loss
        state.waited = 0 if is_best else state.waited + 1
        if is_best:
            state.best_epoch = state.epoch
            state.best_loss = watched
        self._mark_step()
        if self.ranks.is_first:
            self._save_epoch(is_best)
        ends = self.callback.epoch_done(row, is_best) is True
        signal = self._stop.result()
        # Only one rank has a callback; the others would wait for it.
        if (ends and self.ranks.count == 1) or (
            self.settings.patience is not None and state.waited >= self.settings.patience
        ):
            return True
        if signal is not None and state.epoch < self.epochs:
            raise Interrupted(signal)
        return False

    def _row(self) -> dict[str, float]:
        """Return the row of the history, summed over all ranks."""
        totals = self.state.totals
        validated = self._validated
        metric = self.task.metric
        if self.ranks.count > 1:
            sums = (validated.loss, validated.metric, validated.baseline, validated.count)
            loss, score, baseline, counted = self.ranks.sums(*sums)
            validated = Totals(loss, score, baseline, counted)
        row = {
            "epoch": self.state.epoch + 1,
            "train_loss": totals.mean_loss,
            f"train_{metric}": totals.mean_metric,
        }
        if float(validated.count):
            row |= {
                "validation_loss": validated.mean_loss,
                f"validation_{metric}": validated.mean_metric,
            }
        if self.task.baseline is not None:
            watched = validated if float(validated.count) else totals
            row[f"{self.task.baseline}_{metric}"] = watched.mean_baseline
        return row | {"seconds": max(totals.seconds, 1e-9), "elements_per_second": totals.speed}

    def _tune(self) -> None:
        """Choose thresholds by the outputs of all ranks for the validation data, if the task has
        thresholds.
        """
        if not self.task.kept:
            return
        # The ranks had the batches in turn.
        gathered = self.ranks.gathered(self._answers)
        pairs = [
            answers_of_rank[index]
            for index in range(len(gathered[0]))
            for answers_of_rank in gathered
            if index < len(answers_of_rank)
        ]
        if pairs:
            answers, batches = map(list, zip(*pairs, strict=True))
            self.task.tune(self.model, answers, batches)

    def _refuse_divergence(self, row: dict[str, float]) -> None:
        """Raise if the training has diverged, so that such a model is never saved."""
        check_losses(row, self.state, self.settings)
        # After the last step no further training loss shows the divergence.
        if not torch.stack([weight.isfinite().all() for weight in self.model.parameters()]).all():
            raise diverged("weights that are not finite", self.state, self.settings)

    def _save_stepped(self) -> None:
        """Write the checkpoint of the last complete step, after the death of a rank or worker."""
        if 0 < self._stepped.batch < self._batches and not self._is_stepping:
            self.state = self._stepped
            self._learner.carried = self._stepped_carried
            self._save_within()

    def _save_within(self) -> None:
        """Write a checkpoint within an epoch."""
        if float(self.state.totals.count):
            self._refuse_divergence({"train_loss": self.state.totals.mean_loss})
        self._save_last()

    def _save_epoch(self, is_best: bool) -> None:
        """Write the checkpoint of a complete epoch, and the model if it is the best."""
        # `last` first: `_resume` can make `best` from it if the process dies in between.
        self._save_last()
        if self.folder is None:
            self.best = self._model_files() if is_best else self.best
            return
        if is_best:
            write_folder(self.folder / BEST, self._model_files())
        write_file(self.folder / CURVES, curves_csv(self.state.history))

    def _save_last(self) -> None:
        """Write the checkpoint for resuming."""
        if self.folder is None:
            return
        # The file contains the learning rate of the settings; that of a batch follows from its
        # position.
        self._set_rate(self.settings.lr)
        # No order at the end of an epoch.
        self.state.order = self.order.state_dict(self.state.batch) if self.state.batch else {}
        files = self._model_files() | state_files(self.state, self.optimizer, self._learner.carried)
        write_folder(self.folder / LAST, files)
        drop_replaced(self.folder)
        self._saved = time.monotonic()
