"""Programs are run by NumPy here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_interpreter import run_program
from torch import Tensor

from raglane.kernels.program import loop
from raglane.programs.program import Program


def _run(program: Program, *, offsets: Tensor, ascending: bool = True, **given: Any) -> Any:
    arrays = {kind: [part.detach().numpy() for part in parts] for kind, parts in given.items()}
    outputs, finals = run_program(program, offsets.tolist(), ascending=ascending, **arrays)
    return [torch.from_numpy(part) for part in outputs], [torch.from_numpy(part) for part in finals]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.engine, "run", _run)
