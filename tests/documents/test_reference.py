"""The reference in docs/ leaves nothing out: every public name, and the equations of every cell."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raglane
import raglane.cells
from raglane.kernels.dispatch import BACKENDS
from raglane.nn.pooling import POOLINGS
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.schedules import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"
_DIRECTIVE = re.compile(
    r"^\.\. (?:auto)?(?:class|function|exception|data|module):: ([\w.]+)$", flags=re.MULTILINE
)
_CELLS = [
    cell
    for cell in (getattr(raglane.cells, name) for name in raglane.cells.__all__)
    if inspect.isclass(cell)
    and issubclass(cell, raglane.cells.CellSpec)
    and cell is not raglane.cells.CellSpec
]


def _public_modules(name: str = "raglane") -> list[str]:
    """Return the names of a module and of all public modules in it."""
    module = importlib.import_module(name)
    inner = [other for other in module.__all__ if isinstance(getattr(module, other), ModuleType)]
    return [name, *(found for other in inner for found in _public_modules(f"{name}.{other}"))]


def _documented() -> list[str]:
    pages = sorted((DOCS / "api").glob("*.md"))
    return [name for page in pages for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def _find(name: str) -> Any:
    """Return the object of a dotted name."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except AttributeError:  # a module that is not imported into the one above
        return importlib.import_module(name)


def test_each_name_is_documented_once() -> None:
    names = _documented()
    assert len(names) > 50
    assert sorted(set(names)) == sorted(names)


def test_public_modules_are_found() -> None:
    assert set(_public_modules()) >= {
        "raglane",
        "raglane.data",
        "raglane.errors",
        "raglane.nn",
    }


@pytest.mark.parametrize("module", _public_modules())
def test_every_public_name_is_in_the_reference(module: str) -> None:
    documented = _documented()
    objects = [_find(name) for name in documented]
    values = {name: _find(f"{module}.{name}") for name in importlib.import_module(module).__all__}
    missing = [
        name
        for name, value in values.items()
        if f"{module}.{name}" not in documented
        and not isinstance(value, ModuleType)
        and not getattr(value, "__module__", "").startswith("torch.")
        and not any(value is known for known in objects)
    ]
    assert missing == []


@pytest.mark.parametrize("cell", _CELLS)
def test_the_equations_of_each_cell_are_in_the_page_of_cells(cell: type[Any]) -> None:
    behind = (inspect.getdoc(cell) or "").split("::\n\n", maxsplit=1)[1].split("\n")
    end = next(
        (place for place, line in enumerate(behind) if line and not line.startswith("    ")),
        len(behind),
    )
    equations = textwrap.dedent("\n".join(behind[:end])).strip("\n")
    assert "=" in equations
    assert f"```text\n{equations}\n```\n" in (DOCS / "cells.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("documented", "names"),
    [
        (RecurrentLayer, [*SCHEDULES, *BACKENDS]),
        (raglane.nn.SequenceEncoder, POOLINGS),
    ],
)
def test_docstrings_list_all_names_of_a_choice(documented: type, names: Iterable[str]) -> None:
    text = inspect.getdoc(documented) or ""
    assert [name for name in names if f'``"{name}"``' not in text] == []
