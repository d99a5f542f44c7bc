"""The reference kernel: every cell on every schedule against PyTorch's modules, one sequence at a time, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raglane.cells import CELLS, Weights
from raglane.kernels.contract import Request, Result, Traits
from raglane.kernels.reference import BACKEND
from raglane.schedules import SCHEDULES, Count, Schedule, Table, lanes
from raglane.segments import offsets_from_lengths

D, H = 3, 4

LENGTHS: dict[str, list[int]] = {
    "no sequences": [],
    "empty ones only": [0, 0],
    "one element": [1],
    "equal": [3, 3, 3, 3],
    "mixed": [1, 0, 7, 2, 2, 0, 5, 1],
    "skewed": [2, 1, 1, 19, 1, 2, 1, 1, 0, 1],
}

TORCH_MODULES: dict[str, Any] = {
    "rnn_tanh": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="tanh", **options),
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that in these small batches rows take one sequence after another."""
    monkeypatch.setattr(lanes, "DEFAULT_LANES", 3)


def _module(name: str, layers: int, directions: int, device: torch.device, **options: Any) -> Any:
    options = {"dtype": torch.float64, **options}
    return TORCH_MODULES[name](D, H, layers, bidirectional=directions == 2, device=device, **options)


def _weights(module: Any) -> tuple[Weights, ...]:
    suffixes = [
        f"_l{layer}{direction}"
        for layer in range(module.num_layers)
        for direction in ("", "_reverse")[: 1 + module.bidirectional]
    ]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    given = dict(module.named_parameters())
    return tuple(Weights(*(given.get(name + suffix) for name in names)) for suffix in suffixes)  # type: ignore[arg-type]


def _request(name: str, module: Any, lengths: list[int], **options: Any) -> Request:
    """A request for the module's weights on random values and initial states."""
    like = module.weight_ih_l0
    directions = 1 + module.bidirectional
    sizes = CELLS[name].state_sizes(H, module.proj_size)
    host = torch.tensor(lengths, dtype=torch.int64)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(like).requires_grad_()

    return Request(
        CELLS[name],
        randn(sum(lengths), D),
        offsets_from_lengths(host).to(like.device),
        host,
        tuple(randn(module.num_layers * directions, len(lengths), size) for size in sizes),
        _weights(module),
        layers=module.num_layers,
        directions=directions,
        **options,
    )


def _one_at_a_time(module: Any, request: Request) -> Result:
    """What PyTorch gives for each sequence alone; an empty one it cannot run."""
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


def _gradients(result: Result, leaves: list[Tensor], weighting: list[Tensor]) -> list[Tensor]:
    parts = [part for part in (result.output, *result.state) if part is not None]
    loss = torch.stack([(part * scale).sum() for part, scale in zip(parts, weighting, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def _assert_like_torch(request: Request, module: Any, schedule: str) -> None:
    ours, theirs = BACKEND.run(request, schedule), _one_at_a_time(module, request)
    assert ours.output is not None
    assert theirs.output is not None
    assert _error(ours.output, theirs.output) < 1e-12
    for mine, wanted in zip(ours.state, theirs.state, strict=True):
        assert _error(mine, wanted) < 1e-12
    leaves = [request.values, *request.state, *module.parameters()]
    weighting = [torch.randn_like(part) for part in (theirs.output, *theirs.state)]
    for mine, wanted in zip(_gradients(ours, leaves, weighting), _gradients(theirs, leaves, weighting), strict=True):
        assert _error(mine, wanted) < 1e-12


def test_it_has_every_schedule_and_every_cell_is_compared() -> None:
    assert BACKEND.schedules == tuple(SCHEDULES)
    assert set(TORCH_MODULES) == set(CELLS)
    traits = Traits(CELLS["gru"], 3, 4, torch.float64, torch.device("cpu"), need_states=True)
    assert all(BACKEND.refuses(traits, schedule) is None for schedule in SCHEDULES)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_torch_one_sequence_at_a_time(
    name: str, schedule: str, layers: int, directions: int, lengths: list[int], device: torch.device
) -> None:
    module = _module(name, layers, directions, device)
    _assert_like_torch(_request(name, module, lengths), module, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{"proj_size": 2}, {"bias": False}, {"proj_size": 3, "bias": False}])
def test_projection_and_no_bias(schedule: str, options: dict[str, Any], device: torch.device) -> None:
    module = _module("lstm", 2, 2, device, **options)
    _assert_like_torch(_request("lstm", module, LENGTHS["mixed"]), module, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 9), max_size=9), seed=st.integers(0, 2**30))
def test_any_lengths(schedule: str, device: torch.device, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    module = _module("gru", 1, 2, device)
    _assert_like_torch(_request("gru", module, lengths), module, schedule)


class _Staggered(Schedule):
    """A schedule nobody needs: each sequence begins late, above or below the rows that run; at times none does."""

    name = "staggered"

    def __init__(self, upwards: bool) -> None:
        self.upwards = upwards

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        rows = range(lengths.shape[0])[:: -1 if self.upwards else 1]
        entries = sorted(
            (3 * sequence + step, rows[sequence], sequence, step)
            for sequence, length in enumerate(lengths.tolist())
            for step in range(length)
        )
        times = torch.tensor([entry[0] for entry in entries], dtype=torch.int64)
        steps = int(times.max()) + 1 if entries else 0
        columns = torch.tensor(entries, dtype=torch.int64).reshape(-1, 4)
        return Table(
            offsets_from_lengths(torch.bincount(times, minlength=steps)),
            columns[:, 2],
            columns[:, 3],
            columns[:, 1],
        )

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:
        raise NotImplementedError


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [0, 2, 1, 6, 0, 0, 3]])
def test_any_schedule(lengths: list[int], upwards: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setitem(SCHEDULES, "staggered", _Staggered(upwards))
    module = _module("lstm", 1, 2, device)
    _assert_like_torch(_request("lstm", module, lengths), module, "staggered")


@pytest.mark.parametrize("schedule", ["masked", "packed", "lanes"])
@pytest.mark.parametrize("name", CELLS)
def test_differentiable_twice(name: str, schedule: str, device: torch.device) -> None:
    module = _module(name, 1, 2, device)
    request = _request(name, module, [2, 0, 1, 3])
    flat_weights = [part for weights in request.weights for part in weights if part is not None]

    def function(values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, parts = rest[: len(request.state)], iter(rest[len(request.state) :])
        weights = tuple(
            Weights(*(None if part is None else next(parts) for part in old))  # type: ignore[arg-type]
            for old in request.weights
        )
        result = BACKEND.run(replace(request, values=values, state=states, weights=weights), schedule)
        assert result.output is not None
        return result.output, *result.state

    inputs = (request.values, *request.state, *flat_weights)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_nan_stays_in_its_sequence(name: str, schedule: str, device: torch.device) -> None:
    lengths = [2, 3, 0, 4, 1, 1, 2]
    module = _module(name, 2, 2, device)
    clean = _request(name, module, lengths)
    for bad in range(len(lengths)):
        begin, end = (int(bound) for bound in clean.offsets[bad : bad + 2])
        real = torch.ones(sum(lengths), dtype=torch.bool, device=device)
        real[begin:end] = False
        others = [sequence for sequence in range(len(lengths)) if sequence != bad]
        values, state = clean.values.detach().clone(), [part.detach().clone() for part in clean.state]
        values[begin:end] = torch.nan
        for part in state:
            part[:, bad] = torch.nan
        dirty = replace(
            clean,
            values=values.requires_grad_(),
            state=tuple(part.requires_grad_() for part in state),
        )
        seen: list[list[Tensor]] = []
        for request in (clean, dirty):
            result = BACKEND.run(request, schedule)
            assert result.output is not None
            parts = [result.output[real], *(part[:, others] for part in result.state)]
            loss = torch.stack([part.square().sum() for part in parts]).sum()
            by_values, *by_state = torch.autograd.grad(loss, (request.values, *request.state))
            seen.append([*parts, by_values[real], *(part[:, others] for part in by_state)])
        for mine, wanted in zip(seen[1], seen[0], strict=True):
            assert bool(mine.isfinite().all())
            assert _error(mine, wanted) < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_cannot_overflow(schedule: str, device: torch.device) -> None:
    # This state grows tenfold a step: one sequence of 400 steps of zeros makes 400 steps of padding for the other,
    # whose state would pass float64's largest number there, and its zero gradient would become NaN.
    module = _module("rnn_relu", 1, 1, device, bias=False)
    with torch.no_grad():
        module.weight_hh_l0.copy_(10 * torch.eye(H))
    request = _request("rnn_relu", module, [2, 400])
    with torch.no_grad():
        request.values[:2] = 1.0
        request.values[2:] = 0.0
        module.weight_ih_l0.fill_(1.0)
        request.state[0].zero_()
    _assert_like_torch(request, module, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_outputs_that_nobody_reads(name: str, schedule: str, device: torch.device) -> None:
    module = _module(name, 2, 2, device)
    request = _request(name, module, LENGTHS["mixed"])
    whole = BACKEND.run(request, schedule)
    part = BACKEND.run(replace(request, need_output=False), schedule)
    assert part.output is None
    assert part.states is None
    torch.testing.assert_close(part.state, whole.state, rtol=0, atol=0)


@pytest.mark.parametrize("need_output", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_every_state(name: str, schedule: str, need_output: bool, device: torch.device) -> None:
    module = _module(name, 2, 2, device)
    request = _request(name, module, LENGTHS["mixed"], need_states=True, need_output=need_output)
    result = BACKEND.run(request, schedule)
    assert result.states is not None
    assert (result.output is not None) == need_output
    values = request.values
    bounds = request.offsets.tolist()
    for layer in range(2):
        wanted = [torch.zeros(values.shape[0], 2 * part.shape[2]).to(values) for part in request.state]
        for direction in range(2):
            index = 2 * layer + direction
            weights = request.weights[index]
            prepared = request.cell.prepare(weights, values, request.offsets)
            for sequence, (begin, end) in enumerate(pairwise(bounds)):
                state = tuple(part[index, sequence : sequence + 1] for part in request.state)
                for element in range(begin, end) if direction == 0 else range(end - 1, begin - 1, -1):
                    _, state = request.cell.step(weights, prepared[element : element + 1], state)
                    for collected, part in zip(wanted, state, strict=True):
                        size = part.shape[1]
                        collected[element, direction * size : (direction + 1) * size] = part[0].detach()
        for mine, theirs in zip(result.states[layer], wanted, strict=True):
            assert _error(mine, theirs) < 1e-12
        values = result.states[layer][0]


def test_dropout_acts_between_layers_in_training_only(device: torch.device) -> None:
    module = _module("gru", 2, 1, device)
    request = _request("gru", module, LENGTHS["mixed"], dropout=1.0)
    module.weight_ih_l1.requires_grad_()
    plain = BACKEND.run(request, "packed")
    dropped = BACKEND.run(replace(request, training=True), "packed")
    assert plain.output is not None
    assert dropped.output is not None
    # The first layer's states are whole, and the second layer reads zeros.
    torch.testing.assert_close(dropped.state[0][0], plain.state[0][0])
    assert float(torch.autograd.grad(dropped.output.sum(), module.weight_ih_l1)[0].abs().max()) == 0.0
    assert float(torch.autograd.grad(plain.output.sum(), module.weight_ih_l1)[0].abs().max()) > 0.0
    shallow = _request("gru", _module("gru", 1, 1, device), [2, 1], dropout=1.0, training=True)
    output = BACKEND.run(shallow, "packed").output
    assert output is not None
    assert bool((output != 0).any())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_float32(name: str, schedule: str, device: torch.device) -> None:
    module = _module(name, 2, 2, device)
    exact = _request(name, module, LENGTHS["skewed"])
    wanted = BACKEND.run(exact, schedule)
    request = replace(
        exact,
        values=exact.values.float(),
        state=tuple(part.float() for part in exact.state),
        weights=tuple(
            Weights(*(None if part is None else part.float() for part in weights))  # type: ignore[arg-type]
            for weights in exact.weights
        ),
    )
    result = BACKEND.run(request, schedule)
    for mine, theirs in zip((result.output, *result.state), (wanted.output, *wanted.state), strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.dtype is torch.float32
        assert _error(mine.double(), theirs) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CELLS)
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    module = _module(name, 1, 2, device, dtype=dtype)
    request = _request(name, module, LENGTHS["mixed"])
    results = [BACKEND.run(request, schedule) for schedule in SCHEDULES]
    for result in results:
        for mine, wanted in zip((result.output, *result.state), (results[0].output, *results[0].state), strict=True):
            assert mine is not None
            assert wanted is not None
            assert mine.dtype is dtype
            assert _error(mine.double(), wanted.double()) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_autocast(name: str, schedule: str, device: torch.device) -> None:
    module = _module(name, 2, 1, device, dtype=torch.float32)
    request = _request(name, module, LENGTHS["mixed"], need_states=True)
    plain = BACKEND.run(request, schedule)
    with torch.autocast(device.type, torch.bfloat16):
        cast = BACKEND.run(request, schedule)
    assert cast.output is not None
    assert plain.output is not None
    assert cast.states is not None
    tensors = [cast.output, *cast.state, *(part for layer in cast.states for part in layer)]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert _error(cast.output.float(), plain.output) < 0.1
    gradients = torch.autograd.grad(cast.output.float().sum(), list(module.parameters()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_autocast_leaves_float64_alone(device: torch.device) -> None:
    request = _request("lstm", _module("lstm", 1, 1, device), [2, 1])
    with torch.autocast(device.type, torch.bfloat16):
        result = BACKEND.run(request, "packed")
    assert result.output is not None
    assert result.output.dtype is torch.float64


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_get_zeros_where_there_is_no_element(schedule: str, device: torch.device) -> None:
    module = _module("gru", 2, 2, device)
    result = BACKEND.run(_request("gru", module, [0, 0]), schedule)
    assert result.output is not None
    for gradient in torch.autograd.grad(result.output.sum(), list(module.parameters())):
        assert float(gradient.abs().max()) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_given_is_changed(schedule: str, device: torch.device) -> None:
    module = _module("lstm", 2, 2, device)
    request = _request("lstm", module, LENGTHS["mixed"])
    given = [request.values, request.offsets, request.lengths, *request.state, *module.parameters()]
    before = [tensor.detach().clone() for tensor in given]
    with torch.no_grad():
        result = BACKEND.run(request, schedule)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
    assert result.output is not None
    assert not result.output.requires_grad


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_on_a_device_without_data(schedule: str, lengths: list[int]) -> None:
    # Nothing can be read back from the meta device, as nothing may be read back from a GPU.
    module = _module("lstm", 2, 2, torch.device("meta"), proj_size=2)
    request = _request("lstm", module, lengths, need_states=True)
    result = BACKEND.run(request, schedule)
    assert result.output is not None
    assert result.states is not None
    assert (result.output.device.type, result.output.shape) == ("meta", (sum(lengths), 4))
    assert [part.shape for part in result.state] == [part.shape for part in request.state]
    assert [part.shape for part in result.states[1]] == [(sum(lengths), 4), (sum(lengths), 8)]
    torch.autograd.grad(result.output.sum(), list(module.parameters()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_waits_for_a_gpu(schedule: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only a GPU can be waited for")
    module = _module("lstm", 2, 2, device)
    request = _request("lstm", module, LENGTHS["mixed"])
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = BACKEND.run(request, schedule)
        assert result.output is not None
        torch.autograd.grad(result.output.sum(), list(module.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
