"""The masks of regularisation themselves: what shares one, how much is dropped, and that the mean is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from every_layer import a_batch, parts

WIDE = 400


def relu_network(layers: int, recurrent: float, **options: Any) -> Any:
    """Layers that hand on what they read plus ``recurrent`` times their state, where nothing is below 0."""
    layer: Any = rl.nn.RNN(WIDE, WIDE, layers, nonlinearity="relu", bias=False, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            identity = torch.eye(WIDE, dtype=torch.float64)
            if weight.shape[1] > WIDE:  # what reads both directions reads the mean of them
                identity = torch.cat([identity, identity], 1) / 2
            weight.copy_(identity * (1.0 if "_ih" in name else recurrent))
    return layer


def assert_drops(mask: Tensor, share: float) -> None:
    """Zeros in this share, within five standard deviations, and elsewhere what keeps the mean."""
    kept = mask[mask != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)))
    deviation = (share * (1 - share) / mask.numel()) ** 0.5
    assert abs((mask == 0).double().mean().item() - share) < 5 * deviation


def test_one_mask_a_sequence_on_inputs() -> None:
    layer = relu_network(1, 0.0, bidirectional=True, input_dropout=0.3)
    out, _ = layer(rl.Ragged([torch.ones(length, WIDE, dtype=torch.float64) for length in (4, 0, 6, 1)]))
    assert torch.equal(out.values[:, :WIDE], out.values[:, WIDE:]), "both directions read the same input"
    masks = out.first()[[0, 2, 3], :WIDE]
    for sequence, mask in zip((0, 2, 3), masks, strict=True):
        assert bool((out[sequence][:, :WIDE] == mask).all()), "the same at all steps"
    assert_drops(masks, 0.3)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_every_layer_has_its_own_mask_on_inputs() -> None:
    layer = relu_network(2, 0.0, input_dropout=0.3)
    batch = rl.Ragged([torch.ones(3, WIDE, dtype=torch.float64)])
    out, _, states = layer(batch, return_states=True)
    first = states[0][0][0]
    second = (out[0][0] / first)[first != 0]
    assert_drops(first, 0.3)
    assert_drops(second, 0.3)
    assert second.numel() < WIDE


def test_one_mask_a_sequence_on_states() -> None:
    layer = relu_network(1, 1.0, bidirectional=True, state_dropout=0.3)
    counts = (4, 0, 6, 1)
    batch = rl.Ragged([torch.zeros(count, WIDE, dtype=torch.float64) for count in counts])
    out, _ = layer(batch, torch.ones(2, 4, WIDE, dtype=torch.float64))
    # From a state of ones and inputs of zeros, the state after t steps is the mask to the power of t.
    forward, reverse = out.first()[[0, 2, 3], :WIDE], out.last()[[0, 2, 3], WIDE:]
    for row, sequence in enumerate((0, 2, 3)):
        powers = torch.arange(1, counts[sequence] + 1, dtype=torch.float64).unsqueeze(1)
        torch.testing.assert_close(out[sequence][:, :WIDE], forward[row] ** powers)
        torch.testing.assert_close(out[sequence][:, WIDE:], reverse[row] ** powers.flip(0))
    assert_drops(torch.cat([forward, reverse]), 0.3)
    assert not torch.equal(forward, reverse), "each direction has its own"
    assert not torch.equal(forward[0], forward[1])


def test_one_mask_a_call_on_weights() -> None:
    layer = relu_network(1, 0.0, weight_dropout=0.3)
    with torch.no_grad():
        layer.weight_hh_l0.fill_(1.0)
    batch = rl.Ragged([torch.zeros(1, WIDE, dtype=torch.float64)] * WIDE)
    # The state of each sequence is one unit: its first output is a column of the weights as they were used.
    hx = torch.eye(WIDE, dtype=torch.float64).unsqueeze(0)
    columns = layer(batch, hx)[0].values
    assert_drops(columns, 0.3)
    assert not torch.equal(layer(batch, hx)[0].values, columns), "another call, another mask"
    twice = layer(rl.Ragged([torch.zeros(1, WIDE, dtype=torch.float64)] * 2), hx[:, [5, 5]])[0].values
    assert torch.equal(twice[0], twice[1]), "all sequences read the same weights"
    assert bool((layer.weight_hh_l0 == 1.0).all()), "the parameter itself is as it was"


@pytest.mark.parametrize("zoneout", [0.3, (0.0, 0.6), (0.5, 0.0)])
def test_the_share_of_units_held(zoneout: Any) -> None:
    layer = rl.nn.LSTM(3, WIDE, zoneout=zoneout, dtype=torch.float64)
    batch = a_batch([9, 1, 8])
    hx = torch.randn(2, 1, 3, WIDE, dtype=torch.float64)
    _, _, states = layer(batch, tuple(hx), return_states=True)
    for part, initial, share in zip(states[0], hx, parts(zoneout) * 2, strict=False):
        held = torch.cat([own.diff(dim=0, prepend=initial[:, row]) == 0 for row, own in enumerate(part)])
        if share == 0:
            assert not held.any()
            continue
        assert abs(held.double().mean().item() - share) < 5 * (share * (1 - share) / held.numel()) ** 0.5
        assert not torch.equal(held[0], held[1]), "each step draws its own"


def test_dropout_between_layers_acts_beside_the_others() -> None:
    for options in ({"weight_dropout": 0.2}, {"input_dropout": 0.3}, {"zoneout": 0.0, "state_dropout": 0.2}):
        layer = relu_network(2, 0.0, dropout=0.4, **options)
        out, _, states = layer(rl.Ragged([torch.ones(20, WIDE, dtype=torch.float64)]), return_states=True)
        seen = states[0].values != 0
        if "input_dropout" in options:
            seen &= (out.values != 0).any(0)  # the second layer's own mask, the same at all steps
        zeros = (out.values == 0)[seen].double()
        assert abs(zeros.mean().item() - 0.4) < 0.03, options
