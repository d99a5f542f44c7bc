"""``rl.testing.assert_close`` accepts what is close, and says where the rest differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from raglane.testing import assert_close

BATCH = rl.Ragged([torch.arange(6.0).view(3, 2), torch.empty(0, 2), torch.ones(1, 2)])


def test_close_results() -> None:
    assert_close(BATCH + 1e-7, BATCH)
    assert_close((BATCH, {"h": torch.ones(2)}), (BATCH, {"h": torch.ones(2)}))
    assert_close(BATCH.double(), BATCH, check_dtype=False)
    assert_close(BATCH / 0 * 0, BATCH / 0 * 0, equal_nan=True)
    assert_close(BATCH + 0.1, BATCH, rtol=0.0, atol=0.2)
    assert_close([1.0, 2], [1.0, 2])


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        (
            BATCH,
            torch.where(BATCH > 4, 9.0, BATCH),
            "sequence 0, step 2: Tensor-likes are not close",
        ),
        (BATCH, BATCH[:, :2], r"lengths \[3, 0, 1\], expected \[2, 0, 1\]"),
        (BATCH, BATCH.values, "a Ragged, expected a Tensor"),
        ([BATCH], [BATCH + 1], r"\[0\] sequence 0, step 0: "),
        ({"a": BATCH}, {"b": BATCH}, "keys"),
        ((BATCH,), (BATCH, BATCH), "1 items, expected 2"),
        (BATCH, BATCH.double(), "dtypes do not match|dtype"),
        ((1.0, 2.0), (1.0, 2.5), r"\[1\] Scalars are not close"),
        (BATCH / 0 * 0, BATCH / 0 * 0, "step 0: Tensor-likes"),
    ],
)
def test_differences(actual: Any, expected: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_close(actual, expected)
