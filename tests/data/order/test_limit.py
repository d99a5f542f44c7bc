"""The sizes of batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raglane.data import BatchLimit
from raglane.data.order.limit import pieces_of
from raglane.errors import ArgumentError, ArgumentTypeError

_LENGTHS = st.lists(st.integers(0, 12), max_size=40)
_NUMBER = st.one_of(st.none(), st.integers(1, 40))


def _fits(limit: BatchLimit, lengths: list[int]) -> bool:
    return (
        (limit.sequences is None or len(lengths) <= limit.sequences)
        and (limit.elements is None or sum(lengths) <= limit.elements)
        and (limit.padded is None or len(lengths) * max(lengths) <= limit.padded)
    )


def _naive(limit: BatchLimit, lengths: list[int]) -> list[list[int]]:
    """One sequence after the other, into the last batch or a new one."""
    batches: list[list[int]] = []
    for length in lengths:
        if batches and _fits(limit, [*batches[-1], length]):
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def _cut(limit: BatchLimit, lengths: list[int], descending: bool = False) -> list[list[int]]:
    starts = limit.cut(np.array(lengths, np.int64), descending=descending).tolist()
    return [lengths[start:end] for start, end in pairwise([*starts, len(lengths)])]


@given(_LENGTHS, st.booleans(), _NUMBER, _NUMBER, _NUMBER)
@example([2] * 9, False, None, 5, None)
@example([1] * 9, False, None, 2, None)
def test_batches_are_as_large_as_can_be(
    lengths: list[int], descending: bool, sequences: int | None, elements: int | None, padded: int | None
) -> None:
    if sequences is elements is padded is None:
        sequences = 3
    if descending:
        lengths = sorted(lengths, reverse=True)
    limit = BatchLimit(sequences, elements, padded)
    batches, naive = _cut(limit, lengths, descending), _naive(limit, lengths)
    assert [length for batch in batches for length in batch] == lengths
    assert len(batches) == len(naive)
    assert batches[:-2] == naive[:-2]
    assert all(_fits(limit, batch) or len(batch) == 1 for batch in batches)
    if len(batches) > 1:
        # The last two are even: one more would leave the last larger, or with more sequences.
        one, other = batches[-2:]
        if one == naive[-2]:
            moved = one[-1:] + other
            assert len(one) == 1 or not _is_smaller(limit, moved, one[:-1])
        else:
            assert _is_smaller(limit, other, one)
            assert not _is_smaller(limit, one[-1:] + other, one[:-1])


def _is_smaller(limit: BatchLimit, one: list[int], other: list[int]) -> bool:
    """Return True if a batch is at most as large as another, by the limit and in sequences."""

    def share(lengths: list[int]) -> float:
        sizes = (len(lengths), sum(lengths), len(lengths) * max(lengths, default=0))
        mosts = (limit.sequences, limit.elements, limit.padded)
        return max(size / most for size, most in zip(sizes, mosts, strict=True) if most is not None)

    return share(one) <= share(other) and len(one) <= len(other) and len(other) > 0


def test_a_rest_is_shared_by_the_last_two() -> None:
    assert _cut(BatchLimit(sequences=8), [1] * 20) == [[1] * 8, [1] * 6, [1] * 6]
    assert _cut(BatchLimit(elements=10), [4, 2, 2, 2, 1]) == [[4, 2, 2], [2, 1]]


@given(_LENGTHS, st.integers(1, 15))
def test_pieces(lengths: list[int], longest: int) -> None:
    owners, found = pieces_of(np.array(lengths, np.int64), longest)
    wanted = []
    for row, length in enumerate(lengths):
        rest = length
        while rest > longest:
            wanted.append((row, longest))
            rest -= longest
        wanted.append((row, rest))
    assert list(zip(owners.tolist(), found.tolist(), strict=True)) == wanted


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ArgumentError, "limit must be .*got no number"),
        ({"sequences": 0}, ArgumentError, "sequences must be .*got 0"),
        ({"elements": 2.0}, ArgumentTypeError, "elements must be .*got 2.0"),
        ({"padded": True}, ArgumentTypeError, "padded must be .*got True"),
        ({"elements": 3, "too_long": "keep"}, ArgumentError, "too_long must be .*got 'keep'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BatchLimit(**arguments)
