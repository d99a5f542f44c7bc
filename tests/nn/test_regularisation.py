"""Dropout on inputs, states and weights, and zoneout, on every backend, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from every_layer import (
    LAYERS,
    LENGTHS,
    READ,
    H,
    a_batch,
    assert_alike_everywhere,
    assert_same,
    build,
    gradients,
    parts,
    regularisation_of,
    results_of,
)
from raglane.errors import ArgumentError
from raglane.native import missing_kernels
from raglane.schedules import SCHEDULES
from strategies import sequences_of


def run(layer: Any, batch: Any, seed: int = 7, **call: Any) -> list[Tensor]:
    """Return all results of a call with this seed, and a number drawn after it."""
    torch.manual_seed(seed)
    results = results_of(layer(batch, **call))
    return [*results, torch.rand(1, dtype=torch.float64)]


# -- every backend ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_every_schedule_and_backend_draws_the_same(name: str) -> None:
    assert_alike_everywhere(build(name, 2, bidirectional=True, **regularisation_of(name, dropout=0.3)), run)


def test_every_kind_of_input_draws_the_same() -> None:
    layer = build("lstm", 2, bidirectional=True, **regularisation_of("lstm"))
    batch = a_batch([3, 1, 5, 5])
    expected = run(layer, batch)
    padded, told = batch.to_padded(batch_first=False, total_length=7)
    by_padded = run(layer, padded, lengths=told)
    assert not by_padded[0][told.max() :].any()
    by_padded[0] = rl.Ragged.from_padded(by_padded[0], told, batch_first=False).values
    assert_same(by_padded, expected, 0.0)
    torch.manual_seed(7)
    packed_out, packed_state = layer(batch.to_packed())
    packed = [rl.Ragged.from_packed(packed_out).values, *parts(packed_state)]
    assert_same(packed, expected[:-1], 0.0)
    single, alone = run(layer, batch[0]), run(layer, rl.Ragged([batch[0]]))
    assert_same(single, [alone[0], *(part.squeeze(1) for part in alone[1:-1]), alone[-1]], 0.0)


def test_masks_do_not_depend_on_the_strides_of_hx() -> None:
    layer = build("gru", **READ)
    batch, hx = a_batch(), torch.randn(1, 5, H, dtype=torch.float64)
    other = torch.empty_strided(hx.shape, (20, 1, 5), dtype=torch.float64).copy_(hx)
    assert_same(run(layer, batch, hx=other), run(layer, batch, hx=hx), 0.0)


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_has_no_effect_in_evaluation(name: str) -> None:
    options = {**regularisation_of(name, dropout=0.5), "zoneout": (0.0,) * len(build(name).cell.states)}
    layer = build(name, 2, bidirectional=True, **options).eval()
    plain = build(name, 2, bidirectional=True).eval()
    plain.load_state_dict(layer.state_dict())
    batch = a_batch()
    assert_same(run(layer, batch), run(plain, batch), 0.0)
    assert_same(run(layer, batch, return_states=True), run(plain, batch, return_states=True), 0.0)


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_takes_the_mean_of_zoneout(name: str) -> None:
    """Each new state is the mean: the share of zoneout times the old one, and the rest times the cell's."""
    count = len(build(name).cell.states)
    shares = (0.25, 0.6, 0.1, 0.4)[:count]
    layer = build(name, **regularisation_of(name, zoneout=shares)).eval()
    sequences = sequences_of([3, 0, 2])
    weights = layer._weights()[0]
    expected, finals = [], []
    for sequence in sequences:
        state = tuple(torch.zeros(1, size, dtype=torch.float64) for size in layer.state_sizes)
        for t in range(len(sequence)):
            ready = layer.cell.prepare(weights, sequence[t : t + 1], torch.tensor([0, 1]))
            _, new = layer.cell.step(weights, ready, state)
            state = tuple(p * old + (1 - p) * n for p, old, n in zip(shares, state, new, strict=True))
            expected.append(state[0])
        finals.append(state)
    theirs = [torch.cat(expected), *(torch.cat(part).unsqueeze(0) for part in zip(*finals, strict=True))]
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule):
            assert_same(results_of(layer(rl.Ragged(sequences))), theirs, what=schedule)


# -- other features ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["lstm", "sru"])
def test_nan_stays_in_its_sequence(name: str, schedule: str) -> None:
    layer = build(name, 2, bidirectional=True, schedule=schedule, **regularisation_of(name, dropout=0.2))
    clean = [torch.randn(length, 3, dtype=torch.float64) for length in (3, 2, 4)]
    dirty = [clean[0], torch.full_like(clean[1], torch.nan), clean[2]]
    seen = []
    for sequences in (clean, dirty):
        batch = rl.Ragged([part.clone().requires_grad_() for part in sequences])
        batch.values.retain_grad()
        torch.manual_seed(1)
        out, state = layer(batch)
        kept = [out[0], out[2], *(part[:, [0, 2]] for part in parts(state))]
        (grad,) = gradients(kept, [batch.values])
        seen.append([*kept, grad[:3], grad[5:]])
    assert all(bool(part.isfinite().all()) for part in seen[1])
    assert_same(seen[1], seen[0])


@pytest.mark.parametrize("name", ["gru", "lstm projected", "mingru"])
def test_autocast(name: str, device: torch.device) -> None:
    """The same masks in bfloat16, on every schedule."""
    layer = build(name, 2, bidirectional=True, dtype=torch.float32, **regularisation_of(name))
    batch = rl.Ragged([torch.randn(length, 3) for length in LENGTHS])
    seen = []
    for schedule in SCHEDULES:
        with torch.autocast(device.type, dtype=torch.bfloat16), rl.use_backend(schedule=schedule):
            seen.append(run(layer, batch))
    assert seen[0][0].dtype is torch.bfloat16
    for other in seen[1:]:
        assert_same(other, seen[0], 0.02)


def test_explain() -> None:
    batch = rl.Ragged([torch.randn(2, 3)])
    layer = rl.nn.LSTM(3, 4, state_dropout=0.2)
    program = "reference" if missing_kernels() else "program"
    assert rl.explain(layer, batch).backend == program
    assert "lstm with state dropout" in rl.explain(layer, batch).reason
    assert rl.explain(layer.eval(), batch).backend == rl.explain(rl.nn.LSTM(3, 4), batch).backend
    assert rl.explain(rl.nn.LSTM(3, 4, zoneout=0.2).eval(), batch).backend == program
    assert rl.explain(rl.nn.LSTM(3, 4, weight_dropout=0.2), batch).backend != "reference"
    assert "zoneout=(0.1, 0.2)" in repr(rl.nn.LSTM(3, 4, zoneout=(0.1, 0.2)))


def test_nothing_is_drawn_without_an_effect() -> None:
    """Neither without regularisation nor in evaluation."""
    layers = [build("lstm", 2, zoneout=(0.0, 0.0)), build("lstm", 2, **regularisation_of("lstm", dropout=0.5)).eval()]
    before = torch.random.get_rng_state()
    for layer in layers:
        layer(rl.Ragged([torch.ones(2, 3, dtype=torch.float64)]))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rl.nn.MinGRU(3, 4, state_dropout=0.1), "state_dropout must be 0 for this cell.*, got 0.1"),
        (lambda: rl.nn.MinLSTM(3, 4, weight_dropout=0.1), "weight_dropout must be .*got 0.1"),
        (lambda: rl.nn.QRNN(3, 4, state_dropout=0.1), "state_dropout must be .*got 0.1"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1,)), r"zoneout must be .* h, c.*, got \(0.1,\)"),
        (lambda: rl.nn.GRU(3, 4, zoneout=(0.1, 0.1)), r"zoneout must be .*got \(0.1, 0.1\)"),
        (lambda: rl.nn.GRU(3, 4, zoneout=1.0), "zoneout must be a probability.*, got 1.0"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1, 1.5)), r"zoneout must be .*got \(0.1, 1.5\)"),
        (lambda: rl.nn.GRU(3, 4, input_dropout=-0.1), "input_dropout must be .*got -0.1"),
        (lambda: rl.nn.GRU(3, 4, state_dropout=float("nan")), "state_dropout must be .*got nan"),
        (lambda: rl.nn.GRU(3, 4, weight_dropout="0.1"), "weight_dropout must be .*got '0.1'"),  # type: ignore[arg-type]
        (lambda: rl.nn.SRU(3, 4, zoneout=[0.1, 0.2]), r"zoneout must be .*got \[0.1, 0.2\]"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()
