"""Becomes ``tools/sitecustomize.py`` of a copy of the repository: Python then imports the package
from that copy.

A folder on the path is not enough, because the import hook of an editable installation comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_SOURCE = str(Path(__file__).resolve().parents[1] / "src")


class _Copy:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, *_: object) -> ModuleSpec | None:
        if name == "raglane":
            return PathFinder.find_spec(name, [_SOURCE])
        return PathFinder.find_spec(name, path) if name.startswith("raglane.") else None


if Path(__file__).name == "sitecustomize.py":
    sys.meta_path.insert(0, _Copy)
