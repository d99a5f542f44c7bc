"""Streams without an end: their states are renewed by second ones that have seen the last frames."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_whole
from raglane.errors import ArgumentError, CheckpointError
from raglane.streams.queues import Integers


class RenewalParts(NamedTuple):
    """Sequences cut where states are renewed: the rows of the pieces, and of their results those of
    the sequences.
    """

    rows: Tensor
    offsets: Tensor
    answers: Tensor


class Renewal(NamedTuple):
    """When a second state begins, and takes over."""

    most: int  # frames of a state
    warm_up: int

    @property
    def begin(self) -> int:
        """The age of a state at which the second one begins."""
        return self.most - self.warm_up

    def left(self, ages: Integers) -> Integers:
        """Return the frames until a second state begins or takes over."""
        return np.where(ages < self.begin, self.begin, self.most) - ages

    def check_age(self, age: int) -> None:
        """Raise for an age that no stream has, in a state that a client sends."""
        if not 0 <= age < self.most:
            rule = f"that of a state of fewer than {self.most} frames"
            fix = "pass the bytes that Stream.state() returned"
            raise CheckpointError("state", f"an age of {age} frames", rule, fix)

    def parts(self, lengths: Integers, offsets: Integers) -> RenewalParts:
        """Return the pieces of sequences with a state of their own."""
        counts = np.maximum(1, -((self.warm_up - lengths) // self.begin))
        sequence = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(sequence)) - np.repeat(counts.cumsum() - counts, counts)
        starts = number * self.begin
        sizes = np.minimum(self.most, lengths[sequence] - starts)
        ends = sizes.cumsum()
        within = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
        rows = np.repeat(offsets[sequence] + starts, sizes) + within
        answers = np.flatnonzero((within >= self.warm_up) | np.repeat(number == 0, sizes))
        return RenewalParts(
            torch.from_numpy(rows),
            torch.from_numpy(np.append(0, ends)),
            torch.from_numpy(answers),
        )


def renewal(renew: Any, warm_up: Any) -> Renewal | None:
    """Return when states are renewed; None for never."""
    if (renew is None) != (warm_up is None):
        got = "one without the other"
        raise ArgumentError("renew, warm_up", got, "given together", "pass both, or none")
    if renew is None:
        return None
    most = check_whole("renew", renew, 2)
    return Renewal(most, check_whole("warm_up", warm_up, 1, most=most // 2))
