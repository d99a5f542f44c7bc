"""What a training asks of the machine, refused before it is taken."""

from __future__ import annotations

import os
from dataclasses import fields

import torch

from raglane._utils.memory import FLOAT, TRAINED_TENSOR, check_memory
from raglane.data.missing import BLOCKS
from raglane.errors import ArgumentError, argument, message
from raglane.training.inference import pick_device
from raglane.training.model import ModelConfig
from raglane.training.settings import Settings


def check_machine(settings: Settings) -> torch.device:
    """Refuse what would bring this machine down rather than use it; to be asked before any data is read."""
    cores = os.cpu_count() or 1
    # Each rank is a process with all of PyTorch, which a processor is busy with; a cluster knows what it has.
    if settings.engine == "processes" and settings.ranks > max(4, cores):
        fix = f"pass {argument('ranks', cores)}, or start ranks on several machines with torchrun"
        raise ArgumentError(message("ranks", f"{settings.ranks}", f"at most {max(4, cores)} on this machine", fix))
    most = max(64, 4 * cores)
    for name in ("threads", "workers"):
        count = getattr(settings, name)
        if count is not None and count > most:
            raise ArgumentError(message(name, f"{count}", f"at most {most} on this machine", "pass a smaller number"))
    device = pick_device(settings.device)
    smallest = {part.name: getattr(settings, part.name) for part in fields(ModelConfig) if hasattr(settings, part.name)}
    sizes = {"input_size": BLOCKS[settings.missing], "output_size": 1, "embedding": None}
    check_size(ModelConfig(**smallest | sizes), settings, device)
    return device


def threads_of(settings: Settings) -> int | None:
    """How many threads of the CPU a rank has; None where PyTorch chooses, which the only process leaves to it."""
    if settings.threads is not None or settings.ranks == 1:
        return settings.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // settings.ranks, 1)


def check_size(config: ModelConfig, settings: Settings, device: torch.device, elements: int = 1) -> None:
    """Refuse a model that needs more memory to train and to save than there is."""
    weights, tensors = config.count()
    moments = 1 if settings.optimizer in ("sgd", "rmsprop") else 2
    # Weights, gradients and moments; and to save, weights once and moments twice on their way to the file.
    model, saving = (2 + moments) * weights, (1 + 2 * moments) * weights
    outputs = config.layers * (2 if config.bidirectional else 1) * config.hidden * elements
    what = f"a model of {weights:,} weights to train"
    limit = "batch_size" if settings.batch_elements is None else "batch_elements"
    sizes = [argument(name) for name in ("hidden", "layers", "embedding", limit)]
    fix = f"make {', '.join(sizes[:-1])} or {sizes[-1]} smaller"
    if device.type == "cuda":
        check_memory(what, FLOAT * (model + outputs), fix, torch.cuda.mem_get_info(device)[0])
        model, outputs = weights, 0
    check_memory(what, FLOAT * (model + saving + outputs) + TRAINED_TENSOR * tensors, fix)
