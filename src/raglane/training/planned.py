"""Batches as the planner advises them, for the data, the model and the machine of a training."""

from __future__ import annotations

from dataclasses import replace

import torch

from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, argument, message
from raglane.nn.recurrent.explain import explain
from raglane.planner import Plan, plan
from raglane.training.machine import check_machine
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import Settings
from raglane.training.tasks import fit, settle

__all__ = ["plan_batches"]


def plan_batches(settings: Settings, training: Records | Dataset) -> tuple[Settings, Plan]:
    """Choose the batch size, and whether batches are made of similar lengths, by measuring the layer on this machine.

    Args:
        settings: of the training; their ``batch_size`` and ``bucket`` are not looked at.
        training: the sequences to train on.

    Returns:
        The settings with both, and the plan that they follow.

    Raises:
        ArgumentError: ``batch_elements`` is given, no sequence has an element, or not even the smallest batch fits into
            memory.
        DataError: the data cannot be used.
    """
    if settings.batch_elements is not None:
        got, rule = f"auto, with {argument('batch_elements', settings.batch_elements)}", "one of them limits a batch"
        raise ArgumentError(message("batch_size", got, rule, "leave one of them out"))
    device = check_machine(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    settings, _ = settle(settings, training)
    preprocessor = fit(training, settings)
    lengths = preprocessor.apply(training).lengths
    layer = SequenceModel(ModelConfig.of(settings, preprocessor)).encoder.recurrent.to(device)
    # Training leaves the choice of the backend to the layer.
    backend = explain(layer, torch.zeros(1, layer.input_size, device=device)).backend
    found = plan(lengths, layer, backends=[backend], threads=[torch.get_num_threads()])
    chosen = found.best.batch_size or settings.batch_size
    return replace(settings, batch_size=chosen, bucket=found.best.grouped), found
