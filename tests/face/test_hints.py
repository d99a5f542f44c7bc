"""What a refusal names instead is right: each hint is followed, and compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane.errors import RaglaneError
from raglane.ragged.face.refusals import REFUSALS


class Hint(NamedTuple):
    refused: Any  # raises
    words: str  # in the message
    followed: Any
    expected: Any


def each(function: Any) -> Any:
    """Return a function of a batch that calls one on ``(1, L, F)``, one sequence at a time."""
    return lambda r: torch.cat([function(sequence[None])[0] for sequence in r.to_list()])


def alike(ours: Any, theirs: nn.Module) -> Any:
    ours.load_state_dict(theirs.state_dict())
    return ours


torch.manual_seed(0)
CONV = nn.Conv1d(4, 4, 3, padding=1)
LSTM = nn.LSTM(4, 3, batch_first=True)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
PER_SEQUENCE = torch.randn(2, 4)
MASK = rl.Ragged([torch.randn(n, 4) > 0 for n in (5, 3)])
LABELS = [torch.tensor([1, 2]), torch.tensor([3])]


def ctc(r: Any) -> Tensor:
    padded = nn.utils.rnn.pad_sequence(list(r)).log_softmax(-1)
    targets = nn.utils.rnn.pad_sequence(LABELS, batch_first=True)
    return F.ctc_loss(padded, targets, r.lengths, torch.tensor([2, 1]))


HINTS: dict[str, Hint] = {
    "pack_padded_sequence": Hint(
        lambda r: nn.utils.rnn.pack_padded_sequence(r, [5, 3]),
        "r.to_packed()",
        lambda r: r.to_packed().data,
        lambda r: nn.utils.rnn.pack_sequence(list(r)).data,
    ),
    "relu_": Hint(
        lambda r: r.relu_(),
        "without an underscore",
        lambda r: r.relu().values,
        lambda r: r.values.relu(),
    ),
    "conv1d": Hint(
        CONV,
        "rl.nn.Conv1d",
        lambda r: alike(rl.nn.Conv1d(4, 4, 3, padding=1), CONV)(r).values,
        each(lambda s: CONV(s.mT).mT),
    ),
    "max_pool1d": Hint(
        nn.MaxPool1d(2),
        "rl.nn.MaxPool1d",
        lambda r: rl.nn.MaxPool1d(2)(r).values,
        each(lambda s: F.max_pool1d(s.mT, 2).mT),
    ),
    "avg_pool1d": Hint(
        nn.AvgPool1d(2),
        "rl.nn.AvgPool1d",
        lambda r: rl.nn.AvgPool1d(2)(r).values,
        each(lambda s: F.avg_pool1d(s.mT, 2).mT),
    ),
    "batch_norm": Hint(
        nn.BatchNorm1d(4),
        "r.map(f)",
        lambda r: r.map(nn.BatchNorm1d(4)).values,
        lambda r: nn.BatchNorm1d(4)(r.values),
    ),
    "instance_norm": Hint(
        F.instance_norm,
        "(r - r.mean(1, keepdim=True)) / r.std(1, unbiased=False, keepdim=True)",
        lambda r: ((r - r.mean(1, keepdim=True)) / r.std(1, unbiased=False, keepdim=True)).values,
        each(lambda s: F.instance_norm(s.mT, eps=0).mT),
    ),
    "lstm": Hint(
        LSTM,
        "rl.nn",
        lambda r: alike(rl.nn.LSTM(4, 3), LSTM)(r)[0].values,
        each(lambda s: LSTM(s)[0]),
    ),
    "attention": Hint(
        lambda r: F.multi_head_attention_forward(
            r, r, r, 4, 2, None, None, None, None, False, 0.0, PER_SEQUENCE, None
        ),
        "rl.nn.Attention",
        lambda r: alike(rl.nn.Attention(4, num_heads=2), ATTENTION)(r).values,
        each(lambda s: ATTENTION(s, s, s)[0]),
    ),
    "ctc_loss": Hint(
        lambda r: F.ctc_loss(r, rl.Ragged(LABELS), r.lengths, r.lengths),
        "rl.transduction.ctc_loss",
        lambda r: rl.transduction.ctc_loss(r.log_softmax(-1), rl.Ragged(LABELS)),
        ctc,
    ),
    "kl_div": Hint(
        lambda r: torch.kl_div(r, r),
        "torch.nn.functional",
        lambda r: F.kl_div(r, r.exp(), reduction="sum"),
        lambda r: F.kl_div(r.values, r.values.exp(), reduction="sum"),
    ),
    "view": Hint(
        lambda r: r.view(2, 2, 2),
        "r.unflatten(-1, sizes)",
        lambda r: r.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(2).values,
        lambda r: r.values.view(-1, 2, 2).mT.reshape(-1, 4),
    ),
    "grad": Hint(
        lambda r: r.grad,
        "torch.autograd.grad(loss, r.values)",
        lambda r: torch.autograd.grad(r.square().sum(), r.values)[0],
        lambda r: 2 * r.values,
    ),
    "backward": Hint(
        lambda r: r.backward(),
        "r.sum().backward()",
        lambda r: (r.sum().backward(), r.values.grad)[1],
        lambda r: torch.ones_like(r.values),
    ),
    "item": Hint(
        lambda r: r.item(),
        "r.mean().item()",
        lambda r: r.mean().item(),
        lambda r: r.values.mean().item(),
    ),
    "numpy": Hint(
        lambda r: r.numpy(),
        "r.to_numpy()",
        lambda r: torch.from_numpy(r.detach().to_numpy()[0]),
        lambda r: r.values,
    ),
    "expand": Hint(
        lambda r: r.expand(2, 5, 4),
        "x[:, None].expand_as(r)",
        lambda r: PER_SEQUENCE[:, None].expand_as(r).values,
        lambda r: PER_SEQUENCE.repeat_interleave(r.lengths, 0),
    ),
    "repeat": Hint(
        lambda r: r.repeat(2),
        "r.broadcast(x)",
        lambda r: r.broadcast(PER_SEQUENCE).values,
        lambda r: PER_SEQUENCE.repeat_interleave(r.lengths, 0),
    ),
    "narrow": Hint(
        lambda r: torch.narrow(r, 1, 0, 2),
        "r[:, :5]",
        lambda r: r[:, :2].values,
        each(lambda s: s.narrow(1, 0, 2)),
    ),
    "select": Hint(
        lambda r: r.select_scatter(r, 1, -1),
        "r[:, -1]",
        lambda r: r[:, -1],
        lambda r: torch.stack([s[-1] for s in r]),
    ),
    "masked_scatter": Hint(
        lambda r: torch.masked_scatter(r, MASK, r),
        "torch.where(mask, r, other)",
        lambda r: torch.where(MASK, r, 0.0).values,
        lambda r: r.values * MASK.values,
    ),
    "unique": Hint(
        lambda r: torch.unique(r),
        "r.values",
        lambda r: torch.unique(r.values),
        lambda r: r.values.flatten().sort().values,
    ),
    "sum of sequences": Hint(
        lambda r: r.sum(0), "dim=(0, 1)", lambda r: r.sum(dim=(0, 1)), lambda r: r.values.sum(0)
    ),
    "softmax without dim": Hint(
        lambda r: r.softmax(),
        "dim=1",
        lambda r: r.softmax(dim=1).values,
        each(lambda s: s.softmax(1)),
    ),
    "argmax without dim": Hint(
        lambda r: r.argmax(),
        "dim=1",
        lambda r: r.argmax(dim=1),
        lambda r: torch.stack([s.argmax(0) for s in r]),
    ),
    "stack": Hint(
        lambda r: torch.stack([r, r]),
        "torch.cat([a, b])",
        lambda r: torch.cat([r, r]).values,
        lambda r: torch.cat([*r, *r]),
    ),
    "roll": Hint(
        lambda r: r.roll(1, 1),
        "r.shift(k)",
        lambda r: r.shift(1).values,
        each(lambda s: F.pad(s, (0, 0, 1, -1))),
    ),
    "flip of sequences": Hint(
        lambda r: r.flip(0), "r[::-1]", lambda r: r[::-1].values, lambda r: torch.cat([*r][::-1])
    ),
    "negative steps": Hint(
        lambda r: r[:, ::-1], "r.flip(1)", lambda r: r.flip(1).values, each(lambda s: s.flip(1))
    ),
    "several last steps": Hint(
        lambda r: r.last(2), "r[:, -2:]", lambda r: r[:, -2:].values, each(lambda s: s[:, -2:])
    ),
    "several first steps": Hint(
        lambda r: r.first(2), "r[:, :2]", lambda r: r[:, :2].values, each(lambda s: s[:, :2])
    ),
    "several quantiles": Hint(
        lambda r: r.quantile(torch.tensor([0.2, 0.5]), -1),
        "torch.stack([r.quantile(q, -1) for q in qs.tolist()], -1)",
        lambda r: torch.stack([r.quantile(q, -1) for q in (0.2, 0.5)], -1).values,
        lambda r: r.values.quantile(torch.tensor([0.2, 0.5]), -1).T,
    ),
    "a row per sequence": Hint(
        lambda r: torch.cat([r, PER_SEQUENCE], -1),
        "r.broadcast(x)",
        lambda r: torch.cat([r, r.broadcast(PER_SEQUENCE)], -1).values,
        lambda r: torch.cat([r.values, PER_SEQUENCE.repeat_interleave(r.lengths, 0)], -1),
    ),
    "a product over steps": Hint(
        lambda r: r[..., 0] @ torch.ones(1, 2),
        "after r.unsqueeze(-1)",
        lambda r: (r[..., 0].unsqueeze(-1) @ torch.ones(1, 2)).values,
        lambda r: r.values[:, :1].expand(-1, 2),
    ),
    "the maximum of nothing": Hint(
        lambda r: r[:, 3:].amax(1),
        "r[r.lengths > 0]",
        lambda r: (lambda rest: rest[rest.lengths > 0].amax(1))(r[:, 3:]),
        lambda r: r[0][3:].amax(0, keepdim=True),
    ),
    "several weights of prelu": Hint(
        nn.PReLU(4),
        "r.map(f)",
        lambda r: r.map(nn.PReLU(4)).values,
        lambda r: nn.PReLU(4)(r.values),
    ),
    "split of steps": Hint(
        lambda r: torch.chunk(r, 2, 1),
        "torch.split(r, k, 1)",
        lambda r: torch.split(r, 2, 1)[0].values,
        each(lambda s: s[:, :2]),
    ),
    "any other": Hint(
        lambda r: torch.cdist(r, r),
        "each sequence of r.to_list()",
        lambda r: torch.cat([torch.cdist(s, s).flatten() for s in r.to_list()]),
        lambda r: torch.cat([(s[:, None] - s).norm(dim=-1).flatten() for s in r.to_list()]),
    ),
    "lengths as tensors": Hint(lambda r: r.ndimension(), "r.dim()", lambda r: r.dim(), lambda _: 3),
    "broadcasting": Hint(
        lambda r: torch.broadcast_tensors(r, r.mean(1)),
        "r.broadcast(x)",
        lambda r: r.broadcast(r.mean(1)).values,
        lambda r: torch.cat([s.mean(0).expand_as(s) for s in r.to_list()]),
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_hints(name: str) -> None:
    hint = HINTS[name]
    torch.manual_seed(1)
    batch = rl.Ragged([torch.randn(5, 4), torch.randn(3, 4)])
    with pytest.raises((RaglaneError, AttributeError)) as raised:
        hint.refused(batch)
    assert hint.words in str(raised.value)
    if name in ("grad", "backward"):
        batch.requires_grad_()
    torch.testing.assert_close(hint.followed(batch), hint.expected(batch), rtol=1e-4, atol=1e-5)


def test_every_refusal_is_followed() -> None:
    """A new pattern of names needs a hint here."""
    followed = set()
    batch = rl.Ragged([torch.randn(5, 4), torch.randn(3, 4)])
    for hint in HINTS.values():
        with pytest.raises((RaglaneError, AttributeError)) as raised:
            hint.refused(batch)
        text = str(raised.value)
        followed |= {fix for _, _, fix in REFUSALS if fix[1:] in text}
    assert followed == {fix for _, _, fix in REFUSALS}
