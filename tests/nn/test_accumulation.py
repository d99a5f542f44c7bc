"""The recurrence ``h = a h + x``, compared with a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.nn.recurrences import accumulation
from raglane.nn.recurrences.accumulation import accumulate

LENGTHS = [3, 0, 1, 7, 2, 0, 40, 1]
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
E = 5


def _loop(x: Tensor, log_decay: Tensor, resets: Any, initial: Any) -> tuple[Tensor, Tensor]:
    outputs, finals = [], []
    for number in range(len(LENGTHS)):
        state = x.new_zeros(E) if initial is None else initial[number]
        for row in range(int(OFFSETS[number]), int(OFFSETS[number + 1])):
            if resets is not None and resets[row]:
                state = torch.zeros_like(state)
            state = log_decay[row].exp() * state + x[row]
            outputs.append(state)
        finals.append(state)
    return torch.stack(outputs), torch.stack(finals)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("has_resets", [False, True])
def test_loop(
    has_resets: bool, has_initial: bool, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "records_operators", lambda: is_graph)
    total = sum(LENGTHS)
    x = torch.randn(total, E, dtype=torch.float64, requires_grad=True)
    decays = (-torch.rand(total, E, dtype=torch.float64)).requires_grad_()
    resets = torch.rand(total) < 0.3 if has_resets else None
    initial: Any = None
    if has_initial:
        initial = torch.randn(len(LENGTHS), E, dtype=torch.float64, requires_grad=True)
    inputs = [each for each in (x, decays, initial) if each is not None]
    ours = accumulate(x, decays, OFFSETS, resets, initial)
    theirs = _loop(x, decays, resets, initial)
    upstream = [torch.randn_like(each) for each in ours]
    gradients = [torch.autograd.grad(each, inputs, upstream) for each in (ours, theirs)]
    for result, exact in zip([*ours, *gradients[0]], [*theirs, *gradients[1]], strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-12)
    if not is_graph:

        def run(x: Tensor, decays: Tensor, initial: Any = None) -> Any:
            return accumulate(x, decays, OFFSETS, resets, initial)

        assert torch.autograd.gradgradcheck(run, inputs)


def test_bits_do_not_depend_on_the_batch() -> None:
    x = torch.randn(57, E)
    decays = -torch.rand(57, E)
    whole, final = accumulate(x, decays, torch.tensor([0, 57]))
    first, state = accumulate(x[:20], decays[:20], torch.tensor([0, 20]))
    second, last = accumulate(x[20:], decays[20:], torch.tensor([0, 37]), None, state)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final)
    batch, _ = accumulate(x.repeat(3, 1), decays.repeat(3, 1), torch.tensor([0, 57, 114, 171]))
    assert torch.equal(batch[57:114], whole)


def test_a_nan_stays_in_its_sequence() -> None:
    x = torch.randn(6, E)
    x[1] = float("nan")
    starts = torch.tensor([False, False, True, False, False, False])
    output, _ = accumulate(x, -torch.rand(6, E), torch.tensor([0, 4, 6]), starts)
    assert output[2:].isfinite().all()


def test_no_elements() -> None:
    initial = torch.randn(2, E)
    output, final = accumulate(
        torch.zeros(0, E), torch.zeros(0, E), torch.zeros(3, dtype=torch.int64), None, initial
    )
    assert output.shape == (0, E)
    assert torch.equal(final, initial)
