from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from planner.made_up import costs, seen
from raglane.kernels.cpu.matrix import lanes_of
from raglane.kernels.dispatch import BACKENDS, override
from raglane.planner.model import Profile, Way, as_layer, at, features, fit, ways_of
from raglane.planner.probe import PROBES
from raglane.schedules import SCHEDULES

PADDED, PACKED = Way("torch", "padded", "float32", 1), Way("torch", "packed", "float32", 1)
LANES = Way("cpu", "lanes", "float32", 2)


def test_features_of_a_padded_batch() -> None:
    # Three rows for four steps: 12 elements, of which min(rows, 4) counts all.
    found = seen(PADDED, torch.tensor([4, 1, 2]))
    assert found.tolist() == [1, 4, 12, 12, 12, 12, 3, 0, 0, 0, 1, 12, 0]


def test_features_of_many_rows_are_capped() -> None:
    found = features(PADDED, Profile.of(PADDED, torch.full((100,), 50)), 300e6)
    assert found.tolist() == [1, 50, 4 * 50, 16 * 50, 64 * 50, 5000, 100, 300 - 16, 300 - 64, 300 - 256, 0, 0, 0]


def test_packs_have_other_coefficients_where_lengths_differ() -> None:
    even = seen(PACKED, torch.tensor([3, 3]))
    uneven = seen(PACKED, torch.tensor([3, 1]))
    assert even.tolist() == [1, 3, 6, 6, 6, 6, 2, 0, 0, 0] + 10 * [0] + [0, 0]
    assert uneven.tolist() == 10 * [0] + [1, 3, 4, 4, 4, 4, 2, 0, 0, 0] + [3 * 4, 0]


@pytest.mark.parametrize("lengths", [[7, 0, 3, 3, 12, 1], [0, 0]], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_profile_counts_what_the_schedule_computes(name: str, lengths: list[int]) -> None:
    profile = Profile.of(Way("reference", name, "float64", 1), torch.tensor(lengths))
    count = SCHEDULES[name].count(torch.tensor(lengths))
    assert (profile.length, profile.computed, profile.count) == (count.steps, count.elements, len(lengths))


def test_lanes_are_those_that_the_work_needs() -> None:
    # While the long sequence runs, more than 6 lanes per thread would be idle.
    assert lanes_of(torch.tensor([1000, *[10] * 200]), 2) == 12
    assert lanes_of(torch.tensor([5] * 1000), 4) == 4 * 48
    assert lanes_of(torch.tensor([0, 0]), 2) == 1


def test_a_profile_has_the_lanes_of_its_threads() -> None:
    for threads in (1, 2, 4):
        for backend in ("cpu", "program"):
            profile = Profile.of(Way(backend, "lanes", "float32", threads), torch.full((1000,), 5))
            assert profile.rows.max() == 48 * threads


@pytest.mark.parametrize("way", [PADDED, PACKED, LANES], ids=str)
def test_fit_finds_the_costs_that_it_was_measured_with(way: Way) -> None:
    probes = np.array([seen(way, torch.tensor(lengths)) for group in PROBES for lengths in group])
    seconds = probes @ costs(way, "train")
    found = fit(probes, seconds)
    assert (found >= 0).all()
    np.testing.assert_allclose(probes @ found, seconds, rtol=0.02)
    # A larger and more ragged batch than the measured ones.
    other = torch.tensor([400, *range(1, 200)])
    new = seen(way, other)
    assert new @ found == pytest.approx(new @ costs(way, "train"), rel=0.1)


def test_fit_believes_the_many() -> None:
    probes = np.array([seen(PADDED, torch.tensor(lengths)) for group in PROBES for lengths in group])
    seconds = probes @ costs(PADDED, "infer")
    disturbed = seconds.copy()
    disturbed[[2, 9]] *= 8
    np.testing.assert_allclose((probes @ fit(probes, disturbed))[3:9], seconds[3:9], rtol=0.12)


@pytest.mark.parametrize("seed", range(100))
def test_fit_of_anything_ends_at_the_minimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    measured = random.random((random.integers(1, 20), random.integers(1, 18))) ** 4
    measured[:, random.random(measured.shape[1]) < 0.2] = 0
    seconds = random.random(len(measured)) + 1e-3

    def loss(coefficients: Any) -> float:
        """Huber's."""
        missed = np.abs(measured @ coefficients / seconds - 1)
        return float(np.where(missed < 0.1, missed**2 / 2, 0.1 * (missed - 0.05)).sum())

    found = fit(measured, seconds)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    for change in np.concatenate((np.eye(len(found)), -np.eye(len(found)))):
        near = np.maximum(0, found + 0.05 * change * np.where(found == 0, 1e-3, found))
        assert loss(near) >= loss(found) * (1 - 2e-2) - 1e-9


def test_every_pair_that_can_run_the_layer() -> None:
    pairs = {(way.backend, way.schedule) for way in ways_of(rl.nn.LSTM(3, 4), [torch.float32], [1])}
    assert pairs == {(name, schedule) for name, backend in BACKENDS.items() for schedule in backend.schedules} - {
        ("program", "lanes")
    }
    assert {way.backend for way in ways_of(rl.nn.PeepholeLSTM(3, 4), [torch.float32], [1])} == {"program", "reference"}


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
