"""The reference in docs/ leaves nothing out: every public name, and the equations of every cell."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raglane
import raglane.cells

DOCS = Path(__file__).parents[2] / "docs"
_MODULES = ("raglane", "raglane.nn", "raglane.nn.init", "raglane.nn.losses", "raglane.data", "raglane.packing")
_DIRECTIVE = re.compile(r"^\.\. (?:auto)?(?:class|function|exception|data|module):: ([\w.]+)$", flags=re.MULTILINE)
_CELLS = [
    cell
    for cell in (getattr(raglane.cells, name) for name in raglane.cells.__all__)
    if inspect.isclass(cell) and issubclass(cell, raglane.cells.CellSpec) and cell is not raglane.cells.CellSpec
]


def _documented() -> list[str]:
    pages = sorted((DOCS / "api").glob("*.md"))
    return [name for page in pages for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def _find(name: str) -> Any:
    """What a dotted name names."""
    if name in _MODULES or name.count(".") == 0:
        return importlib.import_module(name)
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except AttributeError:
        return importlib.import_module(name)


def test_each_name_is_documented_once() -> None:
    names = _documented()
    assert len(names) > 100
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("module", [*_MODULES, "raglane.errors"])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    documented = _documented()
    objects = [_find(name) for name in documented]
    public = importlib.import_module(module).__all__
    values = {name: _find(f"{module}.{name}") for name in public}
    missing = [
        name
        for name, value in values.items()
        if f"{module}.{name}" not in documented
        and not isinstance(value, ModuleType)
        and not any(value is known for known in objects)
    ]
    assert missing == []


def test_every_module_of_the_package_is_in_the_reference() -> None:
    rooms = {f"raglane.{name}" for name in raglane.__all__ if isinstance(getattr(raglane, name), ModuleType)}
    assert rooms == {name for name in (*_MODULES, "raglane.errors") if name.count(".") == 1}


@pytest.mark.parametrize("cell", _CELLS, ids=lambda cell: cell.__name__)
def test_the_equations_of_each_cell_are_in_the_page_of_cells(cell: type[Any]) -> None:
    behind = (inspect.getdoc(cell) or "").split("::\n\n", maxsplit=1)[1].split("\n")
    end = next(place for place, line in enumerate(behind) if line and not line.startswith("    "))
    equations = textwrap.dedent("\n".join(behind[:end])).strip("\n")
    assert "=" in equations
    assert f"```text\n{equations}\n```\n" in (DOCS / "cells.md").read_text(encoding="utf-8")
