"""Batches as the planner advises them, for the data, the model and the machine of a training."""

from __future__ import annotations

from dataclasses import replace

import torch

from raglane.data.order.limit import pieces_of
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, argument, message
from raglane.nn.recurrent.explain import explain
from raglane.planner import Plan, plan, words
from raglane.training.machine import check_machine, threads_of
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.ranks.elsewhere import found as found_ranks
from raglane.training.settings import Settings
from raglane.training.tasks import fit, settle


def plan_batches(settings: Settings, training: Records | Dataset, what: str = "batch_size") -> tuple[Settings, str]:
    """Choose how large a batch is, and whether batches are made of similar lengths, by measuring the layer here.

    Several ranks share a batch, and the memory and the cores of the machine: a batch is as large as the best of one
    rank, times their number.
    """
    if what == "batch_size" and settings.batch_elements is not None:
        got, rule = f"auto, with {argument('batch_elements', settings.batch_elements)}", "one of them limits a batch"
        raise ArgumentError(message("batch_size", got, rule, "leave one of them out"))
    device = check_machine(settings)
    others = found_ranks()
    ranks = settings.ranks if others is None else others.count
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    threads = threads_of(settings) or torch.get_num_threads()
    settings, _ = settle(settings, training)
    preprocessor = fit(training, settings)
    lengths = preprocessor.apply(training).lengths
    if settings.steps is not None:
        # A batch holds a piece of each stream.
        lengths = torch.from_numpy(pieces_of(lengths.numpy(), settings.steps)[1])
    layer = SequenceModel(ModelConfig.of(settings, preprocessor)).encoder.recurrent.to(device)
    # Training leaves the choice of the backend to the layer.
    backend = explain(layer, torch.zeros(1, layer.input_size, device=device)).backend
    found = plan(lengths, layer, ranks=ranks, backends=[backend], threads=[threads])
    if what == "batch_elements":
        why = words.why(found.best_by_elements, found.rows, ranks)
        return _by_elements(settings, found, int(lengths.max()), ranks), why
    chosen = ranks * found.best.size
    if settings.steps is not None:
        # Not more streams than sequences.
        return replace(settings, batch_size=max(min(chosen, len(training)), ranks)), found.why
    return replace(settings, batch_size=chosen, bucket=found.best.grouped), found.why


def _by_elements(settings: Settings, found: Plan, longest: int, ranks: int) -> Settings:
    """The settings with batches that are limited by elements: with room for the longest sequences, if they must fit."""
    best = found.best_by_elements
    chosen = ranks * best.size
    if ranks > 1 or settings.too_long == "refuse":
        # What Batches asks for, so that each rank has a sequence in every step.
        chosen = max(chosen, longest if ranks == 1 else 3 * ranks * longest)
    return replace(settings, batch_elements=chosen, bucket=best.grouped)
