"""Regularisation compared with a naive loop under the same masks, and the masks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import raglane as rl
from every_layer import (
    LAYERS,
    LENGTHS,
    SINGLE,
    H,
    a_batch,
    a_state,
    assert_same,
    build,
    gradients,
    parts,
    regularisation_of,
    results_of,
)
from strategies import sequences_of


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

    ``pieces`` are ``(L_i, D)`` each and ``initial`` ``(layers * directions, M, size)`` per state. Return the output of
    each piece, and the final states as rows of rows.
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
        weights = [part._replace(**{name: getattr(part, name) * next_mask(rule.weight_dropout)}) for part in weights]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    holds = [torch.cat([next(held) for _ in initial], 1) for _ in range(count)] if rule.zoneout else None
    on_state = next_mask(rule.state_dropout) if rule.state_dropout else None
    sizes, finals, index = [len(piece) for piece in pieces], [], 0
    for depth in range(layer.num_layers):
        if depth and layer.dropout:
            on_outputs = torch.split(next_mask(layer.dropout), sizes)
            pieces = [piece * mask for piece, mask in zip(pieces, on_outputs, strict=True)]
        if rule.input_dropout:
            pieces = [piece * mask for piece, mask in zip(pieces, next_mask(rule.input_dropout), strict=True)]
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
                        new = tuple(b * old + (1 - b) * n for b, old, n in zip(bits, state, new, strict=True))
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
    assert_like_naive(build(name, 2, bidirectional=True, **regularisation_of(name, dropout=0.3)), LENGTHS, draws)


@pytest.mark.parametrize("options", SINGLE, ids=str)
def test_a_naive_loop_with_each_alone(options: dict[str, Any], draws: Draws) -> None:
    assert_like_naive(build("lstm", 2, **options), LENGTHS, draws)


@pytest.mark.parametrize("name", ["lstm", "indrnn_tanh"])
def test_an_episode_has_masks_of_its_own(name: str, draws: Draws) -> None:
    """With resets, masks of sequences are masks of episodes."""
    layer = build(name, 2, bidirectional=True, **regularisation_of(name))
    batch = a_batch([4, 0, 3])
    marks = rl.Ragged([torch.tensor(part, dtype=torch.bool) for part in ([0, 0, 1, 1], [], [1, 0, 0])])
    ours = results_of(layer(batch, resets=marks))
    pieces = list(torch.split(batch.values, [2, 1, 1, 0, 3]))
    sizes = layer.cell.state_sizes(H)
    outputs, finals = naive(layer, pieces, tuple(torch.zeros(4, 5, size, dtype=torch.float64) for size in sizes), draws)
    last, first = [2, 3, 4], [0, 3, 4]
    rows = [torch.stack([row[first if index % 2 else last] for index, row in enumerate(part)]) for part in finals]
    assert_same(ours, [torch.cat(outputs), *rows])


@pytest.mark.parametrize("zoneout", [0.3, (0.0, 0.6), (0.5, 0.0)])
def test_the_share_of_units_held(zoneout: Any) -> None:
    layer = rl.nn.LSTM(3, 400, zoneout=zoneout, dtype=torch.float64)
    batch = a_batch([9, 1, 8])
    hx = torch.randn(2, 1, 3, 400, dtype=torch.float64)
    _, _, states = layer(batch, tuple(hx), return_states=True)
    for part, initial, share in zip(states[0], hx, parts(zoneout) * 2, strict=False):
        held = torch.cat([own.diff(dim=0, prepend=initial[:, row]) == 0 for row, own in enumerate(part)])
        if share == 0:
            assert not held.any()
            continue
        assert abs(held.double().mean().item() - share) < 5 * (share * (1 - share) / held.numel()) ** 0.5
        assert not torch.equal(held[0], held[1]), "each step draws its own"
