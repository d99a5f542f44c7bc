"""Calibrations that are kept between processes: one file per machine, version and layer."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import torch

from raglane._utils import caches
from raglane.native.library import location
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.calibration import Calibration
from raglane.planner.machine import facts
from raglane.planner.model import Floats
from raglane.planner.probe import MODES, PROBES
from raglane.planner.ways import Way

__all__ = ["KIND", "key_of", "load", "save"]

KIND = "plans"
"""The folder among the user's caches."""

_FORMAT = 4


def key_of(layer: RecurrentLayer, ways: Sequence[Way]) -> str:
    """What a calibration is of: machine, versions, the built kernels, the layer without its weights, and the ways.

    The source of modules that are not torch's and not Raglane's counts too, since a cell of one's own changes.
    """
    modules = {type(part) for part in layer.modules()}
    own = [kind for kind in modules if kind.__module__.split(".")[0] not in ("torch", "raglane")]
    kernels = location()
    parts = [
        _FORMAT,
        PROBES,
        facts(["numpy"]),
        None if kernels is None else kernels.stat().st_mtime_ns,
        f"{type(layer).__qualname__}: {layer!r}",
        layer.training,
        {name: [*weight.shape, str(weight.dtype), str(weight.device)] for name, weight in layer.named_parameters()},
        sorted(_source(kind) for kind in own),
        [astuple(way) for way in ways],
        os.environ.get("RAGLANE_ISA"),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def load(key: str, ways: Sequence[Way]) -> Calibration | None:
    """The calibration that was saved under a key; None where there is none, or none that can be read."""
    try:
        content = json.loads(caches.load(KIND, key) or "")
        seconds = {(way, mode): _floats(content["seconds"][f"{way}; {mode}"]) for way in ways for mode in MODES}
        memory = {way: _floats(content["memory"][str(way)]) for way in ways}
        longest = {(way, mode): float(content["longest"][f"{way}; {mode}"]) for way in ways for mode in MODES}
        _floats(list(longest.values()))
        return Calibration(seconds, memory, longest, float(_floats([content["yardstick"]])[0]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def save(key: str, calibration: Calibration) -> None:
    """Keep a calibration, whole or not at all; a folder that cannot be written is passed over."""
    content = {
        "seconds": {f"{way}; {mode}": list(found) for (way, mode), found in calibration.seconds.items()},
        "longest": {f"{way}; {mode}": found for (way, mode), found in calibration.longest.items()},
        "yardstick": calibration.yardstick,
        "memory": {str(way): list(found) for way, found in calibration.memory.items()},
    }
    caches.save(KIND, key, json.dumps(content))


def _floats(numbers: Sequence[float]) -> Floats:
    found = np.array(numbers, np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError("not a list of numbers")
    return found


def _source(kind: type[torch.nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        # Typed into an interpreter: what it was yesterday cannot be told.
        return f"{kind!r} of process {os.getpid()}"
