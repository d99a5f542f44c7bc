"""The ways to run a layer that are compared: backend, schedule, dtype, number of threads."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raglane.errors import ArgumentTypeError, DispatchError, message
from raglane.kernels.dispatch import BACKENDS, using
from raglane.nn.recurrent.accelerate import accelerate
from raglane.nn.recurrent.explain import explain
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.ragged import Ragged


@dataclass(frozen=True)
class Way:
    """One way to run a layer."""

    backend: str
    schedule: str
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.schedule}, {self.dtype}, {self.threads} thread{'s'[: self.threads != 1]}"


def as_layer(layer: object) -> RecurrentLayer:
    """A copy of a layer that timing may change."""
    if isinstance(layer, RecurrentLayer):
        return copy.deepcopy(layer)
    kind = type(layer)
    if kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        twin = accelerate(copy.deepcopy(typing.cast(torch.nn.Module, layer)))
        # They are what accelerate converts.
        return typing.cast(RecurrentLayer, twin)
    rule = "a recurrent layer of rl.nn, or torch.nn.RNN, LSTM or GRU"
    raise ArgumentTypeError(message("layer", f"a {kind.__name__}", rule, "pass the recurrent layer of your model"))


def ways_of(layer: RecurrentLayer, dtypes: Sequence[torch.dtype], threads: Sequence[int]) -> list[Way]:
    """Every way that can run the layer, the fastest backends first; no program where a kernel made by hand runs it."""
    like = next(layer.parameters(), torch.empty(0))
    found: list[Way] = []
    for dtype in dtypes:
        batch = Ragged.from_flat(torch.zeros(1, layer.input_size, dtype=dtype, device=like.device), lengths=[1])
        for name, backend in BACKENDS.items():
            if name == "program" and any(way.backend == "cpu" for way in found):
                continue  # the same work by hand is no slower
            counts = (max(threads),) if name == "reference" else threads
            for schedule in backend.schedules:
                try:
                    with using(schedule=schedule, backend=name):
                        explain(layer, batch)
                except DispatchError:
                    continue
                found += [Way(name, schedule, str(dtype).removeprefix("torch."), count) for count in counts]
    return found


def thread_counts(most: int) -> list[int]:
    """Powers of two below the most, and the most."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def cast(layer: RecurrentLayer, dtype: str) -> RecurrentLayer:
    """A layer in a dtype; the layer itself where it has it already."""
    wanted: torch.dtype = getattr(torch, dtype)
    if all(weight.dtype is wanted for weight in layer.parameters()):
        return layer
    return copy.deepcopy(layer).to(wanted)


@contextmanager
def at(way: Way) -> Iterator[None]:
    """Run all layers within the block this way; what held before holds again after it."""
    before = torch.get_num_threads()
    try:
        if before != way.threads:
            torch.set_num_threads(way.threads)
        with using(schedule=way.schedule, backend=way.backend):
            yield
    finally:
        if before != way.threads:
            torch.set_num_threads(before)
