"""Compares a model of another package with and without ``rl.accelerate``: numbers, training, files,
time and memory.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl

STEPS = 10  # of the optimizer, whose losses are compared
TIMES = 7
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
CURVE = 1e-8


@dataclass
class Example:
    """A model of a package, and one training step of it."""

    model: nn.Module
    batches: list[Any]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    """The loss of a batch, and outputs: tensors, or lists, tuples and dicts of them."""
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    """Without float64 if the package does not compute in it."""
    fit: Callable[[Any], list[float]] | None = None
    """The package's own training of a model, if it has one: it returns numbers that depend on all
    weights."""


def compare(make: Callable[[], Example]) -> dict[str, Any]:
    """Return the measurements of an example; raise AssertionError if a number is outside its
    bound.
    """
    found: dict[str, Any] = {}
    for dtype in make().dtypes:
        plain, fast = _pair(make, dtype)
        found["layers"] = len(rl.explain(fast.model).replaced)
        assert found["layers"], f"no layer was replaced: {rl.explain(fast.model)}"
        difference = _difference(plain, fast)
        found[f"difference {str(dtype)[6:]}"] = difference
        assert difference <= BOUNDS[dtype], f"{difference:.1e} in {dtype}"
    plain, fast = _pair(make, make().dtypes[0])
    curves = [_curve(example) for example in (plain, fast)]
    assert curves[0][0] != curves[0][-1], "nothing was trained"
    found["curve"] = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(*curves, strict=True))
    if make().dtypes[0] is torch.float64:
        assert found["curve"] <= CURVE, f"losses {curves}"
    _exchange(*_pair(make, torch.float32))
    return found | _costs(*_pair(make, torch.float32))


def _pair(make: Callable[[], Example], dtype: torch.dtype) -> tuple[Example, Example]:
    """Return the example and a copy that is accelerated, without dropout."""
    torch.manual_seed(0)
    plain = make()
    _convert(plain, dtype)
    for module in plain.model.modules():
        for name in ("dropout", "p"):
            if isinstance(getattr(module, name, None), float) and not isinstance(
                module, nn.ModuleDict
            ):
                setattr(module, name, 0.0)
    fast = copy.deepcopy(plain)
    rl.accelerate(fast.model)
    return plain, fast


def _convert(example: Example, dtype: torch.dtype) -> None:
    example.model.to(dtype)
    example.batches = [
        _mapped(batch, lambda part: part.to(dtype) if part.is_floating_point() else part)
        for batch in example.batches
    ]


def _mapped(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a nest of tensors with each tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)({key: _mapped(part, change) for key, part in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(part, change) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(part, change) for part in batch)
    return batch


def _difference(plain: Example, fast: Example) -> float:
    """Return the largest difference of outputs or gradients, relative to the largest output or
    gradient.
    """
    sides = []
    for example in (plain, fast):
        example.model.eval()
        example.model.zero_grad()
        torch.manual_seed(1)
        loss, outputs = example.loss(example.model, example.batches[0])
        loss.backward()
        found: list[Tensor] = []
        _mapped(outputs, found.append)
        grads = [part.grad for part in example.model.parameters() if part.grad is not None]
        sides.append([[part.detach().double() for part in group] for group in (found, grads)])
    worst = 0.0
    for group, other in zip(*sides, strict=True):
        assert group, "no outputs, or no gradients"
        largest = max(float(part.abs().max()) for part in group if part.numel())
        for one, two in zip(group, other, strict=True):
            worst = max(worst, float((one - two).abs().max()) / largest if one.numel() else 0.0)
    return worst


def _curve(example: Example) -> list[float]:
    """Return the losses of a short training."""
    example.model.train()
    if example.fit is not None:
        torch.manual_seed(0)
        return example.fit(example.model)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss, _ = example.loss(example.model, example.batches[step % len(example.batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def _exchange(plain: Example, fast: Example) -> None:
    """Assert that weights pass in both directions, and that the accelerated model can be
    pickled.
    """
    with torch.no_grad():
        for part in fast.model.parameters():
            part.mul_(1.01)
    stored = io.BytesIO()
    torch.save(fast.model.state_dict(), stored)
    stored.seek(0)
    plain.model.load_state_dict(torch.load(stored))
    assert _difference(plain, fast) <= BOUNDS[torch.float32]
    fast.model.load_state_dict(plain.model.state_dict())
    assert _difference(plain, fast) <= BOUNDS[torch.float32]
    try:
        stored_model = pickle.dumps(plain.model)
    except Exception:
        return  # the package's own model cannot be pickled
    fast.model.zero_grad()
    again = copy.copy(fast)
    again.model = pickle.loads(pickle.dumps(fast.model))
    assert len(stored_model) > 0
    assert _difference(fast, again) == 0.0


def _costs(plain: Example, fast: Example) -> dict[str, float]:
    """Return the times of a training step in ms, and the growth of memory in MB."""
    seconds: tuple[list[float], list[float]] = [], []
    memory = [0.0, 0.0]
    for turn in range(TIMES):
        for side, example in enumerate((plain, fast)):
            example.model.train()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            before = _status("VmRSS")
            start = time.perf_counter()
            for batch in example.batches:
                loss, _ = example.loss(example.model, batch)
                loss.backward()
                example.model.zero_grad()
            if turn:
                seconds[side].append((time.perf_counter() - start) / len(example.batches))
            memory[side] = max(memory[side], (_status("VmHWM") - before) / 1024)
    times = [1e3 * statistics.median(part) for part in seconds]
    return {
        "torch ms": times[0],
        "raglane ms": times[1],
        "torch MB": memory[0],
        "raglane MB": memory[1],
    }


def _status(field: str) -> int:
    """Return a figure of the process's memory in KiB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
