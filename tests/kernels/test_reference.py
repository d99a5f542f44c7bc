"""The reference kernel: every cell on every schedule against the formulas of :mod:`naive_cells`, in float64."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cell_requests import LENGTHS, few_lanes, gradients, largest_error, leaves_of, random_request  # noqa: F401
from naive_cells import naive_network
from raglane.cells import CELLS, Weights
from raglane.kernels.contract import Request, Result, Traits
from raglane.kernels.reference import BACKEND
from raglane.schedules import SCHEDULES
from strategies import lengths as any_lengths


class Truth(NamedTuple):
    """A request, all its correct results, and the gradients of a weighted sum of them."""

    request: Request
    results: list[Tensor]
    weighting: list[Tensor]
    gradients: list[Tensor]


def results_of(result: Result) -> list[Tensor]:
    """Return the output, the final states, and the states of every step."""
    return [part for part in (result.output, *result.state, *chain(*(result.states or ()))) if part is not None]


def truth_of(request: Request) -> Truth:
    results = results_of(naive_network(request))
    weighting = [torch.randn_like(part) for part in results]
    return Truth(request, results, weighting, summed_gradients(results, request, weighting))


def summed_gradients(results: list[Tensor], request: Request, weighting: list[Tensor]) -> list[Tensor]:
    return gradients(Result(None, tuple(results)), leaves_of(request), weighting)


@cache
def truth(name: str, lengths: tuple[int, ...], device: torch.device, size: int = 1, **options: Any) -> Truth:
    """Compute a case once for all schedules, from its own seed; ``size`` is the number of layers and directions."""
    torch.manual_seed(zlib.crc32(repr((name, lengths, size, options)).encode()))
    projection = options.get("sizes", (0, 0, 0))[2]
    if projection:
        options["weights"] = tuple(projected(width, device) for width in (3, 3, 4, 4))
    return truth_of(random_request(name, list(lengths), size, size, device=device, **options))


def projected(width: int, device: torch.device) -> Weights:
    """Return weights of an LSTM with 4 units, projected to 2, and without biases."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device).requires_grad_()

    return Weights(drawn(16, width), drawn(16, 2), None, None, drawn(2, 4))


def assert_true(wanted: Truth, schedule: str) -> None:
    request = replace(wanted.request, need_states=True)
    results = results_of(BACKEND.run(request, schedule))
    for mine, theirs in zip(results, wanted.results, strict=True):
        assert largest_error(mine, theirs) < 1e-12
    for mine, theirs in zip(summed_gradients(results, request, wanted.weighting), wanted.gradients, strict=True):
        assert largest_error(mine, theirs) < 1e-12


def test_it_runs_every_cell_on_every_schedule() -> None:
    for cell in CELLS.values():
        traits = Traits(cell, 3, 4, torch.float64, torch.device("cpu"), need_states=True)
        assert all(BACKEND.refuses(traits, schedule) is None for schedule in SCHEDULES)


@pytest.mark.parametrize("lengths", LENGTHS.values())
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CELLS)
def test_agrees_with_the_formulas(
    name: str, size: int, schedule: str, lengths: list[int], device: torch.device
) -> None:
    assert_true(truth(name, tuple(lengths), device, size), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {"bias": False}) for name in CELLS), ("lstm", {"sizes": (3, 4, 2)})]
)
def test_projection_and_no_bias(name: str, schedule: str, options: dict[str, Any], device: torch.device) -> None:
    assert_true(truth(name, (2, 0, 3, 1), device, 2, **options), schedule)


@pytest.mark.parametrize("name", CELLS)
@settings(max_examples=3)
@given(lengths=any_lengths(4, 5), schedule=st.sampled_from(list(SCHEDULES)), seed=st.integers(0, 2**31))
def test_random_lengths(name: str, lengths: list[int], schedule: str, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    assert_true(truth_of(random_request(name, lengths, directions=2, device=device)), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_cannot_overflow(schedule: str, device: torch.device) -> None:
    # This state grows tenfold per step: one sequence of 400 steps of zeros makes 400 steps of padding for the other,
    # whose state would pass float64's largest number there, and its zero gradient would become NaN.
    request = random_request("rnn_relu", [2, 400], bias=False, device=device)
    with torch.no_grad():
        request.weights[0].hidden.copy_(10 * torch.eye(4))
        request.weights[0].input.fill_(1.0)
        request.values[:2] = 1.0
        request.values[2:] = 0.0
        request.state[0].zero_()
    assert_true(truth_of(request), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_what_is_needed(schedule: str, device: torch.device) -> None:
    request = random_request("lstm", [2, 0, 4, 1], 2, 2, device=device)
    without = BACKEND.run(replace(request, need_states=True, need_output=False), schedule)
    assert (without.output, BACKEND.run(request, schedule).states) == (None, None)
    for mine, theirs in zip(results_of(without), truth_of(request).results[1:], strict=True):
        assert largest_error(mine, theirs) < 1e-12


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
