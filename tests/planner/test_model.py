"""The cost model, and rows of a plan against sums by hand, where a call takes a millisecond per
computed row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from made_plans import BRIEF_LOOKS
from planner.made_up import ROW, costs, seen
from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.kernels.cpu.matrix import lanes_of
from raglane.kernels.dispatch import BACKENDS, override
from raglane.planner import predicted
from raglane.planner.calibration import Calibration
from raglane.planner.model import (
    LayerWay,
    Profile,
    as_layer,
    at,
    cast,
    features,
    fit,
    thread_counts,
    ways_of,
)
from raglane.planner.predicted import EpochSample, Row, epoch_of, largest_batch, row_of, thin_out
from raglane.planner.probe import MODES, PROBES
from raglane.schedules import SCHEDULES

PADDED, PACKED = (
    LayerWay("torch", "padded", "float32", 1),
    LayerWay("torch", "packed", "float32", 1),
)
LANES = LayerWay("cpu", "lanes", "float32", 2)


def test_features_of_a_padded_batch() -> None:
    # Three rows for four steps: 12 elements, of which min(rows, 4) counts all.
    assert seen(PADDED, torch.tensor([4, 1, 2])).tolist() == [
        1,
        4,
        12,
        12,
        12,
        12,
        3,
        0,
        0,
        0,
        1,
        12,
        0,
    ]
    # Many rows are capped.
    found = features(PADDED, Profile.of(PADDED, torch.full((100,), 50)), 300e6)
    assert found.tolist() == [
        1,
        50,
        4 * 50,
        16 * 50,
        64 * 50,
        5000,
        100,
        300 - 16,
        300 - 64,
        300 - 256,
        0,
        0,
        0,
    ]
    even = seen(PACKED, torch.tensor([3, 3]))
    uneven = seen(PACKED, torch.tensor([3, 1]))
    assert even.tolist() == [1, 3, 6, 6, 6, 6, 2, 0, 0, 0] + 10 * [0] + [0, 0]
    assert uneven.tolist() == 10 * [0] + [1, 3, 4, 4, 4, 4, 2, 0, 0, 0] + [3 * 4, 0]


@pytest.mark.parametrize("lengths", [[7, 0, 3, 3, 12, 1], [0, 0]], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_profile_counts_what_the_schedule_computes(name: str, lengths: list[int]) -> None:
    profile = Profile.of(LayerWay("reference", name, "float64", 1), torch.tensor(lengths))
    count = SCHEDULES[name].count(torch.tensor(lengths))
    assert (profile.length, profile.computed, profile.count) == (
        count.steps,
        count.elements,
        len(lengths),
    )


def test_lanes_are_those_that_the_work_needs() -> None:
    # While the long sequence runs, more than 6 lanes per thread would be idle.
    assert lanes_of(torch.tensor([1000, *[10] * 200]), 2) == 12
    assert lanes_of(torch.tensor([5] * 1000), 4) == 4 * 48
    assert lanes_of(torch.tensor([0, 0]), 2) == 1
    for threads in (1, 2, 4):
        for backend in ("cpu", "program"):
            profile = Profile.of(
                LayerWay(backend, "lanes", "float32", threads), torch.full((1000,), 5)
            )
            assert profile.rows.max() == 48 * threads


@pytest.mark.parametrize("way", [PADDED, PACKED, LANES], ids=str)
def test_fit_finds_the_costs_that_it_was_measured_with(way: LayerWay) -> None:
    probes = np.array([seen(way, torch.tensor(lengths)) for group in PROBES for lengths in group])
    seconds = probes @ costs(way, "train")
    found = fit(probes, seconds)
    assert (found >= 0).all()
    np.testing.assert_allclose(probes @ found, seconds, rtol=0.02)
    # A larger and more ragged batch than the measured ones.
    new = seen(way, torch.tensor([400, *range(1, 200)]))
    assert new @ found == pytest.approx(new @ costs(way, "train"), rel=0.1)


def test_fit_believes_the_many() -> None:
    probes = np.array(
        [seen(PADDED, torch.tensor(lengths)) for group in PROBES for lengths in group]
    )
    seconds = probes @ costs(PADDED, "infer")
    disturbed = seconds.copy()
    disturbed[[2, 9]] *= 8
    np.testing.assert_allclose((probes @ fit(probes, disturbed))[3:9], seconds[3:9], rtol=0.02)


@pytest.mark.parametrize("seed", range(25))
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
    assert pairs == {
        (name, schedule) for name, backend in BACKENDS.items() for schedule in backend.schedules
    } - {
        ("program", "lanes"),
        ("triton", "lanes"),
    }
    ways = ways_of(rl.nn.PeepholeLSTM(3, 4), [torch.float32, torch.bfloat16], [1])
    others = {(way.backend, way.dtype) for way in ways}
    assert others == {
        (name, dtype) for name in ("program", "reference") for dtype in ("float32", "bfloat16")
    }
    assert [thread_counts(most) for most in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]
    # The reference runs with the most threads alone.
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
    assert as_layer(twin) is not twin is cast(twin, "float32") is not cast(twin, "bfloat16")
    assert twin.get_parameter("weight_ih_l0").dtype is torch.float32


def test_other_modules_than_layers_are_refused() -> None:
    for wrong in (nn.Linear(3, 4), nn.Sequential(rl.nn.LSTM(3, 4)), "lstm", None, rl.nn.LSTM):
        with pytest.raises(
            rl.errors.ArgumentTypeError,
            match=r"layer must be a recurrent layer of rl\.nn.*, got .*",
        ):
            as_layer(wrong)


def test_a_way_ends_with_its_block() -> None:
    threads = torch.get_num_threads()

    def fail() -> None:
        with at(LayerWay("torch", "padded", "float32", threads + 1)):
            assert torch.get_num_threads() == threads + 1
            assert override() == ("padded", "torch")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == threads
    assert override() == ("auto", "auto")


IN_PADDED, IN_PACKED = (
    LayerWay("reference", "padded", "float32", 1),
    LayerWay("reference", "packed", "float32", 1),
)
# Batches of two sequences each: 4, 8, 20 and 40 elements padded, of which 3, 7, 16 and 24 exist.
BATCHES = ([2, 1], [4, 3], [10, 6], [20, 4])


def _row(
    way: LayerWay, weights: list[float], *, factor: float = 1.0, ranks: int = 1, layer: int = 0
) -> Row:
    lengths = [torch.tensor(batch) for batch in BATCHES]
    padded = round(sum(w * len(b) * max(b) for w, b in zip(weights, BATCHES, strict=True)))
    real = round(sum(w * sum(b) for w, b in zip(weights, BATCHES, strict=True)))
    epoch = EpochSample(tuple(lengths), np.array(weights), real, padded, round(sum(weights)))
    known = Calibration(
        {
            (way, mode): 1e-3 / (1 + place) * (np.arange(10) == 5)
            for place, mode in enumerate(MODES)
        },
        {(way, mode): 1e-5 * np.outer(np.arange(41), np.arange(10) == 5) for mode in MODES},
        {way: np.array([7.0, 100.0, 0.0])},
        {(way, mode): 1.0 for mode in MODES},
    )
    return row_of(
        way, BatchLimit(sequences=2), False, epoch, known, factor=factor, ranks=ranks, weights=layer
    )


def test_a_row_adds_up_its_batches() -> None:
    row = _row(IN_PADDED, [5, 3, 1, 1])
    assert (row.batches, row.elements, row.waste) == (10, 104, 28)
    assert row.train_seconds == pytest.approx(0.104)
    assert row.infer_seconds == pytest.approx(0.052)
    packed = _row(IN_PACKED, [5, 3, 1, 1])
    assert (packed.batches, packed.elements, packed.waste) == (10, 76, 0)
    assert packed.train_seconds == pytest.approx(0.076)
    # Of 41 predictions, 0 to 400 microseconds per element, the interval of 90 % leaves out one at
    # each end.
    assert packed.train_range == packed.infer_range == pytest.approx((76e-5, 39 * 76e-5))


@pytest.mark.parametrize("way", [IN_PADDED, IN_PACKED], ids=str)
def test_a_part_of_a_list_stands_for_all_of_it(way: LayerWay) -> None:
    """What belongs to an epoch grows with the list, and what belongs to a step does not."""
    part, whole = _row(way, [5, 3, 1, 1]), _row(way, [5, 3, 1, 1], factor=2.5)
    for name in ("batches", "elements", "waste", "train_seconds", "infer_seconds"):
        assert getattr(whole, name) == pytest.approx(2.5 * getattr(part, name)), name
    assert whole.train_range == pytest.approx([2.5 * end for end in part.train_range])
    for name in ("step_p50", "step_p90", "step_max", "peak_bytes", "rank_spread"):
        assert getattr(whole, name) == getattr(part, name), name


def test_steps_are_quantiles_of_all_batches() -> None:
    """A batch counts as often as it stands for others, and a step that exists is told, no mean of
    several.
    """
    for weights, milliseconds in (
        ([5.0, 3.0, 1.0, 1.0], [4, 20, 40]),
        ([4.0, 3.0, 1.0, 2.0], [8, 40, 40]),
        ([1.0, 1.0, 1.0, 97.0], [40, 40, 40]),
        ([97.0, 1.0, 1.0, 1.0], [4, 4, 40]),
    ):
        row = _row(IN_PADDED, weights)
        assert [1000 * s for s in (row.step_p50, row.step_p90, row.step_max)] == pytest.approx(
            milliseconds
        ), weights
    # Memory is that of the largest batch and the weights.
    assert _row(IN_PADDED, [5, 3, 1, 1], layer=1000).peak_bytes == 1000 + 7 + 100 * 40
    assert _row(IN_PACKED, [5, 3, 1, 1], layer=1000).peak_bytes == 1000 + 7 + 100 * 24


def test_the_slowest_of_several_is_drawn_as_often_as_it_comes() -> None:
    weights = np.array([99.0, 0.0, 0.0, 1.0])
    row = _row(IN_PADDED, weights.tolist(), ranks=2)
    # Of two batches one is long in 2 of 100 steps: (0.98 * 4 + 0.02 * 40) / (0.99 * 4 + 0.01 * 40)
    # = 1.08.
    assert row.rank_spread == pytest.approx(1.08, abs=0.05)
    assert row.rank_seconds == row.train_seconds * row.rank_spread
    assert replace(row, rank_spread=2.0).rank_seconds == 2 * row.train_seconds
    assert _row(IN_PADDED, weights.tolist()).rank_spread == 1


PADDED_ROW = replace(ROW, backend="torch", schedule="padded", elements=2000, waste=1000)
FEW = torch.tensor([3, 5, 0, 12])


def _found(
    memory: float, memory_of: list[float], best: Row = ROW, *, runs: bool = False
) -> tuple[int, int | None]:
    known = Calibration({}, {}, {best.way: np.array(memory_of)}, {})
    return largest_batch(rl.nn.LSTM(3, 4), FEW, best, known, memory, 1000, runs=runs)


def test_memory_is_a_constant_and_a_sum_over_elements_and_sequences() -> None:
    # 1,000 of weights, 500 per call, 40 per element, and 50 per sequence, which has 5 elements on
    # average.
    assert _found(11_500, [500, 40, 50]) == (200, None)
    assert _found(11_500, [500, 20, 50], PADDED_ROW) == (200, None)
    assert _found(1000, [500, 40, 50]) == (0, None)
    assert _found(float("inf"), [0, 0, 0])[0] == 2**62


def test_the_advised_settings_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane.planner.calibration._LOOKS", BRIEF_LOOKS)
    layer = rl.nn.LSTM(3, 4)
    found = rl.plan(
        [3, 5, 9, 12] * 20,
        layer,
        max_memory=2 << 20,
        batch_sizes=[8],
        threads=[1],
        backends=["cpu"],
    )
    assert found.most_bytes is not None
    assert found.most_elements > 1000
    assert found.memory_limit == BatchLimit(elements=found.most_elements)
    for most, limit in ((found.most_elements, 3 * found.most_elements), (0, 1), (2**62, 2**62)):
        assert replace(found, ranks=3, most_elements=most).memory_limit == BatchLimit(
            elements=limit
        )
    assert found.most_bytes == pytest.approx(2 << 20, rel=0.1)
    assert f"up to {found.most_elements:,} elements (one was run: " in str(found)
    assert _found(2 << 20, [500, 40, 50], replace(ROW, train_seconds=1e6), runs=True)[1] is None
    assert _found(1e15, [500, 40, 50], runs=True)[1] is None
    # 200 elements take 20 s and 40 s, at 0.1 s and 0.2 s each.
    held = [
        _found(11_500, [500, 20, 50], replace(PADDED_ROW, train_seconds=s), runs=True)[1]
        for s in (100.0, 200.0)
    ]
    assert held[0] is not None
    assert held[1] is None


MANY = [3, 5, 8, 2, 13, 1, 0, 9] * 60


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The batch that cells were compared on, the layers, and how they ran; the first takes 9 s, the
    next 8 s ...
    """
    known: dict[str, Any] = {"layers": [], "ran": []}

    def make_batch(layer: rl.nn.LSTM, lengths: torch.Tensor) -> rl.Ragged:
        known["lengths"], like = lengths, layer.get_parameter("weight_ih_l0")
        return rl.Ragged.from_flat(torch.zeros(int(lengths.sum()), 3).to(like), lengths=lengths)

    def step_of(layer: rl.nn.LSTM, batch: rl.Ragged, mode: str) -> Any:
        known["layers"].append(layer)
        return lambda: known["ran"].append(
            (override(), torch.get_num_threads(), mode, batch.values.dtype)
        )

    monkeypatch.setattr(predicted, "make_batch", make_batch)
    monkeypatch.setattr(predicted, "step_of", step_of)
    monkeypatch.setattr(
        predicted,
        "time_in_turns",
        lambda calls, _: [call() or 9 - n for n, call in enumerate(calls)],
    )
    monkeypatch.setattr(predicted, "peak_bytes", lambda call, _: call() or 7)
    return known


def test_other_cells_are_built_like_the_layer(compared: dict[str, Any]) -> None:
    for layer in (rl.nn.GRU(3, 4, 2, bidirectional=True).eval(), rl.nn.GRU(3, 5).bfloat16()):
        compared["layers"].clear()
        found = predicted.compare_cells(layer, torch.tensor(MANY), replace(ROW, threads=2))
        expected = [predicted.Ratio(*[n / 9] * 3) for n in range(2, 9)]
        assert (list(found.values()), [*found][-1]) == (expected, "LSTM")
        dtype = layer.weight_ih_l0.dtype
        assert set(compared["ran"][-8:]) <= {
            ((s, b), 2, "train", dtype) for s in SCHEDULES for b in BACKENDS
        }
        assert len(compared["layers"]) == 8
        for other in compared["layers"]:
            assert (other.input_size, other.hidden_size, other.num_layers) == (
                3,
                layer.hidden_size,
                layer.num_layers,
            )
            assert (other.bidirectional, other.training) == (layer.bidirectional, layer.training)
            assert other.weight_ih_l0.dtype is dtype
    # A largest batch is run as it is recommended.
    assert _found(
        11_500, [500, 20, 50], replace(PADDED_ROW, dtype="bfloat16", threads=2), runs=True
    ) == (200, 1007)
    assert compared["ran"][-1] == (("padded", "torch"), 2, "train", torch.bfloat16)
    lengths = torch.arange(1, 49)
    predicted.compare_cells(rl.nn.GRU(3, 4), lengths, ROW)
    batches = epoch_of(lengths, ROW.limit, bucketed=False).batches
    below = [batch for batch in batches if batch.sum() < compared["lengths"].sum()]
    assert any(torch.equal(compared["lengths"], batch) for batch in batches)
    assert len(below) == len(batches) // 2 == 3
    # On a few thousand elements.
    for length, wanted in ((1000, [1000] * 4), (4096, [4096]), (10_000, [4096])):
        predicted.compare_cells(rl.nn.GRU(3, 4), torch.full((80,), length), ROW)
        assert compared["lengths"].tolist() == wanted


RANDOM = torch.tensor(np.random.default_rng(0).integers(0, 40, 500))


def _total(epoch: EpochSample) -> float:
    """The elements of all batches that the evaluated ones represent."""
    return float(epoch.weights @ [int(batch.sum()) for batch in epoch.batches])


def test_every_sequence_comes_once() -> None:
    limits = [BatchLimit(sequences=size) for size in (8, 500, 10_000)]
    for limit in (*limits, BatchLimit(elements=300, too_long="alone")):
        for bucketed in (False, True):
            epoch = epoch_of(RANDOM, limit, bucketed=bucketed)
            assert epoch.elements == int(RANDOM.sum())
            assert _total(epoch) == pytest.approx(epoch.elements)
            if len(epoch.batches) == epoch.count:
                assert torch.equal(torch.cat(epoch.batches).sort().values, RANDOM.sort().values)
                assert epoch.padded == sum(len(batch) * int(batch.max()) for batch in epoch.batches)
    for limit in (BatchLimit(sequences=16), BatchLimit(elements=320)):
        for bucketed, order in ((False, EpochOrder.random()), (True, EpochOrder.bucketed())):
            wanted = BatchSampler(RANDOM, limit, order)
            epoch = epoch_of(RANDOM, limit, bucketed=bucketed)
            assert epoch.count == len(wanted)
            assert [batch.tolist() for batch in epoch.batches] == [
                RANDOM[batch].tolist() for batch in wanted
            ]


def test_the_longest_is_in_a_sample() -> None:
    lengths = torch.cat((torch.ones(5000, dtype=torch.int64), torch.tensor([900])))
    for bucketed in (False, True):
        epoch = epoch_of(lengths, BatchLimit(sequences=8), bucketed=bucketed)
        assert len(epoch.batches) < epoch.count
        assert max(int(batch.max()) for batch in epoch.batches) == 900
        weights = {
            int(batch.max()): weight
            for batch, weight in zip(epoch.batches, epoch.weights, strict=True)
        }
        # The batch of the longest represents itself, any other many.
        assert weights[900] == 1
        assert weights[1] > 9
        assert _total(epoch) == pytest.approx(epoch.elements)
    # The batch with the most steps need not have the most elements.
    longest, real = np.full(500, 5), np.full(500, 20)
    longest[7], real[3] = 90, 40
    assert {3, 7} <= set(predicted._choose(longest, real, 0)[0].tolist())
    part, factor = thin_out(torch.arange(200_000))
    assert part.shape == (1 << 16,)
    assert factor == 200_000 / (1 << 16)
    assert len(set(part.tolist())) == len(part)
    assert int(part.max()) == 199_999
    assert abs(float(part.float().mean()) - 100_000) < 1500
    same, one = thin_out(RANDOM)
    assert same is RANDOM
    assert one == 1
