from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raglane as rl
from raglane.kernels.dispatch import BACKENDS, override
from raglane.planner.model import Way, as_layer, at, cast, ways_of


def test_every_pair_that_can_run_the_layer() -> None:
    pairs = {(way.backend, way.schedule) for way in ways_of(rl.nn.LSTM(3, 4), [torch.float32], [1])}
    assert pairs == {(name, schedule) for name, backend in BACKENDS.items() for schedule in backend.schedules} - {
        ("program", "lanes")
    }
    assert {way.backend for way in ways_of(rl.nn.PeepholeLSTM(3, 4), [torch.float32], [1])} == {"program", "reference"}


def test_what_a_layer_chose_for_itself_is_not_asked() -> None:
    layer = rl.nn.LSTM(3, 4, backend="torch", schedule="padded")
    assert len(ways_of(layer, [torch.float32], [1])) == len(ways_of(rl.nn.LSTM(3, 4), [torch.float32], [1]))


def test_the_reference_runs_with_the_most_threads_alone() -> None:
    ways = ways_of(rl.nn.GRU(3, 4), [torch.float32, torch.bfloat16], [1, 2])
    assert {way.threads for way in ways if way.backend == "reference"} == {2}
    assert {(way.dtype, way.threads) for way in ways if way.backend == "cpu"} == {
        (dtype, count) for dtype in ("float32", "bfloat16") for count in (1, 2)
    }


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_torchs_layers_are_taken_and_left_alone(kind: Any) -> None:
    layer = kind(3, 4, bidirectional=True)
    twin = as_layer(layer)
    assert type(layer) is kind
    assert isinstance(twin, getattr(rl.nn, kind.__name__))
    assert twin.weight_ih_l0 is not layer.weight_ih_l0
    assert torch.equal(twin.get_parameter("weight_ih_l0"), layer.weight_ih_l0)


def test_what_is_no_layer_is_refused() -> None:
    for wrong in (nn.Linear(3, 4), nn.Sequential(rl.nn.LSTM(3, 4)), "lstm", None, rl.nn.LSTM):
        with pytest.raises(rl.errors.ArgumentTypeError, match=r"layer must be a recurrent layer of rl\.nn.*, got .*"):
            as_layer(wrong)


def test_a_way_ends_with_its_block() -> None:
    threads = torch.get_num_threads()

    def fail() -> None:
        with at(Way("torch", "padded", "float32", threads + 1)):
            assert torch.get_num_threads() == threads + 1
            assert override() == ("padded", "torch")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == threads
    assert override() == ("auto", "auto")


def test_cast_copies_only_what_changes() -> None:
    layer = rl.nn.GRU(3, 4)
    assert cast(layer, "float32") is layer
    assert cast(layer, "bfloat16").weight_hh_l0.dtype is torch.bfloat16
    assert layer.weight_hh_l0.dtype is torch.float32
