"""Causal convolutions equal torch's convolutions with zeros before each sequence."""

from __future__ import annotations

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


def test_torch_weights_fit() -> None:
    layer, other = rl.nn.CausalConv1d(4, 6, 3, groups=2), torch.nn.Conv1d(4, 6, 3, groups=2)
    assert layer.weight.shape == other.weight.shape
    assert layer.bias is not None
    assert other.bias is not None
    assert layer.bias.shape == other.bias.shape


@pytest.mark.parametrize(
    ("sizes", "options", "name"),
    [
        ((0, 1, 1), {}, "input_size"),
        ((1, 0, 1), {}, "output_size"),
        ((1, 1, 0), {}, "kernel_size"),
        ((1, 1, 2), {"dilation": 0}, "dilation"),
        ((4, 6, 2), {"groups": 4}, "groups"),
        ((4, 6, 2), {"groups": 1.5}, "groups"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int], options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be"):
        rl.nn.CausalConv1d(*sizes, **options)
