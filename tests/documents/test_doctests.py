"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import zlib

import numpy
import pytest
import torch

import raglane as rl
from raglane.native import missing_kernels

MODULES = ["raglane", *(found.name for found in pkgutil.walk_packages(rl.__path__, "raglane."))]
PARTS = sorted({name.split(".")[1] for name in MODULES if "." in name} | {""})


def _part_of(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("part", PARTS)
def test_examples(part: str) -> None:
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
        result = doctest.testmod(module, globs=known, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        failed += [name] * (result.failed > 0)
    assert failed == []
