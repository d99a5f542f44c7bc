"""Dropout on inputs, states and weights, and zoneout: on every backend, and against a loop under
the same masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import raglane as rl
from every_layer import (
    LAYERS,
    LENGTHS,
    READ,
    SINGLE,
    H,
    a_batch,
    a_state,
    assert_alike_everywhere,
    assert_nan_stays_in_its_sequence,
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


@pytest.mark.parametrize("name", LAYERS)
def test_every_schedule_and_backend_draws_the_same(name: str) -> None:
    assert_alike_everywhere(build(name, 2, **regularisation_of(name, dropout=0.3)), run)


@pytest.mark.parametrize("name", ["lstm", "layernorm_gru", "sru"])
def test_every_schedule_and_backend_drops_the_same_inputs(name: str) -> None:
    assert_alike_everywhere(build(name, 2, input_dropout=0.3, dropout=0.3), run)


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
    assert_same(
        [rl.Ragged.from_packed(packed_out).values, *parts(packed_state)], expected[:-1], 0.0
    )
    single, alone = run(layer, batch[0]), run(layer, rl.Ragged([batch[0]]))
    assert_same(single, [alone[0], *(part.squeeze(1) for part in alone[1:-1]), alone[-1]], 0.0)


def test_masks_do_not_depend_on_the_strides_of_hx() -> None:
    layer = build("gru", **READ)
    batch, hx = a_batch(), torch.randn(1, 5, H, dtype=torch.float64)
    other = torch.empty_strided(hx.shape, (20, 1, 5), dtype=torch.float64).copy_(hx)
    assert_same(run(layer, batch, hx=other), run(layer, batch, hx=hx), 0.0)


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_has_no_effect_in_evaluation(name: str) -> None:
    options = {
        **regularisation_of(name, dropout=0.5),
        "zoneout": (0.0,) * len(build(name).cell.states),
    }
    layer = build(name, 2, bidirectional=True, **options).eval()
    plain = build(name, 2, bidirectional=True).eval()
    plain.load_state_dict(layer.state_dict())
    batch = a_batch()
    assert_same(run(layer, batch), run(plain, batch), 0.0)
    assert_same(run(layer, batch, _with_states=True), run(plain, batch, _with_states=True), 0.0)


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_takes_the_mean_of_zoneout(name: str) -> None:
    """Each new state is the mean: the share of zoneout times the old one, and the rest times the
    cell's.
    """
    shares = (0.25, 0.6, 0.1, 0.4)[: len(build(name).cell.states)]
    layer = build(name, **regularisation_of(name, zoneout=shares)).eval()
    sequences = sequences_of([3, 0, 2])
    weights = layer._weights()[0]
    expected, finals = [], []
    for sequence in sequences:
        state = tuple(torch.zeros(1, size, dtype=torch.float64) for size in layer.state_sizes)
        for t in range(len(sequence)):
            ready = layer.cell.prepare(weights, sequence[t : t + 1], torch.tensor([0, 1]))
            _, new = layer.cell.step(weights, ready, state)
            state = tuple(
                p * old + (1 - p) * n for p, old, n in zip(shares, state, new, strict=True)
            )
            expected.append(state[0])
        finals.append(state)
    theirs = [
        torch.cat(expected),
        *(torch.cat(part).unsqueeze(0) for part in zip(*finals, strict=True)),
    ]
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule):
            assert_same(results_of(layer(rl.Ragged(sequences))), theirs, what=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["lstm", "sru"])
def test_nan_stays_in_its_sequence(name: str, schedule: str) -> None:
    layer = build(
        name, 2, bidirectional=True, schedule=schedule, **regularisation_of(name, dropout=0.2)
    )
    assert_nan_stays_in_its_sequence(layer)


def test_a_checkpoint_draws_the_same_again() -> None:
    layer, batch = build("lstm", 2, **regularisation_of("lstm", dropout=0.3)), a_batch()
    seen = []
    for call in (layer, partial(checkpoint, layer, use_reentrant=False)):
        results = run(call, batch)
        seen.append([*results, *gradients(results, [batch.values, *layer.parameters()])])
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
    layers = [
        build("lstm", 2, zoneout=(0.0, 0.0)),
        build("lstm", 2, **regularisation_of("lstm", dropout=0.5)).eval(),
    ]
    before = torch.random.get_rng_state()
    for layer in layers:
        layer(rl.Ragged([torch.ones(2, 3, dtype=torch.float64)]))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: rl.nn.MinGRU(3, 4, state_dropout=0.1),
            "state_dropout must be 0 for this cell.*, got 0.1",
        ),
        (lambda: rl.nn.MinLSTM(3, 4, weight_dropout=0.1), "weight_dropout must be .*got 0.1"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1,)), r"zoneout must be .* h, c.*, got \(0.1,\)"),
        (lambda: rl.nn.GRU(3, 4, zoneout=1.0), "zoneout must be a probability.*, got 1.0"),
        (lambda: rl.nn.LSTM(3, 4, zoneout=(0.1, 1.5)), r"zoneout must be .*got \(0.1, 1.5\)"),
        (lambda: rl.nn.GRU(3, 4, input_dropout=-0.1), "input_dropout must be .*got -0.1"),
        (lambda: rl.nn.GRU(3, 4, state_dropout=float("nan")), "state_dropout must be .*got nan"),
        (lambda: rl.nn.SRU(3, 4, zoneout=[0.1, 0.2]), r"zoneout must be .*got \[0.1, 0.2\]"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


class Draws:
    """Records the masks of bernoulli, and the probabilities and masks of dropout, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[Tensor] = []
        self.masks: list[tuple[float, Tensor]] = []
        bernoulli = torch.bernoulli

        def record_bernoulli(probabilities: Tensor) -> Tensor:
            self.held.append(bernoulli(probabilities))
            return self.held[-1]

        def record_dropout(values: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
            assert training
            mask = bernoulli(torch.full_like(values, 1 - p, requires_grad=False)) / (1 - p)
            self.masks.append((p, mask))
            return values * mask

        monkeypatch.setattr(torch, "bernoulli", record_bernoulli)
        monkeypatch.setattr(F, "dropout", record_dropout)

    def clear(self) -> None:
        self.held.clear()
        self.masks.clear()


def naive(
    layer: Any, pieces: list[Tensor], initial: tuple[Tensor, ...], draws: Draws
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run a layer one piece, layer, direction and step at a time, under the recorded masks.

    ``pieces`` are ``(L_i, D)`` each and ``initial`` ``(layers * directions, M, size)`` per state.
    Return the output of each piece, and the final states as rows of rows.
    """
    cell, rule = layer.cell, layer.regularisation
    masks, held = iter(draws.masks), iter(draws.held)

    def next_mask(probability: float) -> Tensor:
        drawn, mask = next(masks)
        assert drawn == probability
        return mask

    weights = list(layer._weights())
    if rule.weight_dropout:
        name = "recurrent" if hasattr(weights[0], "recurrent") else "hidden"
        weights = [
            part._replace(**{name: getattr(part, name) * next_mask(rule.weight_dropout)})
            for part in weights
        ]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    holds = (
        [torch.cat([next(held) for _ in initial], 1) for _ in range(count)]
        if rule.zoneout
        else None
    )
    on_state = next_mask(rule.state_dropout) if rule.state_dropout else None
    sizes, finals, index = [len(piece) for piece in pieces], [], 0
    for depth in range(layer.num_layers):
        if depth and layer.dropout:
            on_outputs = torch.split(next_mask(layer.dropout), sizes)
            pieces = [piece * mask for piece, mask in zip(pieces, on_outputs, strict=True)]
        if rule.input_dropout:
            pieces = [
                piece * mask
                for piece, mask in zip(pieces, next_mask(rule.input_dropout), strict=True)
            ]
        sides = []
        for reverse in (False, True)[: 2 if layer.bidirectional else 1]:
            outputs = []
            for row, piece in enumerate(pieces):
                state = tuple(part[index, row : row + 1] for part in initial)
                hold = None if holds is None else torch.split(holds[index], sizes)[row]
                steps = [piece.new_zeros(1, state[0].shape[1])] * len(piece)
                for t in range(len(piece))[:: -1 if reverse else 1]:
                    ready = cell.prepare(weights[index], piece[t : t + 1], torch.tensor([0, 1]))
                    mask = None if on_state is None else on_state[index, row : row + 1]
                    _, new = cell.step(weights[index], ready, state, mask)
                    if hold is not None:
                        bits = torch.split(hold[t : t + 1], [part.shape[1] for part in state], 1)
                        new = tuple(
                            b * old + (1 - b) * n
                            for b, old, n in zip(bits, state, new, strict=True)
                        )
                    state = new
                    steps[t] = state[0]
                outputs.append(torch.cat([piece.new_zeros(0, state[0].shape[1]), *steps]))
                finals.append(state)
            sides.append(outputs)
            index += 1
        pieces = [torch.cat(pair, 1) for pair in zip(*sides, strict=True)]
    assert next(masks, None) is None
    assert next(held, None) is None
    rows = [torch.cat(column).view(count, len(sizes), -1) for column in zip(*finals, strict=True)]
    return pieces, [list(part) for part in rows]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    return Draws(monkeypatch)


def assert_like_naive(layer: Any, lengths: list[int], draws: Draws) -> None:
    """Compare outputs, final states and gradients of a call with the naive loop."""
    sequences = sequences_of(lengths, requires_grad=True)
    hx = a_state(layer, len(lengths))
    draws.clear()
    ours = results_of(layer(rl.Ragged(sequences), hx))
    outputs, finals = naive(layer, sequences, parts(hx), draws)
    theirs = [torch.cat(outputs), *(torch.stack(part) for part in finals)]
    assert_same(ours, theirs, what="result")
    wanted = [*sequences, *parts(hx), *layer.parameters()]
    assert_same(gradients(ours, wanted), gradients(theirs, wanted), what="gradient")


@pytest.mark.parametrize("name", LAYERS)
def test_a_naive_loop_under_the_same_masks(name: str, draws: Draws) -> None:
    assert_like_naive(
        build(name, 2, bidirectional=True, **regularisation_of(name, dropout=0.3)), LENGTHS, draws
    )


@pytest.mark.parametrize("options", SINGLE, ids=str)
def test_a_naive_loop_with_each_alone(options: dict[str, Any], draws: Draws) -> None:
    assert_like_naive(build("lstm", 2, **options), LENGTHS, draws)


@pytest.mark.parametrize("name", ["lstm", "indrnn_tanh"])
def test_an_episode_has_masks_of_its_own(name: str, draws: Draws) -> None:
    """With resets, masks of sequences are masks of episodes."""
    layer = build(name, 2, bidirectional=True, **regularisation_of(name))
    batch = a_batch([4, 0, 3])
    marks = rl.Ragged(
        [torch.tensor(part, dtype=torch.bool) for part in ([0, 0, 1, 1], [], [1, 0, 0])]
    )
    ours = results_of(layer(batch, resets=marks))
    pieces = list(torch.split(batch.values, [2, 1, 1, 0, 3]))
    sizes = layer.cell.state_sizes(H)
    outputs, finals = naive(
        layer, pieces, tuple(torch.zeros(4, 5, size, dtype=torch.float64) for size in sizes), draws
    )
    last, first = [2, 3, 4], [0, 3, 4]
    rows = [
        torch.stack([row[first if index % 2 else last] for index, row in enumerate(part)])
        for part in finals
    ]
    assert_same(ours, [torch.cat(outputs), *rows])


@pytest.mark.parametrize("zoneout", [0.3, (0.0, 0.6), (0.5, 0.0)])
def test_the_share_of_units_held(zoneout: Any) -> None:
    layer = rl.nn.LSTM(3, 400, zoneout=zoneout, dtype=torch.float64)
    batch = a_batch([9, 1, 8])
    hx = torch.randn(2, 1, 3, 400, dtype=torch.float64)
    _, _, states = layer.with_states(batch, tuple(hx))
    for part, initial, share in zip(states[0], hx, parts(zoneout) * 2, strict=False):
        held = torch.cat(
            [own.diff(dim=0, prepend=initial[:, row]) == 0 for row, own in enumerate(part)]
        )
        if share == 0:
            assert not held.any()
            continue
        assert (
            abs(held.double().mean().item() - share)
            < 5 * (share * (1 - share) / held.numel()) ** 0.5
        )
        assert not torch.equal(held[0], held[1]), "each step draws its own"


@pytest.mark.parametrize("name", ["input_dropout", "state_dropout", "weight_dropout", "zoneout"])
def test_attributes_are_the_arguments(name: str) -> None:
    shares: dict[str, Any] = {name: 0.25}
    layer = rl.nn.LSTM(3, 4, **shares)
    assert getattr(layer, name) == 0.25
    other = rl.nn.LSTM(3, 4)
    assert getattr(other, name) == 0
    other.load_state_dict(layer.state_dict())
    setattr(other, name, 0.25)
    batch = a_batch(dtype=torch.float32)
    results = []
    for each in (layer, other):
        torch.manual_seed(2)
        results.append(each(batch)[0].values)
    assert torch.equal(*results)
    with pytest.raises(ArgumentError, match=f"{name} must be a probability"):
        setattr(other, name, 1.5)


def test_a_subclass_of_torchs_may_have_an_attribute_of_such_a_name() -> None:
    class Own(torch.nn.LSTM):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.zoneout = 0.5

    layer = rl.accelerate(Own())
    assert isinstance(layer, rl.nn.LSTM)
    assert layer.zoneout == 0.5
    assert rl.to_torch(layer).zoneout == 0.5
