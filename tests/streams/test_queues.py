"""Queues of rows compared with lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raglane.kernels.cpu.prepared import as_array
from raglane.streams.queues import RowQueues


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queues_hold_the_rows_of_lists(dtype: torch.dtype) -> None:
    queues, lists, random = (
        RowQueues(6, 1, dtype),
        [list[float]() for _ in range(6)],
        np.random.default_rng(0),
    )
    for at in range(0, 6000, 20):
        rows = torch.arange(at, at + 20).remainder(251).to(dtype).unsqueeze(1)
        slots = random.permutation(6)[: random.integers(1, 7)]
        lengths = random.integers(1, 4, len(slots))
        parts = rows[: lengths.sum()].split(lengths.tolist())
        if at % 3:
            queues.extend(slots, lengths, torch.cat(parts))
        else:
            for slot, part in zip(slots, parts, strict=True):
                queues.append(slot, as_array(part))
        for slot, part in zip(slots, parts, strict=True):
            lists[slot] += part.flatten().tolist()
        full = random.permutation([slot for slot in range(6) if lists[slot]])[
            : random.integers(1, 7)
        ]
        most = np.array([len(lists[slot]) for slot in full])
        counts = np.ones_like(most) if at % 7 < 2 else random.integers(1, most + 1)
        taken = torch.empty(counts.sum(), 1, dtype=dtype)
        queues.take(full, 1 if at % 7 < 2 else counts, taken)
        found = [part.flatten().tolist() for part in taken.split(counts.tolist())]
        for slot, part in zip(full, found, strict=True):
            assert part == [lists[slot].pop(0) for _ in part]
        one = int(random.integers(6))
        assert queues.take_one(one, min(1, len(lists[one]))).flatten().tolist() == lists[one][:1]
        del lists[one][:1]
        if at % 11 == 0:
            assert queues.drop(one) == len(lists[one])
            lists[one].clear()
        assert len(queues) == sum(map(len, lists)) == queues.counts.sum()
