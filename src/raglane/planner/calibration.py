"""What a layer costs on this machine: a few seconds of measurements, and the model that is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import probe
from raglane.planner.model import Floats, Integers, features, fit, rows_of
from raglane.planner.peak import peak_bytes
from raglane.planner.probe import MODES, PROBES
from raglane.planner.ways import Way, at, cast
from raglane.schedules import SCHEDULES

__all__ = ["Calibration", "calibrate"]

# A probe that would take longer is left out, and what lies beyond it is extrapolated.
_LONGEST = 0.4
# The probes that are never left out, and those of which memory is measured too.
_ALWAYS, _WEIGHED = range(4), (1, 2, 3, 7, 8)


@dataclass(frozen=True)
class Calibration:
    """The coefficients of every way.

    Attributes:
        seconds: by way and mode, those of :func:`~raglane.planner.model.features`.
        memory: by way, those of :func:`memory_features`, for the bytes of a training step.
    """

    seconds: dict[tuple[Way, str], Floats]
    memory: dict[Way, Floats]

    def bytes_of(self, way: Way, lengths: Tensor) -> int:
        """The bytes that a training step of a batch holds at its peak, without weights that were there before."""
        return int(memory_features(way, lengths) @ self.memory[way])


def memory_features(way: Way, lengths: Tensor) -> Floats:
    """What the memory of a training step is linear in: a call, elements computed, sequences."""
    return np.array([1, SCHEDULES[way.schedule].count(lengths).elements, lengths.shape[0]], np.float64)


def calibrate(
    layer: RecurrentLayer,
    ways: Sequence[Way],
    say: Callable[[float], object] = lambda share: None,  # noqa: ARG005
) -> Calibration:
    """Measure a layer on a few batches in every way.

    Args:
        layer: its weights get no gradients and stay as they are.
        ways: that can run it.
        say: told which share is done, from 0 to 1.
    """
    layers = {way.dtype: cast(layer, way.dtype) for way in ways}
    device = probe.device_of(layer)
    series = {(way, mode): _Series() for way in ways for mode in MODES}
    memory: dict[Way, list[tuple[Floats, float]]] = {way: [] for way in ways}
    most = max((way.threads for way in ways), default=1)
    for place, lengths in enumerate(map(torch.tensor, PROBES)):
        for way in ways:
            # The model is the same for fewer threads, and needs less to be found.
            if way.threads != most and place % 2:
                continue
            batch, rows = probe.make_batch(layers[way.dtype], lengths), rows_of(way, lengths)
            with at(way):
                for mode in MODES:
                    one = series[way, mode]
                    if place not in _ALWAYS and one.expects(rows) > _LONGEST:
                        continue
                    call = probe.step_of(layers[way.dtype], batch, mode)
                    one.add(rows, features(way, rows, len(batch)), probe.time_call(call, device))
                    if mode == "train" and way.threads == most and place in _WEIGHED:
                        memory[way].append((memory_features(way, lengths), peak_bytes(call, device)))
        say((place + 1) / len(PROBES))
    found = {_without_threads(way): _fitted(pairs) for way, pairs in memory.items() if pairs}
    return Calibration(
        {key: _fitted(one.pairs) for key, one in series.items()},
        {way: found[_without_threads(way)] for way in ways},
    )


@dataclass
class _Series:
    """The probes of one way and mode so far."""

    pairs: list[tuple[Floats, float]] = field(default_factory=list)
    steps: int = 1
    computed: int = 1

    def expects(self, rows: Integers) -> float:
        """A guess at the seconds of a call: those of the one before, times what grew more, its steps or its rows."""
        before = self.pairs[-1][1] if self.pairs else 0.0
        return before * max(len(rows) / self.steps, int(rows.sum()) / self.computed)

    def add(self, rows: Integers, seen: Floats, seconds: float) -> None:
        self.pairs.append((seen, seconds))
        self.steps, self.computed = len(rows), int(rows.sum())


def _without_threads(way: Way) -> tuple[str, str, str]:
    """Memory does not depend on the number of threads."""
    return way.backend, way.schedule, way.dtype


def _fitted(pairs: Sequence[tuple[Floats, float]]) -> Floats:
    return fit(np.array([seen for seen, _ in pairs]), np.array([amount for _, amount in pairs]))
