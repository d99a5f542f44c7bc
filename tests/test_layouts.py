"""Conversions from every layout and to every layout, with gradients.

Each layout is built and read here by an obvious loop of its own, which knows nothing of Raglane's
index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import raglane as rl
from strategies import lengths, sequences_of


class Layout(NamedTuple):
    build: Callable[[list[Tensor]], Any]
    take: Callable[[Any], rl.Ragged]
    give: Callable[[rl.Ragged], Any]
    read: Callable[[Any], list[Tensor]]


def build_padded(sequences: list[Tensor]) -> tuple[Tensor, list[int]]:
    longest = max((len(s) for s in sequences), default=0)
    rows = [
        torch.cat([s, s.new_full((longest - len(s), s.shape[1]), float("nan"))]) for s in sequences
    ]
    return torch.stack(rows), [len(s) for s in sequences]


def read_padded(padded: tuple[Tensor, Any]) -> list[Tensor]:
    return [row[: int(length)] for row, length in zip(padded[0], padded[1], strict=True)]


def build_packed(sequences: list[Tensor]) -> PackedSequence:
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    longest = max(len(s) for s in sequences)
    rows = [sequences[i][t] for t in range(longest) for i in order if t < len(sequences[i])]
    sizes = [sum(len(s) > t for s in sequences) for t in range(longest)]
    data = torch.stack(rows) if rows else sequences[0][:0]
    return PackedSequence(data, torch.tensor(sizes, dtype=torch.int64), torch.tensor(order))


def read_packed(packed: PackedSequence) -> list[Tensor]:
    assert packed.sorted_indices is not None
    order, sizes = packed.sorted_indices.tolist(), packed.batch_sizes.tolist()
    ranks = [order.index(sequence) for sequence in range(len(order))]
    return [
        packed.data[[sum(sizes[:t]) + rank for t, size in enumerate(sizes) if rank < size]]
        for rank in ranks
    ]


LAYOUTS = {
    "list": Layout(lambda s: s, rl.Ragged, lambda r: r.to_list(), lambda held: held),
    "flat": Layout(
        lambda s: (torch.cat(s), [len(x) for x in s]),
        lambda held: rl.Ragged.from_flat(held[0], lengths=held[1]),
        lambda r: (r.values, r.offsets),
        lambda held: [
            held[0][a:b] for a, b in zip(held[1].tolist()[:-1], held[1].tolist()[1:], strict=True)
        ],
    ),
    "padded": Layout(
        build_padded,
        lambda held: rl.Ragged.from_padded(*held),
        lambda r: r.to_padded(padding_value=7),
        read_padded,
    ),
    "padded, time first": Layout(
        lambda s: (build_padded(s)[0].transpose(0, 1), [len(x) for x in s]),
        lambda held: rl.Ragged.from_padded(held[0], held[1], batch_first=False),
        lambda r: r.to_padded(batch_first=False),
        lambda held: read_padded((held[0].transpose(0, 1), held[1])),
    ),
    "packed": Layout(build_packed, rl.Ragged.from_packed, lambda r: r.to_packed(), read_packed),
    "nested": Layout(
        lambda s: torch.nested.as_nested_tensor(s, layout=torch.jagged),
        rl.Ragged.from_nested,
        lambda r: r.to_nested(),
        lambda held: list(held.unbind()),
    ),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *zip(LAYOUTS, LAYOUTS, strict=True),
        *zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True),
    ],
)
@given(lengths=lengths())
def test_from_one_to_the_other(
    source: str, target: str, lengths: list[int], device: torch.device
) -> None:
    if not lengths:
        return  # a loop cannot build a layout of nothing; test_ragged.py has the empty batch
    sequences = sequences_of(lengths, (2,), device=device, requires_grad=True)
    arrived = LAYOUTS[target].read(
        LAYOUTS[target].give(LAYOUTS[source].take(LAYOUTS[source].build(sequences)))
    )
    assert [len(sequence) for sequence in arrived] == lengths
    weights = [torch.randn_like(sequence) for sequence in sequences]
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for own, sequence, weight in zip(arrived, sequences, weights, strict=True):
        assert torch.equal(own, sequence)
        loss = loss + (own * weight).sum() + 0 * sequence.sum()
    for gradient, weight in zip(torch.autograd.grad(loss, sequences), weights, strict=True):
        assert torch.equal(gradient, weight)
