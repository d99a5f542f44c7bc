"""Measures a layer on this machine for a minute or two, fits the model of time, and caches it."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from raglane._utils import caches
from raglane.native.library import location
from raglane.native.machine import facts
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import probe
from raglane.planner.model import Floats, LayerWay, Profile, at, cast, features, fit
from raglane.planner.probe import MODES, PROBES, peak_bytes

# The folder in the user's cache folder.
_KIND = "plans"
# The version of its files.
_FORMAT = 5
# A way that takes this many times as long as the fastest, in most probes of every size, is measured
# on short calls.
_BEHIND = 2.0
# The number of probes that are timed in turns. They have similar sizes: after large ones, the
# allocator returns memory to the system, and small ones would pay for new pages.
_TURNS = 4
# Bytes of the largest probes: more than an allocator keeps.
_LARGE = 160e6
# Calls this many times as long as the longest measured one are extrapolated.
_REACH = 3.0
# The longest call in seconds, and the most rounds, of three passes; ways that cannot be the fastest
# repeat the first. A median of three ignores a pass that other programs disturbed, in its calls or
# in its yardsticks.
_LOOKS = ((0.3, 6), (0.5, 15), (0.5, 15))
# A saved measurement is made again if the yardstick now takes less than this share of its time then.
_DISTURBED = 0.67
# The logarithm of a ratio of two looks at the yardstick that is noise.
_NOISE = 0.1
# Lengths of the batches whose memory is measured.
_WEIGHED = ([5] * 12, [30], [40, *[4] * 7], [12] * 30)


class Calibration(NamedTuple):
    """The coefficients of time and memory of every way, and the longest measured call.

    ``spread`` has a row of coefficients per timing of a probe: those fitted without this probe,
    times its measured time over the predicted one. Quantiles of their predictions are the
    jackknife+ interval (Barber, Candes, Ramdas and Tibshirani 2021), which widens with the noise of
    timings, the residuals of the fit and the distance from the probes.
    """

    seconds: dict[tuple[LayerWay, str], Floats]
    spread: dict[tuple[LayerWay, str], Floats]
    memory: dict[LayerWay, Floats]
    longest: dict[tuple[LayerWay, str], float]
    yardstick: float = 1.0

    def bytes_of(self, way: LayerWay, profile: Profile) -> int:
        """Return the peak memory of a training step in bytes, without the weights."""
        return int(_size(profile) @ self.memory[way])

    def reaches(self, way: LayerWay, mode: str, seconds: Floats, weights: Floats) -> bool:
        """Return True if most of the time is in calls that are not much longer than the longest
        measured one.
        """
        times = seconds * weights
        return bool(times[seconds <= _REACH * self.longest[way, mode]].sum() >= times.sum() / 2)

    def features(self, way: LayerWay, profile: Profile) -> Floats:
        """Return the features that the coefficients in :attr:`seconds` belong to."""
        return features(way, profile, self.bytes_of(way, profile))


def _size(profile: Profile) -> Floats:
    """Return the features of memory: a constant, computed elements, sequences."""
    return np.array([1, profile.computed, profile.count], np.float64)


def calibrate(
    layer: RecurrentLayer, ways: Sequence[LayerWay], progress: Callable[[float], object]
) -> Calibration:
    """Measure a layer on a few batches in every way, for longer in those that can be the
    fastest.
    """
    progress(0.0)
    layers = {way.dtype: cast(layer, way.dtype) for way in ways}
    memory = _weigh_all(ways, layers)
    measurements = [_ProbeTimes(way, mode) for way in ways for mode in MODES]
    yardstick = probe.Yardstick(layers[ways[0].dtype], ways[0])
    looks: dict[int, list[float]] = {way.threads: [] for way in ways}
    slow = _slow(ways)
    able = measurements
    ahead = list[_ProbeTimes]()
    for done, look in enumerate(_LOOKS):
        for number, measurement in enumerate(able):
            progress((done + number / len(able)) / len(_LOOKS))
            way = measurement.way
            probes = PROBES[:3]
            if way not in slow:
                probes = (*PROBES, probe.large_probes(_LARGE / max(memory[way][1], 1e-9)))
            effort = look if measurement in ahead else _LOOKS[0]
            with at(way):
                looks[way.threads] += _measure(
                    measurement, layers[way.dtype], _take_turns(way, probes), effort, yardstick
                )
        progress((done + 1) / len(_LOOKS))
        able = [measurement for measurement in able if measurement.way not in slow]
        ahead = _ahead(able)
    usual = {threads: statistics.median(times) for threads, times in looks.items()}
    calibration = Calibration({}, {}, memory, {}, usual[max(usual)])
    for measurement in measurements:
        measurement.fit_to(calibration, usual[measurement.way.threads])
    return calibration


def scaled_to_now(
    calibration: Calibration, layer: RecurrentLayer, ways: Sequence[LayerWay]
) -> Calibration | None:
    """Return a cached calibration at the current speed of the machine, by a look at the yardstick.

    None if the machine is much faster now: other programs disturbed the measurement.
    """
    most_threads = max(ways, key=lambda way: way.threads)
    with at(most_threads):
        yardstick = probe.Yardstick(cast(layer, ways[0].dtype), ways[0])
        factor = yardstick.look() / calibration.yardstick
    if factor < _DISTURBED:
        return None
    if abs(math.log(factor)) < _NOISE:
        return calibration
    return calibration._replace(
        seconds={pair: factor * numbers for pair, numbers in calibration.seconds.items()},
        spread={pair: factor * numbers for pair, numbers in calibration.spread.items()},
        longest={pair: factor * seconds for pair, seconds in calibration.longest.items()},
        yardstick=factor * calibration.yardstick,
    )


def _weigh_all(
    ways: Sequence[LayerWay], layers: dict[str, RecurrentLayer]
) -> dict[LayerWay, Floats]:
    """Measure the memory of all ways; it does not depend on the number of threads."""
    memory: dict[LayerWay, Floats] = {}
    for way in ways:
        same = way._replace(threads=0)
        if same not in memory:
            memory[same] = _weigh(way, layers[way.dtype])
    return {way: memory[way._replace(threads=0)] for way in ways}


def _slow(ways: Sequence[LayerWay]) -> set[LayerWay]:
    """Return the ways that are measured briefly: the reference kernel is never the fastest if
    another backend supports the layer.
    """
    backends = {way.backend for way in ways}
    return {way for way in ways if way.backend == "reference" and len(backends) > 1}


@dataclass(eq=False)
class _ProbeTimes:
    """The probes of one way and mode, by their lengths, with the times of each in seconds and in
    yardsticks.
    """

    way: LayerWay
    mode: str
    profiles: dict[tuple[int, ...], Profile] = field(default_factory=dict)
    timed: dict[tuple[int, ...], list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """The way without its number of threads, and the mode."""
        return self.way.backend, self.way.schedule, self.way.dtype, self.mode

    def expects(self, profile: Profile) -> float:
        """Return an upper bound of the time of a call, in proportion to a measured one, by steps or
        by rows.
        """
        return min(
            (
                self.time(lengths)
                * max(profile.length / measured.length, profile.computed / measured.computed)
                for lengths, measured in self.profiles.items()
            ),
            default=0.0,
        )

    def add(
        self, lengths: Sequence[int], profile: Profile, seconds: float, yardstick: float
    ) -> None:
        """Record the time of a probe."""
        key = tuple(lengths)
        self.profiles[key] = profile
        self.timed.setdefault(key, []).append((seconds, seconds / yardstick))

    def time(self, lengths: tuple[int, ...]) -> float:
        """Return the median time of a probe in yardsticks."""
        return statistics.median(taken for _, taken in self.timed[lengths])

    def fit_to(self, calibration: Calibration, yardstick: float) -> None:
        """Add the coefficients that fit the times of all probes."""
        pair = self.way, self.mode
        seen = [calibration.features(self.way, profile) for profile in self.profiles.values()]
        seconds = yardstick * np.array([self.time(lengths) for lengths in self.profiles])
        calibration.seconds[pair] = fit(np.array(seen), seconds)
        calibration.spread[pair] = self.spread(np.array(seen), seconds)
        calibration.longest[pair] = float(seconds.max())

    def spread(self, seen: Floats, seconds: Floats) -> Floats:
        """Return the coefficients of ``Calibration.spread``, ``(timings, features)``."""
        rows = []
        for index, timed in enumerate(self.timed.values()):
            without = fit(np.delete(seen, index, 0), np.delete(seconds, index))
            predicted = seen[index] @ without
            rows += [without * (taken / predicted) for taken, _ in timed if predicted > 0]
        return np.array(rows).reshape(-1, seen.shape[1])


def _ahead(measured: Sequence[_ProbeTimes]) -> list[_ProbeTimes]:
    """Return those that can be the fastest: near the fastest time in half of the probes of one
    size.
    """
    fastest: dict[tuple[object, ...], float] = {}
    for measurement in measured:
        for lengths in measurement.timed:
            key = measurement.mode, measurement.way.dtype, lengths
            fastest[key] = min(fastest.get(key, math.inf), measurement.time(lengths))

    def is_near(measurement: _ProbeTimes, group: Sequence[list[int]]) -> bool:
        timed = [lengths for lengths in map(tuple, group) if lengths in measurement.timed]
        ratios = [
            measurement.time(lengths) / fastest[measurement.mode, measurement.way.dtype, lengths]
            for lengths in timed
        ]
        return bool(ratios) and statistics.median_low(ratios) < _BEHIND

    near = {
        measurement.kind
        for measurement in measured
        if any(is_near(measurement, group) for group in PROBES)
    }
    return [measurement for measurement in measured if measurement.kind in near]


def _take_turns(way: LayerWay, probes: Sequence[Sequence[list[int]]]) -> list[Sequence[list[int]]]:
    """Return groups of probes to time in turns: the smallest, then groups with similar numbers of
    elements.
    """
    rest = [lengths for group in probes[1:] for lengths in group]
    rest.sort(key=lambda lengths: Profile.of(way, torch.tensor(lengths)).computed)
    return [probes[0], *(rest[start : start + _TURNS] for start in range(0, len(rest), _TURNS))]


def _measure(
    measurement: _ProbeTimes,
    layer: RecurrentLayer,
    groups: Sequence[Sequence[list[int]]],
    look: tuple[float, int],
    yardstick: probe.Yardstick,
) -> list[float]:
    """Time the probes of one way and mode, except those that would take too long; return
    yardsticks.
    """
    looks = [yardstick.look()]
    for group in groups:
        profiles = [Profile.of(measurement.way, torch.tensor(lengths)) for lengths in group]
        # The shortest first, because the time of a group is limited.
        order = sorted(range(len(group)), key=lambda index: measurement.expects(profiles[index]))
        calls = [
            probe.step_of(layer, probe.make_batch(layer, group[index]), measurement.mode, look[1])
            for index in order
        ]
        # The smallest are all measured, even on a slow machine: an unmeasured kind of batch would
        # seem free.
        longest = math.inf if group is groups[0] else look[0]
        times = probe.time_in_turns(calls, probe.device_of(layer), look[1], longest)
        looks.append(yardstick.look())
        for index, seconds in zip(order, times, strict=False):
            # Other programs can only make a yardstick too long, so the shorter one is used.
            measurement.add(group[index], profiles[index], seconds, min(looks[-2:]))
        if len(times) < len(group):
            break
    return looks


def _weigh(way: LayerWay, layer: RecurrentLayer) -> Floats:
    """Fit the linear model of memory to a few batches."""
    sizes = []
    peaks = []
    with at(way):
        for lengths in map(torch.tensor, _WEIGHED):
            call = probe.step_of(layer, probe.make_batch(layer, lengths), "train")
            call()
            sizes.append(_size(Profile.of(way, lengths)))
            peaks.append(peak_bytes(call, probe.device_of(layer)))
    return fit(np.array(sizes), np.array(peaks, np.float64))


def key_of(layer: RecurrentLayer, ways: Sequence[LayerWay]) -> str:
    """Return the cache key of a calibration: machine, versions, kernels, the layer without weights,
    and the ways.
    """
    modules = {type(module) for module in layer.modules()}
    custom = [kind for kind in modules if kind.__module__.split(".")[0] not in ("torch", "raglane")]
    kernels = location()
    identity = [
        _FORMAT,
        PROBES,
        facts(["numpy"]),
        None if kernels is None else kernels.stat().st_mtime_ns,
        f"{type(layer).__qualname__}: {layer!r}",
        layer.training,
        {
            name: [*weight.shape, str(weight.dtype), str(weight.device)]
            for name, weight in layer.named_parameters()
        },
        sorted(_source(kind) for kind in custom),
        [tuple(way) for way in ways],
        os.environ.get("RAGLANE_ISA"),
        os.environ.get("RAGLANE_THREADS"),
    ]
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]


def load(key: str, ways: Sequence[LayerWay]) -> Calibration | None:
    """Return the cached calibration of a key, or None if it is missing or damaged."""
    try:
        content = json.loads(caches.load(_KIND, key) or "")
        names = {(way, mode): f"{way}; {mode}" for way in ways for mode in MODES}
        seconds = {pair: _floats(content["seconds"][name]) for pair, name in names.items()}
        spread = {
            pair: _floats(content["spread"][name]).reshape(-1, len(seconds[pair]))
            for pair, name in names.items()
        }
        memory = {way: _floats(content["memory"][str(way)]) for way in ways}
        longest = {pair: float(content["longest"][name]) for pair, name in names.items()}
        _floats(list(longest.values()))
        yardstick = float(_floats([content["yardstick"]])[0])
        return Calibration(seconds, spread, memory, longest, yardstick)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def save(key: str, calibration: Calibration) -> None:
    """Cache a calibration; a folder that cannot be written is ignored."""
    content = {
        "seconds": {
            f"{way}; {mode}": list(numbers) for (way, mode), numbers in calibration.seconds.items()
        },
        "spread": {
            f"{way}; {mode}": numbers.ravel().tolist()
            for (way, mode), numbers in calibration.spread.items()
        },
        "longest": {
            f"{way}; {mode}": numbers for (way, mode), numbers in calibration.longest.items()
        },
        "yardstick": calibration.yardstick,
        "memory": {str(way): list(numbers) for way, numbers in calibration.memory.items()},
    }
    caches.save(_KIND, key, json.dumps(content))


def _floats(numbers: Sequence[float]) -> Floats:
    array = np.array(numbers, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError("not a list of numbers")
    return array


def _source(kind: type[torch.nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        # Defined in an interactive session: the source is not available, so the key holds for this
        # process only.
        return f"{kind!r} of process {os.getpid()}"
