"""The transducer against a padded twin in plain torch, and its searches against loops over one
sequence.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from batches import random_batch
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged
from raglane.transduction import Transducer, rnnt_loss

TOKENS, FEATURES, HIDDEN = 4, 3, 5


def made(cell: Any = "gru", **options: Any) -> Transducer:
    return Transducer(
        TOKENS,
        FEATURES,
        HIDDEN,
        cell,
        **{"joint_size": 6, "embedding": 7, "dtype": torch.float64, **options},
    ).eval()


def states_of(model: Transducer, tokens: list[int]) -> Tensor:
    """The prediction network's part of the sum after each token, ``(U + 1, joint_size)``."""
    return model.state(
        model.recurrent(Ragged([model.embedding(torch.tensor([model.blank, *tokens]))]))[0].values
    )


@pytest.mark.parametrize("cell", ["gru", "lstm", "mingru", rl.nn.LayerNormLSTM])
@pytest.mark.parametrize("blank", [0, 3])
def test_the_loss_is_that_of_one_sequence_after_another(cell: Any, blank: int) -> None:
    model, frames = made(cell, blank=blank, num_layers=2), random_batch([6, 0, 3, 1])
    targets = Ragged([[1, 2, 1], [], [], [2]])
    losses = []
    for own, labels in zip(frames, targets, strict=True):
        states = states_of(model, labels.tolist())
        logits = model.joint((model.frame(own)[:, None] + states[None]).tanh()).flatten(0, 1)
        losses.append(
            rnnt_loss(Ragged([logits]), None, Ragged([labels]), blank=blank, reduction="none")
        )
    expected, parameters = torch.cat(losses), list(model.parameters())
    own = -model(frames, targets)
    torch.testing.assert_close(own, expected)
    pairs = zip(
        *(torch.autograd.grad(loss.sum(), parameters) for loss in (own, expected)), strict=True
    )
    for part, other in pairs:
        torch.testing.assert_close(part, other)
    mean = (expected / torch.tensor([3, 1, 1, 1])).mean()
    torch.testing.assert_close(model.loss(frames, targets), mean)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("max_symbols", [1, 3])
def test_greedy(cell: str, max_symbols: int) -> None:
    """Each emission is the likeliest one, in a loop over one sequence."""
    model, frames = made(cell), random_batch([9, 0, 5, 1])
    with torch.no_grad():
        model.joint.bias[0] -= 0.5
    found = model.decode(frames, max_symbols=max_symbols)
    assert found.times is not None
    assert found.confidences is not None
    for index, own in enumerate(frames):
        tokens: list[int] = []
        times, chances, score = [], [], 0.0
        for t, frame in enumerate(own):
            for _ in range(max_symbols):
                log_probs = model.joint(
                    (model.frame(frame) + states_of(model, tokens)[-1]).tanh()
                ).log_softmax(0)
                token = int(log_probs.argmax())
                score += float(log_probs[token].detach())
                if token == model.blank:
                    break
                tokens.append(token)
                times.append([t, t + 1])
                chances.append(float(log_probs[token].detach().exp()))
        assert found.tokens[index].tolist() == tokens
        assert found.times[index].tolist() == times
        assert found.confidences[index].tolist() == pytest.approx(chances)
        assert found.scores[index].item() == pytest.approx(score)
    assert len(found.tokens.values) > 0


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_stream_in_pieces(cell: str) -> None:
    model, frames = made(cell), random_batch([9, 4, 6])
    with torch.no_grad():
        model.joint.bias[0] -= 0.5
    whole = model.decode(frames)
    state, pieces = None, []
    for begin, end in itertools.pairwise([0, 2, 2, 5, 9]):
        piece = model.decode(Ragged([own[begin:end] for own in frames]), state)
        state = piece.state
        pieces.append(piece)
    for name in ("tokens", "times", "confidences"):
        parts = [getattr(piece, name).to_list() for piece in pieces]
        for index, expected in enumerate(getattr(whole, name)):
            torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected)
    torch.testing.assert_close(sum(piece.scores for piece in pieces), whole.scores)
    assert state is not None
    torch.testing.assert_close(state, whole.state)


def probability(model: Transducer, frames: Tensor, tokens: list[int]) -> float:
    with torch.no_grad():
        return math.exp(
            float(model(Ragged([frames]), Ragged([torch.tensor(tokens, dtype=torch.int64)])))
        )


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_wide_beam_finds_the_most_probable_outputs(cell: str) -> None:
    """Of all outputs of up to 2 tokens, each by its loss."""
    model, frames = made(cell), random_batch([3, 0, 2])
    outputs = [
        list(tokens) for size in range(3) for tokens in itertools.product([1, 2, 3], repeat=size)
    ]
    found = model.decode(frames, beam_size=60, max_length=2, n_best=5)
    assert found.tokens[int(found.offsets[1])].tolist() == []
    for item in (0, 2):
        expected = sorted(
            ((probability(model, frames[item], tokens), tokens) for tokens in outputs), reverse=True
        )[:5]
        places = range(int(found.offsets[item]), int(found.offsets[item + 1]))
        assert [found.tokens[place].tolist() for place in places] == [
            tokens for _, tokens in expected
        ]
        chances = [chance for chance, _ in expected]
        assert found.scores[places.start : places.stop].exp().tolist() == pytest.approx(chances)


def test_dropout_only_in_training() -> None:
    model, frames, targets = made(dropout=0.5), random_batch([4]), Ragged([[1, 2]])
    assert torch.equal(model(frames, targets), model(frames, targets))
    model.train()
    assert not torch.equal(model(frames, targets), model(frames, targets))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_tokens": 0}, ArgumentError, "num_tokens must be"),
        ({"encoder_size": 0}, ArgumentError, "encoder_size must be"),
        ({"blank": 4}, ArgumentError, "blank must be at most 3, got 4"),
        ({"cell": "none"}, ArgumentError, "cell must be one of"),
        ({"bidirectional": True}, ArgumentTypeError, "cell must be a layer of one direction"),
        ({"joint_size": 0}, ArgumentError, "joint_size must be"),
        ({"dropout": 2}, ArgumentError, "dropout must be"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Transducer(**{"num_tokens": 4, "encoder_size": 3, "hidden_size": 5, **options})


def test_bad_arguments() -> None:
    model, frames = made(), random_batch([4, 3])
    for given, targets, error, text in (
        (frames.values, [[1], [2]], ArgumentTypeError, "frames must be a Ragged"),
        (frames.to(torch.float32), [[1], [2]], ShapeError, "frames must be"),
        (
            frames,
            [[1], [0]],
            ArgumentError,
            "targets must be from 0 to 3, except the blank, 0, got label 0",
        ),
        (
            frames,
            [[1], [4]],
            ArgumentError,
            "targets must be from 0 to 3, except the blank, 0, got label 4",
        ),
        (
            frames,
            [[1]],
            ShapeError,
            "targets must be one sequence of labels for each of the 2 sequences of frames",
        ),
    ):
        with pytest.raises(error, match=text):
            model(given, Ragged(targets))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="frames must be encoder_size = 3 features"):
        model.decode(Ragged([torch.zeros(4, 2)]), beam_size=2, max_length=3)
    with pytest.raises(ArgumentError, match="max_symbols must be"):
        model.decode(frames, max_symbols=0)
    state = model.decode(frames).state
    with pytest.raises(
        ShapeError, match="state must be tensors with one row for each of the 1 items"
    ):
        model.decode(random_batch([3]), state)
    with pytest.raises(ArgumentTypeError, match="state must be the state of a greedy search"):
        model.decode(frames, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="of the greedy search, got n_best, max_length with"):
        model.decode(frames, max_length=2, n_best=2)
    with pytest.raises(ArgumentError, match="state must be None for whole sequences"):
        model.decode(frames, state, beam_size=2)


def test_a_beam_writes_at_most_as_many_tokens_as_frames() -> None:
    model, frames = made(), random_batch([2, 0, 3])
    with torch.no_grad():
        model.joint.bias[0] -= 20
    assert model.decode(frames, beam_size=4).best().lengths.tolist() == [2, 0, 3]
