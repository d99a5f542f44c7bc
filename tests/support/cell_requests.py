"""Random requests for any cell, and comparisons of results and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from raglane import schedules
from raglane.cells import CELLS, CellSpec
from raglane.kernels.contract import Request, Result
from raglane.segments import offsets_from_lengths

LENGTHS: dict[str, list[int]] = {
    "no sequences": [],
    "empty ones only": [0, 0],
    "one element": [1],
    "equal": [3, 3, 3, 3],
    "mixed": [1, 0, 7, 2, 2, 0, 5, 1],
    "skewed": [2, 1, 1, 19, 1, 2, 1, 1, 0, 1],
}


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In files that import this fixture, use few lanes: each runs several sequences of a small batch."""
    monkeypatch.setattr(schedules, "DEFAULT_LANES", 3)


def random_weights(
    cell: CellSpec,
    input_size: int,
    hidden_size: int,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Any:
    """Return weights that require gradients, of one layer in one direction."""
    return cell.weights_type(
        *(
            None
            if shape is None
            else torch.randn(shape, dtype=torch.float64, device=device).mul(0.6).to(dtype).requires_grad_()
            for shape in cell.shapes(input_size, hidden_size, bias).values()
        )
    )


def possible(cell: CellSpec, state: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Turn random states into valid ones: the normalizer of an sLSTM is positive."""
    return tuple(part.abs() + 0.5 if name == "n" else part for name, part in zip(cell.states, state, strict=True))


def random_request(
    name: str,
    lengths: list[int],
    layers: int = 1,
    directions: int = 1,
    *,
    sizes: tuple[int, int, int] = (3, 4, 0),
    bias: bool = True,
    weights: tuple[Any, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
    **options: Any,
) -> Request:
    """Return a request with random values, initial states and, by default, weights, which all require gradients."""
    cell, (input_size, hidden_size, proj_size) = CELLS[name], sizes
    states = cell.state_sizes(hidden_size, proj_size)
    host = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    if weights is None:
        weights = tuple(
            random_weights(cell.above() if layer else cell, width, hidden_size, bias, dtype, device)
            for layer, width in enumerate([input_size, *[directions * states[0]] * (layers - 1)])
            for _ in range(directions)
        )

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu").to(weights[0].input)

    return Request(
        cell,
        randn(sum(lengths), input_size).requires_grad_(),
        offsets_from_lengths(host).to(weights[0].input.device),
        host,
        tuple(
            part.requires_grad_()
            for part in possible(cell, [randn(layers * directions, len(lengths), size) for size in states])
        ),
        weights,
        layers=layers,
        directions=directions,
        **options,
    )


def leaves_of(request: Request) -> list[Tensor]:
    """Return the values, initial states and weights of a request."""
    weights = [part for layer in request.weights for part in layer if part is not None]
    return [request.values, *request.state, *weights]


def gradients(result: Result, leaves: list[Tensor], weighting: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of the output and final states; zeros for an unused leaf."""
    parts = [part for part in (result.output, *result.state) if part is not None]
    loss = torch.stack([(part * scale).sum() for part, scale in zip(parts, weighting, strict=True)]).sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def squares(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squares."""
    return torch.stack([part.square().sum() for part in parts]).sum()
