"""The ways to run a layer, and a model that predicts the time of a call from the number of rows at
each step.

A step has a constant cost and a cost per row, which falls with the number of rows. So the time of a
call is a sum of features of its batch, each with a coefficient of at least 0 that depends on the
layer and the machine::

    1,  S,  sum_t min(rows_t, k) for k = 4, 16, 64,  R = sum_t rows_t,  B,  max(0, M - m) for m = 16, 64, 256

where ``rows_t`` is the number of rows at step ``t``, ``S`` the number of steps and ``M`` the
megabytes that a training step uses. Sums of ``min(rows, k)`` make the cost of a step a concave
function of its rows, linear between the ``k``. Memory beyond the caches costs more, and so does
memory beyond what an allocator keeps between calls.

NOTE (extra work of backends): torch's padded tensors are made from flat values, which is more work
if lengths differ. Torch runs a pack of equal lengths as a padded tensor, and any other step by
step, so the two have separate coefficients; its backward pass also fills a tensor of the whole
batch at every step: ``S * R``.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane.errors import ArgumentTypeError, DispatchError
from raglane.kernels.cpu.matrix import lanes_of
from raglane.kernels.dispatch import BACKENDS, use_backend
from raglane.nn.porting.accelerate import accelerate
from raglane.nn.recurrent.explain import explain
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.ragged import Ragged
from raglane.schedules import SCHEDULES

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_KNOTS = (4, 16, 64)
# Megabytes that fit into caches, that an allocator keeps, and above which tensors are new memory of
# the system.
_MUCH = (16.0, 64.0, 256.0)
# Measurements with a larger relative error have less weight: other programs disturbed them.
_TRUSTED = 0.1


class LayerWay(NamedTuple):
    """A way to run a layer: backend, schedule, dtype and number of threads."""

    backend: str
    schedule: str
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.schedule}, {self.dtype}, {self.threads} thread{'s'[: self.threads != 1]}"


def as_layer(layer: object) -> RecurrentLayer:
    """Return a copy of a layer, converted to Raglane's if it is torch's."""
    if isinstance(layer, RecurrentLayer):
        return copy.deepcopy(layer)
    kind = type(layer)
    if kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        return typing.cast(
            RecurrentLayer, accelerate(copy.deepcopy(typing.cast(torch.nn.Module, layer)))
        )
    rule = "a recurrent layer of rl.nn, or torch.nn.RNN, LSTM or GRU"
    raise ArgumentTypeError(
        "layer", f"a {kind.__name__}", rule, "pass the recurrent layer of your model"
    )


def ways_of(
    layer: RecurrentLayer, dtypes: Sequence[torch.dtype], threads: Sequence[int]
) -> list[LayerWay]:
    """Return every way that supports the layer, without programs if a cpu kernel exists."""
    like = next(layer.parameters(), torch.empty(0))
    ways: list[LayerWay] = []
    for dtype in dtypes:
        batch = Ragged.from_flat(
            torch.zeros(1, layer.input_size, dtype=dtype, device=like.device), lengths=[1]
        )
        for name, backend in BACKENDS.items():
            if name == "program" and any(way.backend == "cpu" for way in ways):
                continue  # a program of the same cell is not faster
            counts = (max(threads),) if name == "reference" else threads
            for schedule in backend.schedules:
                try:
                    with use_backend(schedule=schedule, backend=name):
                        explain(layer, batch)
                except DispatchError:
                    continue
                ways += [
                    LayerWay(name, schedule, str(dtype).removeprefix("torch."), count)
                    for count in counts
                ]
    return ways


def thread_counts(most: int) -> list[int]:
    """Return the powers of two below ``most``, and ``most``."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def cast(layer: RecurrentLayer, dtype: str) -> RecurrentLayer:
    """Return a copy of a layer in a dtype, or the layer itself if it has that dtype."""
    target: torch.dtype = getattr(torch, dtype)
    if all(weight.dtype is target for weight in layer.parameters()):
        return layer
    return copy.deepcopy(layer).to(target)


@contextmanager
def at(way: LayerWay) -> Iterator[None]:
    """Run all layers within the block this way."""
    before = torch.get_num_threads()
    try:
        if before != way.threads:
            torch.set_num_threads(way.threads)
        with use_backend(schedule=way.schedule, backend=way.backend):
            yield
    finally:
        if before != way.threads:
            torch.set_num_threads(before)


class Profile(NamedTuple):
    """The numbers of rows that a call runs, and for how many steps each."""

    rows: Integers
    steps: Integers
    count: int  # type: ignore[assignment]  # hides tuple.count
    real: int

    @classmethod
    def of(cls, way: LayerWay, lengths: Tensor) -> Profile:
        """Return the profile of a call."""
        threads = way.threads if way.backend in ("cpu", "program") else 0
        rows, steps = _phases(way.schedule, threads, lengths)
        return cls(rows, steps, lengths.shape[0], int(lengths.sum()))

    @property
    def length(self) -> int:
        """``S``, the number of steps."""
        return int(self.steps.sum())

    @property
    def computed(self) -> int:
        """The number of computed elements, including padding."""
        return int(self.rows @ self.steps)

    @property
    def is_even(self) -> bool:
        """True if all steps run the same number of rows."""
        return self.rows.size == 0 or bool((self.rows == self.rows[0]).all())


@lru_cache(maxsize=1024)  # by the identity of the lengths, which the ways of one schedule share
def _phases(schedule: str, threads: int, lengths: Tensor) -> tuple[Integers, Integers]:
    lanes = lanes_of(lengths, threads) if threads else None
    rows, steps = SCHEDULES[schedule].phases(lengths, lanes)
    return rows.numpy(), steps.numpy()


def features(way: LayerWay, profile: Profile, memory: float) -> Floats:
    """Return the features of one call, of which the coefficients are fitted."""
    steps = profile.length
    rows = profile.computed
    capped = [int(np.minimum(profile.rows, knot) @ profile.steps) for knot in _KNOTS]
    beyond = [max(0.0, memory / 1e6 - much) for much in _MUCH]
    columns: list[float] = [1, steps, *capped, rows, profile.count, *beyond]
    if (way.backend, way.schedule) == ("torch", "padded"):
        padding = rows > profile.real
        columns += [padding, padding * rows, padding * beyond[0]]
    if (way.backend, way.schedule) == ("torch", "packed"):
        none = [0] * len(columns)
        if not profile.is_even:
            columns = [*none, *columns, steps * rows, steps * beyond[0]]
            return np.array(columns, np.float64)
        columns = [*columns, *none, 0, 0]
    return np.array(columns, np.float64)


def fit(measured: Floats, seconds: Floats) -> Floats:
    """Fit coefficients of at least 0 that minimise relative errors; outliers have less weight."""
    scaled = measured / seconds[:, None]
    weights = np.ones(len(seconds))
    coefficients = _least_squares(scaled, weights)
    for _ in range(5):
        missed = np.abs(scaled @ coefficients - 1)
        weights = _TRUSTED / np.maximum(missed, _TRUSTED)
        coefficients = _least_squares(scaled, weights)
    return coefficients


def _least_squares(scaled: Floats, weights: Floats) -> Floats:
    """Solve the non-negative least squares of ``scaled @ x = 1`` by active sets (Lawson and Hanson
    1974).
    """
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1
    unit = scaled / size
    gram = unit.T @ (weights[:, None] * unit) + 1e-6 * np.eye(unit.shape[1])
    aim = unit.T @ weights
    solution = np.zeros(len(size))
    free = np.zeros(len(size), bool)
    # Each round frees one coefficient that reduces the error. Few are bound again, so the limit is
    # never reached.
    for _ in range(10 * len(size)):
        slope = np.where(free, -np.inf, aim - gram @ solution)
        if slope.max() <= 1e-9:
            break
        free[slope.argmax()] = True
        while True:
            best = np.zeros(len(size))
            best[free] = np.linalg.solve(gram[np.ix_(free, free)], aim[free])
            below = free & (best <= 0)
            if not below.any():
                solution = best
                break
            # Go towards it until a coefficient reaches 0; that one is bound again.
            ratios = np.full(len(size), np.inf)
            ratios[below] = solution[below] / np.maximum(solution[below] - best[below], 1e-300)
            solution = solution + ratios.min() * (best - solution)
            free &= ratios > ratios.min()
            solution[~free] = 0
    return solution / size
