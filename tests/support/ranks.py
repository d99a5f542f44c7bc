"""Ranks forked from a process that has imported what they need, in place of interpreters that start
anew.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from made_datasets import dataset
from processes import CONTEXT
from raglane.data.records import offsets_of
from raglane.training.ranks import Ranks, launch
from raglane.training.settings import Settings

_Kinds = list[tuple[Settings, torch.dtype]]


def forked(pipe: Connection) -> tuple[Any, Callable[[], int | None]]:
    """A process that does what one of ``launch.start_process`` does."""
    process = CONTEXT.Process(target=_run, args=(pipe,), daemon=True)
    process.start()
    return process, lambda: process.exitcode


def _run(pipe: Connection) -> None:
    gc.freeze()  # the garbage collector then skips what the server imported
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.environ.update(launch._network())
    launch.run_rank(pipe)


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let the ranks of this process be forked."""
    patch.setattr(launch, "start_process", forked)


def gradients(settings: _Kinds, ranks: int) -> list[list[Tensor]]:
    """The gradient of a step of each of some trainings to tag, as each of several processes has it.

    A step of gradient descent at a rate of 1 changes the weights by the gradient.
    """
    if ranks == 1:
        return [[_gradient(chosen, dtype, Ranks()) for chosen, dtype in settings]]
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipes = []
    for rank in range(ranks):
        mine, its = CONTEXT.Pipe()
        CONTEXT.Process(
            target=_gradients, args=(settings, rank, ranks, store.port, its), daemon=True
        ).start()
        its.close()
        pipes.append(mine)
    return [
        [torch.tensor(gradient, dtype=torch.float64) for gradient in pipe.recv()] for pipe in pipes
    ]


def _gradients(settings: _Kinds, rank: int, count: int, port: int, pipe: Connection) -> None:
    os.environ.update(launch._network())
    ranks = Ranks(rank, count)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    ranks.join(store)
    pipe.send([_gradient(chosen, dtype, ranks).tolist() for chosen, dtype in settings])


def _gradient(settings: Settings, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    from raglane.training.job import Job
    from raglane.training.trainer import Trainer

    random = np.random.default_rng(0)
    lengths = random.integers(0, 6, 12)
    # The others are empty: a rank that gets nothing but such has nothing to say, and the others
    # must not wait for it.
    lengths[: 12 - 3] = 0
    offsets = offsets_of(lengths)
    tags = np.where(np.arange(offsets[-1]) % 2, "a", "b").astype(object)
    values = random.normal(size=(int(offsets[-1]), 3)).astype(np.float32)
    records = dataset(values, offsets, tags=tags, channels=("x", "y", "z"))
    trainer = Trainer(Job(replace(settings, hidden_size=4), training=records), ranks)
    data = trainer.training.tensors()
    trainer.training._tensors = replace(data, values=data.values.to(dtype))
    trainer.model.to(dtype)
    before = torch.cat(
        [weight.detach().flatten().double() for weight in trainer.model.parameters()]
    )
    trainer.run()
    return before - torch.cat(
        [weight.detach().flatten().double() for weight in trainer.model.parameters()]
    )
