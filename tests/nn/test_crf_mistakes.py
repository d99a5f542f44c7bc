"""What a conditional random field refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crf_by_hand import TAGS, random_batch
from raglane import Ragged
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn.crf import CRF

EMISSIONS, GOLD = Ragged([[[0.0] * TAGS] * 2, [[0.0] * TAGS]]), Ragged([[0, 1], [2]])


@pytest.mark.parametrize(
    ("emissions", "tags", "kind", "said"),
    [
        (EMISSIONS.values, GOLD, ArgumentTypeError, "emissions must be .*got a Tensor"),
        (EMISSIONS, GOLD.values, ArgumentTypeError, "tags must be .*got a Tensor"),
        (GOLD + 0.5, GOLD, ShapeError, "each of the 3 tags"),
        (EMISSIONS.map(lambda values: values[:, :2]), GOLD, ShapeError, r"shape \(2,\)"),
        (EMISSIONS.map(lambda values: values.long()), GOLD, ArgumentTypeError, "floating-point"),
        (EMISSIONS, GOLD.to(torch.float32), ArgumentTypeError, "tags must be .*got torch.float32"),
        (EMISSIONS, GOLD.map(lambda values: values.unsqueeze(1)), ShapeError, "tags must be .*got elements of shape"),
        (EMISSIONS, Ragged([[0], [1, 2]]), ShapeError, "tags must be .*got length 1 for sequence 0"),
        (EMISSIONS, Ragged([[0, 1]]), ShapeError, "tags must be .*got 1 sequences"),
        (EMISSIONS, GOLD + 1, ArgumentError, "values from 1 to 3"),
        (EMISSIONS, GOLD - 1, ArgumentError, "values from -1 to 1"),
    ],
)
def test_mistakes(device: torch.device, emissions: Any, tags: Any, kind: type[RaglaneError], said: str) -> None:
    if kind is ArgumentError and device.type != "cpu":
        pytest.skip("a GPU's kernel checks tags itself")
    batches = [batch.to(device) for batch in (emissions, tags)]
    with pytest.raises(kind, match=said):
        CRF(TAGS)(*batches)


def test_mistakes_of_other_arguments() -> None:
    with pytest.raises(ArgumentError, match="num_tags"):
        CRF(0)
    with pytest.raises(ArgumentError, match="'mean'"):
        CRF(TAGS)(*random_batch([1]), reduction="mean")
    with pytest.raises(ShapeError, match="one device for all, meta"):
        CRF(TAGS, device="meta").decode(EMISSIONS)
