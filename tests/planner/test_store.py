from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from raglane.planner import calibration
from raglane.planner.calibration import Calibration
from raglane.planner.model import Way
from raglane.planner.probe import MODES

WAYS = [Way("cpu", "lanes", "float32", 2), Way("torch", "packed", "float32", 1)]
FOUND = Calibration(
    {(way, mode): np.array([0.1, 2.5e-7, float(len(mode))]) for way in WAYS for mode in MODES},
    {way: np.array([1.0, 64.0, 8.0]) for way in WAYS},
    {(way, mode): 0.25 * len(mode) for way in WAYS for mode in MODES},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    return tmp_path / "plans"


def test_what_was_saved_comes_back(folder: Path) -> None:
    assert calibration.load("key", WAYS) is None
    calibration.save("key", FOUND)
    found = calibration.load("key", WAYS)
    assert found is not None
    for way in WAYS:
        assert found.memory[way].tolist() == FOUND.memory[way].tolist()
        for mode in MODES:
            assert found.seconds[way, mode].tolist() == FOUND.seconds[way, mode].tolist()
    assert found.longest == FOUND.longest
    assert [file.name for file in folder.iterdir()] == ["key.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"seconds": 3, "memory": {}}', "\x00", "[" * 100_000])
def test_a_broken_file_is_measured_again(folder: Path, content: str) -> None:
    folder.mkdir(parents=True)
    (folder / "key.json").write_text(content)
    assert calibration.load("key", WAYS) is None


def test_numbers_that_are_none_are_measured_again(folder: Path) -> None:
    for wrong in ("NaN", "Infinity", '"x"', "null"):
        calibration.save("key", FOUND)
        file = folder / "key.json"
        file.write_text(file.read_text().replace("64.0", wrong))
        assert calibration.load("key", WAYS) is None


def test_other_ways_are_not_in_it() -> None:
    calibration.save("key", FOUND)
    assert calibration.load("key", [*WAYS, Way("cpu", "lanes", "float32", 4)]) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path / "file"))
    calibration.save("key", FOUND)
    assert calibration.load("key", WAYS) is None


class Leaky(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = nn.Linear(input_size, hidden_size)

    def step(self, x_t: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = 0.9 * state + self.linear(x_t)
        return state, state


def test_a_key_tells_layers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        rl.nn.LSTM(3, 4),
        rl.nn.LSTM(3, 5),
        rl.nn.LSTM(3, 4, bidirectional=True),
        rl.nn.LSTM(3, 4, num_layers=2),
        rl.nn.LSTM(3, 4, dropout=0.0).eval(),
        rl.nn.LSTM(3, 4, zoneout=0.1),
        rl.nn.LSTM(3, 4).double(),
        rl.nn.GRU(3, 4),
        rl.nn.Recurrent(Leaky, 3, 4),
    ]
    keys = [calibration.key_of(layer, WAYS) for layer in layers]
    assert len(set(keys)) == len(keys)
    assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS) == keys[0]
    assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS[:1]) != keys[0]
    monkeypatch.setenv("RAGLANE_ISA", "portable")
    assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS) != keys[0]


def test_a_key_knows_the_source_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rl.nn.Recurrent(Leaky, 3, 4)
    key = calibration.key_of(layer, WAYS)
    assert calibration.key_of(layer, WAYS) == key
    monkeypatch.setattr("inspect.getsource", lambda _: "class Leaky: another")
    assert calibration.key_of(layer, WAYS) != key
