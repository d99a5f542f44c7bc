"""The code in the README and in docs/ runs and prints what it says.

Of a page in docs/, from top to bottom: a block whose first line names a file, such as "text
steps.csv", is written to that file; Python runs, and goes on where the block before ended; in a
block "console", commands of Raglane run, and print what stands below them, where "..." is any text.
All of it happens in a folder of its own.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from commands import Capsys
from made_plans import BRIEF_LOOKS
from markdown_files import Block, blocks
from raglane.cli import main

ROOT = Path(__file__).parents[2]
_CHECKER = doctest.OutputChecker()
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _blocks(path: Path) -> list[Block]:
    return [
        block
        for block in blocks(path.read_text(encoding="utf-8"))
        if block.language in ("python", "console") or block.file
    ]


README = [block.text for block in _blocks(ROOT / "README.md")]
DOCUMENTS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if _blocks(path)]


def test_there_are_blocks() -> None:
    assert len(README) >= 3
    assert {path.stem for path in DOCUMENTS} >= {
        "add-a-cell",
        "methods",
        "data-formats",
        "training",
        "packing",
    }


def _run(block: str, names: dict[str, Any], where: str) -> None:
    if ">>>" not in block:
        exec(compile(block, where, "exec"), names)
        return
    example = doctest.DocTestParser().get_doctest(block, names, where, where, 0)
    # A copy of the names is what the example gets, so what it defines is handed on by hand.
    assert (
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False).failed
        == 0
    )
    names.update(example.globs)


def _run_commands(block: str, capsys: Capsys) -> None:
    """Each line that begins with ``$ raglane`` as a command; the lines up to the next are what it
    prints.
    """
    steps = re.split(r"^\$ raglane ", block, flags=re.MULTILINE)
    assert not steps[0].strip(), "a block of commands begins with one"
    for step in steps[1:]:
        command, _, expected = step.replace("\\\n", "").partition("\n")
        capsys.readouterr()
        code = main(shlex.split(command, comments=True))
        printed = "".join(capsys.readouterr())
        assert code == (2 if "raglane: error: " in expected else 0), printed
        assert _CHECKER.check_output(expected, printed, _FLAGS), (
            f"{command}\nprinted:\n{printed}\nnot:\n{expected}"
        )


@pytest.mark.parametrize("block", README)
def test_block(block: str) -> None:
    _run(block, {"__name__": "readme", "rl": rl}, "README.md")


# The first call of torch.compile imports a module of torch that warns.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT / "docs").with_suffix(""))
)
def test_document(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raglane.planner.calibration._LOOKS", BRIEF_LOOKS)
    names: dict[str, Any] = {"__name__": path.stem}
    for block in _blocks(path):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            _run_commands(block.text, capsys)
        else:
            _run(block.text, names, path.name)
