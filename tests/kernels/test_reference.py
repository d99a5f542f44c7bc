"""The reference kernel: every cell on every schedule against one sequence at a time, in float64.

Where PyTorch has the cell, its module runs the sequences; else the formulas of :mod:`naive_cells` do.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cell_requests import LENGTHS, few_lanes, gradients, largest_error, leaves_of, random_request  # noqa: F401
from naive_cells import naive_network
from raglane.cells import CELLS, Weights
from raglane.kernels.contract import Request, Result, Traits
from raglane.kernels.reference import BACKEND
from raglane.schedules import SCHEDULES

D, H = 3, 4

TORCH_MODULES: dict[str, Any] = {
    "rnn_tanh": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="tanh", **options),
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}
# The naive formulas are slow: fewer combinations of layers and directions for the cells that need them.
NETWORKS = [
    (name, layers, directions)
    for name in CELLS
    for layers, directions in ([(1, 1), (1, 2), (2, 1), (2, 2)] if name in TORCH_MODULES else [(1, 1), (2, 2)])
]


class Truth(NamedTuple):
    """A request, its correct result, and the gradients of a weighted sum."""

    request: Request
    result: Result
    weighting: list[Tensor]
    gradients: list[Tensor]


@cache
def truth(
    name: str,
    lengths: tuple[int, ...],
    layers: int,
    directions: int,
    device: torch.device,
    bias: bool = True,
    proj_size: int = 0,
) -> Truth:
    """Compute a case once for all schedules, from its own seed."""
    torch.manual_seed(zlib.crc32(repr((name, lengths, layers, directions, bias, proj_size)).encode()))
    shape: dict[str, Any] = {"layers": layers, "directions": directions, "sizes": (D, H, proj_size)}
    if name in TORCH_MODULES:
        module = TORCH_MODULES[name](
            D,
            H,
            layers,
            bias=bias,
            bidirectional=directions == 2,
            device=device,
            dtype=torch.float64,
            **({"proj_size": proj_size} if proj_size else {}),
        )
        request = random_request(name, list(lengths), **shape, weights=_weights(module))
        result = _one_at_a_time(module, request)
    else:
        request = random_request(name, list(lengths), **shape, bias=bias, device=device)
        result = naive_network(request)
    assert result.output is not None
    weighting = [torch.randn_like(part) for part in (result.output, *result.state)]
    return Truth(request, result, weighting, gradients(result, leaves_of(request), weighting))


def _weights(module: Any) -> tuple[Weights, ...]:
    suffixes = [
        f"_l{layer}{direction}"
        for layer in range(module.num_layers)
        for direction in ("", "_reverse")[: 1 + module.bidirectional]
    ]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    given = dict(module.named_parameters())
    return tuple(Weights(*(given.get(name + suffix) for name in names)) for suffix in suffixes)  # type: ignore[arg-type]


def _one_at_a_time(module: Any, request: Request) -> Result:
    """Run each sequence by PyTorch, except empty ones, for which it raises."""
    outputs: list[Tensor] = []
    finals: list[list[Tensor]] = [[] for _ in request.state]
    bounds = request.offsets.tolist()
    for sequence in range(len(bounds) - 1):
        values = request.values[bounds[sequence] : bounds[sequence + 1]]
        state = tuple(part[:, sequence] for part in request.state)
        if values.shape[0]:
            output, final = module(values, state if len(state) > 1 else state[0])
            outputs.append(output)
            state = final if isinstance(final, tuple) else (final,)
        for collected, part in zip(finals, state, strict=True):
            collected.append(part)
    size = request.directions * request.state[0].shape[2]
    return Result(
        torch.cat([request.values.new_zeros(0, size), *outputs]),
        tuple(
            torch.stack(parts, 1) if parts else initial for parts, initial in zip(finals, request.state, strict=True)
        ),
    )


def _assert_true(wanted: Truth, schedule: str) -> None:
    ours = BACKEND.run(wanted.request, schedule)
    for mine, theirs in zip((ours.output, *ours.state), (wanted.result.output, *wanted.result.state), strict=True):
        assert mine is not None
        assert theirs is not None
        assert largest_error(mine, theirs) < 1e-12
    leaves = leaves_of(wanted.request)
    for mine, theirs in zip(gradients(ours, leaves, wanted.weighting), wanted.gradients, strict=True):
        assert largest_error(mine, theirs) < 1e-12


def test_it_has_every_schedule_and_every_cell_is_compared() -> None:
    assert BACKEND.schedules == tuple(SCHEDULES)
    assert {name for name, _, _ in NETWORKS} == set(CELLS)
    for cell in CELLS.values():
        traits = Traits(cell, 3, 4, torch.float64, torch.device("cpu"), need_states=True)
        assert all(BACKEND.refuses(traits, schedule) is None for schedule in SCHEDULES)


@pytest.mark.parametrize("lengths", LENGTHS.values())
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "layers", "directions"), NETWORKS)
def test_one_sequence_at_a_time(
    name: str, schedule: str, layers: int, directions: int, lengths: list[int], device: torch.device
) -> None:
    _assert_true(truth(name, tuple(lengths), layers, directions, device), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "bias", "proj_size"), [*((name, False, 0) for name in CELLS), ("lstm", True, 2), ("lstm", False, 3)]
)
def test_projection_and_no_bias(name: str, schedule: str, bias: bool, proj_size: int, device: torch.device) -> None:
    _assert_true(truth(name, (2, 0, 3, 1), 2, 2, device, bias, proj_size), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_cannot_overflow(schedule: str, device: torch.device) -> None:
    # This state grows tenfold per step: one sequence of 400 steps of zeros makes 400 steps of padding for the other,
    # whose state would pass float64's largest number there, and its zero gradient would become NaN.
    module: Any = nn.RNN(D, H, nonlinearity="relu", bias=False, device=device, dtype=torch.float64)
    with torch.no_grad():
        module.weight_hh_l0.copy_(10 * torch.eye(H))
        module.weight_ih_l0.fill_(1.0)
    request = random_request("rnn_relu", [2, 400], weights=_weights(module))
    with torch.no_grad():
        request.values[:2] = 1.0
        request.values[2:] = 0.0
        request.state[0].zero_()
    result = _one_at_a_time(module, request)
    assert result.output is not None
    weighting = [torch.randn_like(part) for part in (result.output, *result.state)]
    _assert_true(Truth(request, result, weighting, gradients(result, leaves_of(request), weighting)), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_every_state(name: str, schedule: str, device: torch.device) -> None:
    """All states of all steps and layers with their gradients, with and without output."""
    wanted = _histories(name, device)
    for need_output in (True, False):
        request = replace(wanted.request, need_states=True, need_output=need_output)
        result = BACKEND.run(request, schedule)
        assert (result.output is not None) == need_output
        assert BACKEND.run(replace(request, need_states=False), schedule).states is None
        assert result.states is not None
        assert wanted.result.states is not None
        for mine, theirs in zip(_flat(result), _flat(wanted.result), strict=True):
            assert largest_error(mine, theirs) < 1e-12
        again = Result(None, tuple(_flat(result)))
        for mine, theirs in zip(gradients(again, leaves_of(request), wanted.weighting), wanted.gradients, strict=True):
            assert largest_error(mine, theirs) < 1e-12


def _flat(result: Result) -> list[Tensor]:
    return [part for layer in result.states or () for part in layer]


@cache
def _histories(name: str, device: torch.device) -> Truth:
    torch.manual_seed(zlib.crc32(name.encode()))
    request = random_request(name, [2, 0, 4, 1], 2, 2, device=device)
    result = naive_network(request)
    weighting = [torch.randn_like(part) for part in _flat(result)]
    again = Result(None, tuple(_flat(result)))
    return Truth(request, result, weighting, gradients(again, leaves_of(request), weighting))


def test_dropout_acts_between_layers_in_training_only(device: torch.device) -> None:
    request = random_request("gru", LENGTHS["mixed"], 2, device=device, dropout=1.0)
    second = request.weights[1].input
    plain = BACKEND.run(request, "packed")
    dropped = BACKEND.run(replace(request, training=True), "packed")
    assert plain.output is not None
    assert dropped.output is not None
    # The first layer's states are whole, and the second layer reads zeros.
    torch.testing.assert_close(dropped.state[0][0], plain.state[0][0])
    assert float(torch.autograd.grad(dropped.output.sum(), second)[0].abs().max()) == 0.0
    assert float(torch.autograd.grad(plain.output.sum(), second)[0].abs().max()) > 0.0
    shallow = random_request("gru", [2, 1], device=device, dropout=1.0, training=True)
    output = BACKEND.run(shallow, "packed").output
    assert output is not None
    assert bool((output != 0).any())
