"""The causal convolution of channels, compared with a loop over elements in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.nn.recurrences import depthwise
from raglane.nn.recurrences.depthwise import convolve_channels, last_elements, step_channels

LENGTHS = [3, 0, 1, 7, 2, 0, 40, 1]
E = 5


def _loop(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: list[int],
    resets: Any,
    before: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the last K elements that the next ones would read."""
    size = weight.shape[1]
    outputs = []
    lasts = []
    begin = 0
    for number, length in enumerate(lengths):
        history = [values.new_zeros(E)] * size if before is None else list(before[number])
        for row in range(begin, begin + length):
            if resets is not None and resets[row]:
                history = [values.new_zeros(E)] * size
            history = [*history[1:], values[row]]
            output: Any = sum(history[tap] * weight[:, tap] for tap in range(size))
            outputs.append(output if bias is None else output + bias)
        lasts.append(torch.stack(history))
        begin += length
    return torch.stack(outputs), torch.stack(lasts)


def _drawn(size: int, has_bias: bool, has_resets: bool, has_before: bool) -> list[Any]:
    total = sum(LENGTHS)
    double: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    return [
        torch.randn(total, E, **double),
        torch.randn(E, size, **double),
        torch.randn(E, **double) if has_bias else None,
        torch.rand(total) < 0.3 if has_resets else None,
        torch.randn(len(LENGTHS), size, E, **double) if has_before else None,
    ]


OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("has_before", [False, True])
@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize(("size", "has_bias"), [(4, True), (2, False), (1, True)])
def test_loop(
    size: int,
    has_bias: bool,
    has_resets: bool,
    has_before: bool,
    is_graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, weight, bias, resets, before = _drawn(size, has_bias, has_resets, has_before)
    # Blocks of 16 rows, so that there are several.
    monkeypatch.setattr(depthwise, "_BLOCK", 1)
    monkeypatch.setattr(depthwise, "records_operators", lambda: is_graph)
    expected, lasts = _loop(values, weight, bias, LENGTHS, resets, before)
    earlier = None if before is None else before[:, 1:]
    output = convolve_channels(values, weight, bias, OFFSETS, resets, earlier)
    final = last_elements(values, size, OFFSETS, resets, before)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(final, lasts, rtol=0, atol=1e-12)
    inputs = [each for each in (values, weight, bias, before) if each is not None]
    upstream = [torch.randn_like(output), torch.randn_like(final)]
    ours = torch.autograd.grad([output, final], inputs, upstream, allow_unused=True)
    theirs = torch.autograd.grad([expected, lasts], inputs, upstream, allow_unused=True)
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)


def test_second_derivatives() -> None:
    values, weight, bias, resets, before = _drawn(3, True, True, True)

    def run(values: Tensor, weight: Tensor, bias: Tensor, before: Tensor) -> Tensor:
        return convolve_channels(values, weight, bias, OFFSETS, resets, before[:, 1:])

    assert torch.autograd.gradgradcheck(run, (values, weight, bias, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_batches_have_the_same_bits(dtype: torch.dtype) -> None:
    values = torch.randn(60, E).to(dtype)
    weight = torch.randn(E, 4).to(dtype)
    bias = torch.randn(E).to(dtype)
    alone = convolve_channels(values, weight, bias, torch.tensor([0, 60]))
    pieces = []
    before = values.new_zeros(1, 4, E)
    for begin, end in ((0, 1), (1, 2), (2, 31), (31, 60)):
        piece = values[begin:end]
        offsets = torch.tensor([0, end - begin])
        pieces.append(convolve_channels(piece, weight, bias, offsets, None, before[:, 1:]))
        if end - begin == 1:
            assert torch.equal(pieces[-1], step_channels(piece, weight, bias, before[:, 1:]))
        before = last_elements(piece, 4, offsets, None, before)
    assert torch.equal(alone, torch.cat(pieces))
    joined = torch.cat([torch.randn(9, E).to(dtype), values, torch.randn(2, E).to(dtype)])
    offsets = torch.tensor([0, 9, 69, 71])
    assert torch.equal(convolve_channels(joined, weight, bias, offsets)[9:69], alone)


def test_a_nan_stays_in_its_sequence() -> None:
    values, weight, bias, _, _ = _drawn(4, True, False, False)
    spoiled = values.detach().clone()
    spoiled[3] = float("nan")  # the sequence of one element
    spoiled.requires_grad_()
    output = convolve_channels(spoiled, weight, bias, OFFSETS)
    (gradient,) = torch.autograd.grad(output[4:].sum(), spoiled)
    assert output[4:].isfinite().all()
    assert output[:3].isfinite().all()
    assert gradient.isfinite().all()


def test_no_elements() -> None:
    values = torch.randn(0, E)
    offsets = torch.zeros(3, dtype=torch.int64)
    before = torch.randn(2, 4, E)
    assert convolve_channels(values, torch.randn(E, 4), None, offsets).shape == (0, E)
    assert torch.equal(last_elements(values, 4, offsets, None, before), before)
