"""Limits of the machine for settings and models, and batch sizes planned for it."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from raglane._utils.memory import FLOAT, TRAINED_TENSOR, check_memory
from raglane._utils.messages import argument
from raglane.data.dataset import Dataset
from raglane.data.order.limit import pieces_of
from raglane.data.prepare import seasons
from raglane.data.prepare.missing import BLOCKS
from raglane.errors import ArgumentError
from raglane.nn.recurrent.explain import explain
from raglane.training.inference import pick_device
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.ranks import ranks_of
from raglane.training.settings import Settings
from raglane.training.tasks import fit

if TYPE_CHECKING:
    from raglane.planner import Plan


def check_machine(settings: Settings) -> torch.device:
    """Raise if the settings need more processes, threads or memory than this machine has; return
    the device.
    """
    cores = os.cpu_count() or 1
    # Each rank is a process that uses at least one processor; Ray checks the resources of its
    # cluster.
    if settings.engine == "processes" and settings.processes > max(4, cores):
        fix = f"pass {argument('ranks', cores)}, or start ranks on several machines with torchrun"
        raise ArgumentError(
            "processes", f"{settings.processes}", f"at most {max(4, cores)} on this machine", fix
        )
    most = max(64, 4 * cores)
    for name in ("threads", "workers"):
        count = getattr(settings, name)
        if count is not None and count > most:
            raise ArgumentError(
                name, f"{count}", f"at most {most} on this machine", "pass a smaller number"
            )
    device = pick_device(settings.device)
    smallest = {
        field.name: getattr(settings, field.name)
        for field in fields(ModelConfig)
        if hasattr(settings, field.name)
    }
    width = BLOCKS[settings.missing] + seasons.width(1, settings.season or 0)
    sizes = {"input_size": width, "output_size": 1, "embedding": None}
    check_size(ModelConfig(**smallest | sizes), settings, device)
    return device


def threads_of(settings: Settings) -> int | None:
    """Return the CPU threads of a rank; None leaves the choice to PyTorch."""
    if settings.threads is not None or settings.processes == 1:
        return settings.threads
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(cores // settings.processes, 1)


def check_size(
    config: ModelConfig, settings: Settings, device: torch.device, elements: int = 1
) -> None:
    """Raise if a model needs more memory to train and to save than is available."""
    weights, tensors = config.count()
    moments = 1 if settings.optimizer in ("sgd", "rmsprop") else 2
    # Training needs weights, gradients and moments; saving copies the weights once and the moments
    # twice.
    model = (2 + moments) * weights
    saving = (1 + 2 * moments) * weights
    outputs = config.num_layers * (2 if config.bidirectional else 1) * config.hidden_size * elements
    what = f"a model of {weights:,} weights to train"
    limit = "batch_size" if settings.batch_elements is None else "batch_elements"
    sizes = [argument(name) for name in ("hidden_size", "num_layers", "embedding", limit)]
    fix = f"make {', '.join(sizes[:-1])} or {sizes[-1]} smaller"
    if device.type == "cuda":
        check_memory(what, FLOAT * (model + outputs), fix, torch.cuda.mem_get_info(device)[0])
        model = weights
        outputs = 0
    check_memory(what, FLOAT * (model + saving + outputs) + TRAINED_TENSOR * tensors, fix)


def plan_batches(
    settings: Settings, training: Dataset, what: str = "batch_size"
) -> tuple[Settings, str]:
    """Choose the batch size and bucketing by measuring the layer on this machine; return the
    settings and the reason.

    Ranks share a batch, so its size is the best one of a rank times their number.
    """
    from raglane.planner import plan, texts

    if what == "batch_size" and settings.batch_elements is not None:
        got = f"auto, with {argument('batch_elements', settings.batch_elements)}"
        rule = "the only limit of a batch"
        raise ArgumentError("batch_size", got, rule, "leave one of them out")
    device = pick_device(settings.device)
    others = ranks_of()
    ranks = settings.processes if others is None else others.count
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    threads = threads_of(settings) or torch.get_num_threads()
    preprocessor = fit(training, settings)
    lengths = preprocessor.apply(training).lengths
    if settings.bptt_steps is not None:
        # A batch contains a chunk of each stream.
        lengths = torch.from_numpy(pieces_of(lengths.numpy(), settings.bptt_steps)[1])
    layer = SequenceModel(ModelConfig.of(settings, preprocessor)).encoder.recurrent.to(device)
    # Only the backend that the layer chooses in training.
    backend = explain(layer, torch.zeros(1, layer.input_size, device=device)).backend
    advice = plan(lengths, layer, processes=ranks, backends=[backend], threads=[threads])
    if what == "batch_elements":
        why = texts.why(advice.best_by_elements, advice.rows, ranks)
        return _by_elements(settings, advice, int(lengths.max()), ranks), why
    chosen = ranks * advice.best.size
    if settings.bptt_steps is not None:
        # At most one stream per sequence.
        return replace(settings, batch_size=max(min(chosen, len(training)), ranks)), advice.why
    return replace(settings, batch_size=chosen, bucket=advice.best.bucketed), advice.why


def _by_elements(settings: Settings, advice: Plan, longest: int, ranks: int) -> Settings:
    """Return the settings with the planned limit of elements, raised if the longest sequences must
    fit.
    """
    best = advice.best_by_elements
    chosen = ranks * best.size
    if ranks > 1 or settings.too_long == "raise":
        # BatchSampler requires this, so that each rank has a sequence in every step.
        chosen = max(chosen, longest if ranks == 1 else 3 * ranks * longest)
    return replace(settings, batch_elements=chosen, bucket=best.bucketed)
