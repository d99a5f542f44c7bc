"""Layers and kernels that several fuzzers draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import every_layer
import raglane as rl
from cpu_networks import DIVISIONS, LIBRARY, POISON
from guarded import chosen_library
from raglane.native.library import Library, has_cell
from raglane.nn.recurrent.stack import one_or_tuple

LAYERS: dict[str, Callable[..., Any]] = {
    **{
        kind.cell: partial(getattr(rl.nn, kind.layer), **kind.options) for kind in every_layer.KINDS
    },
    "lstm projected": lambda d, h, **options: rl.nn.LSTM(d, h, proj_size=max(1, h // 2), **options),
    "lstm checkpointed": partial(rl.nn.LSTM, checkpoint_every=4),
    "gru checkpointed": partial(rl.nn.GRU, checkpoint_every=7),
    "rnn clipped": partial(rl.nn.RNN, clip=0.7),
    "lstm clipped": partial(rl.nn.LSTM, clip=0.7),
    "indrnn bounded": partial(rl.nn.IndRNN, max_length=20),
}
del LAYERS["grud"]  # takes only inputs with three columns per channel
KERNEL_LAYERS = {name: make for name, make in LAYERS.items() if has_cell(make(3, 4).cell.name)}


@contextmanager
def drawn_kernels(chance: random.Random) -> Iterator[Library]:
    """Use a random instruction set, division of the work and number of threads within the block."""
    flags = chance.choice([0, *DIVISIONS.values()]) | chance.choice([0, POISON])
    chosen = replace(LIBRARY.with_isa(chance.choice(LIBRARY.isas)), flags=flags)
    threads = torch.get_num_threads()
    torch.set_num_threads(chance.choice([1, 2, 3, 4]))
    try:
        with chosen_library(chosen):
            yield chosen
    finally:
        torch.set_num_threads(threads)


def hx(state: tuple[Tensor, ...]) -> Any:
    """Return initial states as a layer takes them; None if there are none."""
    return one_or_tuple(state) if state else None


def error(found: Tensor, truth: Tensor) -> float:
    """Return the largest difference, as a share of the largest number (plus 1)."""
    assert found.shape == truth.shape, f"shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
    return (
        float((found.double() - truth).abs().max() / (1 + truth.abs().max()))
        if found.numel()
        else 0.0
    )
