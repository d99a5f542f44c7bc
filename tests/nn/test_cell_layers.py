"""Every layer of rl.nn: its numbers compared with independently written formulas, and all options
of a call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from cell_requests import largest_error
from every_layer import (
    GATED,
    KINDS,
    D,
    H,
    Kind,
    a_batch,
    a_state,
    assert_same,
    assert_same_for_every_input,
    build,
    gradients,
    parts,
    results_of,
    truth_of,
)
from strategies import sequences_of

LENGTHS = [4, 0, 1, 6, 2]


def _assert_truth(kind: Kind, layer: Any, lengths: list[int], clip: float | None = None) -> None:
    """Compare outputs, the states of all steps, and all gradients with the formulas."""
    batch, hx = a_batch(lengths), a_state(layer, len(lengths))
    truth = truth_of(kind, layer, batch, hx, clip)
    assert truth.output is not None
    assert truth.states is not None
    results, expected = results_of(layer(batch, hx)), [truth.output, *truth.state]
    assert_same(results, expected)
    leaves = [batch.values, *parts(hx), *layer.parameters()]
    if results[0].requires_grad and results[0].numel():
        assert_same(gradients(results, leaves), gradients(expected, leaves))
    nothing, _, states = layer(batch, hx, return_output=False, _with_states=True)
    assert nothing is None
    history = [part.values for layer_states in states for part in parts(layer_states)]
    assert_same(history, [part for layer_states in truth.states for part in layer_states])


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (LENGTHS, {"num_layers": 2, "bidirectional": True}),
        (LENGTHS, {"num_layers": 2, "backend": "reference"}),
        (LENGTHS, {"bias": False}),
        ([30, 1, 1, 2], {}),
        ([0, 0], {"bidirectional": True}),
        ([], {"bidirectional": True}),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_are_their_formulas(kind: Kind, lengths: list[int], options: dict[str, Any]) -> None:
    _assert_truth(kind, build(kind, **options), lengths)


@pytest.mark.parametrize(
    ("kind", "clip"), [(kind, (0.4, 2)[place % 2]) for place, kind in enumerate(GATED)], ids=str
)
def test_clip(kind: Kind, clip: float) -> None:
    layer = build(kind, 2, bidirectional=True, clip=clip)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(5)
    _assert_truth(kind, layer, LENGTHS, clip)
    batch = a_batch(LENGTHS)
    free = build(kind, 2, bidirectional=True)
    free.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(batch)[0].values, free(batch)[0].values)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_like_in_like_out(kind: Kind, first: bool) -> None:
    layer = build(kind, 2, bidirectional=True, batch_first=first)
    assert_same_for_every_input(layer, a_state(layer, 3))


@pytest.mark.parametrize(("first", "initial_state"), [(False, "zeros"), (True, "learned")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_step_by_step_equals_at_once(kind: Kind, first: bool, initial_state: str) -> None:
    layer = build(kind, 2, batch_first=first, initial_state=initial_state)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5)
    inputs = torch.randn(6, 3, D, dtype=torch.float64)
    expected, final = layer(inputs.transpose(0, 1) if first else inputs)
    state = single_state = None
    for t in range(6):
        out, state = layer.step(inputs[t], state)
        single, single_state = layer.step(inputs[t, 1], single_state)
        assert_same([out, single], [expected[:, t] if first else expected[t], out[1]])
    assert_same(parts(state), parts(final))
    assert_same(parts(single_state), [part[:, 1] for part in parts(final)])


@pytest.mark.parametrize(("layers", "both"), [(1, True), (2, False)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_output_and_summary(kind: Kind, layers: int, both: bool) -> None:
    layer, batch = build(kind, layers, bidirectional=both), a_batch([4, 1, 6])
    out, state = layer(batch)
    nothing, same_state = layer(batch, return_output=False)
    assert nothing is None
    assert_same(parts(same_state), parts(state))
    expected = out.last()[:, :H]
    if both:
        expected = torch.cat([expected, out.first()[:, H:]], 1)
        assert not torch.allclose(out.last(), expected)
    assert_same(
        [layer.final(nothing, state), layer.final(*layer(batch[2]))], [expected, expected[2]]
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dropout_acts_between_layers_in_training_only(kind: Kind) -> None:
    layer, batch = build(kind, 2, dropout=1.0), a_batch(LENGTHS)
    plain = build(kind, 2)
    plain.load_state_dict(layer.state_dict())
    out, state = plain(batch)
    assert_same([layer.eval()(batch)[0].values], [out.values])
    dropped, dropped_state = layer.train()(batch)
    assert not torch.allclose(dropped.values, out.values)
    # The second layer reads only zeros.
    assert_same([part[0] for part in parts(dropped_state)], [part[0] for part in parts(state)])
    assert not torch.autograd.grad(dropped.values.sum(), layer.weight_ih_l1)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_dtypes(kind: Kind, dtype: torch.dtype) -> None:
    # With few units, layer normalisation of nearly equal ones would magnify rounding errors.
    layer = build(kind, units=32, bidirectional=True)
    sequences = sequences_of(LENGTHS, (D,), dtype)
    layer.to(dtype)
    out, state = layer(rl.Ragged(sequences))
    assert {out.dtype, *(part.dtype for part in parts(state))} == {dtype}
    exact, exact_state = layer.to(torch.float64)(
        rl.Ragged([sequence.double() for sequence in sequences])
    )
    for ours, theirs in zip(
        (out.values, *parts(state)), (exact.values, *parts(exact_state)), strict=True
    ):
        assert largest_error(ours.double(), theirs) < 32 * torch.finfo(dtype).eps


# Not every CPU has torch's kernels for float16.
@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.bfloat16, "auto"), (torch.float16, "reference")]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
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
        assert (
            float((ours - theirs).norm() / theirs.norm()) < 0.1
        )  # the sign of an argument of relu may change


@pytest.mark.parametrize("length", [2, 7, 150, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_bound_is_rounded_inwards(
    backend: Any, casts: bool, dtype: torch.dtype, length: int
) -> None:
    layer: Any = rl.nn.IndRNN(1, 3, bias=False, max_length=length, dtype=dtype, backend=backend)
    start = torch.ones(1, 1, 3, dtype=dtype)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.copy_(torch.tensor([5.0, 3.0, 0.5]))
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        _, state = layer(torch.zeros(1, 1, 1, dtype=dtype), start)
    (gradient,) = torch.autograd.grad(-state.sum(), layer.weight_hh_l0)
    held, other, inner = state.double().flatten().tolist()
    # The largest number within the bound: the next one of the dtype is outside.
    assert held == other <= 2 ** (1 / length) < held + torch.finfo(state.dtype).eps
    assert inner == 0.5
    assert gradient.tolist() == [0.0, 0.0, -1.0]


def test_a_bound_lets_gradients_inwards_only() -> None:
    layer: Any = rl.nn.IndRNN(
        1, 4, bias=False, max_length=2, dtype=torch.float64, backend="reference"
    )
    bound = 2**0.5
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.copy_(torch.tensor([5.0, 1.0, bound, 5.0]))
    _, state = layer(
        torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    )
    assert state.flatten().tolist() == pytest.approx([bound, 1.0, bound, bound])
    # A step is against the gradient: with +h the first weight becomes smaller, with -h the last one
    # larger.
    (gradient,) = torch.autograd.grad(
        (state * torch.tensor([1.0, 1.0, 1.0, -1.0])).sum(), layer.weight_hh_l0
    )
    assert gradient.tolist() == [1.0, 1.0, 1.0, 0.0]
    with torch.no_grad():
        layer.weight_hh_l0.neg_()
        layer.weight_ih_l0.fill_(10.0)  # open the relu
    _, state = layer(
        torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    )
    assert state.flatten().tolist() == pytest.approx([10 - bound, 9.0, 10 - bound, 10 - bound])
    (gradient,) = torch.autograd.grad(
        (state * torch.tensor([1.0, 1.0, 1.0, -1.0])).sum(), layer.weight_hh_l0
    )
    assert gradient.tolist() == [0.0, 1.0, 1.0, -1.0]
