"""Operations sequence by sequence, against the obvious loop, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from strategies import lengths

Batch = Callable[[rl.Ragged], Any]
Single = Callable[[Tensor], Tensor]


def or_empty(function: Single, empty: float = 7.0) -> Single:
    """Return the result for a sequence, or ``empty`` if it has no element."""
    return lambda x: function(x) if len(x) else torch.full_like(x.sum(0), empty)


def shifted(x: Tensor, steps: int) -> Tensor:
    result = torch.full_like(x, -2.0)
    for t in range(len(x)):
        if 0 <= t - steps < len(x):
            result[t] = x[t - steps]
    return result


PER_SEQUENCE: dict[str, tuple[Batch, Single]] = {
    "first": (lambda r: r.first(empty=7.0), or_empty(lambda x: x[0])),
    "last": (lambda r: r.last(empty=7.0), or_empty(lambda x: x[-1])),
    "sum": (lambda r: r.sum(1), lambda x: x.sum(0)),
    "mean": (lambda r: r.mean(1, empty=7.0), or_empty(lambda x: x.mean(0))),
    "amax": (lambda r: r.amax(1, empty=7.0), or_empty(lambda x: x.amax(0))),
    "amin": (lambda r: r.amin(1, empty=7.0), or_empty(lambda x: x.amin(0))),
    "logsumexp": (lambda r: r.logsumexp(1, empty=7.0), or_empty(lambda x: x.logsumexp(0))),
}

PER_ELEMENT: dict[str, tuple[Batch, Single]] = {
    "softmax": (lambda r: r.softmax(1), lambda x: x.softmax(0)),
    "cumsum": (lambda r: r.cumsum(1), lambda x: x.cumsum(0)),
    "reverse": (lambda r: r.reverse(), lambda x: x.flip(0)),
    "shift 1": (lambda r: r.shift(1, -2.0), lambda x: shifted(x, 1)),
    "shift -2": (lambda r: r.shift(-2, -2.0), lambda x: shifted(x, -2)),
    "shift 99": (lambda r: r.shift(99, -2.0), lambda x: shifted(x, 99)),
    "truncate": (lambda r: r.truncate(3), lambda x: x[:3]),
    "truncate to nothing": (lambda r: r.truncate(0), lambda x: x[:0]),
    "concat": (lambda r: r.concat(r * 2, r), lambda x: torch.cat([x, x * 2, x])),
    "broadcast": (lambda r: r.broadcast(r.sum(1)), lambda x: x.sum(0).expand_as(x)),
}


@pytest.mark.parametrize("name", [*PER_SEQUENCE, *PER_ELEMENT])
@settings(max_examples=12)
@given(lengths=lengths(), features=st.sampled_from([(), (3,), (2, 2)]))
def test_against_a_loop(
    name: str, features: tuple[int, ...], lengths: list[int], device: torch.device
) -> None:
    apply, single = {**PER_SEQUENCE, **PER_ELEMENT}[name]
    size = (sum(lengths), *features)
    # Zeros are equal to each other and to the first numbers of sums.
    ours = torch.randn(size, dtype=torch.float64, device=device) * torch.randint(
        2, size, device=device
    )
    ours.requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    result = apply(rl.Ragged.from_flat(ours, lengths=lengths))
    expected = [single(sequence) for sequence in torch.split(theirs, lengths)] if lengths else []
    if isinstance(result, rl.Ragged):
        assert result.lengths.tolist() == [len(sequence) for sequence in expected]
        joined = torch.cat([theirs[:0], *expected])
        result = result.values
    else:
        joined = torch.stack(expected) if expected else theirs.new_zeros((0, *features))
    joined = joined + 0 * theirs.sum()  # otherwise a loss of empty sequences has no gradient
    torch.testing.assert_close(result, joined, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(joined)
    (result * weight + 0 * ours.sum()).sum().backward()
    (joined * weight).sum().backward()
    expected_grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
    torch.testing.assert_close(ours.grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*PER_SEQUENCE, *PER_ELEMENT])
def test_gradients_of_gradients(name: str) -> None:
    apply, _ = {**PER_SEQUENCE, **PER_ELEMENT}[name]

    def function(values: Tensor) -> Tensor:
        result = apply(rl.Ragged.from_flat(values, lengths=[3, 0, 1, 2]))
        result = result.values if isinstance(result, rl.Ragged) else result
        return result.square()  # so that the second derivative is not zero everywhere

    values = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, values, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, values)


@pytest.mark.parametrize("name", [*PER_SEQUENCE, *PER_ELEMENT])
def test_a_nan_stays_in_its_sequence(name: str) -> None:
    """Values and gradients of a sequence between two of NaN are those in a batch of its own."""
    apply, _ = {**PER_SEQUENCE, **PER_ELEMENT}[name]
    middle = torch.randn(3, 2, dtype=torch.float64)

    def run(sequences: list[Tensor], index: int) -> tuple[Tensor, Tensor]:
        values: Any = torch.cat(sequences).requires_grad_()
        own = apply(rl.Ragged.from_flat(values, lengths=[len(sequence) for sequence in sequences]))[
            index
        ]
        own.sum().backward()
        start = sum(len(sequence) for sequence in sequences[:index])
        return own.detach(), values.grad[start : start + 3]

    poison = torch.full((4, 2), float("nan"), dtype=torch.float64)
    alone, among = run([middle], 0), run([poison, middle, poison], 1)
    assert torch.equal(alone[0], among[0])
    assert torch.equal(alone[1], among[1])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "name", ["first", "last", "sum", "amax", "amin", "cumsum", "reverse", "truncate"]
)
def test_integers(name: str, dtype: torch.dtype) -> None:
    sequences = [torch.randint(0, 2, (length, 2)).to(dtype) for length in (3, 1, 4)]
    batch = rl.Ragged(sequences)
    arguments = {"truncate": [2], "first": [], "last": [], "reverse": []}.get(name, [1])
    result = getattr(batch, name)(*arguments)
    alone = [getattr(rl.Ragged([sequence]), name)(*arguments) for sequence in sequences]
    if isinstance(result, rl.Ragged):
        assert torch.equal(result.values, torch.cat([one.values for one in alone]))
        result = result.values
    else:
        assert torch.equal(result, torch.cat(alone))
    assert result.dtype is (torch.int64 if name in ("sum", "cumsum") else dtype)


@given(lengths=lengths(), size=st.integers(1, 5), data=st.data())
def test_windows(lengths: list[int], size: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, size))
    values = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    windows = rl.Ragged.from_flat(values, lengths=lengths).windows(size, step)
    expected, start = [], 0
    for length in lengths:
        reached = 0
        for first in range(0, length, step):
            if reached < length:
                expected.append(values[start + first : start + min(first + size, length)])
                reached = min(first + size, length)
        start += length
    assert windows.lengths.tolist() == [len(window) for window in expected]
    joined = torch.cat([values[:0], *expected])
    assert torch.equal(windows.values, joined)
    weight = torch.randn_like(joined)
    ours = torch.autograd.grad((windows.values * weight).sum(), values)[0]
    torch.testing.assert_close(ours, torch.autograd.grad((joined * weight).sum(), values)[0])


@pytest.mark.parametrize(
    ("move", "index"),
    [
        (lambda r: r[torch.tensor([0, 1, 0])], [*range(40_000), *range(39_999)]),
        (lambda r: r.select([0, 1, 0]), [*range(40_000), *range(39_999)]),
        (lambda r: r.select(np.array([-2, 0])), [*range(39_999)] * 2),
        (
            lambda r: r.windows(2, 1)[:30_000],
            [start + step for start in range(30_000) for step in range(2)],
        ),
        (lambda r: r.windows(4, 4), [*range(40_000)]),
    ],
)
def test_elements_of_a_large_batch_that_are_in_several_slices(
    move: Batch, index: list[int]
) -> None:
    """Many rows are moved in another way than few, and their gradients are added."""
    values = torch.randn(40_000, dtype=torch.float64, requires_grad=True)
    moved = move(rl.Ragged.from_flat(values, lengths=[39_999, 1])).values
    assert torch.equal(moved, values[index])
    weight = torch.randn_like(moved)
    (ours,) = torch.autograd.grad(moved, values, weight)
    torch.testing.assert_close(
        ours, torch.zeros_like(values).index_add(0, torch.tensor(index), weight)
    )


def test_cumsum_does_not_round_like_the_batch() -> None:
    """A small sequence after a huge one keeps all its digits."""
    batch = rl.Ragged([torch.full((1000,), 1e6), torch.tensor([1e-3, 1e-3])])
    torch.testing.assert_close(batch.cumsum(1)[1], torch.tensor([1e-3, 2e-3]), rtol=1e-6, atol=0)


def test_sums_of_long_sequences_keep_their_digits() -> None:
    """A float32 to which 0.1 is added 100,000 times is wrong by 1e-4."""
    batch = rl.Ragged.from_flat(torch.full((100_515,), 0.1), lengths=[2, 513, 0, 100_000])
    for result in (
        batch.sum(1),
        batch.mean(1) * batch.lengths,
        batch.logsumexp(1).exp() * math.exp(-0.1) * 0.1,
    ):
        torch.testing.assert_close(
            result[[0, 1, 3]], batch.lengths[[0, 1, 3]] * 0.1, rtol=1e-5, atol=0
        )
    ones: Any = torch.ones(4, requires_grad=True)
    (batch.broadcast(ones) * batch).values.sum().backward()
    torch.testing.assert_close(ones.grad, batch.lengths * 0.1, rtol=1e-5, atol=0)


def test_softmax_and_logsumexp_of_large_and_infinite_numbers() -> None:
    assert rl.Ragged([[1e4, 1e4, -1e4]]).softmax(1).values.tolist() == [0.5, 0.5, 0.0]
    infinite = float("inf")
    values: Any = torch.tensor([1e4, 1e4, -infinite, -infinite, -infinite, 2.0], requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=[2, 2, 0, 2])
    assert batch.logsumexp(1).tolist() == [
        pytest.approx(1e4 + math.log(2)),
        -infinite,
        -infinite,
        2.0,
    ]
    batch.logsumexp(1)[[0, 1, 3]].sum().backward()
    assert values.grad.tolist() == pytest.approx([0.5, 0.5, 0, 0, 0, 1])


class _NothingWaits(TorchDispatchMode):
    """Fails for an operator that would wait for a device, to which it copies a tensor of the
    host.
    """

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        devices = {part.device for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        if devices and kwargs.get("device") and not kwargs.get("non_blocking"):
            devices.add(torch.device(kwargs["device"]))
        assert len(devices) <= 1, func
        return func(*args, **kwargs)


def _decoded(attention: Any, batch: rl.Ragged) -> rl.Ragged:
    steps: Any = {} if attention == "dot" else {"input_feeding": True, "scheduled_sampling": 0.5}
    decoder = rl.transduction.AttentionDecoder(7, 3, 4, attention=attention, device="meta", **steps)
    return decoder(
        batch, rl.Ragged.from_flat(batch.values.new_ones(4, dtype=torch.int64), lengths=[1, 3, 0])
    )


CALLS: dict[str, Batch] = {
    name: batch for name, (batch, _) in (PER_SEQUENCE | PER_ELEMENT).items()
} | {
    "select": lambda r: r.select([1, 0]),
    "windows": lambda r: r.windows(2, 1),
    "soft_dtw": lambda r: rl.transduction.soft_dtw(r, r),
    **{attention: partial(_decoded, attention) for attention in ("additive", "dot", "location")},
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no numbers to wait for, and treats tensors of the host as a GPU does."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    values = torch.ones(5, 3, device="meta", requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=[2, 0, 3])
    with _NothingWaits():  # type: ignore[no-untyped-call]
        result = CALLS[name](batch)
        torch.autograd.grad((result if isinstance(result, Tensor) else result.values).sum(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    """A sum of ones in bfloat16 stops growing at 256, and float16 ends at 65504."""
    batch = rl.Ragged.from_flat(torch.ones(1000, dtype=dtype, requires_grad=True), lengths=[1000])
    for result, expected in (
        (batch.sum(1), 1000),
        ((batch * 100).mean(1), 100),
        (batch.logsumexp(1), 1 + math.log(1000)),
    ):
        assert result.dtype is dtype
        assert result.item() == pytest.approx(expected, rel=4e-3)
    assert batch.softmax(1).values[0].item() == pytest.approx(1e-3, rel=4e-3)
    assert (
        rl.Ragged([torch.tensor([6e4, 6e4, -6e4, -6e4], dtype=dtype)]).cumsum(1).values[-1].item()
        == 0
    )
    one: Any = torch.ones(1, dtype=dtype, requires_grad=True)
    batch.broadcast(one).values.sum().backward()
    assert one.grad.item() == 1000


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda r: r.mean(1), ArgumentTypeError, r"r\.float\(\)"),
        (lambda r: r.truncate(-1), ArgumentError, "at least 0"),
        (lambda r: r.windows(0), ArgumentError, "size, stride must be at least 1"),
        (lambda r: r.windows(2, 3), ArgumentError, "at most size"),
        (lambda r: r.broadcast(torch.ones(3)), ShapeError, "each of the 2 sequences"),
        (lambda r: r.concat(r[:1]), ShapeError, "others must be 2 sequences"),
        (lambda r: r.concat([1]), ArgumentTypeError, "others must be a Ragged"),
    ],
)
def test_refuses(call: Batch, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(rl.Ragged([[1, 2], [3]]))
