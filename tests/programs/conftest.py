"""Programs run by NumPy, where a test asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from program_interpreter import run_program
from raglane.kernels.cpu import programs
from raglane.programs.program import Program


def _run(program: Program, *, offsets: Tensor, ascending: bool = True, over: Any = None, **given: Any) -> Any:
    arrays = {kind: [part.detach().numpy() for part in parts] for kind, parts in given.items()}
    outputs, finals = run_program(program, offsets.tolist(), ascending=ascending, **arrays)
    for place, part in (over or {}).items():
        part.copy_(torch.from_numpy(outputs[place]))
    return [torch.from_numpy(part) for part in outputs], [torch.from_numpy(part) for part in finals]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "run", _run)
