"""``raglane train --dry-run``: all of a training up to its first step, without files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from raglane._utils.messages import count_of
from raglane._utils.words import seconds_in_words
from raglane.runs.card import DataParts
from raglane.training.checkpoint import describe
from raglane.training.job import Job
from raglane.training.settings import Settings
from raglane.training.trainer import Trainer


def try_run(
    settings: Settings, parts: DataParts, folder: Path | None, log: Callable[[str], None]
) -> None:
    """Build the model of a training, run its first batch, and print what the training would do."""
    trainer = Trainer(
        Job(settings, training=parts.training, validation=parts.validation, test=parts.test)
    )
    log(f"model: {describe(trainer.model)}, on {trainer.device}")
    begun = time.perf_counter()
    inputs, loss = trainer.try_batch()
    seconds = seconds_in_words(time.perf_counter() - begun)
    log(
        f"first batch: {count_of(len(inputs), 'sequence')}, "
        f"{count_of(inputs.values.shape[0], 'element')}, loss {loss:.4f}; "
        f"forward and backward in {seconds}"
    )
    number = len(trainer.order)
    batches = f"{number:,} batch" if number == 1 else f"{number:,} batches"
    epochs = count_of(trainer.epochs, "epoch")
    if settings.patience is not None:
        epochs = f"up to {epochs}"
    log(
        f"would train {epochs} of {batches}"
        + (f" in {settings.processes} processes" if settings.processes > 1 else "")
        + ("" if folder is None else f", and write {folder}")
        + "; nothing is written"
    )
