"""What RNN, LSTM and GRU say of wrong inputs, states and lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raglane as rl
from looped import looped


@looped(
    ("arguments", "error", "says"),
    [
        ((rl.Ragged([torch.ones(2, 4)]),), ValueError, "input_size = 5"),
        ((rl.Ragged([torch.ones(2)]),), RuntimeError, "input_size = 5"),
        ((rl.Ragged([torch.ones(2, 5).double()]),), ValueError, r"\.to\(torch\.float32\)"),
        ((rl.Ragged([torch.ones(2, 5)]), torch.ones(1, 1, 4)), TypeError, r"a tuple \(h, c\)"),
        ((rl.Ragged([torch.ones(2, 5)]), (torch.ones(1, 1, 4), torch.ones(1, 2, 4))), RuntimeError, r"hx \(c\)"),
        ((rl.Ragged([torch.ones(2, 5)]), (torch.ones(1, 1, 4).double(),) * 2), ValueError, r"hx \(h\).*float32"),
        (([torch.ones(2, 5)],), TypeError, r"rl\.Ragged\(sequences\)"),
    ],
)
def test_refuses(arguments: tuple[Any, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rl.nn.LSTM(5, 4)(*arguments)


def test_refuses_lengths_that_do_not_fit() -> None:
    layer = rl.nn.GRU(5, 4, batch_first=True)
    with pytest.raises(TypeError, match="brings its own"):
        layer(rl.Ragged([torch.ones(2, 5)]), lengths=[2])
    with pytest.raises(ValueError, match="lengths"):
        layer(torch.ones(2, 3, 5), lengths=[1, 4])
    with pytest.raises(ValueError, match=r"\(B, T, D\)"):
        layer(torch.ones(3, 5), lengths=[3])
    with pytest.raises(TypeError, match="bidirectional=False"):
        rl.nn.GRU(5, 4, bidirectional=True).step(torch.ones(5))


@looped("batch_first", [False, True])
@looped(
    ("hx", "says"),
    [
        (torch.ones(1, 3, 4), r"a tuple \(h, c\)"),
        ((None, None), r"a tuple \(h, c\)"),
        ((torch.ones(1, 2, 4), torch.ones(1, 3, 4)), r"hx \(h\).*\(1, 3, 4\)"),
        ((torch.ones(1, 3, 4).double(),) * 2, r"hx \(h\).*float64"),
    ],
)
def test_a_wrong_state_is_named_for_plain_tensors_too(hx: Any, says: str, batch_first: bool) -> None:
    """Where torch's own forward takes the input as it is, its messages would not say what to pass."""
    layer = rl.nn.LSTM(5, 4, batch_first=batch_first)
    inputs = torch.ones(3, 6, 5) if batch_first else torch.ones(6, 3, 5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(6, 5)] * 3)
    for batch in (inputs, packed):
        with pytest.raises((TypeError, ValueError), match=says):
            layer(batch, hx)


@looped(
    ("call", "says"),
    [
        (lambda layer: layer(torch.ones(6, 3, 7)), "input_size = 5"),
        (lambda layer: layer(torch.ones(6, 3, 5).double()), r"\.to\(torch\.float32\)"),
        (lambda layer: layer(torch.ones(5)), r"\(T, D\)"),
        (lambda layer: layer(torch.nested.nested_tensor([torch.ones(2, 5)], layout=torch.jagged)), "from_nested"),
        (lambda layer: layer.step([1.0]), "x_t must be .*got a list"),
        (lambda layer: layer.summary(None, None), "state must be .*got a NoneType"),
    ],
)
def test_other_wrong_inputs_are_named(call: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call(rl.nn.GRU(5, 4))
