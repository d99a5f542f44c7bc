"""The batches of an epoch, as lengths: how they are cut, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane.data.lengths import longest_and_elements
from raglane.data.order import Batches, Limit, Order

__all__ = ["Epoch", "epoch_of", "thin_out"]

_Integers = NDArray[np.int64]

# Sequences of a longer list that are looked at, and batches of an epoch.
_SEQUENCES, _BATCHES = 1 << 16, 64


@dataclass(frozen=True, eq=False)
class Epoch:
    """What is known of an epoch's batches.

    Attributes:
        batches: ``(b,)`` lengths each; a sample where there are many, in which the longest batch always is.
        weights: ``(b,)``, how many batches of the epoch each stands for. The one with the longest sequence and the one
            with the most elements stand for themselves alone: a sample has them always, the epoch once.
        elements: of the whole epoch.
        padded: elements that its batches take padded.
        count: of its batches.
    """

    batches: tuple[Tensor, ...]
    weights: NDArray[np.float64]
    elements: int
    padded: int
    count: int


def thin_out(lengths: Tensor, seed: int = 0) -> tuple[Tensor, float]:
    """A random part of a long list of lengths, with its longest, and the number of sequences that each stands for."""
    count = lengths.shape[0]
    if count <= _SEQUENCES:
        return lengths, 1.0
    drawn = torch.from_numpy(np.random.default_rng(seed).choice(count, _SEQUENCES, replace=False, shuffle=False))
    # In place of the longest drawn: the memory of the largest batch must not be left to chance.
    drawn[lengths[drawn].argmax()] = lengths.argmax()
    return lengths[drawn], count / _SEQUENCES


def epoch_of(lengths: Tensor, limit: Limit, *, grouped: bool, seed: int = 0) -> Epoch:
    """The batches of an epoch."""
    known = lengths.numpy()
    order = Order.grouped() if grouped else Order.random()
    rows, bounds = Batches(known, limit, order, seed=seed).whole()
    ordered, starts, ends = known[rows], bounds[:-1], bounds[1:]
    longest, real = longest_and_elements(known, rows, bounds)
    chosen, weights = _choose(longest, real, seed)
    return Epoch(
        tuple(torch.from_numpy(ordered[starts[place] : ends[place]]) for place in chosen),
        weights,
        int(real.sum()),
        int((longest * (ends - starts)).sum()),
        len(starts),
    )


def _choose(longest: _Integers, real: _Integers, seed: int) -> tuple[_Integers, NDArray[np.float64]]:
    """Which batches are looked at, and how many each stands for, so that the elements of the epoch come out right."""
    count = len(real)
    if count <= _BATCHES:
        return np.arange(count), np.ones(count)
    # What takes longest and what needs the most memory must not be left out by chance.
    extreme = np.unique([longest.argmax(), real.argmax()])
    others = np.setdiff1d(np.arange(count), extreme, assume_unique=True)
    drawn = np.random.default_rng(seed).choice(others, _BATCHES - len(extreme), replace=False, shuffle=False)
    known = int(real[drawn].sum())
    each = int(real[others].sum()) / known if known else len(others) / len(drawn)
    return np.concatenate((extreme, drawn)), np.repeat([1.0, each], [len(extreme), len(drawn)])
