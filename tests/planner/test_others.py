from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from raglane.planner import rows
from raglane.planner.rows import Row, epoch_of

LENGTHS = [3, 5, 8, 2, 13, 1, 0, 9] * 60


def test_other_cells_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "time_in_turns", lambda calls, _: [call() for call in calls])
    cost = {"GRU": 3.0, "MinGRU": 1.0}
    monkeypatch.setattr(rows, "_step", lambda layer, *_: lambda: cost.get(type(layer).__name__, 2.0))
    found = rows.compare_cells(rl.nn.GRU(3, 4), torch.tensor(LENGTHS), _row())
    assert next(iter(found)) == "MinGRU"
    assert found["MinGRU"] == pytest.approx(1 / 3)
    assert found["LSTM"] == pytest.approx(2 / 3)
    assert "GRU" not in found


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The batch that cells were compared on, and the layers; nothing is timed."""
    known: dict[str, Any] = {"layers": []}

    def make_batch(layer: object, lengths: torch.Tensor) -> rl.Ragged:
        known["lengths"] = lengths
        return rl.Ragged.from_flat(torch.zeros(int(lengths.sum()), 3), lengths=lengths)

    monkeypatch.setattr(rows, "make_batch", make_batch)
    monkeypatch.setattr(rows, "_step", lambda layer, *_: known["layers"].append(layer))
    monkeypatch.setattr(rows, "time_in_turns", lambda calls, _: [1.0] * len(calls))
    return known


def test_other_cells_are_built_like_the_layer(compared: dict[str, Any]) -> None:
    for layer in (rl.nn.GRU(3, 4, 2, bidirectional=True).eval(), rl.nn.GRU(3, 5)):
        compared["layers"].clear()
        rows.compare_cells(layer, torch.tensor(LENGTHS), _row())
        assert len(compared["layers"]) == 8
        for other in compared["layers"]:
            assert (other.input_size, other.hidden_size, other.num_layers) == (3, layer.hidden_size, layer.num_layers)
            assert (other.bidirectional, other.training) == (layer.bidirectional, layer.training)


def test_other_cells_are_compared_on_a_typical_batch(compared: dict[str, Any]) -> None:
    lengths = torch.arange(1, 49)
    rows.compare_cells(rl.nn.GRU(3, 4), lengths, _row())
    batches = epoch_of(lengths, _row().limit, grouped=False).batches
    below = [batch for batch in batches if batch.sum() < compared["lengths"].sum()]
    assert any(torch.equal(compared["lengths"], batch) for batch in batches)
    assert len(below) == len(batches) // 2 == 3


def test_other_cells_are_compared_on_a_few_thousand_elements(compared: dict[str, Any]) -> None:
    for length, wanted in ((1000, [1000] * 4), (4096, [4096]), (10_000, [4096])):
        rows.compare_cells(rl.nn.GRU(3, 4), torch.full((80,), length), _row())
        assert compared["lengths"].tolist() == wanted


def _row() -> Row:
    return Row(
        "cpu", "lanes", 8, None, False, "float32", 1, 10, 1000, 0, 1e-3, 1e-4, 1e-4, 1e-4, 1e-4, 5000, 1.0, False
    )
