"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import zlib

import harness
import numpy
import pytest
import torch

import raglane as rl
from made_plans import BRIEF_LOOKS
from raglane.native import missing_kernels

PACKAGES = (rl, harness)
MODULES = [
    name
    for package in PACKAGES
    for name in (
        package.__name__,
        *(found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
]


def _part_of(name: str) -> str:
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "raglane" else package


PARTS = sorted({_part_of(name) for name in MODULES})


@pytest.mark.parametrize("part", PARTS)
def test_examples(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane.planner.calibration._LOOKS", BRIEF_LOOKS)
    failed = []
    for name in MODULES:
        if _part_of(name) != part or name.endswith("__main__"):
            continue
        if name.startswith("raglane.kernels.cpu.") and missing_kernels():
            continue
        module = importlib.import_module(name)
        # Examples of methods name the class that they belong to, wherever its parts are written.
        known = {"torch": torch, "numpy": numpy, "rl": rl, "Ragged": rl.Ragged, **vars(module)}
        torch.manual_seed(zlib.crc32(name.encode()))
        result = doctest.testmod(
            module, globs=known, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        failed += [name] * (result.failed > 0)
    assert failed == []
