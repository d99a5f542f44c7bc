"""Recorded batches, lengths in mapped files, and sequences that are too long."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.data.order import limit as limits
from raglane.data.order.limit import settle
from raglane.errors import ArgumentError

_PLACES = np.arange(4000) * 7919 % 61


# Digests that detect any change of the batches.
@pytest.mark.parametrize(
    ("lengths", "limit", "order", "ranks", "digest"),
    [
        (_PLACES, BatchLimit(sequences=32), EpochOrder.random(), 2, "9a953a209093045e"),
        (
            _PLACES * 3000,
            BatchLimit(sequences=32),
            EpochOrder.bucketed(5, noise=0.2),
            1,
            "869e4d425ceb897f",
        ),
        (_PLACES, BatchLimit(sequences=32), EpochOrder.windows(700), 2, "7c81a6525505b7e5"),
        (
            _PLACES,
            BatchLimit(elements=600, too_long="chunk"),
            EpochOrder.bucketed(5),
            2,
            "53fcb6a56188016c",
        ),
        (
            _PLACES,
            BatchLimit(elements=50, too_long="chunk"),
            EpochOrder.sorted(),
            1,
            "536c8302d1b4d73d",
        ),
        (
            _PLACES,
            BatchLimit(elements=50, too_long="drop"),
            EpochOrder.random(),
            1,
            "71fef64b7cd10217",
        ),
        (
            _PLACES * 3000,
            BatchLimit(9, 90_000, too_long="drop"),
            EpochOrder.bucketed(5),
            1,
            "8abae9c5dbbfb811",
        ),
        (
            _PLACES * 3000,
            BatchLimit(padded=150_000, too_long="alone"),
            EpochOrder.sorted(),
            1,
            "6d267d552b73a1ec",
        ),
        (_PLACES, BatchLimit(padded=700), EpochOrder.bucketed(5, noise=0.2), 1, "e442834d3ba8c9a0"),
    ],
)
def test_batches_are_those_that_were_recorded(
    lengths: np.ndarray[Any, Any], limit: BatchLimit, order: EpochOrder, ranks: int, digest: str
) -> None:
    found = hashlib.sha256()
    for rank in range(ranks):
        batches = BatchSampler(
            lengths, limit, order, seed=7, largest_first=True, num_replicas=ranks, rank=rank
        )
        found.update(json.dumps([list(batches), list(batches), batches.state_dict(1)]).encode())
    assert found.hexdigest()[:16] == digest


def _mapped(folder: Path, lengths: np.ndarray[Any, Any], mode: Any) -> np.ndarray[Any, Any]:
    np.save(folder / "lengths.npy", lengths)
    return np.load(folder / "lengths.npy", mmap_mode=mode)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_lengths_in_a_file_stay_there_and_give_the_same_batches(tmp_path: Path, mode: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 70, 2_000_000, dtype=np.int32)
    lengths[-5:] = 90_000
    mapped = _mapped(tmp_path, lengths, mode)
    # As a Dataset has them.
    known = torch.from_numpy(np.asarray(mapped)) if mode == "c" else mapped
    for limit in (
        BatchLimit(sequences=64),
        BatchLimit(elements=4000, too_long="drop"),
        BatchLimit(padded=4000, too_long="alone"),
    ):
        tracemalloc.start()
        batches = BatchSampler(known, limit, EpochOrder.bucketed(3), seed=2)
        iterator = iter(batches)
        first = [next(iterator) for _ in range(5)]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < lengths.nbytes / 2
        wanted = BatchSampler(lengths, limit, EpochOrder.bucketed(3), seed=2)
        iterator = iter(wanted)
        assert first == [next(iterator) for _ in range(5)]
        assert batches.state_dict() == wanted.state_dict()


def test_a_file_that_is_mapped_to_be_written_is_copied(tmp_path: Path) -> None:
    mapped = _mapped(tmp_path, np.arange(400_000, dtype=np.int32), "r+")
    batches = BatchSampler(mapped, BatchLimit(sequences=4), EpochOrder.sorted())
    mapped[:] = 1
    assert next(iter(batches)) == [399_999, 399_998, 399_997, 399_996]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("too_long", ["drop", "chunk", "alone"])
def test_lengths_in_blocks_are_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, too_long: Any
) -> None:
    chance = np.random.default_rng(0)
    for count in range(0, 30, 3):
        lengths = chance.integers(0, 41, count).astype(dtype)
        limit = BatchLimit(elements=int(chance.integers(1, 30)), too_long=too_long)
        monkeypatch.setattr(limits, "_BLOCK", 1 << 18)
        whole = asdict(settle(lengths, limit))
        monkeypatch.setattr(limits, "_BLOCK", 4)
        blocks = asdict(settle(lengths, limit))
        for name, value in whole.items():
            np.testing.assert_array_equal(blocks[name], value)


@pytest.mark.parametrize(
    ("lengths", "limit", "words"),
    [
        ([3] * 9 + [-2], BatchLimit(sequences=2), "lengths must be .*got -2 at index 9"),
        (
            [3] * 9 + [7, 8],
            BatchLimit(elements=5),
            "lengths must be .*got 7 at index 9, and 1 more",
        ),
        ([2**62, 2**62], BatchLimit(sequences=2), "a sum beyond 64-bit integers"),
        (
            np.array([1, 2**63], np.uint64),
            BatchLimit(sequences=2),
            "lengths must be .*got -9223372036854775808",
        ),
    ],
)
def test_errors_in_any_block(
    lengths: Any, limit: BatchLimit, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_BLOCK", 4)
    with pytest.raises(ArgumentError, match=words):
        BatchSampler(lengths, limit)


def test_the_largest_batch_keeps_every_limit() -> None:
    # What is left of the elements after the longest would hold 60 short ones, the padded elements
    # none of them.
    lengths = [100] * 3 + [1] * 80
    for limit, count in (
        (BatchLimit(elements=360, padded=330), 3),
        (BatchLimit(elements=360, padded=600), 6),
        (BatchLimit(elements=360), 63),
        (BatchLimit(elements=360, sequences=9), 9),
    ):
        first = next(iter(BatchSampler(lengths, limit, EpochOrder.random(), largest_first=True)))
        assert len(first) == count
        assert limit.usage(np.array([lengths[row] for row in first]))[-1] <= 1
