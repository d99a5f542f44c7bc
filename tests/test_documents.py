"""The code in the README runs and prints what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import raglane as rl

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0][:40] for block in BLOCKS])
def test_block(block: str) -> None:
    if ">>>" not in block:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})
        return
    example = doctest.DocTestParser().get_doctest(block, {"rl": rl}, "README", str(README), 0)
    assert doctest.DocTestRunner().run(example).failed == 0
