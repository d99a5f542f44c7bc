"""Causal convolutions equal torch's convolutions with zeros before each sequence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import raglane as rl
from raglane.errors import ArgumentError


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dilation", "groups"),
    [(1, 1, 1), (3, 1, 1), (3, 2, 1), (5, 3, 2), (2, 4, 1), (3, 1, 4), (1, 3, 2)],
)
def test_values_and_gradients(kernel: int, dilation: int, groups: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = rl.nn.CausalConv1d(
        4, 8, kernel, dilation=dilation, groups=groups, bias=bias, dtype=torch.float64
    )
    lengths = [7, 0, 1, 13]
    values = torch.randn(21, 4, dtype=torch.float64, requires_grad=True)
    out, state = layer(
        rl.Ragged([part.detach() for part in values.split(lengths)]).with_values(values)
    )
    weights = torch.randn_like(out.values)
    own = [part for part in (values, layer.weight, layer.bias) if part is not None]
    found = torch.autograd.grad((out.values * weights).sum(), own)
    reach = (kernel - 1) * dilation
    expected = torch.cat(
        [
            F.conv1d(
                F.pad(part.T, (reach, 0)),
                layer.weight,
                layer.bias,
                dilation=dilation,
                groups=groups,
            ).T
            for part in values.split(lengths)
            if len(part)
        ]
    )
    torch.testing.assert_close(out.values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        found, torch.autograd.grad((expected * weights).sum(), own), rtol=1e-11, atol=1e-11
    )
    if reach:
        assert torch.equal(state[0, 3], F.pad(values[8:].T, (reach, 0)).T[-reach:].reshape(-1))
    assert rl.nn.CausalConv1d(4, 8, kernel, groups=groups, backend="reference")(torch.empty(0, 4))[
        0
    ].shape == (0, 8)


def test_steps_have_the_bits_of_the_sequence() -> None:
    torch.manual_seed(0)
    layer, frames, state = rl.nn.CausalConv1d(3, 5, 4, dilation=2), torch.randn(12, 3), None
    with torch.no_grad():
        expected, _ = layer(frames)
        for frame, wanted in zip(frames, expected, strict=True):
            out, state = layer.step(frame, state)
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("initial_state", ["zeros", "learned"])
def test_the_weights_are_those_of_torch(bias: bool, initial_state: Any) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"groups": 2, "bias": bias}
    layer = rl.nn.CausalConv1d(4, 6, 3, **options, initial_state=initial_state)
    other = torch.nn.Conv1d(4, 6, 3, **options)
    result = layer.load_state_dict(other.state_dict(), strict=initial_state == "zeros")
    assert result.unexpected_keys == []
    assert [*layer.state_dict()] == [name for name, _ in layer.named_parameters()]
    assert {*layer.state_dict()} - {*other.state_dict()} <= {"initial_h"}
    values = torch.randn(9, 4)

    row = F.pad(values.T, (2, 0)).unsqueeze(0)
    copies = [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for convolution in copies:
        twin = F.conv1d(row, other.weight, other.bias, groups=2).squeeze(0).T
        torch.testing.assert_close(convolution(values)[0], twin)
        # A new parameter, a function of the weights, and another dtype reach the cell.
        weight = torch.nn.Parameter(2 * other.weight.detach())
        convolution.weight = weight
        doubled = F.conv1d(row, weight, other.bias, groups=2).squeeze(0).T
        torch.testing.assert_close(convolution(values)[0], doubled)
        torch.testing.assert_close(convolution.step(values[0])[0], doubled[0])
        (convolution(values)[0].sum()).backward()
        assert weight.grad is not None
        call = torch.func.functional_call(convolution, {"weight": other.weight}, (values,))
        torch.testing.assert_close(call[0], twin)
        wide = convolution.double()(values.double())[0]
        torch.testing.assert_close(wide.float(), doubled)
        assert {part.dtype for part in convolution.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("sizes", "options", "name"),
    [
        ((0, 1, 1), {}, "in_channels"),
        ((1, 0, 1), {}, "out_channels"),
        ((1, 1, 0), {}, "kernel_size"),
        ((1, 1, 2), {"dilation": 0}, "dilation"),
        ((4, 6, 2), {"groups": 4}, "groups"),
        ((4, 6, 2), {"groups": 1.5}, "groups"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int], options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be"):
        rl.nn.CausalConv1d(*sizes, **options)
