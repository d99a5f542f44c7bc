"""The code in the README and in docs/ runs and prints what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

import raglane as rl

ROOT = Path(__file__).parents[2]


def _blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


README = _blocks(ROOT / "README.md")
DOCUMENTS = [path for path in sorted((ROOT / "docs").glob("*.md")) if _blocks(path)]


def test_there_are_blocks() -> None:
    assert len(README) >= 3
    assert {path.stem for path in DOCUMENTS} >= {"add-a-cell", "methods"}


def _run(block: str, names: dict[str, Any], where: str) -> None:
    if ">>>" not in block:
        exec(compile(block, where, "exec"), names)
        return
    example = doctest.DocTestParser().get_doctest(block, names, where, where, 0)
    # A copy of the names is what the example gets, so what it defines is handed on by hand.
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    names.update(example.globs)


@pytest.mark.parametrize("block", README, ids=[block.splitlines()[0][:40] for block in README])
def test_block(block: str) -> None:
    _run(block, {"__name__": "readme", "rl": rl}, "README.md")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_document(path: Path) -> None:
    """Each block goes on where the one before ended."""
    names: dict[str, Any] = {"__name__": path.stem}
    for block in _blocks(path):
        _run(block, names, path.name)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    missing = [name for name in targets if "://" not in name and not (path.parent / name).exists()]
    assert not missing
