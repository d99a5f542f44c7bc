"""Conversions of padded tensors and packs by the kernels, against index arithmetic."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.errors import ArgumentError
from raglane.native import missing_kernels
from raglane.packing import convert, flat_values

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

LENGTHS = [[3, 0, 5, 5, 1], [0, 0], [4], [1] * 7, [2, 9, 0, 4] * 30]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool]


def _padded(
    lengths: list[int], batch_first: bool, features: int = 3, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Random numbers, padding included, on two more steps than needed."""
    steps = max(lengths) + 2
    shape = (len(lengths), steps) if batch_first else (steps, len(lengths))
    return torch.randn(*shape, features).to(dtype)


def _pack(
    lengths: list[int], dtype: torch.dtype = torch.float64, features: int = 3
) -> PackedSequence:
    """Random numbers; empty sequences come last in the order, where the pack leaves them out."""
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return PackedSequence(
        torch.randn(sum(lengths), features).to(dtype),
        torch.tensor(sizes, dtype=torch.int64),
        torch.tensor(order),
    )


def by_arithmetic() -> Any:
    """Have rows moved by an index, as on a device, and not by the kernels."""
    return mock.patch.object(flat_values, "_is_readable", return_value=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_padded_tensor_there_and_back(
    lengths: list[int], batch_first: bool, dtype: torch.dtype
) -> None:
    given = torch.tensor(lengths)
    padded = _padded(lengths, batch_first, dtype=dtype)
    values, layout = flat_values.flatten_padded(padded, given, batch_first) or pytest.fail(
        "not taken"
    )
    with by_arithmetic():
        wanted = convert.flatten_padded(padded, given, batch_first)
    offsets = wanted.offsets
    assert values.equal(wanted.values)
    assert layout.offsets.equal(offsets)
    output = torch.randn(sum(lengths), 4).to(dtype)
    back = layout.from_flat(output)
    with by_arithmetic():
        assert back.equal(
            flat_values.flat_to_padded(output, offsets, max(lengths) + 2, batch_first)
        )
    assert back.equal(flat_values.flat_to_padded(output, offsets, max(lengths) + 2, batch_first))
    assert layout.to_flat(back, sum(lengths)).equal(output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [lengths for lengths in LENGTHS if sum(lengths)])
def test_a_pack_there_and_back(lengths: list[int], dtype: torch.dtype) -> None:
    packed = _pack(lengths, dtype)
    values, layout = flat_values.flatten_packed(packed) or pytest.fail("not taken")
    with by_arithmetic():
        wanted = convert.flatten_packed(packed)
    assert values.equal(wanted.values)
    assert layout.offsets.diff().equal(wanted.lengths_cpu())
    assert layout.offsets.equal(torch.tensor([0, *lengths]).cumsum(0))
    assert layout.from_flat(values).equal(packed.data)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_batches_are_divided_among_threads(
    threads: int, any_threads: Callable[[int], None]
) -> None:
    lengths = torch.randint(0, 60, (200,))
    any_threads(threads)
    for batch_first in (False, True):
        padded = _padded(lengths.tolist(), batch_first, 130)
        values, layout = flat_values.flatten_padded(padded, lengths, batch_first) or pytest.fail(
            "not taken"
        )
        steps = padded.shape[1 if batch_first else 0]
        with by_arithmetic():
            assert values.equal(convert.flatten_padded(padded, lengths, batch_first).values)
            wanted = flat_values.flat_to_padded(values, layout.offsets, steps, batch_first)
        assert layout.from_flat(values).equal(wanted)
    packed = _pack(lengths.tolist(), features=130)
    values, layout = flat_values.flatten_packed(packed) or pytest.fail("not taken")
    with by_arithmetic():
        assert values.equal(convert.flatten_packed(packed).values)
    assert layout.from_flat(values).equal(packed.data)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), id="transpose"),
        pytest.param(lambda x: torch.cat((x, x), 2)[:, :, 1:4], id="slice"),
        pytest.param(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), id="features-apart"),
        pytest.param(lambda x: x[:, :1].expand(-1, 4, -1), id="expanded"),
    ],
)
def test_tensors_with_gaps(view: Callable[[Tensor], Tensor]) -> None:
    padded, lengths = view(_padded([3, 0, 5, 2], False)), torch.tensor([3, 0, 5, 2])
    values, _ = flat_values.flatten_padded(padded, lengths, False) or pytest.fail("not taken")
    with by_arithmetic():
        assert values.equal(convert.flatten_padded(padded.contiguous(), lengths).values)


def test_packs_of_lazy_signs() -> None:
    packed = _pack([3, 0, 5, 1])
    data = torch.complex(packed.data, 1 + packed.data)
    for change in (torch._neg_view, torch.conj):
        values, layout = flat_values.flatten_packed(
            packed._replace(data=change(data))
        ) or pytest.fail("not taken")
        assert layout.from_flat(change(values)).equal(data)
        assert layout.from_flat(values).equal(change(data).resolve_conj().resolve_neg())


@pytest.mark.parametrize("kind", ["pack", "batch first", "time first"])
def test_gradients(kind: str) -> None:
    """They are zeros in padding."""
    lengths, packed = [3, 0, 5, 1], _pack([3, 0, 5, 1])
    batch_first = kind == "batch first"
    given = (packed.data if kind == "pack" else _padded(lengths, batch_first)).requires_grad_()

    def through(given: Tensor) -> Tensor:
        if kind == "pack":
            found = flat_values.flatten_packed(packed._replace(data=given))
        else:
            found = flat_values.flatten_padded(given, torch.tensor(lengths), batch_first)
        values, layout = found or pytest.fail("not taken")
        return layout.from_flat(values.sin())

    assert torch.autograd.gradcheck(through, (given,))
    assert torch.autograd.gradgradcheck(through, (given,))
    (grad,) = torch.autograd.grad(through(given).sum(), given)
    if kind != "pack":
        steps = torch.arange(7).unsqueeze(1) >= torch.tensor(lengths)
        assert grad[steps.t() if batch_first else steps].eq(0).all()


def test_later_changes_by_the_caller_have_no_effect() -> None:
    """The conversion back inverts the conversion there, by private copies."""
    changes: list[Callable[[Tensor], Any]] = [
        lambda x: x.fill_(9),
        lambda x: x.resize_(0),
        lambda x: x.set_(torch.UntypedStorage()),
    ]
    for change in changes:
        for name in ("batch_sizes", "sorted_indices"):
            packed = _pack([3, 0, 5, 1])
            values, layout = flat_values.flatten_packed(packed) or pytest.fail("not taken")
            before = layout.from_flat(values)
            change(getattr(packed, name))
            change(layout.offsets)
            assert before.equal(packed.data)
            assert layout.from_flat(values).equal(before)
        padded, lengths = _padded([3, 2], False), torch.tensor([3, 2])
        values, layout = flat_values.flatten_padded(padded, lengths, False) or pytest.fail(
            "not taken"
        )
        before = layout.from_flat(values)
        change(lengths)
        change(layout.offsets)
        assert layout.from_flat(values).equal(before)


def test_sequences_of_one_length_that_change_places_after_the_call() -> None:
    """Lengths and offsets stay the same then, but gradients would go to another sequence."""
    packed = _pack([2, 2])
    data = packed.data.detach().requires_grad_()
    values, _ = flat_values.flatten_packed(packed._replace(data=data)) or pytest.fail("not taken")
    order: Any = packed.sorted_indices
    order.copy_(order.flip(0))
    weights = torch.randn(4, 1, dtype=values.dtype)
    (grad,) = torch.autograd.grad((values * weights).sum(), data)
    assert grad.equal(weights[[0, 2, 1, 3]].expand_as(grad))


def test_a_plan_that_changes_reaches_no_memory() -> None:
    for values, layout in (
        flat_values.flatten_packed(_pack([3, 0, 5, 1])) or pytest.fail("not taken"),
        flat_values.flatten_padded(_padded([3, 2], False), torch.tensor([3, 2]), False)
        or pytest.fail("not taken"),
    ):
        for place in range(len(layout.plan)):
            for number in (-1, 1 << 40, -(1 << 63), (1 << 63) - 1):
                kept = layout.plan[place]
                layout.plan[place] = number
                with pytest.raises(ArgumentError, match=r"must be"):
                    layout.from_flat(values)
                layout.plan[place] = kept
        layout.from_flat(values)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([2, 3, 1], [2, 0, 1]),
        ([3, 2, 0, 1], [2, 0, 1]),
        ([3, 2, 2], [2, 0, 1]),
        ([3, -1, 4], [2, 0, 1]),
        ([1 << 40, 2, 1], None),
        ([-1, 2, 1], None),
        ([3, 2, 1], [2, 0, 0]),
        ([3, 2, 1], [2, 0, 3]),
        ([3, 2, 1], [2, 0, -1]),
        ([3, 2, 1], [0, 1]),
    ],
)
def test_packs_whose_parts_do_not_fit_reach_no_memory(
    sizes: list[int], order: list[int] | None
) -> None:
    packed = PackedSequence(torch.randn(6, 2), torch.tensor([3, 2, 1]), torch.tensor([2, 0, 1]))
    indices: Any = None if order is None else torch.tensor(order)
    changed = packed._replace(batch_sizes=torch.tensor(sizes), sorted_indices=indices)
    assert (
        flat_values.flatten_packed(changed if order else changed._replace(unsorted_indices=indices))
        is None
    )
    assert flat_values.flatten_packed(packed) is not None
    apart = torch.tensor([[2, 1], [0, 9], [1, 9]])[:, 0]
    assert flat_values.flatten_packed(packed._replace(sorted_indices=apart)) is None
