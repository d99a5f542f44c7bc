"""What a layer costs on this machine: a few seconds of measurements, and the model that is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import probe
from raglane.planner.model import Floats, Profile, features, fit
from raglane.planner.peak import peak_bytes
from raglane.planner.probe import MODES, PROBES
from raglane.planner.ways import Way, at, cast

__all__ = ["Calibration", "calibrate"]

# A probe that would take longer is left out, and what lies beyond it is extrapolated.
_LONGEST = 0.25
# The probes that are never left out, and those of which memory is measured too.
_ALWAYS, _WEIGHED = range(5), (2, 4, 6, 8)
# How often all are measured: what else the machine did at one time, it hardly did at both.
_ROUNDS = 2


@dataclass(frozen=True)
class Calibration:
    """The coefficients of every way.

    Attributes:
        seconds: by way and mode, those of :func:`~raglane.planner.model.features`.
        memory: by way, for a call, an element computed and a sequence, the bytes of a training step.
    """

    seconds: dict[tuple[Way, str], Floats]
    memory: dict[Way, Floats]

    def bytes_of(self, way: Way, profile: Profile) -> int:
        """The bytes that a training step of a batch holds at its peak, without weights that were there before."""
        return int(_size(profile) @ self.memory[way])


def _size(profile: Profile) -> Floats:
    """What the memory of a training step is linear in: a call, elements computed, sequences."""
    return np.array([1, profile.computed, profile.count], np.float64)


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
    most = max((way.threads for way in ways), default=1)
    device = probe.device_of(layer)
    series = {(way, mode): _Series() for way in ways for mode in MODES}
    memory: dict[Way, list[tuple[Floats, float]]] = {way: [] for way in ways}
    for turn, place in enumerate(place for _ in range(_ROUNDS) for place in range(len(PROBES))):
        lengths = torch.tensor(PROBES[place])
        for way in ways:
            # What matters less is measured on fewer batches.
            if place % 2 and (way.threads != most or way.backend == "reference"):
                continue
            batch, profile = probe.make_batch(layers[way.dtype], lengths), Profile.of(way, lengths)
            with at(way):
                for mode in MODES:
                    one = series[way, mode]
                    if place in _ALWAYS or one.expects(profile) <= _LONGEST:
                        call = probe.step_of(layers[way.dtype], batch, mode)
                        one.add(place, profile, features(way, profile), probe.time_call(call, device))
                if way.threads == most and place in _WEIGHED and turn == place:
                    call = probe.step_of(layers[way.dtype], batch, "train")
                    call()
                    memory[way].append((_size(profile), peak_bytes(call, device)))
        say((turn + 1) / (_ROUNDS * len(PROBES)))
    found = {_without_threads(way): _fitted(pairs) for way, pairs in memory.items() if pairs}
    return Calibration(
        {key: one.fitted() for key, one in series.items()},
        {way: found[_without_threads(way)] for way in ways},
    )


@dataclass
class _Series:
    """The probes of one way and mode so far, by their place in ``PROBES``: of each the shortest time."""

    profiles: dict[int, Profile] = field(default_factory=dict)
    seen: dict[int, Floats] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def expects(self, profile: Profile) -> float:
        """The most that a call will take: no more in proportion than one before, by steps or by rows."""
        return min(
            (
                seconds * max(profile.length / known.length, profile.computed / known.computed)
                for seconds, known in zip(self.seconds.values(), self.profiles.values(), strict=True)
            ),
            default=0.0,
        )

    def add(self, place: int, profile: Profile, seen: Floats, seconds: float) -> None:
        self.profiles[place], self.seen[place] = profile, seen
        self.seconds[place] = min(seconds, self.seconds.get(place, seconds))

    def fitted(self) -> Floats:
        return _fitted([(self.seen[place], seconds) for place, seconds in self.seconds.items()])


def _without_threads(way: Way) -> tuple[str, str, str]:
    """Memory does not depend on the number of threads."""
    return way.backend, way.schedule, way.dtype


def _fitted(pairs: Sequence[tuple[Floats, float]]) -> Floats:
    return fit(np.array([seen for seen, _ in pairs]), np.array([amount for _, amount in pairs]))
