"""The page of twenty tasks: its form, and the code that tests/documents/test_documents.py does not
run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from markdown_files import blocks

_PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
_SETUP, *_SECTIONS = re.split(r"^## ", _PAGE, flags=re.MULTILINE)


def _code(text: str) -> str:
    (block,) = blocks(text)
    return block.text


def _section(title: str) -> str:
    return _code(next(section for section in _SECTIONS if section.startswith(title)))


def test_twenty_tasks_have_five_lines_each() -> None:
    assert len(_SECTIONS) == 20
    for section in _SECTIONS:
        lines = [line for line in _code(section).splitlines() if line.strip()]
        assert 1 <= len(lines) <= 5, section
        assert "More: [" in section


def test_exporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(_code(_SETUP), names)
    exec(_section("Exporting"), names)
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_several_processes(tmp_path: Path) -> None:
    """Both ranks get halves of all batches, and end with the same gradients."""
    report = """
rows = torch.tensor([row for batch in batches for row in batch])
total = torch.stack([parameter.grad.sum() for parameter in model.parameters()]).sum()
gathered = [None, None]
torch.distributed.all_gather_object(gathered, (sorted(rows.tolist()), float(total)))
if torch.distributed.get_rank() == 0:
    print(sorted(gathered[0][0] + gathered[1][0]), gathered[0][1] == gathered[1][1])
# The reducer holds the group, whose threads must end before the interpreter does.
del ddp
torch.distributed.destroy_process_group()
"""
    script = tmp_path / "script.py"
    seed = "import torch\n\ntorch.manual_seed(0)\n"
    script.write_text(seed + _code(_SETUP) + _section("Several processes") + report)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 2, 3] True\n"
