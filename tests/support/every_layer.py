"""Every recurrent layer with a cell of its own, small and in float64, and what tests ask of them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from layer_kinds import KINDS, parts
from raglane.kernels.dispatch import BACKENDS
from raglane.native import missing_kernels
from raglane.nn.recurrent.request import one_or_tuple

__all__ = [
    "LAYERS",
    "LENGTHS",
    "PAIRS",
    "READING",
    "D",
    "H",
    "a_batch",
    "a_state",
    "assert_same",
    "build",
    "gradients",
    "parts",
    "results_of",
    "slopes",
]

D, H = 3, 4
LENGTHS = [3, 0, 1, 5, 2]

LAYERS: dict[str, Callable[..., Any]] = {
    **{kind.cell: partial(getattr(rl.nn, kind.layer), **kind.options) for kind in KINDS},
    "lstm projected": partial(rl.nn.LSTM, proj_size=2),
}
"""How each kind of layer is made, by its cell, and an LSTM whose two states differ in size besides."""

PAIRS = [
    (schedule, name)
    for name, backend in BACKENDS.items()
    for schedule in backend.schedules
    if name != "cpu" or missing_kernels() is None
]
"""Every schedule with every backend that runs it here; a backend may still refuse a cell."""


def build(name: str, *args: Any, **options: Any) -> Any:
    """A layer from D to H features in float64."""
    return LAYERS[name](D, H, *args, dtype=torch.float64, **options)


READING = [name for name in LAYERS if build(name).cell.reads_state]
"""The layers in which weights meet the state."""


def a_batch(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    """Random values that want gradients."""
    values = torch.randn(sum(lengths), D, dtype=torch.float64).to(dtype)
    return rl.Ragged.from_flat(values.requires_grad_(), lengths=list(lengths))


def a_state(layer: Any, count: int) -> Any:
    """A random initial state of so many sequences that wants gradients."""
    rows, sizes = layer.num_layers * (2 if layer.bidirectional else 1), layer.state_sizes
    made = [torch.randn(rows, count, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return one_or_tuple(tuple(made))


def results_of(answer: Any) -> list[Tensor]:
    """All tensors of what a layer returned: outputs, final states, and states of every step."""
    output, state, *states = answer
    histories = [part.values for layer in (states[0] if states else []) for part in parts(layer)]
    values = [] if output is None else [output.values if isinstance(output, rl.Ragged) else output]
    return [*values, *parts(state), *histories]


def slopes(result: Tensor) -> Tensor:
    """The gradient of a loss that weighs every number of a result differently."""
    return torch.cos(torch.arange(result.numel(), dtype=torch.float64, device=result.device)).view_as(result)


def gradients(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of that loss, zeros where it does not hang on a tensor."""
    found = torch.autograd.grad(
        [result for result in results if result.requires_grad],
        list(wanted),
        [slopes(result).to(result.dtype) for result in results if result.requires_grad],
        retain_graph=True,
        allow_unused=True,
    )
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found, strict=True)]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-12, what: str = "") -> None:
    """Max-norm relative errors within a tolerance."""
    assert len(ours) == len(theirs)
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{what} {index}"
        assert own.shape == other.shape, where
        assert own.dtype is other.dtype, where
        if other.numel():
            scale = max(1.0, float(other.detach().abs().max()))
            error = float((own.detach() - other.detach()).abs().max()) / scale
            assert error <= tolerance, f"{where}: relative error {error:.2e}"
