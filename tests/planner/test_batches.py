from __future__ import annotations

import numpy as np
import pytest
import torch

from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.planner.rows import Epoch, epoch_of, thin_out

LENGTHS = torch.tensor(np.random.default_rng(0).integers(0, 40, 500))


def _all(epoch: Epoch) -> list[int]:
    return sorted(length for batch in epoch.batches for length in batch.tolist())


def _total(epoch: Epoch) -> float:
    """The elements that the batches stand for."""
    return float(epoch.weights @ [int(batch.sum()) for batch in epoch.batches])


def test_every_sequence_comes_once() -> None:
    for limit in (
        BatchLimit(sequences=8),
        BatchLimit(sequences=500),
        BatchLimit(sequences=10_000),
        BatchLimit(elements=300, too_long="alone"),
    ):
        for grouped in (False, True):
            epoch = epoch_of(LENGTHS, limit, grouped=grouped)
            assert epoch.elements == int(LENGTHS.sum())
            assert _total(epoch) == pytest.approx(epoch.elements)
            if len(epoch.batches) == epoch.count:
                assert _all(epoch) == sorted(LENGTHS.tolist())
                assert epoch.count == len(epoch.batches)
                padded = sum(len(batch) * int(batch.max()) for batch in epoch.batches)
                assert epoch.padded == padded


def test_batches_are_those_of_the_loader() -> None:
    for limit in (BatchLimit(sequences=16), BatchLimit(elements=320)):
        for grouped, order in ((False, EpochOrder.random()), (True, EpochOrder.grouped())):
            wanted = BatchSampler(LENGTHS, limit, order)
            epoch = epoch_of(LENGTHS, limit, grouped=grouped)
            assert epoch.count == len(wanted)
            assert [batch.tolist() for batch in epoch.batches] == [LENGTHS[batch].tolist() for batch in wanted]


def test_a_sequence_above_the_limit_is_a_batch_of_its_own() -> None:
    batches = epoch_of(torch.tensor([5, 50, 5, 5]), BatchLimit(elements=10, too_long="alone"), grouped=False).batches
    assert [50] in [batch.tolist() for batch in batches]
    assert sum(len(batch) for batch in batches) == 4


def test_the_longest_is_in_a_sample() -> None:
    lengths = torch.cat((torch.ones(5000, dtype=torch.int64), torch.tensor([900])))
    for grouped in (False, True):
        epoch = epoch_of(lengths, BatchLimit(sequences=8), grouped=grouped)
        assert len(epoch.batches) < epoch.count
        assert max(int(batch.max()) for batch in epoch.batches) == 900
        weights = {int(batch.max()): weight for batch, weight in zip(epoch.batches, epoch.weights, strict=True)}
        # The batch of the longest stands for itself, any other for many.
        assert weights[900] == 1
        assert weights[1] > 9
        assert _total(epoch) == pytest.approx(epoch.elements)


def test_a_long_list_is_thinned_out() -> None:
    lengths = torch.arange(200_000)
    part, factor = thin_out(lengths)
    assert part.shape == (1 << 16,)
    assert factor == 200_000 / (1 << 16)
    assert len(set(part.tolist())) == len(part)
    assert int(part.max()) == 199_999
    assert abs(float(part.float().mean()) - 100_000) < 1500
    same, one = thin_out(LENGTHS)
    assert same is LENGTHS
    assert one == 1
