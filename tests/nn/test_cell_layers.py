"""Every layer of rl.nn: its numbers against formulas written a second time, and every way to call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from cell_requests import gradients, largest_error
from every_layer import GATED, KINDS, D, H, Kind, a_state, build, parts, truth_of
from looped import looped
from raglane.kernels.contract import Result
from strategies import sequences_of

LENGTHS = [4, 0, 1, 6, 2]
SHAPES = [(1, False), (1, True), (2, False), (2, True)]


def _batch(lengths: list[int], requires_grad: bool = False) -> rl.Ragged:
    values = torch.randn(sum(lengths), D, dtype=torch.float64, requires_grad=requires_grad)
    return rl.Ragged.from_flat(values, lengths=lengths)


def _same(ours: Any, theirs: Any) -> None:
    """Numbers in one shape, to the rounding of float64."""
    for mine, wanted in zip(parts(ours), parts(theirs), strict=True):
        assert largest_error(mine, wanted) < 1e-12


# -- numbers ----------------------------------------------------------------------------------------------------------


def _assert_truth(kind: Kind, layer: Any, lengths: list[int], clip: float | None = None) -> None:
    """Outputs, states and gradients of everything."""
    batch, hx = _batch(lengths, requires_grad=True), a_state(layer, len(lengths))
    out, state = layer(batch, hx)
    wanted = truth_of(kind, layer, batch, hx, clip)
    assert wanted.output is not None
    _same((out.values, *parts(state)), (wanted.output, *wanted.state))
    leaves = [batch.values, *parts(hx), *layer.parameters()]
    weighting = [torch.randn_like(part) for part in (wanted.output, *wanted.state)]
    mine = gradients(Result(out.values, parts(state)), leaves, weighting)
    for own, other in zip(mine, gradients(wanted, leaves, weighting), strict=True):
        assert largest_error(own, other) < 1e-12


@pytest.mark.parametrize("backend", ["auto", "reference"])
@looped("bias", [True, False])
@looped(("layers", "both"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_are_their_formulas(kind: Kind, layers: int, both: bool, bias: bool, backend: str) -> None:
    layer = build(kind, num_layers=layers, bidirectional=both, bias=bias, backend=backend)
    _assert_truth(kind, layer, LENGTHS)


@looped("lengths", [[], [0], [0, 0], [1], [3, 3], [30, 1, 1, 2]])
@looped("kind", KINDS)
def test_few_and_uneven_sequences(kind: Kind, lengths: list[int]) -> None:
    _assert_truth(kind, build(kind, bidirectional=True), lengths)


@looped("clip", [0.4, 2])
@looped("kind", GATED)
def test_clip(kind: Kind, clip: float) -> None:
    layer = build(kind, 2, bidirectional=True, clip=clip)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(5)
    _assert_truth(kind, layer, LENGTHS, clip)
    batch = _batch(LENGTHS)
    free = build(kind, 2, bidirectional=True)
    free.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(batch)[0].values, free(batch)[0].values)


@looped("kind", KINDS)
def test_gradients_are_the_limits_of_differences(kind: Kind) -> None:
    layer = build(kind, 2, bidirectional=True)
    names, given = zip(*layer.named_parameters(), strict=True)
    hx = a_state(layer, 3)

    def function(values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        state = rest[: len(parts(hx))]
        weights = dict(zip(names, rest[len(state) :], strict=True))
        batch = rl.Ragged.from_flat(values, lengths=[2, 0, 1])
        out, final = torch.func.functional_call(layer, weights, (batch, state if len(state) > 1 else state[0]))
        return out.values, *parts(final)

    inputs = (torch.randn(3, D, dtype=torch.float64, requires_grad=True), *parts(hx), *given)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


# -- like in, like out ------------------------------------------------------------------------------------------------


@looped("first", [False, True])
@looped("kind", KINDS)
def test_like_in_like_out(kind: Kind, first: bool) -> None:
    """Every kind of input gives the ragged batch's numbers, in its own kind."""
    layer = build(kind, 2, bidirectional=True, batch_first=first)
    lengths = [4, 1, 6, 4]
    batch, hx = _batch(lengths), a_state(layer, 4)
    out, state = layer(batch, hx)
    assert isinstance(out, rl.Ragged)
    assert torch.equal(out.host_lengths, batch.host_lengths)

    padded, told = batch.to_padded(first, total_length=8)
    padded_out, padded_state = layer(padded, hx, lengths=told)
    _same(padded_out, out.to_padded(first, total_length=8)[0])
    _same(padded_state, state)

    theirs = nn.utils.rnn.pack_padded_sequence(padded, torch.tensor(lengths, device="cpu"), first, enforce_sorted=False)
    for packed in (batch.to_packed(), theirs):
        packed_out, packed_state = layer(packed, hx)
        assert isinstance(packed_out, nn.utils.rnn.PackedSequence)
        assert packed_out.sorted_indices is packed.sorted_indices
        _same(rl.Ragged.from_packed(packed_out).values, out.values)
        _same(packed_state, state)

    alone = tuple(part[:, 2] for part in parts(hx))
    single, single_state = layer(batch[2], alone if len(alone) > 1 else alone[0])
    _same(single, out[2])
    _same(single_state, tuple(part[:, 2] for part in parts(state)))

    dense = torch.randn(3, 5, D, dtype=torch.float64)
    every, every_state = layer(dense if first else dense.transpose(0, 1))
    expected, expected_state = layer(rl.Ragged(list(dense)))
    _same(every if first else every.transpose(0, 1), expected.values.view(3, 5, 2 * H))
    _same(every_state, expected_state)


@looped("kind", KINDS)
def test_packs_with_empty_sequences(kind: Kind) -> None:
    layer, batch = build(kind), _batch([3, 0, 2])
    out, state = layer(batch.to_packed())
    expected, expected_state = layer(batch)
    _same(rl.Ragged.from_packed(out).values, expected.values)
    _same(state, expected_state)


@looped("first", [False, True])
@looped("kind", KINDS)
def test_step_by_step_equals_at_once(kind: Kind, first: bool) -> None:
    layer = build(kind, 2, batch_first=first)
    inputs = torch.randn(6, 3, D, dtype=torch.float64)
    expected, final = layer(inputs.transpose(0, 1) if first else inputs)
    state = single_state = None
    for t in range(6):
        out, state = layer.step(inputs[t], state)
        _same(out, expected[:, t] if first else expected[t])
        single, single_state = layer.step(inputs[t, 1], single_state)
        _same(single, out[1])
    _same(state, final)
    _same(single_state, tuple(part[:, 1] for part in parts(final)))


# -- the rest of the call ---------------------------------------------------------------------------------------------


@looped(("layers", "both"), SHAPES)
@looped("kind", KINDS)
def test_no_output_and_summary(kind: Kind, layers: int, both: bool) -> None:
    layer, batch = build(kind, layers, bidirectional=both), _batch([4, 1, 6])
    out, state = layer(batch)
    nothing, same_state = layer(batch, return_output=False)
    assert nothing is None
    _same(same_state, state)
    expected = out.last()[:, :H]
    if both:
        expected = torch.cat([expected, out.first()[:, H:]], 1)
        assert not torch.allclose(out.last(), expected)
    _same(layer.summary(nothing, state), expected)
    single, single_state = layer(batch[2])
    _same(layer.summary(single, single_state), expected[2])


@looped(("layers", "both"), SHAPES)
@looped("kind", KINDS)
def test_return_states(kind: Kind, layers: int, both: bool) -> None:
    layer, batch = build(kind, layers, bidirectional=both), _batch(LENGTHS)
    hx = a_state(layer, len(LENGTHS))
    out, state, states = layer(batch, hx, return_states=True)
    wanted = truth_of(kind, layer, batch, hx)
    assert wanted.output is not None
    assert wanted.states is not None
    _same((out.values, *parts(state)), (wanted.output, *wanted.state))
    assert len(states) == layers
    for ours, theirs in zip(states, wanted.states, strict=True):
        assert all(isinstance(part, rl.Ragged) for part in parts(ours))
        _same(tuple(part.values for part in parts(ours)), theirs)
    nothing, _, again = layer(batch, hx, return_states=True, return_output=False)
    assert nothing is None
    _same(parts(again[-1])[0].values, out.values)


@looped("kind", KINDS)
def test_dropout_acts_between_layers_in_training_only(kind: Kind) -> None:
    layer, batch = build(kind, 2, dropout=1.0), _batch(LENGTHS)
    plain = build(kind, 2)
    plain.load_state_dict(layer.state_dict())
    out, state = plain(batch)
    _same(layer.eval()(batch)[0].values, out.values)
    dropped, dropped_state = layer.train()(batch)
    assert not torch.allclose(dropped.values, out.values)
    # The first layer is whole, the second reads zeros.
    for ours, theirs in zip(parts(dropped_state), parts(state), strict=True):
        _same(ours[0], theirs[0])
    assert not torch.autograd.grad(dropped.values.sum(), layer.weight_ih_l1)[0].any()


# -- devices and dtypes -----------------------------------------------------------------------------------------------


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_dtypes(kind: Kind, dtype: torch.dtype) -> None:
    # Of few units, some are nearly equal by chance, and normalising them would magnify every rounding.
    layer = build(kind, 2, units=32, bidirectional=True)
    sequences = sequences_of(LENGTHS, (D,), dtype)
    layer.to(dtype)
    out, state = layer(rl.Ragged(sequences))
    assert {out.dtype, *(part.dtype for part in parts(state))} == {dtype}
    exact, exact_state = layer.to(torch.float64)(rl.Ragged([sequence.double() for sequence in sequences]))
    for ours, theirs in zip((out.values, *parts(state)), (exact.values, *parts(exact_state)), strict=True):
        assert largest_error(ours.double(), theirs) < 32 * torch.finfo(dtype).eps


# Not every CPU has torch's kernels for float16.
@looped(("dtype", "backend"), [(torch.bfloat16, "auto"), (torch.float16, "reference")])
@looped("kind", KINDS)
def test_autocast(kind: Kind, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    layer = build(kind, 2, units=32, dtype=torch.float32, backend=backend)
    batch = rl.Ragged(sequences_of(LENGTHS, (D,), torch.float32))
    plain, _ = layer(batch)
    with torch.autocast(device.type, dtype):
        out, state = layer(batch)
    assert {out.dtype, *(part.dtype for part in parts(state))} == {dtype}
    assert largest_error(out.values.float(), plain.values) < 0.05
    found = torch.autograd.grad(out.values.float().sum(), list(layer.parameters()))
    wanted = torch.autograd.grad(plain.values.sum(), list(layer.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 0.1  # a relu or two may sit on the other side


# -- IndRNN and minLSTM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
def test_a_bound_indrnn_at_most_doubles_its_state(nonlinearity: str) -> None:
    length = 20
    layer: Any = rl.nn.IndRNN(1, 3, nonlinearity=nonlinearity, max_length=length, bias=False, dtype=torch.float64)  # type: ignore[arg-type]
    given = torch.tensor([5.0, -5.0, 0.5], dtype=torch.float64)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(given)
    start = torch.full((1, 1, 3), 1e-3, dtype=torch.float64)
    _, state = layer(torch.zeros(length, 1, 1, dtype=torch.float64), start)
    assert (state.abs() <= 2e-3 * (1 + 1e-12)).all()
    if nonlinearity == "relu":  # a negative weight shuts a relu at its first step
        assert state.flatten().tolist() == pytest.approx([2e-3, 0.0, 1e-3 * 0.5**length], rel=1e-12, abs=0)
    assert torch.equal(layer.weight_hh_l0.detach(), given)  # the parameters themselves are left as they are


@looped("length", [2, 3, 7, 20, 100, 150, 400, 5000])
@looped("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@looped("casts", [False, True])
@looped("backend", ["auto", "reference"])
def test_a_bound_is_rounded_inwards(backend: str, casts: bool, dtype: torch.dtype, length: int) -> None:
    layer: Any = rl.nn.IndRNN(1, 3, bias=False, max_length=length, dtype=dtype, backend=backend)
    start = torch.ones(1, 1, 3, dtype=dtype)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.copy_(torch.tensor([5.0, 3.0, 0.5]))
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        _, state = layer(torch.zeros(1, 1, 1, dtype=dtype), start)
    (gradient,) = torch.autograd.grad(-state.sum(), layer.weight_hh_l0)
    held, other, inner = state.double().flatten().tolist()
    # The largest number within the bound: with one more step of the dtype, it would be outside.
    assert held == other <= 2 ** (1 / length) < held + torch.finfo(state.dtype).eps
    assert inner == 0.5
    assert gradient.tolist() == [0.0, 0.0, -1.0]


def test_a_bound_lets_gradients_inwards_only() -> None:
    layer: Any = rl.nn.IndRNN(1, 4, bias=False, max_length=2, dtype=torch.float64, backend="reference")
    bound = 2**0.5
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.copy_(torch.tensor([5.0, 1.0, bound, 5.0]))
    _, state = layer(torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64))
    assert state.flatten().tolist() == pytest.approx([bound, 1.0, bound, bound])
    # A step goes against the gradient: of +h it makes the first weight smaller, of -h the last one larger still.
    (gradient,) = torch.autograd.grad((state * torch.tensor([1.0, 1.0, 1.0, -1.0])).sum(), layer.weight_hh_l0)
    assert gradient.tolist() == [1.0, 1.0, 1.0, 0.0]
    with torch.no_grad():
        layer.weight_hh_l0.neg_()
        layer.weight_ih_l0.fill_(10.0)  # open the relu
    _, state = layer(torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64))
    assert state.flatten().tolist() == pytest.approx([10 - bound, 9.0, 10 - bound, 10 - bound])
    (gradient,) = torch.autograd.grad((state * torch.tensor([1.0, 1.0, 1.0, -1.0])).sum(), layer.weight_hh_l0)
    assert gradient.tolist() == [0.0, 1.0, 1.0, -1.0]


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    layer = rl.nn.IndRNN(D, H, 2, "tanh", bidirectional=True, max_length=7, dtype=torch.float64)
    _assert_truth(Kind("IndRNN", "indrnn_tanh"), layer, LENGTHS)
    assert all(bool((weight.abs() <= 1).all()) for name, weight in layer.named_parameters() if "weight_hh" in name)


@looped("backend", ["auto", "reference"])
@looped("dtype", [torch.float32, torch.float64])
def test_minlstm_with_extreme_gates(dtype: torch.dtype, backend: str) -> None:
    """Where both gates are 0 in every dtype, their ratio still decides, and gradients are finite."""
    layer: Any = rl.nn.MinLSTM(1, 3, dtype=dtype, backend=backend)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.bias_ih_l0.copy_(torch.tensor([-500.0, -500.0, 300.0, -500.0, -700.0, 400.0, 2.0, 2.0, 2.0]))
    values = torch.ones(2, 1, dtype=dtype, requires_grad=True)
    out, _ = layer(rl.Ragged.from_flat(values, lengths=[2]))
    # keep = 1/2, 1, 1/2; the state begins with 0.
    torch.testing.assert_close(out.values, torch.tensor([[1.0, 0.0, 1.0], [1.5, 0.0, 1.5]], dtype=dtype))
    found = torch.autograd.grad(out.values.square().sum(), [values, *layer.parameters()])
    assert all(bool(gradient.isfinite().all()) for gradient in found)
