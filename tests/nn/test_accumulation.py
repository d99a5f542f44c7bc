"""The recurrence ``h = a h + x`` of mixers of transformers, compared with a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory

LENGTHS = [3, 0, 1, 7, 2, 0, 40, 1]
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
B = len(LENGTHS)
E = 5


class _Cache:
    """A cache of one layer, without a convolution."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def is_recording_past(self, _: int) -> bool:
        return False

    def get_conv_state(self, _: int, **__: Any) -> None:
        return None

    def get_recurrent_state(self, _: int, **__: Any) -> Tensor | None:
        return self.state

    def update_recurrent_state(self, state: Tensor, _: int) -> None:
        self.state = state


def _accumulate(
    x: Tensor, steps: Tensor, offsets: Tensor, resets: Any = None, initial: Any = None
) -> tuple[Tensor, Tensor]:
    cache = _Cache(initial)
    layout = BatchLayout((offsets.shape[0] - 1, 1), torch.arange(x.shape[0]), offsets, resets)
    logs = -2 * steps
    output = Memory(cache, 0, layout).accumulate(x / logs, logs)
    assert cache.state is not None
    return output, cache.state


def _loop(x: Tensor, steps: Tensor, resets: Any, initial: Any) -> tuple[Tensor, Tensor]:
    outputs, finals = [], []
    for number in range(B):
        state = x.new_zeros(E) if initial is None else initial[number]
        for row in range(int(OFFSETS[number]), int(OFFSETS[number + 1])):
            if resets is not None and resets[row]:
                state = torch.zeros_like(state)
            state = (-steps[row]).exp() * state + x[row]
            outputs.append(state)
        finals.append(state)
    return torch.stack(outputs), torch.stack(finals)


@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("has_resets", [False, True])
def test_loop(has_resets: bool, has_initial: bool) -> None:
    total = sum(LENGTHS)
    x = torch.randn(total, E, dtype=torch.float64, requires_grad=True)
    steps = (torch.rand(total, E, dtype=torch.float64) + 0.01).requires_grad_()
    resets = torch.rand(total) < 0.3 if has_resets else None
    initial: Any = None
    if has_initial:
        initial = torch.randn(B, E, dtype=torch.float64, requires_grad=True)
    inputs = [each for each in (x, steps, initial) if each is not None]
    ours = _accumulate(x, steps, OFFSETS, resets, initial)
    theirs = _loop(x, steps, resets, initial)
    upstream = [torch.randn_like(each) for each in ours]
    gradients = [torch.autograd.grad(each, inputs, upstream) for each in (ours, theirs)]
    for result, exact in zip([*ours, *gradients[0]], [*theirs, *gradients[1]], strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-12)

    def run(x: Tensor, steps: Tensor, initial: Any = None) -> Any:
        return _accumulate(x, steps, OFFSETS, resets, initial)

    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_bits_do_not_depend_on_the_batch() -> None:
    x = torch.randn(57, E)
    steps = torch.rand(57, E) + 0.01
    whole, final = _accumulate(x, steps, torch.tensor([0, 57]))
    first, state = _accumulate(x[:20], steps[:20], torch.tensor([0, 20]))
    second, last = _accumulate(x[20:], steps[20:], torch.tensor([0, 37]), None, state)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final)
    batch, _ = _accumulate(x.repeat(3, 1), steps.repeat(3, 1), torch.tensor([0, 57, 114, 171]))
    assert torch.equal(batch[57:114], whole)


def test_a_nan_stays_in_its_sequence() -> None:
    x = torch.randn(6, E)
    x[1] = float("nan")
    starts = torch.tensor([False, False, True, False, False, False])
    output, _ = _accumulate(x, torch.rand(6, E) + 0.01, torch.tensor([0, 4, 6]), starts)
    assert output[2:].isfinite().all()


def test_no_elements() -> None:
    initial = torch.randn(2, E)
    empty = torch.zeros(0, E)
    output, final = _accumulate(empty, empty, torch.zeros(3, dtype=torch.int64), None, initial)
    assert output.shape == (0, E)
    assert torch.equal(final, initial)


def test_a_step_continues() -> None:
    x, steps, state = torch.randn(3, B, E).abs()
    cache = _Cache(state)
    layout = BatchLayout((B, 1), None, torch.arange(B + 1), None)
    expected = (-steps).exp() * state + x
    logs = -2 * steps
    torch.testing.assert_close(Memory(cache, 0, layout).accumulate(x / logs, logs), expected)
    torch.testing.assert_close(cache.state, expected)
