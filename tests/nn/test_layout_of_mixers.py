"""How lengths enter models of transformers: without the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raglane.errors import ArgumentError
from raglane.nn.porting.transformers.entry import Entry
from raglane.nn.porting.transformers.layout import layout_of, numbers_of
from raglane.nn.porting.transformers.mamba import MambaMixer
from raglane.nn.porting.transformers.mamba2 import BambaMixer, GraniteMixer

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
POSITIONS = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 0, 1, 1]])
NUMBERS = [[0, 0, 1, 1, 1], [1, 1, 2, 2, 0]]


def test_layout() -> None:
    values = torch.arange(10.0).view(2, 5, 1)
    layout = layout_of(values, None, torch.tensor(NUMBERS))
    rows = layout.rows(values)
    assert rows.flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert layout.offsets.tolist() == [0, 3, 7]
    assert layout.resets is not None
    assert layout.resets.tolist() == [False] * 5 + [True, False]
    expected = torch.where(torch.tensor(NUMBERS) > 0, values[..., 0], 0)
    assert torch.equal(layout.batch(rows)[..., 0], expected)
    assert layout.begins(True).tolist() == [True, False, False, True, False, True, False]
    assert layout.begins(False).tolist() == layout.resets.tolist()
    whole = layout_of(values, None, torch.ones(2, 9))
    assert whole.elements is None
    assert whole.resets is None
    empty = layout_of(values, torch.tensor([[-1] * 5, [3] * 5]), None)
    assert empty.offsets.tolist() == [0, 0, 5]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"attention_mask": MASK, "position_ids": POSITIONS}, NUMBERS),
        ({"attention_mask": MASK}, None),
        ({"attention_mask": MASK[:1].expand(2, -1), "position_ids": POSITIONS[:1]}, None),
        ({"position_ids": torch.arange(7, 12).unsqueeze(0)}, None),
        ({"seq_idx": torch.tensor([[4, 4, 0, 0, 0]])}, [[1, 1, 2, 2, 2]] * 2),
        ({"seq_idx": torch.tensor([[-1, 0, 0, 1, -1]])}, [[0, 1, 1, 2, 0]] * 2),
        ({"attention_mask": torch.tensor(NUMBERS), "seq_idx": torch.zeros(2, 5)}, NUMBERS),
    ],
)
def test_numbers(call: dict[str, Tensor], expected: Any) -> None:
    result = numbers_of(call, (2, 5), False)
    assert (None if result is None else result.numbers.tolist()) == expected


def test_numbers_of_one_row() -> None:
    result = numbers_of({"cu_seq_lens_q": torch.tensor([0, 1, 4, 5])}, (1, 5), False)
    assert result is not None
    assert result.numbers.tolist() == [[1, 2, 2, 2, 3]]
    assert numbers_of({"attention_mask": torch.tensor([[1, 1], [1, 0]])}, (2, 1), False) is not None
    assert numbers_of({"attention_mask": torch.ones(2, 2)}, (2, 1), False) is None


class _Model(nn.Module):
    dtype = torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""


def test_arguments() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    call = {"attention_mask": MASK, "position_ids": POSITIONS}
    names = ("input_ids", "attention_mask", "position_ids")
    model = _Model()
    _, plain = Entry(names, MambaMixer)(model, (tokens, MASK, POSITIONS), {}) or ((), {})
    assert plain["attention_mask"].tolist() == NUMBERS
    _, hybrid = Entry(names, BambaMixer)(model, (tokens,), call) or ((), {})
    assert (hybrid["seq_idx"] + 1).tolist() == NUMBERS
    assert hybrid["attention_mask"] is None
    assert hybrid["use_cache"] is False
    assert hybrid["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 0, 1, 0]]
    _, masked = Entry(names, GraniteMixer)(model, (tokens,), call) or ((), {})
    is_visible = masked["attention_mask"][1, 0] == 0
    assert is_visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    with pytest.raises(ArgumentError, match="use_cache"):
        Entry(names, BambaMixer)(model.eval(), (tokens,), call | {"use_cache": True})
