"""A simulated machine with known times, on which tests of the planner measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from raglane.kernels.dispatch import override
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import calibration, probe
from raglane.planner.model import Floats, LayerWay, Profile, features
from raglane.planner.predicted import Row
from raglane.ragged import Ragged

Costs = Callable[[LayerWay, str], Floats]
_TIMES = 1e-3, 1e-4, (1e-3, 1e-3), (1e-4, 1e-4), 1e-4, 1e-4, 1e-4
ROW = Row("cpu", "lanes", 8, None, False, "float32", 1, 10, 1000, 0, *_TIMES, 5000, 1.0, False)


class Measured(NamedTuple):
    """A simulated call: its way, mode and batch."""

    way: LayerWay
    mode: str
    lengths: torch.Tensor

    def __call__(self) -> None:
        pass


def costs(way: LayerWay, mode: str) -> Floats:
    """Seconds per feature: the cpu kernels cost a tenth of torch's, a second thread saves a
    third.
    """
    base = np.array([100.0, 10.0, 0.0, 1.0, 0.0, 2.0, 0.5, 1.0, 0.5, 0.5]) * 1e-6
    if (way.backend, way.schedule) == ("torch", "packed"):
        base = np.concatenate((base, 2 * base, [1e-9, 1e-9]))
    if (way.backend, way.schedule) == ("torch", "padded"):
        base = np.append(base, [5e-6, 1e-7, 0])
    speed = {"cpu": 0.1, "torch": 1.0, "reference": 20.0}[way.backend]
    return base * speed * (1.0 if mode == "infer" else 3.0) / (1.0 if way.threads == 1 else 1.5)


def held(profile: Profile) -> int:
    return 1000 + 2000 * profile.computed + 8 * profile.count


def seen(way: LayerWay, lengths: torch.Tensor) -> Floats:
    profile = Profile.of(way, lengths)
    return features(way, profile, held(profile))


def ignore_progress(share: float) -> None:
    pass


def make_up(monkeypatch: pytest.MonkeyPatch, costs: Costs = costs) -> list[Measured]:
    """Replace all measurements by these costs; return the list of measured calls."""
    measured: list[Measured] = []

    def step_of(layer: RecurrentLayer, batch: Ragged, mode: str, calls: int = 1) -> Measured:
        schedule, backend = override()
        dtype = str(batch.values.dtype).removeprefix("torch.")
        return Measured(
            LayerWay(backend, schedule, dtype, torch.get_num_threads()), mode, batch.lengths_cpu
        )

    def time_in_turns(
        calls: Sequence[Measured], device: torch.device, rounds: int = 15, within: float = math.inf
    ) -> list[float]:
        times: list[float] = []
        for call in calls:
            if sum(times) < within:
                measured.append(call)
                times.append(float(seen(call.way, call.lengths) @ costs(call.way, call.mode)))
        return times

    def peak_bytes(call: Measured, device: torch.device) -> int:
        return held(Profile.of(call.way, call.lengths))

    def make_batch(layer: RecurrentLayer, lengths: Sequence[int] | torch.Tensor) -> Ragged:
        # Nothing reads the values, which take a tenth of the time to draw.
        dtype = next(layer.parameters()).dtype
        known = torch.as_tensor(lengths, dtype=torch.int64)
        return Ragged.from_flat(torch.zeros(int(known.sum()), 1, dtype=dtype), lengths=known)

    monkeypatch.setattr(probe, "make_batch", make_batch)
    monkeypatch.setattr(probe, "step_of", step_of)
    monkeypatch.setattr(probe, "time_in_turns", time_in_turns)
    monkeypatch.setattr(probe.Yardstick, "look", lambda _: 0.5e-3)
    monkeypatch.setattr(calibration, "peak_bytes", peak_bytes)
    return measured
