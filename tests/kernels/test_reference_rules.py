"""The reference kernel: isolation, dtypes, devices, and derivatives of second order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cell_requests import LENGTHS, few_lanes, largest_error, leaves_of, random_request  # noqa: F401
from raglane.cells import CELLS
from raglane.kernels.contract import Request
from raglane.kernels.reference import BACKEND
from raglane.schedules import SCHEDULES


def _converted(request: Request, dtype: torch.dtype) -> Request:
    """The same numbers in another dtype."""

    def convert(weights: Any) -> Any:
        return type(weights)(*(None if part is None else part.detach().to(dtype) for part in weights))

    return replace(
        request,
        values=request.values.detach().to(dtype),
        state=tuple(part.detach().to(dtype) for part in request.state),
        weights=tuple(convert(weights) for weights in request.weights),
    )


def _weights_of(request: Request) -> list[Tensor]:
    return leaves_of(request)[1 + len(request.state) :]


# Slow tests have more cases for these cells. Tests of cells cover the others, and schedules treat all cells alike.
AT_LENGTH = ("rnn_tanh", "rnn_relu", "lstm", "gru")
TWICE = [
    (name, schedule)
    for name in CELLS
    for schedule in (["masked", "packed", "lanes"] if name in AT_LENGTH else ["lanes"])
]


@pytest.mark.parametrize(("name", "schedule"), TWICE)
def test_differentiable_twice(name: str, schedule: str, device: torch.device) -> None:
    request = random_request(name, [2, 0, 1, 3], directions=2, device=device)

    def function(values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, parts = rest[: len(request.state)], iter(rest[len(request.state) :])
        weights = tuple(type(old)(*(None if part is None else next(parts) for part in old)) for old in request.weights)
        result = BACKEND.run(replace(request, values=values, state=states, weights=weights), schedule)
        assert result.output is not None
        return result.output, *result.state

    inputs = leaves_of(request)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_nan_stays_in_its_sequence(name: str, schedule: str, device: torch.device) -> None:
    lengths = [2, 3, 0, 4, 1, 1, 2]
    request = random_request(name, lengths, 2 if name in AT_LENGTH else 1, 2, device=device)
    for bad in range(len(lengths)):
        kept = torch.arange(len(lengths), device=device) != bad
        rows = kept.repeat_interleave(torch.tensor(lengths, device=device))
        spoilt = replace(
            request,
            values=torch.where(rows[:, None], request.values, torch.nan).detach().requires_grad_(),
            state=tuple(torch.where(kept[:, None], s, torch.nan).detach().requires_grad_() for s in request.state),
        )
        found = []
        for each in (spoilt, request):
            result = BACKEND.run(each, schedule)
            assert result.output is not None
            parts = [result.output[rows], *(part[:, kept] for part in result.state)]
            loss = torch.stack([part.square().sum() for part in parts]).sum()
            leaves = (each.values, *each.state)
            by_values, *by_state = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            found.append([*parts, by_values[rows], *(part[:, kept] for part in by_state)])
        for mine, wanted in zip(*found, strict=True):
            assert bool(mine.isfinite().all())
            assert largest_error(mine, wanted) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_dtypes(name: str, schedule: str, dtype: torch.dtype, device: torch.device) -> None:
    request = _converted(random_request(name, LENGTHS["mixed"], directions=2, device=device), dtype)
    wanted = BACKEND.run(_converted(request, torch.float64), schedule)
    result = BACKEND.run(request, schedule)
    for mine, theirs in zip((result.output, *result.state), (wanted.output, *wanted.state), strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.dtype is dtype
        assert largest_error(mine.double(), theirs) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_autocast(name: str, schedule: str, device: torch.device) -> None:
    request = random_request(name, LENGTHS["mixed"], 2, dtype=torch.float32, device=device, need_states=True)
    plain = BACKEND.run(request, schedule)
    with torch.autocast(device.type, torch.bfloat16):
        cast = BACKEND.run(request, schedule)
    assert cast.output is not None
    assert plain.output is not None
    assert cast.states is not None
    tensors = [cast.output, *cast.state, *(part for layer in cast.states for part in layer)]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert largest_error(cast.output.float(), plain.output) < 0.1
    by_weights = torch.autograd.grad(cast.output.float().sum(), _weights_of(request))
    assert {gradient.dtype for gradient in by_weights} == {torch.float32}


@pytest.mark.parametrize("name", CELLS)
def test_autocast_leaves_float64_alone(name: str, device: torch.device) -> None:
    request = random_request(name, [2, 1], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        result = BACKEND.run(request, "packed")
    assert result.output is not None
    assert result.output.dtype is torch.float64


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_weights_get_zeros_where_there_is_no_element(name: str, schedule: str, device: torch.device) -> None:
    request = random_request(name, [0, 0], 2, 2, device=device)
    result = BACKEND.run(request, schedule)
    assert result.output is not None
    for gradient in torch.autograd.grad(result.output.sum(), _weights_of(request)):
        assert float(gradient.abs().max()) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_nothing_given_is_changed(name: str, schedule: str, device: torch.device) -> None:
    request = random_request(name, LENGTHS["mixed"], 2, 2, device=device)
    given = [*leaves_of(request), request.offsets, request.host_lengths]
    before = [tensor.detach().clone() for tensor in given]
    with torch.no_grad():
        result = BACKEND.run(request, schedule)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
    assert result.output is not None
    assert not result.output.requires_grad


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_on_a_device_without_data(name: str, schedule: str) -> None:
    # Nothing can be read back from the meta device, as nothing may be read back from a GPU.
    request = random_request(name, [2, 0, 1], 2, 2, device=torch.device("meta"), need_states=True)
    result = BACKEND.run(request, schedule)
    assert result.output is not None
    assert result.states is not None
    assert (result.output.device.type, result.output.shape) == ("meta", (3, 8))
    assert [part.shape for part in result.state] == [part.shape for part in request.state]
    assert [part.shape for part in result.states[1]] == [(3, 2 * part.shape[2]) for part in request.state]
    torch.autograd.grad(result.output.sum(), _weights_of(request))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_nothing_waits_for_a_gpu(name: str, schedule: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only a GPU can be waited for")
    request = random_request(name, LENGTHS["mixed"], 2, 2, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = BACKEND.run(request, schedule)
        assert result.output is not None
        torch.autograd.grad(result.output.sum(), _weights_of(request))
    finally:
        torch.cuda.set_sync_debug_mode("default")
