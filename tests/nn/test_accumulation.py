"""The recurrence of the RG-LRU, compared with a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raglane.kernels.cpu.recurrences import RecurrenceCall
from raglane.nn.mixers.gated_decay import accumulate
from raglane.nn.mixers.ways import Decay
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory

LENGTHS = [3, 0, 1, 7, 2, 0, 70, 1]
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
N, B = sum(LENGTHS), len(LENGTHS)
E = 21


def _drawn(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Any]:
    """x, the gates, their biases, the rates, how fresh elements are, and initial states."""
    elements = [torch.randn(N, E), torch.randn(N, E) * scale, torch.randn(N, E) * scale]
    rows = [*elements, torch.randn(E), torch.randn(E), torch.rand(E) + 0.01]
    return [each.to(dtype) for each in (*rows, torch.rand(N), torch.randn(B, E))]


def _loop(tensors: list[Any], resets: Tensor | None) -> tuple[Tensor, Tensor]:
    x, entry, recurrent, entry_bias, recurrent_bias, rates, fresh, initial = tensors
    outputs, finals = [], []
    for number in range(B):
        state = x.new_zeros(E) if initial is None else initial[number]
        for row in range(int(OFFSETS[number]), int(OFFSETS[number + 1])):
            if resets is not None and resets[row]:
                state = torch.zeros_like(state)
            logs = -rates * torch.sigmoid(recurrent[row] + recurrent_bias)
            factor = _Root.apply(-torch.expm1(2 * logs))  # type: ignore[no-untyped-call]
            if fresh is not None:
                factor = factor + fresh[row] * (1 - factor)
            state = logs.exp() * state + x[row] * torch.sigmoid(entry[row] + entry_bias) * factor
            outputs.append(state)
        finals.append(state)
    return torch.stack(outputs), torch.stack(finals)


class _Root(torch.autograd.Function):
    """The root of transformers, whose gradient is at most 1,000."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (4 * x).clamp(min=1e-6).sqrt()


def _run(way: str, tensors: list[Any], resets: Tensor | None) -> tuple[Tensor, ...]:
    if way == "kernel":
        return accumulate(tuple(tensors), OFFSETS, resets)
    call = RecurrenceCall(tuple(tensors), OFFSETS, resets, ())
    return accumulate.by_steps(call) if way == "steps" else accumulate.by_chunks(call)


def _compare(way: str, tensors: list[Any], resets: Tensor | None, bound: float) -> None:
    inputs = [each.requires_grad_() for each in tensors if each is not None]
    ours, theirs = _run(way, tensors, resets), _loop(tensors, resets)
    upstream = [torch.randn_like(each) for each in theirs]
    gradients = [torch.autograd.grad(each, inputs, upstream) for each in (ours, theirs)]
    for result, exact in zip([*ours, *gradients[0]], [*theirs, *gradients[1]], strict=True):
        torch.testing.assert_close(result, exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("way", ["kernel", "steps", "chunks"])
@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("missing", [(), (6,), (7,), (6, 7)])
def test_loop(missing: tuple[int, ...], has_resets: bool, way: str) -> None:
    tensors = [None if i in missing else each for i, each in enumerate(_drawn())]
    _compare(way, tensors, torch.rand(N) < 0.3 if has_resets else None, 1e-11)


@pytest.mark.parametrize("way", ["kernel", "steps", "chunks"])
def test_gates_that_are_shut_or_open(way: str) -> None:
    """Decays from 0 to 1, to rounding, of which the roots have bounded gradients."""
    tensors = _drawn(scale=1000.0)
    tensors[5] *= 1000
    with torch.no_grad():
        tensors[2][:20] = -40  # 1 - exp(-2 d) is below the bound
    _compare(way, tensors, None, 1e-9)


def test_infinite_rates() -> None:
    tensors = _drawn()
    tensors[5][:] = torch.inf
    output, final = accumulate(tuple(tensors), OFFSETS, None)
    assert output.isfinite().all()
    torch.testing.assert_close(output, tensors[0] * torch.sigmoid(tensors[1] + tensors[3]))
    assert torch.equal(final[0], output[2])


def test_float32_is_near_float64() -> None:
    tensors = _drawn(torch.float32)
    exact, _ = accumulate(tuple(each.double() for each in tensors), OFFSETS, None)
    output, _ = accumulate(tuple(tensors), OFFSETS, None)
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
    halves = [each.bfloat16() for each in tensors[:3]]
    exact, _ = accumulate(tuple(each.double() for each in (*halves, *tensors[3:])), OFFSETS, None)
    output, final = accumulate((*halves, *tensors[3:]), OFFSETS, None)
    assert (output.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-5)


def test_second_derivatives() -> None:
    resets = torch.rand(N) < 0.3

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return accumulate(tensors, OFFSETS, resets)

    inputs = [each.requires_grad_() for each in _drawn()]
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("channels", [E, 150])
def test_bits_do_not_depend_on_the_batch_or_on_threads(channels: int) -> None:
    rows, parameters = torch.randn(3, 57, channels), torch.rand(3, channels)

    def run(begin: int, end: int, copies: int = 1, state: Tensor | None = None) -> Any:
        parts = [each[begin:end].repeat(copies, 1).requires_grad_() for each in rows]
        offsets = torch.arange(copies + 1) * (end - begin)
        weights = [each.clone().requires_grad_() for each in parameters]
        output, final = accumulate((*parts, *weights, None, state), offsets, None)
        return output, final, torch.autograd.grad(output.sum(), [*parts, *weights])

    whole, final, gradients = run(0, 57)
    first, state, _ = run(0, 20)
    second, last, _ = run(20, 57, state=state)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final)
    batch, _, of_batch = run(0, 57, 30)
    assert torch.equal(batch[57:114], whole)
    for ours, each in zip(of_batch[:3], gradients[:3], strict=True):
        assert torch.equal(ours[57:114], each)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, run(0, 57, 30)[2], of_batch))
    finally:
        torch.set_num_threads(threads)


def test_a_nan_stays_in_its_sequence() -> None:
    tensors = _drawn()
    tensors[0][1] = float("nan")
    starts = torch.zeros(N, dtype=torch.bool)
    starts[2] = True
    output, _ = accumulate(tuple(tensors), OFFSETS, starts)
    assert output[2:].isfinite().all()


class _Cache:
    """A cache of one layer, without a convolution."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def is_recording_past(self, _: int) -> bool:
        return False

    def get_conv_state(self, _: int, **__: Any) -> Tensor:
        return self.state

    def get_recurrent_state(self, _: int, **__: Any) -> Tensor:
        return self.state

    def update_recurrent_state(self, state: Tensor, _: int) -> None:
        self.state = state


def test_a_memory_continues() -> None:
    tensors = _drawn()
    cache = _Cache(tensors[7])
    layout = BatchLayout((B, 70), torch.arange(N), OFFSETS, None)
    output = Memory(cache, 0, layout).accumulate(Decay(*tensors[:6]))
    expected, final = _loop([*tensors[:6], None, tensors[7]], None)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(cache.state, final)


def test_no_elements() -> None:
    initial = torch.randn(2, E)
    empty, row = torch.zeros(0, E), torch.ones(E)
    offsets = torch.zeros(3, dtype=torch.int64)
    output, final = accumulate((*[empty] * 3, *[row] * 3, None, initial), offsets, None)
    assert output.shape == (0, E)
    assert torch.equal(final, initial)
