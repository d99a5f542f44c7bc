"""Ranks forked from a process that has imported what they need, in place of interpreters that start anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from attacks.forked import CONTEXT
from raglane.data.dataset import SequenceDataset
from raglane.data.preprocess import Preprocessor
from raglane.training.batches import training_order
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.ranks import child, launch
from raglane.training.ranks.group import Ranks
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.tasks import make_task

_Kinds = list[tuple[Settings, torch.dtype]]

__all__ = ["fork_ranks", "forked", "gradients"]


def forked(pipe: Connection) -> tuple[Any, Callable[[], int | None]]:
    """A process that does what one of ``launch.start_process`` does."""
    process = CONTEXT.Process(target=_run, args=(pipe,), daemon=True)
    process.start()
    return process, lambda: process.exitcode


def _run(pipe: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.environ.update(launch._network())
    child.run(pipe)


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
        CONTEXT.Process(target=_gradients, args=(settings, rank, ranks, store.port, its), daemon=True).start()
        its.close()
        pipes.append(mine)
    return [[torch.tensor(gradient, dtype=torch.float64) for gradient in pipe.recv()] for pipe in pipes]


def _gradients(settings: _Kinds, rank: int, count: int, port: int, pipe: Connection) -> None:
    os.environ.update(launch._network())
    ranks = Ranks(rank, count)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    ranks.join(store)
    pipe.send([_gradient(chosen, dtype, ranks).tolist() for chosen, dtype in settings])


def _gradient(settings: Settings, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    from raglane.training.loop import run_epochs

    torch.manual_seed(0)
    lengths = torch.randint(0, 6, (12,))
    # The others are empty: a rank that gets nothing but such has nothing to say, and the others must not wait for it.
    lengths[: 12 - 3] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randn(int(offsets[-1]), 3, dtype=torch.float64)
    dataset = SequenceDataset(values.to(dtype), offsets, torch.randint(0, 2, (len(values),)), per_element=True)
    preprocessor = Preprocessor("tag", labels=("a", "b"))
    model = SequenceModel(ModelConfig("tag", settings.layer, input_size=3, output_size=2, hidden=4)).to(dtype)
    before = torch.cat([weight.detach().flatten().double() for weight in model.parameters()])
    order = training_order(dataset.lengths, settings, ranks.rank, ranks.count)
    run_epochs(
        model,
        make_task(preprocessor, settings),
        settings,
        dataset,
        order,
        None,
        state=TrainingState(),
        folder=None,
        device=torch.device("cpu"),
        model_files=dict,
        ranks=ranks,
    )
    return before - torch.cat([weight.detach().flatten().double() for weight in model.parameters()])
