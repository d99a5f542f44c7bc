"""What a layer costs on this machine: measurements of a minute or two, and the model that is fitted to them."""

from __future__ import annotations

import statistics
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
_LONGEST = 0.3
# How often all are measured: what else the machine did at one time, it hardly did at both.
_TURNS = 2
# Bytes that the largest probes hold: more than an allocator keeps.
_LARGE = 160e6
# Batches of which memory is measured.
_WEIGHED = ([5] * 12, [30], [40, *[4] * 7], [12] * 30)


@dataclass(frozen=True)
class Calibration:
    """The coefficients of every way.

    Attributes:
        seconds: by way and mode, those of :func:`~raglane.planner.model.features`.
        yardstick: seconds of the yardstick, the median while the layer was measured, at the most threads.
        memory: by way, for a call, an element computed and a sequence, the bytes of a training step.
    """

    seconds: dict[tuple[Way, str], Floats]
    memory: dict[Way, Floats]
    yardstick: float = 1.0

    def bytes_of(self, way: Way, profile: Profile) -> int:
        """The bytes that a training step of a batch holds at its peak, without weights that were there before."""
        return int(_size(profile) @ self.memory[way])

    def features(self, way: Way, profile: Profile) -> Floats:
        """What :attr:`seconds` has coefficients of."""
        return features(way, profile, self.bytes_of(way, profile))


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
    known: dict[tuple[str, str, str], Floats] = {}
    for way in ways:
        # Memory does not depend on the number of threads.
        key = way.backend, way.schedule, way.dtype
        if key not in known:
            known[key] = _weigh(way, layers[way.dtype])
    memory = {way: known[way.backend, way.schedule, way.dtype] for way in ways}
    measured = [_Measured(way, mode) for way in ways for mode in MODES]
    yardstick = probe.Yardstick(probe.device_of(layer))
    looks: dict[int, list[float]] = {way.threads: [] for way in ways}
    for turn in range(_TURNS):
        for place, one in enumerate(measured):
            # The reference kernel is measured on less, since nobody takes it for its speed.
            is_slow = one.way.backend == "reference"
            groups = PROBES[:3] if is_slow else (*PROBES, probe.large_probes(_LARGE / memory[one.way][1]))
            with at(one.way):
                looks[one.way.threads] += _measure(one, layers[one.way.dtype], groups, yardstick)
            say((turn + (place + 1) / len(measured)) / _TURNS)
    usual = {threads: statistics.median(found) for threads, found in looks.items()}
    found = Calibration({}, memory, usual[max(usual)])
    for one in measured:
        seen = np.array([found.features(one.way, profile) for profile in one.profiles])
        found.seconds[one.way, one.mode] = fit(seen, usual[one.way.threads] * np.array(one.times))
    return found


@dataclass
class _Measured:
    """The probes of one way and mode so far: of each the shortest time, in proportion to the yardstick."""

    way: Way
    mode: str
    profiles: list[Profile] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def expects(self, profile: Profile) -> float:
        """The most that a call will take: no more in proportion than one before, by steps or by rows."""
        return min(
            (
                taken * max(profile.length / known.length, profile.computed / known.computed)
                for taken, known in zip(self.times, self.profiles, strict=True)
            ),
            default=0.0,
        )

    def add(self, profile: Profile, taken: float) -> None:
        """Note a time; of a probe that is known already, the shorter one stays."""
        for place, known in enumerate(self.profiles):
            if known.equals(profile):
                self.times[place] = min(self.times[place], taken)
                return
        self.profiles.append(profile)
        self.times.append(taken)


def _measure(
    one: _Measured, layer: RecurrentLayer, groups: Sequence[Sequence[list[int]]], yardstick: probe.Yardstick
) -> list[float]:
    """Time the probes of one way and mode, group by group, but for those that would take too long.

    Returns:
        What the yardstick said meanwhile.
    """
    looks = [yardstick.look()]
    for group in groups:
        lengths = [torch.tensor(each) for each in group]
        profiles = [Profile.of(one.way, each) for each in lengths]
        kept = [place for place in range(len(group)) if one.expects(profiles[place]) * looks[-1] <= _LONGEST]
        if kept:
            batches = [probe.make_batch(layer, lengths[place]) for place in kept]
            calls = [probe.step_of(layer, batch, one.mode) for batch in batches]
            times = probe.time_in_turns(calls, probe.device_of(layer))
            looks.append(yardstick.look())
            for place, seconds in zip(kept, times, strict=True):
                one.add(profiles[place], 2 * seconds / (looks[-1] + looks[-2]))
    return looks


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
