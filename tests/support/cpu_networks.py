"""Networks in float64 for the tests of the cpu kernels, with the results of the reference
backend.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.contract import Backend, Request
from raglane.native import missing_kernels
from raglane.native.library import cell_facts, library
from raglane.segments import offsets_from_lengths

if missing := missing_kernels():
    pytest.skip(missing, allow_module_level=True)
LIBRARY = library()
MATRIX_CELLS = tuple(name for name, facts in cell_facts().items() if not facts.is_elementwise)
ELEMENTWISE_CELLS = tuple(name for name, facts in cell_facts().items() if facts.is_elementwise)
KERNEL_CELLS = (*MATRIX_CELLS, *ELEMENTWISE_CELLS)

FOLD, PREPARE, TEAM, NO_TEAM, POISON = 2, 4, 8, 16, 1
DIVISIONS = {
    "fold": FOLD | NO_TEAM,
    "prepare": PREPARE | NO_TEAM,
    "team": PREPARE | TEAM,
    "team-fold": FOLD | TEAM,
}
# More elements than the kernels pack at a time: 512.
MANY = [90, 0, 1, 120, 50, *[7] * 110]
LENGTHS = {
    "mixed": [3, 0, 1, 7, 2],
    "equal": [5] * 4,
    "one long": [25] + [2] * 29,
    "all empty": [0, 0],
    "none": [],
    "one": [1],
}
# (D, H, P): most are no multiple of a vector's width.
SIZES = [
    (3, 1, 0),
    (5, 17, 0),
    (1, 3, 0),
    (4, 33, 0),
    (7, 100, 0),
    (16, 64, 0),
    (5, 17, 6),
    (3, 8, 40),
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Network:
    """A network and a batch, in float64."""

    cell: CellSpec
    values: Tensor
    lengths: Tensor
    state: tuple[Tensor, ...]
    weights: tuple[Any, ...]
    layers: int
    directions: int

    def map(self, f: Callable[[Tensor], Tensor]) -> Network:
        weights = tuple(type(w)(*(None if p is None else f(p) for p in w)) for w in self.weights)
        return replace(
            self, values=f(self.values), state=tuple(f(s) for s in self.state), weights=weights
        )

    def tensors(self) -> list[Tensor]:
        return [self.values, *self.state, *(p for w in self.weights for p in w if p is not None)]

    def only(self, sequence: int) -> Network:
        """Return the network on a batch of one of the sequences."""
        begin, end = offsets_from_lengths(self.lengths).tolist()[sequence : sequence + 2]
        rows = slice(sequence, sequence + 1)
        state = tuple(part[:, rows] for part in self.state)
        return replace(self, values=self.values[begin:end], lengths=self.lengths[rows], state=state)

    def request(self, **options: Any) -> Request:
        return Request(
            self.cell,
            self.values,
            offsets_from_lengths(self.lengths),
            self.lengths,
            self.state,
            self.weights,
            layers=self.layers,
            directions=self.directions,
            **options,
        )

    def run(
        self, backend: Backend, need_output: bool = True, need_states: bool = False
    ) -> list[Tensor]:
        result = backend.run(
            self.request(need_output=need_output, need_states=need_states), "lanes"
        )
        states = [part for layer in result.states or () for part in layer]
        return [part for part in (result.output, *result.state, *states) if part is not None]


def make(
    cell: str,
    lengths: list[int],
    sizes: tuple[int, int, int] = (5, 17, 0),
    layers: int = 1,
    directions: int = 1,
    bias: bool = True,
) -> Network:
    spec, (features, hidden, projection) = CELLS[cell], sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) / math.sqrt(shape[-1])

    width = projection or hidden
    weights = []
    for layer in range(layers):
        shapes = spec.shapes(features if layer == 0 else directions * width, hidden, bias)
        for _ in range(directions):
            parts = [None if shape is None else normal(*shape) for shape in shapes.values()]
            if projection:  # gates read the projected state
                parts = [
                    parts[0],
                    normal(shapes["weight_hh"][0], width),  # type: ignore[index]
                    *parts[2:],
                    normal(projection, hidden),
                ]
            weights.append(spec.weights_type(*parts))
    state = tuple(
        torch.randn(layers * directions, len(lengths), size, dtype=torch.float64)
        for size in spec.state_sizes(hidden, projection)
    )
    values = torch.randn(sum(lengths), features, dtype=torch.float64)
    return Network(
        spec,
        values,
        torch.tensor(lengths, dtype=torch.int64),
        state,
        tuple(weights),
        layers,
        directions,
    )


def with_gradients(network: Network, backend: Backend, need_states: bool = False) -> list[Tensor]:
    """Return outputs, final states, all states if needed, and all gradients of a fixed loss."""
    network = network.map(lambda t: t.detach().clone().requires_grad_())
    results = network.run(backend, need_states=need_states)
    pushed = [
        torch.linspace(-1, 2, max(1, r.numel()))[: r.numel()].view(r.shape).to(r.dtype)
        for r in results
    ]
    # If only c recurs, the initial h is used only for empty sequences.
    grads = torch.autograd.grad(results, network.tensors(), pushed, materialize_grads=True)
    return [r.detach() for r in results] + list(grads)


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape
        if a.numel():
            error = ((a.double() - b).abs().max() / (1 + b.abs().max())).item()
            assert error < tolerance, (index, error)


def assert_same_bits(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), index


@cache
def truth(
    cell: str,
    lengths: str,
    sizes: tuple[int, int, int],
    directions: int,
    rounded: bool,
    need_states: bool = False,
) -> tuple[Network, list[Tensor]]:
    """Return a network and its results on the reference backend; computed once for all instruction
    sets.
    """
    # Seeded here, so that numbers do not depend on the order of tests: in bfloat16, relu near 0
    # changes gradients.
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(repr((cell, lengths, sizes, directions, rounded)).encode()))
        network = make(
            cell, MANY if lengths == "many" else LENGTHS[lengths], sizes, directions=directions
        )
    if rounded:
        network = network.map(lambda t: t.bfloat16().double())
    return network, with_gradients(network, reference.BACKEND, need_states)


def leaf_if(chosen: Tensor, tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() if tensor is chosen else tensor


Use = Callable[..., None]
"""The fixture ``use``, which sets the instruction set and the division of the work."""


class Encoded(torch.utils.data.Dataset[Tensor]):
    """Sequences that a DataLoader worker encodes with a layer."""

    def __init__(self, layer: torch.nn.Module, sequences: list[Tensor]) -> None:
        self.layer, self.sequences = layer, sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.layer(self.sequences[index])[0]
        return out


def sums_between_bfloat16() -> tuple[Tensor, Tensor]:
    """Return float32 sums ``(M,)`` that bfloat16 must round, and their bfloat16 parts ``(M, 2)``.

    They cover the gaps between all bfloat16 numbers of one binade, of both signs, with the middle
    of each gap (a tie).
    """
    large = torch.arange(128, 256).repeat_interleave(64) / 128.0
    small = torch.arange(64).repeat(128) / 4096.0
    parts = torch.stack([torch.cat([large, -large]), torch.cat([small, -small])], 1)
    assert torch.equal(parts.bfloat16().float(), parts)
    return parts.sum(1), parts.bfloat16()
