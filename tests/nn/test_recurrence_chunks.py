"""Linear recurrences by chunks, for devices, compared with the same by steps."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raglane.kernels.cpu.recurrences import RecurrenceCall
from raglane.nn.recurrences.chunks import SIZE
from raglane.nn.recurrences.recurrence_operator import Operator, attend, scan_selectively

LENGTHS = [0, 1, SIZE - 1, SIZE, SIZE + 1, 0, 2 * SIZE, 2 * SIZE + 1, 5 * SIZE + 3, 2]
COUNT = sum(LENGTHS)
OFFSETS = torch.tensor(list(itertools.accumulate(LENGTHS, initial=0)))
HEADS, GROUPS, KEYS, WIDTH = 4, 2, 3, 5
SCAN_OPTIONS = (True, 0.01, 2.0)


def by_steps(
    operator: Operator, tensors: Any, offsets: Tensor, resets: Tensor | None, *options: Any
) -> Any:
    return operator.by_steps(RecurrenceCall(tensors, offsets, resets, options))


def by_chunks(
    operator: Operator, tensors: Any, offsets: Tensor, resets: Tensor | None, *options: Any
) -> Any:
    return operator.by_chunks(RecurrenceCall(tensors, offsets, resets, options))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def scan_tensors() -> list[Tensor | None]:
    return [
        *(drawn(COUNT, 6), drawn(COUNT, 6), -drawn(6, 3).abs()),
        *(drawn(COUNT, 2, 3), drawn(COUNT, 2, 3)),
        *(drawn(6), drawn(6), drawn(len(LENGTHS), 6, 3)),
    ]


def attention_tensors(kind: str) -> list[Tensor | None]:
    keys = torch.nn.functional.normalize(drawn(COUNT, GROUPS, KEYS), dim=-1)
    decays = -drawn(COUNT, HEADS, KEYS).abs() * 0.3
    gain = torch.rand(COUNT, HEADS, dtype=torch.float64) * 2
    is_mlstm = kind.startswith("mlstm")
    batch = len(LENGTHS)
    per_head = {"head", "mlstm", "delta, head"}
    return [
        *(drawn(COUNT, GROUPS, KEYS), keys, drawn(COUNT, HEADS, WIDTH)),
        decays[:, :, 0] if kind in per_head else (decays if "key" in kind else None),
        None if is_mlstm else gain,
        drawn(COUNT, HEADS) if is_mlstm else None,
        drawn(batch, HEADS, KEYS, WIDTH),
        drawn(batch, HEADS, KEYS) if is_mlstm else None,
        drawn(batch, HEADS) if is_mlstm else None,
    ]


KINDS = ("none", "head", "key", "delta", "delta, head", "delta, key", "mlstm", "mlstm, no decay")


def attention_options(kind: str) -> tuple[float, bool, float]:
    return 0.7, "delta" in kind, 1e-2


def differentiated(
    function: Any, tensors: list[Tensor | None], resets: Tensor | None, options: Any
) -> tuple[Any, list[Tensor | None]]:
    inputs = [each if each is None else each.clone().requires_grad_() for each in tensors]
    results = function(tuple(inputs), OFFSETS, resets, *options)
    generator = torch.Generator().manual_seed(3)
    total = sum(
        (result * torch.randn(result.shape, dtype=torch.float64, generator=generator)).sum()
        for result in results
    )
    leaves = [each for each in inputs if each is not None]
    return results, list(torch.autograd.grad(total, leaves))


def compare(
    operator: Operator, tensors: list[Tensor | None], resets: Tensor | None, options: Any
) -> None:
    expected, expected_grads = differentiated(partial(by_steps, operator), tensors, resets, options)
    results, grads = differentiated(partial(by_chunks, operator), tensors, resets, options)
    for ours, right in zip((*results, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def some_resets() -> Tensor:
    return torch.rand(COUNT) < 0.03


@pytest.mark.parametrize("has_resets", [False, True])
def test_chunks_of_a_selective_scan(has_resets: bool) -> None:
    resets = some_resets() if has_resets else None
    compare(scan_selectively, scan_tensors(), resets, SCAN_OPTIONS)


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_linear_attention(kind: str, has_resets: bool) -> None:
    resets = some_resets() if has_resets else None
    tensors = attention_tensors(kind)
    compare(attend, tensors, resets, attention_options(kind))


@pytest.mark.parametrize("log_decay", [-1000.0, -1e5, -math.inf])
def test_chunks_forget_as_steps_do(log_decay: float) -> None:
    tensors: Any = attention_tensors("delta, head")
    tensors[3][[SIZE + 40, COUNT - 60]] = log_decay
    options = attention_options("delta")
    expected = by_steps(attend, tuple(tensors), OFFSETS, None, *options)
    ours = by_chunks(attend, tuple(tensors), OFFSETS, None, *options)
    torch.testing.assert_close(ours[:2], expected[:2], rtol=1e-9, atol=1e-9)


def test_chunks_of_one_strong_decay_in_float32() -> None:
    """Decays that are divided by each other would overflow."""
    offsets = torch.tensor([0, 64])
    narrow = [torch.randn(64, 1, 8), torch.randn(64, 1, 8), torch.randn(64, 2, 8)]
    for log_decay in (-1000.0, -1e5, -math.inf):
        decays = -torch.rand(64, 2)
        decays[40] = log_decay
        tensors = [*narrow, decays, None, None, None, None, None]
        exact = [None if each is None else each.double() for each in tensors]
        ours = by_chunks(attend, tuple(tensors), offsets, None, 1.0, False, 0.0)
        right = by_steps(attend, tuple(exact), offsets, None, 1.0, False, 0.0)
        for one, other in zip(ours[:2], right[:2], strict=True):
            scale = float(other.abs().max())
            torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * scale)


def test_chunks_of_equal_keys() -> None:
    """An inverse of a chunk's matrix by powers would lose all digits."""
    key = torch.nn.functional.normalize(torch.randn(1, 1, 64), dim=-1).expand(64, 1, 64)
    gain = torch.full((64, 1), 0.99)
    tensors = [torch.randn(64, 1, 64), key, torch.randn(64, 1, 32), None, gain, *[None] * 4]
    exact = [None if each is None else each.double() for each in tensors]
    offsets = torch.tensor([0, 64])
    ours = by_chunks(attend, tuple(tensors), offsets, None, 1.0, True, 0.0)
    right = by_steps(attend, tuple(exact), offsets, None, 1.0, True, 0.0)
    for one, other in zip(ours[:2], right[:2], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_sequence_and_before_a_reset(kind: str) -> None:
    tensors: Any = attention_tensors(kind)
    eighth = int(OFFSETS[7])
    tensors[2][eighth + 3] = math.nan
    resets = torch.zeros(COUNT, dtype=torch.bool)
    resets[eighth + SIZE + 5] = True
    for each in tensors:
        if each is not None:
            each.requires_grad_()
    output, *_ = by_chunks(attend, tuple(tensors), OFFSETS, resets, *attention_options(kind))
    is_nan = output.isnan().flatten(1).any(1)
    assert is_nan[eighth + 3 : eighth + SIZE + 5].all()
    assert is_nan.sum() == SIZE + 2
    others = torch.ones(COUNT, dtype=torch.bool)
    others[eighth : int(OFFSETS[8])] = False
    grads = torch.autograd.grad(output[others].sum(), [tensors[0], tensors[2]])
    assert all(grad[others].isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_batch(kind: str) -> None:
    tensors = attention_tensors(kind)
    options = attention_options(kind)
    whole, *_ = by_chunks(attend, tuple(tensors), OFFSETS, None, *options)
    begin, end = (int(OFFSETS[place]) for place in (8, 9))
    alone = [
        None if each is None else (each[begin:end] if len(each) == COUNT else each[8:9])
        for each in tensors
    ]
    offsets = torch.tensor([0, end - begin])
    output, *_ = by_chunks(attend, tuple(alone), offsets, None, *options)
    assert torch.equal(output, whole[begin:end])


class ReadsNothing(TorchDispatchMode):
    """Refuse operators that read numbers of a tensor, for which a device is waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in (
            *("_local_scalar_dense", "nonzero", "item", "masked_select", "unique_dim"),
            *("equal", "is_nonzero", "_to_copy"),
        ), func
        return func(*args, **(kwargs or {}))


def test_chunks_read_no_number_and_no_length() -> None:
    resets = some_resets()
    scan = tuple(scan_tensors())
    attention = {kind: tuple(attention_tensors(kind)) for kind in KINDS}
    with ReadsNothing():  # type: ignore[no-untyped-call]
        by_chunks(scan_selectively, scan, OFFSETS, resets, *SCAN_OPTIONS)
        for kind, tensors in attention.items():
            by_chunks(attend, tensors, OFFSETS, resets, *attention_options(kind))


def test_operators_grow_with_the_logarithm_of_the_length() -> None:
    class Counts(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.total += 1
            return func(*args, **(kwargs or {}))

    def operators(steps: int) -> int:
        tensors: Any = [drawn(steps, 6), drawn(steps, 6), -drawn(6, 3).abs()]
        tensors += [drawn(steps, 2, 3), drawn(steps, 2, 3), None, None, None]
        with Counts() as counts:  # type: ignore[no-untyped-call]
            by_chunks(
                scan_selectively, tuple(tensors), torch.tensor([0, steps]), None, *SCAN_OPTIONS
            )
        return counts.total

    few, many, most = (operators(steps) for steps in (1000, 4000, 16000))
    assert many - few == most - many < 100


def test_a_batch_without_elements() -> None:
    tensors: Any = [
        None if each is None else (each[:0] if len(each) == COUNT else each)
        for each in attention_tensors("mlstm")
    ]
    offsets = torch.zeros(len(LENGTHS) + 1, dtype=torch.int64)
    output, *states = by_chunks(attend, tuple(tensors), offsets, None, 1.0, False, 1e-6)
    assert output.shape == (0, HEADS, WIDTH)
    assert all(torch.equal(state, start) for state, start in zip(states, tensors[6:], strict=True))
    scan: Any = scan_tensors()
    scan = [each[:0] if len(each) == COUNT else each for each in scan]
    output, final = by_chunks(scan_selectively, tuple(scan), offsets, None, *SCAN_OPTIONS)
    assert output.shape == (0, 6)
    assert torch.equal(final, scan[7])


def test_another_device_runs_chunks() -> None:
    import raglane as rl

    lengths = torch.tensor([3, 2])
    x, dt, of_b = (
        rl.Ragged.from_flat(torch.empty(5, size, device="meta"), lengths=lengths.to("meta"))
        for size in (4, 4, 3)
    )
    y, state = rl.nn.selective_scan(x, dt, torch.empty(4, 3, device="meta"), of_b, of_b)
    assert y.values.shape == (5, 4)
    assert state.shape == (2, 4, 3)
    assert y.device.type == "meta"
