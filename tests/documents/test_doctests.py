"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy
import pytest
import torch

import raglane as rl
from raglane.native import missing_kernels

MODULES = ["raglane", *(found.name for found in pkgutil.walk_packages(rl.__path__, "raglane."))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name: str) -> None:
    if name.startswith("raglane.kernels.cpu.") and (reason := missing_kernels()):
        pytest.skip(reason)
    module = importlib.import_module(name)
    # Examples of methods name the class that they belong to, wherever its parts are written.
    known = {"torch": torch, "numpy": numpy, "rl": rl, "Ragged": rl.Ragged, **vars(module)}
    result = doctest.testmod(module, globs=known, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
