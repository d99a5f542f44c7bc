"""Programs of users, which need no cast and no ignore. Type checkers read it; it is not run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane import Ragged


class Tagger(nn.Module):
    """Score the tags of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.lstm = rl.nn.LSTM(16, 32, bidirectional=True, schedule="packed")
        self.head = nn.Linear(64, 5)

    def forward(self, words: Ragged) -> Ragged:
        out, _ = self.lstm(self.embed(words))
        scores: Ragged = self.head(out)
        return scores


def losses(model: Tagger, words: Ragged, tags: Ragged) -> Tensor:
    scores = model.forward(words)
    accuracy = (scores.argmax(-1) == tags).float().mean()
    assert_type(accuracy, Tensor)
    each = F.cross_entropy(scores, tags, reduction="none")
    return F.cross_entropy(scores, tags) + nn.MSELoss()(scores, scores) + each.mean()


def functions_of_torch(a: Ragged, b: Ragged) -> list[Tensor]:
    return [
        torch.cat([a, b]),
        torch.relu(a),
        torch.where(a > 0, a, b),
        torch.stack([a, b], -1),
        torch.einsum("btf,fg->btg", a, torch.ones(3, 4)),
        F.softmax(a, dim=1),
    ]


def as_a_batch(a: Ragged, b: Ragged) -> None:
    assert_type(a + b, Ragged)
    assert_type(2 * a - b / 3, Ragged)
    assert_type(a > 0, Ragged)
    assert_type(a == b, Ragged)
    assert_type(-a, Ragged)
    assert_type(a @ torch.ones(3, 4), Ragged)
    assert_type(a.relu().exp().clamp(min=0.0), Ragged)
    assert_type(a.softmax(1), Ragged)
    assert_type(a.unsqueeze(-1).squeeze(-1), Ragged)
    assert_type(a.to("cuda").double(), Ragged)
    assert_type(a.cuda().cpu().detach().contiguous(), Ragged)
    assert_type(a.sum(-1), Ragged)
    assert_type(a.sum(1), Tensor)
    assert_type(a.mean(1, empty=0.0), Tensor)
    assert_type(a.mean(), Tensor)
    assert_type(a.amax(dim=(1, 2)), Tensor)
    assert_type(a.max(1).values, Tensor)
    assert_type(a.last(), Tensor)
    assert_type(a.values[0], Tensor)
    assert_type(a.lengths, Tensor)
    assert_type(a.shift(1).reverse().truncate(3), Ragged)
    assert_type(a.split(2)[0].lengths, Tensor)
    assert_type(len(a), int)
    print(a.shape[0] + 1, a.ndim + 1, a.dtype.is_complex, a.device.type, a.requires_grad)


def indices(a: Ragged, mask: Ragged) -> None:
    assert_type(a[0], Tensor)
    assert_type(a[1:3], Ragged)
    assert_type(a[[2, 0]], Ragged)
    assert_type(a[:, 1:], Ragged)
    assert_type(a[:, -1], Tensor)
    assert_type(a[..., 0], Ragged)
    assert_type(a[mask], Ragged)
    for sequence in a:
        assert_type(sequence, Tensor)


def states(batch: Ragged, padded: Tensor) -> None:
    out, (h, c) = rl.nn.LSTM(3, 4)(batch)
    assert_type(out, Ragged)
    assert_type((h, c), tuple[Tensor, Tensor])
    out, h = rl.nn.GRU(3, 4)(batch)
    assert_type(h, Tensor)
    frames, h = rl.nn.GRU(3, 4)(padded)
    assert_type(frames, Tensor)
    lstm = rl.nn.LSTM(3, 4)
    state: tuple[Tensor, Tensor] | None = None
    for x_t in padded:
        y_t, state = lstm.step(x_t, state)
        assert_type(y_t, Tensor)
    out, four = rl.nn.SLSTM(3, 4, num_heads=2)(batch)
    assert_type(four, tuple[Tensor, Tensor, Tensor, Tensor])
    none, h = rl.nn.MinGRU(3, 4)(batch, return_output=False)
    assert_type(none, None)
    assert_type(rl.nn.Attention(4, num_heads=2)(out), Ragged)
    assert_type(rl.nn.Pooling("max")(out), Tensor)


def training(data: list[Tensor], labels: list[str], options: dict[str, Any]) -> None:
    run = rl.fit(data, labels, cell="lstm", pooling="max", batch_size="auto", patience=3)
    rl.fit(data, labels, **options)
    run.predict(data, sequence="walk")
    encoder = rl.nn.SequenceEncoder(3, 4, "slstm", pooling="attention", num_heads=2, zoneout=0.1)
    print(encoder(rl.Ragged(data)).shape)
