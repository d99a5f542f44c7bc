"""The causal convolution of channels, compared with a loop over elements in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.kernels.cpu.recurrences import RecurrenceCall
from raglane.nn.recurrences.depthwise import convolve_channels

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


def _run(by_gathering: bool, tensors: tuple[Any, ...], resets: Tensor | None, kept: int) -> Any:
    if by_gathering:
        return convolve_channels.by_chunks(RecurrenceCall(tensors, OFFSETS, resets, (kept,)))
    return convolve_channels(tensors, OFFSETS, resets, kept)


@pytest.mark.parametrize("by_gathering", [False, True])
@pytest.mark.parametrize("has_before", [False, True])
@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize(("size", "has_bias"), [(4, True), (2, False), (1, True)])
def test_loop(
    size: int, has_bias: bool, has_resets: bool, has_before: bool, by_gathering: bool
) -> None:
    values, weight, bias, resets, before = _drawn(size, has_bias, has_resets, has_before)
    expected, lasts = _loop(values, weight, bias, LENGTHS, resets, before)
    inputs = [each for each in (values, weight, bias, before) if each is not None]
    for kept in (size - 1, size):
        earlier = None if before is None else before[:, size - kept :]
        output, final = _run(by_gathering, (values, weight, bias, earlier), resets, kept)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(final, lasts[:, size - kept :], rtol=0, atol=1e-12)
        upstream = [torch.randn_like(output), torch.randn_like(final)]
        ours = torch.autograd.grad([output, final], inputs, upstream, allow_unused=True)
        theirs = torch.autograd.grad(
            [expected, lasts[:, size - kept :]],
            inputs,
            upstream,
            allow_unused=True,
            retain_graph=True,
        )
        for gradient, exact in zip(ours, theirs, strict=True):
            torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)


def test_second_derivatives() -> None:
    values, weight, bias, resets, before = _drawn(3, True, True, True)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return convolve_channels(tensors, OFFSETS, resets, 3)

    assert torch.autograd.gradgradcheck(run, (values, weight, bias, before), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [E, 200])
def test_pieces_and_batches_have_the_same_bits(channels: int, dtype: torch.dtype) -> None:
    values = torch.randn(60, channels).to(dtype)
    weight, bias = torch.randn(channels, 4), torch.randn(channels)

    def run(rows: Tensor, offsets: list[int], before: Tensor | None = None) -> tuple[Tensor, ...]:
        return convolve_channels((rows, weight, bias, before), torch.tensor(offsets), None, 3)

    alone, final = run(values, [0, 60])
    pieces: list[Tensor] = []
    before: Tensor | None = None
    for begin, end in ((0, 1), (1, 2), (2, 31), (31, 60)):
        piece, before = run(values[begin:end], [0, end - begin], before)
        pieces.append(piece)
    assert torch.equal(alone, torch.cat(pieces))
    assert before is not None
    assert torch.equal(final, before)
    others = [torch.randn(size, channels).to(dtype) for size in (9, 2)]
    joined, _ = run(torch.cat([others[0], values, others[1]]), [0, 9, 69, 71])
    assert torch.equal(joined[9:69], alone)


@pytest.mark.parametrize("by_gathering", [False, True])
def test_a_nan_stays_in_its_sequence(by_gathering: bool) -> None:
    values, weight, bias, _, _ = _drawn(4, True, False, False)
    spoiled = values.detach().clone()
    spoiled[3] = float("nan")  # the sequence of one element
    spoiled.requires_grad_()
    output, final = _run(by_gathering, (spoiled, weight, bias, None), None, 3)
    (gradient,) = torch.autograd.grad(output[4:].sum(), spoiled)
    assert output[4:].isfinite().all()
    assert output[:3].isfinite().all()
    assert final[3:].isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("by_gathering", [False, True])
def test_no_elements(by_gathering: bool) -> None:
    offsets = torch.zeros(3, dtype=torch.int64)
    before = torch.randn(2, 4, E)
    tensors = (torch.randn(0, E), torch.randn(E, 4), None, before)
    if by_gathering:
        output, final = convolve_channels.by_chunks(RecurrenceCall(tensors, offsets, None, (4,)))
    else:
        output, final = convolve_channels(tensors, offsets, None, 4)
    assert output.shape == (0, E)
    assert torch.equal(final, before)
