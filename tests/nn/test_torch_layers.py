"""RNN, LSTM and GRU against torch's, over all combinations of their arguments and every kind of input.

The comparison is with torch's layer run on one sequence at a time, which no padding or packing can disturb.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import raglane as rl
from looped import looped
from raglane.kernels.dispatch import BACKENDS
from raglane.native import missing_kernels
from strategies import lengths, sequences_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
# Where the cpu kernels are missing, tests/kernels/test_cpu_matrix.py is skipped with the reason.
_HERE = [name for name in BACKENDS if name != "cpu" or missing_kernels() is None]
PAIRS = [(schedule, name) for name in _HERE for schedule in BACKENDS[name].schedules]

KINDS: list[dict[str, Any]] = [
    {"kind": "RNN", "nonlinearity": "tanh"},
    {"kind": "RNN", "nonlinearity": "relu"},
    {"kind": "GRU"},
    {"kind": "LSTM"},
    {"kind": "LSTM", "proj_size": 3},
]
ARGUMENTS = [
    {**kind, "num_layers": layers, "bias": bias, "bidirectional": both, "batch_first": first}
    for kind, layers, bias, both, first in itertools.product(KINDS, (1, 2), (True, False), (False, True), (False, True))
]
LENGTHS = [4, 0, 1, 7, 4, 2]


def name_of(arguments: Any) -> str:
    return "-".join(f"{key}={value}" for key, value in arguments.items())


def pair_of_layers(arguments: dict[str, Any], dtype: torch.dtype, **ours: Any) -> tuple[Any, Any]:
    """Torch's layer and ours, with the same weights."""
    options = {key: value for key, value in arguments.items() if key != "kind"}
    theirs = getattr(nn, arguments["kind"])(5, 4, dtype=dtype, **options)
    mine = getattr(rl.nn, arguments["kind"])(5, 4, dtype=dtype, **options, **ours)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def state_of(layer: nn.RNNBase, count: int, dtype: torch.dtype) -> Any:
    """A random initial state, of torch's shape, that wants gradients."""
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    size = layer.proj_size or layer.hidden_size
    h = torch.randn(rows, count, size, dtype=dtype, requires_grad=True)
    if layer.mode != "LSTM":
        return h
    return h, torch.randn(rows, count, layer.hidden_size, dtype=dtype, requires_grad=True)


def parts(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


def like(state: Any, of: Any) -> Any:
    """Parts as a layer takes them: a tuple for an LSTM, a tensor else."""
    return tuple(state) if isinstance(of, tuple) else state[0]


def one_by_one(layer: nn.RNNBase, sequences: list[Tensor], hx: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Torch's layer on each sequence alone: outputs, and the states (L * K, B, size) side by side."""
    size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    outputs, finals = [], []
    for row, sequence in enumerate(sequences):
        own = [part[:, row : row + 1] for part in parts(hx)]
        if len(sequence) == 0:
            outputs.append(sequence.new_zeros((0, size)))
            finals.append(own)
            continue
        dim = 0 if layer.batch_first else 1
        out, state = layer(sequence.unsqueeze(dim), like(own, hx))
        outputs.append(out.squeeze(dim))
        finals.append(list(parts(state)))
    return outputs, [torch.cat(columns, 1) for columns in zip(*finals, strict=True)]


def assert_close(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    """Max-norm relative error within the tolerance of the dtype."""
    if theirs is None or ours is None:
        assert theirs is None or not theirs.any(), what
        assert ours is None or not ours.any(), what
        return
    assert ours.shape == theirs.shape, what
    assert ours.dtype is theirs.dtype, what
    scale = max(theirs.abs().max().item() if theirs.numel() else 0.0, 1e-30)
    error = (ours - theirs).abs().max().item() / scale if theirs.numel() else 0.0
    assert error <= TOLERANCE[ours.dtype], f"{what}: relative error {error:.2e}"


def gradients(layer: nn.RNNBase, inputs: list[Tensor], hx: Any, results: list[Tensor]) -> list[Tensor | None]:
    """Gradients of inputs, initial states and all weights, of a loss that weighs every number differently."""
    loss = sum((torch.cos(torch.arange(r.numel(), dtype=r.dtype)).view_as(r) * r).sum() for r in results)
    wanted = [*inputs, *parts(hx), *layer.parameters()]
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def compare(arguments: dict[str, Any], dtype: torch.dtype, lengths: list[int], **ours: Any) -> None:
    """Outputs, states and all gradients of a ragged batch against one sequence at a time."""
    theirs, mine = pair_of_layers(arguments, dtype, **ours)
    sequences = sequences_of(lengths, (5,), dtype, requires_grad=True)
    hx = state_of(theirs, len(lengths), dtype)
    expected, expected_final = one_by_one(theirs, sequences, hx)
    out, state = mine(rl.Ragged(sequences), hx)
    assert isinstance(out, rl.Ragged)
    assert_close(out.values, torch.cat(expected), "output")
    for index, (own, other) in enumerate(zip(parts(state), expected_final, strict=True)):
        assert_close(own, other, f"state {index}")
    mine_grads = gradients(mine, sequences, hx, [out.values, *parts(state)])
    theirs_grads = gradients(theirs, sequences, hx, [torch.cat(expected), *expected_final])
    names = [*(f"sequence {i}" for i in range(len(lengths))), *(f"hx {i}" for i in range(len(parts(hx))))]
    names += [name for name, _ in mine.named_parameters()]
    for what, own_grad, other_grad in zip(names, mine_grads, theirs_grads, strict=True):
        assert_close(own_grad, other_grad, f"gradient of {what}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@looped("arguments", ARGUMENTS)
def test_ragged_equals_one_by_one(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    compare(arguments, dtype, LENGTHS)


@pytest.mark.parametrize(("schedule", "backend"), PAIRS)
@looped("arguments", [a for a in ARGUMENTS if not a["batch_first"]])
def test_every_schedule_and_backend(arguments: dict[str, Any], schedule: str, backend: str) -> None:
    compare(arguments, torch.float64, LENGTHS, schedule=schedule, backend=backend)


@pytest.mark.parametrize("arguments", KINDS, ids=name_of)
@given(lengths=lengths(most=5))
def test_any_lengths(arguments: dict[str, Any], lengths: list[int]) -> None:
    if lengths:
        compare({**arguments, "bidirectional": True}, torch.float64, lengths)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_batch_without_elements_still_trains(backend: str) -> None:
    """A training step on empty sequences alone moves nothing, and breaks nothing."""
    layer = rl.nn.LSTM(5, 4, backend=backend)
    out, (h, _) = layer(rl.Ragged([torch.empty(0, 5)]))
    (out.values.sum() + h.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@looped(("schedule", "backend"), PAIRS)
@looped("lengths", [[], [0], [0, 0, 0], [1], [3, 3]])
def test_few_sequences(kind: str, schedule: str, backend: str, lengths: list[int]) -> None:
    layer = getattr(rl.nn, kind)(5, 4, 2, bidirectional=True, schedule=schedule, backend=backend)
    batch = rl.Ragged.from_flat(torch.randn(sum(lengths), 5), lengths=lengths)
    hx = state_of(layer, len(lengths), torch.float32)
    out, state = layer(batch, hx)
    assert out.values.shape == (sum(lengths), 8)
    for own, initial in zip(parts(state), parts(hx), strict=True):
        assert own.shape == initial.shape
        empty = torch.tensor(lengths) == 0
        assert torch.equal(own[:, empty], initial[:, empty])


# -- like in, like out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["auto", "reference"])
@looped("arguments", ARGUMENTS)
def test_like_in_like_out(arguments: dict[str, Any], chosen: str) -> None:
    """Every kind of input gives the ragged batch's numbers, in its own kind."""
    _, layer = pair_of_layers(arguments, torch.float64, backend=chosen)
    first = layer.batch_first
    batch = rl.Ragged(sequences_of([4, 1, 7, 4], (5,)))
    hx = state_of(layer, 4, torch.float64)
    out, state = layer(batch, hx)

    padded, told = batch.to_padded(first, total_length=9)
    padded_out, padded_state = layer(padded, hx, lengths=told)
    assert padded_out.shape[:2] == padded.shape[:2]
    assert_close(padded_out, out.to_padded(first, total_length=9)[0], "padded")

    packed_out, packed_state = layer(batch.to_packed(), hx)
    assert isinstance(packed_out, rl.packing.PackedSequence)
    assert_close(rl.Ragged.from_packed(packed_out).values, out.values, "packed")
    theirs = nn.utils.rnn.pack_padded_sequence(padded, told, first, enforce_sorted=False)
    again, _ = layer(theirs, hx)
    assert again.sorted_indices is theirs.sorted_indices
    assert_close(rl.Ragged.from_packed(again).values, out.values, "torch's pack")

    for other in (padded_state, packed_state):
        for own, expected in zip(parts(other), parts(state), strict=True):
            assert_close(own, expected, "state")

    single, single_state = layer(batch[2], like([part[:, 2] for part in parts(hx)], hx))
    assert_close(single, out[2], "unbatched")
    for own, expected in zip(parts(single_state), parts(state), strict=True):
        assert_close(own, expected[:, 2], "unbatched state")


@pytest.mark.parametrize("chosen", ["auto", "reference"])
@looped("arguments", ARGUMENTS)
def test_a_tensor_without_lengths_is_torchs(arguments: dict[str, Any], chosen: str) -> None:
    theirs, mine = pair_of_layers(arguments, torch.float64, backend=chosen)
    inputs = torch.randn(3, 6, 5, dtype=torch.float64)
    expected, expected_state = theirs(inputs)
    out, state = mine(inputs)
    assert_close(out, expected, "output")
    assert out.is_contiguous()  # wherever torch's is, of which callers take a view
    for own, other in zip(parts(state), parts(expected_state), strict=True):
        assert_close(own, other, "state")


def test_packs_with_empty_sequences() -> None:
    layer = rl.nn.GRU(5, 4)
    batch = rl.Ragged(sequences_of([3, 0, 2], (5,), torch.float32))
    out, state = layer(batch.to_packed())
    expected, expected_state = layer(batch)
    assert_close(rl.Ragged.from_packed(out).values, expected.values, "output")
    assert_close(state, expected_state, "state")


def test_one_long_among_many_short() -> None:
    compare({"kind": "LSTM", "bidirectional": True}, torch.float64, [60, *([1, 2] * 10)])


# -- the rest of the call --------------------------------------------------------------------------------------------


@looped("arguments", [a for a in ARGUMENTS if a["bias"]])
def test_no_output_and_summary(arguments: dict[str, Any]) -> None:
    _, layer = pair_of_layers(arguments, torch.float64)
    batch = rl.Ragged(sequences_of([4, 1, 7], (5,)))
    out, state = layer(batch)
    nothing, same_state = layer(batch, return_output=False)
    assert nothing is None
    for own, other in zip(parts(same_state), parts(state), strict=True):
        assert_close(own, other, "state")
    half = out.values.shape[1] // (2 if layer.bidirectional else 1)
    expected = out.last()[:, :half]
    if layer.bidirectional:
        expected = torch.cat([expected, out.first()[:, half:]], 1)
    assert_close(layer.summary(nothing, state), expected, "summary")
    if layer.bidirectional:
        assert not torch.allclose(out.last(), expected)


@looped("arguments", [a for a in ARGUMENTS if a["bias"] and not a["batch_first"]])
def test_return_states(arguments: dict[str, Any]) -> None:
    _, layer = pair_of_layers(arguments, torch.float64)
    batch = rl.Ragged(sequences_of([4, 0, 7], (5,)))
    out, state, states = layer(batch, return_states=True)
    assert len(states) == layer.num_layers
    top = [part.values for part in parts(states[-1])]
    assert_close(top[0], out.values, "the top layer's h is the output")
    directions = 2 if layer.bidirectional else 1
    for index, layer_states in enumerate(states):
        for history, final in zip(parts(layer_states), parts(state), strict=True):
            size = final.shape[2]
            for direction in range(directions):
                own = history.map(lambda v, d=direction, s=size: v[:, d * s : (d + 1) * s])
                reached = own.last() if direction == 0 else own.first()
                reached[1] = final[index * directions + direction, 1]  # the empty sequence has no step
                assert_close(reached, final[index * directions + direction], "the state at the end is the final one")


@looped("first", [False, True])
@looped("kind", KINDS)
def test_step_by_step_equals_at_once(kind: dict[str, Any], first: bool) -> None:
    _, layer = pair_of_layers({**kind, "num_layers": 2, "batch_first": first}, torch.float64)
    inputs = torch.randn(6, 3, 5, dtype=torch.float64)
    expected, final = layer(inputs.transpose(0, 1) if first else inputs)
    state = None
    for t in range(6):
        out, state = layer.step(inputs[t], state)
        assert_close(out, expected[:, t] if first else expected[t], f"step {t}")
    for own, other in zip(parts(state), parts(final), strict=True):
        assert_close(own, other, "state")
    alone, _ = layer.step(inputs[0, 0])
    assert alone.shape == (layer.proj_size or 4,)


@looped(("schedule", "backend"), PAIRS)
@looped("arguments", [a for a in ARGUMENTS if a["num_layers"] == 2 and a["bias"]])
def test_dropout_is_nothing_in_eval_mode(arguments: dict[str, Any], schedule: str, backend: str) -> None:
    theirs, mine = pair_of_layers({**arguments, "dropout": 0.5}, torch.float64, schedule=schedule, backend=backend)
    sequences = sequences_of([3, 0, 5], (5,))
    expected, _ = one_by_one(theirs.eval(), sequences, state := state_of(theirs, 3, torch.float64))
    assert_close(mine.eval()(rl.Ragged(sequences), state)[0].values, torch.cat(expected), "output")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_dropout_statistics(backend: str) -> None:
    """In training a share of the first layer's outputs is zeroed, which the second layer shows; not in eval."""
    layer: Any = rl.nn.RNN(1, 500, 2, nonlinearity="relu", dropout=0.3, bias=False, backend=backend)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1.0)
        layer.weight_hh_l0.zero_()
        layer.weight_ih_l1.copy_(torch.eye(500))
        layer.weight_hh_l1.zero_()
    batch = rl.Ragged([torch.ones(length, 1) for length in (20, 0, 30)])
    out = layer.train()(batch)[0].values
    assert abs((out == 0).float().mean().item() - 0.3) < 0.02
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / 0.7))
    assert torch.equal(layer.eval()(batch)[0].values, torch.ones(50, 500))


def test_nan_on_both_sides() -> None:
    """What lies beside a sequence in memory never reaches it."""
    for schedule, backend in PAIRS:
        layer = rl.nn.LSTM(5, 4, 2, bidirectional=True, schedule=schedule, backend=backend)
        middle = torch.randn(3, 5)
        poison = torch.full((6, 5), float("nan"))
        alone = layer(rl.Ragged([torch.zeros(6, 5), middle, torch.zeros(6, 5)]))[0][1]
        among = layer(rl.Ragged([poison, middle, poison]))[0][1]
        assert torch.equal(alone, among), (schedule, backend)


# -- a drop-in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_weights_go_both_ways(kind: str) -> None:
    mine, theirs = getattr(rl.nn, kind)(5, 4, 2), getattr(nn, kind)(5, 4, 2)
    assert isinstance(mine, nn.RNNBase)
    assert [(n, p.shape) for n, p in mine.named_parameters()] == [(n, p.shape) for n, p in theirs.named_parameters()]
    theirs.load_state_dict(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    torch.manual_seed(3)
    first = getattr(nn, kind)(5, 4).weight_ih_l0
    torch.manual_seed(3)
    assert torch.equal(first, getattr(rl.nn, kind)(5, 4).weight_ih_l0)


def test_weights_may_be_replaced_for_a_call() -> None:
    layer = rl.nn.GRU(5, 4, backend="reference")
    batch = rl.Ragged([torch.randn(3, 5), torch.randn(2, 5)])
    doubled = {name: 2 * value for name, value in layer.named_parameters()}
    out, _ = torch.func.functional_call(layer, doubled, (batch,))
    with torch.no_grad():
        for value in layer.parameters():
            value.mul_(2)
    assert_close(out.values, layer(batch)[0].values, "output")


def test_double_backward_through_reference() -> None:
    layer = rl.nn.LSTM(3, 2, dtype=torch.float64, backend="reference")

    def function(values: Tensor) -> Tensor:
        out: Tensor = layer(rl.Ragged.from_flat(values, lengths=[2, 0, 3]))[0].values
        return out

    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(function, values)


def test_autocast() -> None:
    layer, batch = rl.nn.LSTM(5, 4), rl.Ragged([torch.randn(3, 5), torch.randn(0, 5), torch.randn(2, 5)])
    expected, _ = layer(batch)
    for backend in ("torch", "reference"):
        with torch.autocast("cpu", torch.bfloat16), rl.use_backend(backend=backend):
            out, (h, c) = layer(batch)
        assert out.dtype is h.dtype is c.dtype
        torch.testing.assert_close(out.values.float(), expected.values, rtol=0.05, atol=0.02)


@looped("backend", _HERE)
@looped("kind", ["GRU", "LSTM"])
def test_a_pack_on_every_backend(kind: str, backend: str) -> None:
    """Empty sequences are in a pack's order alone, where torch's own kernels do not look."""
    layer = getattr(rl.nn, kind)(5, 4, 2, bidirectional=True, backend=backend, dtype=torch.float64)
    for counts in ([1, 3, 2], [3, 0, 2], [0, 0, 4, 0], [0, 1, 1]):
        batch = rl.Ragged(sequences_of(counts, (5,)))
        hx = tuple(torch.randn(4, len(counts), 4, dtype=torch.float64) for _ in range(2))
        for state in (None, hx if kind == "LSTM" else hx[0]):
            out, final = layer(batch.to_packed(), state)
            with rl.use_backend(backend="reference", schedule="each"):
                wanted, wanted_final = layer(batch, state)
            assert_close(rl.Ragged.from_packed(out).values, wanted.values, "output")
            for own, expected in zip(parts(final), parts(wanted_final), strict=True):
                assert_close(own, expected, "state")
