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
# How often all are measured: what else the machine did at one time, it hardly did at both.
_TURNS = 2
# Batches of which memory is measured.
_WEIGHED = ([5] * 12, [30], [40, *[4] * 7], [12] * 30)


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
    measured = [_Measured(way, mode) for way in ways for mode in MODES]
    layers = {way.dtype: cast(layer, way.dtype) for way in ways}
    memory = {}
    for turn in range(_TURNS):
        for place, one in enumerate(measured):
            _measure(one, layers[one.way.dtype])
            say((turn + (place + 1) / len(measured)) / _TURNS)
    for way in ways:
        if _without_threads(way) not in memory:
            memory[_without_threads(way)] = _weigh(way, layers[way.dtype])
    return Calibration(
        {(one.way, one.mode): one.fitted() for one in measured},
        {way: memory[_without_threads(way)] for way in ways},
    )


@dataclass
class _Measured:
    """The probes of one way and mode so far: of each the shortest time."""

    way: Way
    mode: str
    profiles: list[Profile] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def expects(self, profile: Profile) -> float:
        """The most that a call will take: no more in proportion than one before, by steps or by rows."""
        return min(
            (
                seconds * max(profile.length / known.length, profile.computed / known.computed)
                for seconds, known in zip(self.seconds, self.profiles, strict=True)
            ),
            default=0.0,
        )

    def add(self, profile: Profile, seconds: float) -> None:
        """Note a time; of a probe that is known already, the shorter one stays."""
        for place, known in enumerate(self.profiles):
            if known.equals(profile):
                self.seconds[place] = min(self.seconds[place], seconds)
                return
        self.profiles.append(profile)
        self.seconds.append(seconds)

    def fitted(self) -> Floats:
        seen = np.array([features(self.way, profile) for profile in self.profiles])
        return fit(seen, np.array(self.seconds))


def _measure(one: _Measured, layer: RecurrentLayer) -> None:
    """Time the probes of one way and mode, group by group, but for those that would take too long."""
    with at(one.way):
        for group in PROBES:
            lengths = [torch.tensor(each) for each in group]
            profiles = [Profile.of(one.way, each) for each in lengths]
            kept = [place for place in range(len(group)) if one.expects(profiles[place]) <= _LONGEST]
            if kept:
                batches = [probe.make_batch(layer, lengths[place]) for place in kept]
                calls = [probe.step_of(layer, batch, one.mode) for batch in batches]
                times = probe.time_in_turns(calls, probe.device_of(layer))
                for place, seconds in zip(kept, times, strict=True):
                    one.add(profiles[place], seconds)


def _weigh(way: Way, layer: RecurrentLayer) -> Floats:
    """The coefficients of memory, from a few batches: it follows a straight line."""
    sizes, held = [], []
    with at(way):
        for lengths in map(torch.tensor, _WEIGHED):
            call = probe.step_of(layer, probe.make_batch(layer, lengths), "train")
            call()
            sizes.append(_size(Profile.of(way, lengths)))
            held.append(peak_bytes(call, probe.device_of(layer)))
    return fit(np.array(sizes), np.array(held, np.float64))


def _without_threads(way: Way) -> tuple[str, str, str]:
    """Memory does not depend on the number of threads."""
    return way.backend, way.schedule, way.dtype
