"""The reference kernel: every cell on every schedule against the formulas of :mod:`naive_cells`,
and its rules.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cell_requests import largest_error, possible, random_weights, squares
from naive_cells import naive_network
from raglane import schedules
from raglane.cells import CELLS
from raglane.kernels.contract import Request, Result
from raglane.kernels.reference import BACKEND
from raglane.schedules import SCHEDULES
from raglane.segments import offsets_from_lengths
from strategies import lengths as any_lengths

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
    """Each lane runs several sequences of a small batch."""
    monkeypatch.setattr(schedules, "DEFAULT_LANES", 3)


def random_request(
    name: str,
    lengths: list[int],
    layers: int = 1,
    directions: int = 1,
    *,
    sizes: tuple[int, int, int] = (3, 4, 0),
    bias: bool = True,
    device: torch.device | None = None,
    **options: Any,
) -> Request:
    """Return a request with random values, initial states and weights, which all require
    gradients.
    """
    cell, (input_size, hidden_size, proj_size) = CELLS[name], sizes
    states = cell.state_sizes(hidden_size, proj_size)
    host = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    weights = tuple(
        random_weights(
            cell.above() if layer else cell,
            width,
            hidden_size,
            bias,
            device=device,
            projection=proj_size,
        )
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
            for part in possible(
                cell, [randn(layers * directions, len(lengths), size) for size in states]
            )
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


class Truth(NamedTuple):
    """A request, all its correct results, and the gradients of a weighted sum of them."""

    request: Request
    results: list[Tensor]
    weighting: list[Tensor]
    gradients: list[Tensor]


def results_of(result: Result) -> list[Tensor]:
    """Return the output, the final states, and the states of every step."""
    return [
        part
        for part in (result.output, *result.state, *chain(*(result.states or ())))
        if part is not None
    ]


def truth_of(request: Request) -> Truth:
    results = results_of(naive_network(request))
    weighting = [torch.randn_like(part) for part in results]
    return Truth(request, results, weighting, summed_gradients(results, request, weighting))


def summed_gradients(
    results: list[Tensor], request: Request, weighting: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of a weighted sum of the results; zeros for an unused leaf."""
    loss = torch.stack(
        [(part * scale).sum() for part, scale in zip(results, weighting, strict=True)]
    ).sum()
    return list(
        torch.autograd.grad(loss, leaves_of(request), allow_unused=True, materialize_grads=True)
    )


@cache
def truth(
    name: str, lengths: tuple[int, ...], device: torch.device, size: int = 1, **options: Any
) -> Truth:
    """Compute a case once for all schedules, from its own seed; ``size`` is the number of layers
    and directions.
    """
    torch.manual_seed(zlib.crc32(repr((name, lengths, size, options)).encode()))
    return truth_of(random_request(name, list(lengths), size, size, device=device, **options))


def assert_true(wanted: Truth, schedule: str) -> None:
    request = replace(wanted.request, need_states=True)
    results = results_of(BACKEND.run(request, schedule))
    for mine, theirs in zip(results, wanted.results, strict=True):
        assert largest_error(mine, theirs) < 1e-12
    for mine, theirs in zip(
        summed_gradients(results, request, wanted.weighting), wanted.gradients, strict=True
    ):
        assert largest_error(mine, theirs) < 1e-12


# Every cell on every schedule with two layers in two directions; each schedule meets all lists of
# lengths.
CASES = [(name, schedule, "mixed", 2) for name in CELLS for schedule in SCHEDULES]
CASES += [
    (
        name,
        schedule,
        list(LENGTHS)[(place + number) % len(LENGTHS)],
        1 + (place + number) // len(LENGTHS) % 2,
    )
    for place, name in enumerate(CELLS)
    for number, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("name", "schedule", "lengths", "size"), CASES)
def test_agrees_with_the_formulas(
    name: str, schedule: str, lengths: str, size: int, device: torch.device
) -> None:
    assert_true(truth(name, tuple(LENGTHS[lengths]), device, size), schedule)


@pytest.mark.parametrize("schedule", ["masked", "lanes"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"bias": False}) for name in CELLS), ("lstm", {"sizes": (3, 4, 2), "bias": False})],
)
def test_projection_and_no_bias(
    name: str, schedule: str, options: dict[str, Any], device: torch.device
) -> None:
    assert_true(truth(name, (2, 0, 3, 1), device, 2, **options), schedule)


@given(
    name=st.sampled_from(list(CELLS)),
    lengths=any_lengths(4, 5),
    schedule=st.sampled_from(list(SCHEDULES)),
    seed=st.integers(0, 2**31),
)
def test_random_lengths(
    name: str, lengths: list[int], schedule: str, seed: int, device: torch.device
) -> None:
    torch.manual_seed(seed)
    assert_true(truth_of(random_request(name, lengths, directions=2, device=device)), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_cannot_overflow(schedule: str, device: torch.device) -> None:
    # This state grows tenfold per step: one sequence of 400 steps of zeros makes 400 steps of
    # padding for the other, whose state would pass float64's largest number there, and its zero
    # gradient would become NaN.
    request = random_request("rnn_relu", [2, 400], bias=False, device=device)
    with torch.no_grad():
        request.weights[0].hidden.copy_(10 * torch.eye(4))
        request.weights[0].input.fill_(1.0)
        request.values[:2] = 1.0
        request.values[2:] = 0.0
        request.state[0].zero_()
    assert_true(truth_of(request), schedule)


def _weights_of(request: Request) -> list[Tensor]:
    return leaves_of(request)[1 + len(request.state) :]


# Each cell on two schedules: schedules treat all cells alike.
EACH = pytest.mark.parametrize(
    ("name", "schedule"),
    [
        (name, list(SCHEDULES)[(place + more) % len(SCHEDULES)])
        for place, name in enumerate(CELLS)
        for more in (0, 2)
    ],
)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "lanes") for name in CELLS), ("lstm", "masked"), ("lstm", "packed")],
)
def test_differentiable_twice(name: str, schedule: str, device: torch.device) -> None:
    """Second derivatives are those of the formulas."""
    request = random_request(name, [2, 0, 1, 3], directions=2, device=device)
    leaves, found = leaves_of(request), []
    for result in (BACKEND.run(request, schedule), naive_network(request)):
        parts = [part for part in (result.output, *result.state) if part is not None]
        first = torch.autograd.grad(
            squares(parts), leaves, create_graph=True, materialize_grads=True
        )
        found.append(torch.autograd.grad(squares(first), leaves, materialize_grads=True))
    for mine, theirs in zip(*found, strict=True):
        assert largest_error(mine, theirs) < 1e-10


@EACH
def test_nan_stays_in_its_sequence(name: str, schedule: str, device: torch.device) -> None:
    lengths = [2, 3, 0, 4, 1, 1, 2]
    request = random_request(name, lengths, 2, 2, device=device)
    for first in (0, 1):
        kept = torch.arange(len(lengths), device=device) % 2 == first
        rows = kept.repeat_interleave(torch.tensor(lengths, device=device))
        spoilt = replace(
            request,
            values=torch.where(rows[:, None], request.values, torch.nan).detach().requires_grad_(),
            state=tuple(
                torch.where(kept[:, None], s, torch.nan).detach().requires_grad_()
                for s in request.state
            ),
        )
        found = []
        for each in (spoilt, request):
            result: Any = BACKEND.run(each, schedule)
            parts = [result.output[rows], *(part[:, kept] for part in result.state)]
            loss = squares(parts)
            leaves = (each.values, *each.state)
            by_values, *by_state = torch.autograd.grad(
                loss, leaves, allow_unused=True, materialize_grads=True
            )
            found.append([*parts, by_values[rows], *(part[:, kept] for part in by_state)])
        for mine, wanted in zip(*found, strict=True):
            assert bool(mine.isfinite().all())
            assert largest_error(mine, wanted) < 1e-12


@pytest.mark.parametrize("name", CELLS)
def test_autocast_leaves_float64_alone(name: str, device: torch.device) -> None:
    request = random_request(name, [2, 1], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        result: Any = BACKEND.run(request, "packed")
    assert result.output.dtype is torch.float64


@EACH
def test_weights_get_zeros_where_there_is_no_element(
    name: str, schedule: str, device: torch.device
) -> None:
    request = random_request(name, [0, 0], 2, 2, device=device)
    result: Any = BACKEND.run(request, schedule)
    for gradient in torch.autograd.grad(result.output.sum(), _weights_of(request)):
        assert float(gradient.abs().max()) == 0.0


@EACH
def test_nothing_given_is_changed(name: str, schedule: str, device: torch.device) -> None:
    request = random_request(name, LENGTHS["mixed"], 2, 2, device=device)
    given = [*leaves_of(request), request.offsets, request.lengths_cpu]
    before = [tensor.detach().clone() for tensor in given]
    with torch.no_grad():
        result: Any = BACKEND.run(request, schedule)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
    assert not result.output.requires_grad


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, list(SCHEDULES)[place % len(SCHEDULES)]) for place, name in enumerate(CELLS)],
)
def test_every_cell_on_a_device_without_data(name: str, schedule: str) -> None:
    # Nothing can be read back from the meta device, as nothing may be read back from a GPU.
    request = random_request(name, [2, 0, 1], 1, 2, device=torch.device("meta"), need_states=True)
    result: Any = BACKEND.run(request, schedule)
    assert (result.output.device.type, result.output.shape) == ("meta", (3, 8))
    assert [part.shape for part in result.state] == [part.shape for part in request.state]
    assert [part.shape for part in result.states[0]] == [
        (3, 2 * part.shape[2]) for part in request.state
    ]
    torch.autograd.grad(result.output.sum(), _weights_of(request))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@EACH
def test_nothing_waits_for_a_gpu(name: str, schedule: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only a GPU can be waited for")
    request = random_request(name, LENGTHS["mixed"], 2, 2, device=device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        result: Any = BACKEND.run(request, schedule)
        torch.autograd.grad(result.output.sum(), _weights_of(request))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("training", [False, True])
def test_dropout_acts_between_layers_in_training_only(training: bool, device: torch.device) -> None:
    request = random_request(
        "gru", LENGTHS["mixed"], 2, device=device, dropout=1.0, training=training
    )
    output: Any = BACKEND.run(request, "packed").output
    # The second layer reads zeros if its input is dropped.
    (gradient,) = torch.autograd.grad(output.sum(), request.weights[1].input)
    assert bool(gradient.any()) != training
