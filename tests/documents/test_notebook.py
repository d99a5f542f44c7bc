"""The notebook of the page Start has the cells of the page, and the outputs that they print."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import load

_CHECKER, _FLAGS = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def script() -> Any:
    return load(Path(__file__).parents[2] / "docs" / "notebook.py")


def test_the_cells_are_those_of_the_page_and_print_their_outputs(script: Any) -> None:
    made = json.loads(script.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cells = list(script.cells(script.PAGE.read_text(encoding="utf-8")))
    assert ["".join(entry["source"]) for entry in made] == [
        cell.source.rstrip("\n") for cell in cells
    ]
    assert made[1]["source"] == ["%pip install '..[data,cli,train,demo]'"]
    names: dict[str, Any] = {}
    for entry, cell in zip(made, cells, strict=True):
        shown = "".join(text for output in entry.get("outputs", ()) for text in output["text"])
        if cell.kind == "python":
            assert script.run(cell, names) == shown
        assert _CHECKER.check_output(cell.expected, shown, _FLAGS), cell.source


@pytest.mark.parametrize(
    ("address", "opened"),
    [
        ("", ""),
        ("https://example.org/owner/name", ""),
        (
            "https://github.com/owner/name",
            "https://colab.research.google.com/github/owner/name/blob/main/docs/start.ipynb",
        ),
    ],
)
def test_only_a_repository_on_github_opens_in_colab(script: Any, address: str, opened: str) -> None:
    assert script.colab({"Repository": address} if address else {}) == opened
