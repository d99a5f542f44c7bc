"""Bahdanau's translator: attention with the previous state before each step of the decoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl

RENAMED = {
    "decoder.embedding.weight": "target.weight",
    "decoder.recurrent.weight_ih_l0": "cell.weight_ih",
    "decoder.recurrent.weight_hh_l0": "cell.weight_hh",
    "decoder.recurrent.bias_ih_l0": "cell.bias_ih",
    "decoder.recurrent.bias_hh_l0": "cell.bias_hh",
    "decoder.attention.vector": "vector",
    "decoder.attention.query.weight": "query.weight",
    "decoder.attention.query.bias": "query.bias",
    "decoder.attention.key.weight": "key.weight",
    "decoder.combine.weight": "combine.weight",
    "decoder.combine.bias": "combine.bias",
    "decoder.head.weight": "head.weight",
    "decoder.head.bias": "head.bias",
}


def sample() -> tuple[Any, ...]:
    sources = [torch.randint(0, 12, (length,)) for length in (5, 2, 7)]
    return sources, [torch.randint(1, 9, (length,)) for length in (3, 6, 1)]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(12, 4)
        self.encoder = nn.GRU(4, 3, batch_first=True, bidirectional=True)
        self.target = nn.Embedding(9, 4)
        self.cell = nn.GRUCell(10, 6)
        self.vector = nn.Parameter(torch.empty(6))
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6, bias=False)
        self.combine = nn.Linear(12, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        lengths = torch.tensor([len(source) for source in sources])
        embedded = self.source(pad_sequence(sources, batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.encoder(packed)
        memory, _ = pad_packed_sequence(out, batch_first=True)
        mask = torch.arange(memory.shape[1]) < lengths[:, None]
        keys = self.key(memory)
        h = torch.cat([state[0], state[1]], -1)
        inputs = pad_sequence([F.pad(target, (1, 0)) for target in targets], batch_first=True)
        wanted = [F.pad(target, (0, 1)) for target in targets]
        outputs = pad_sequence(wanted, batch_first=True, padding_value=-100)
        logits = []
        for step in range(inputs.shape[1]):
            scores = torch.tanh(keys + self.query(h)[:, None]) @ self.vector
            weights = scores.masked_fill(~mask, -torch.inf).softmax(1)
            context = (weights[..., None] * memory).sum(1)
            h = self.cell(torch.cat([self.target(inputs[:, step]), context], -1), h)
            logits.append(self.head(torch.tanh(self.combine(torch.cat([context, h], -1)))))
        stacked = torch.stack(logits, 1).flatten(0, 1)
        return F.cross_entropy(stacked, outputs.flatten(), ignore_index=-100), None


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(12, 4)
        self.encoder = rl.nn.GRU(4, 3, bidirectional=True)
        self.decoder = rl.transduction.AttentionDecoder(
            9, 6, 6, "gru", attention_order="bahdanau", embedding=4
        )

    def forward(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        memory, state = self.encoder(self.source(rl.Ragged(sources)))
        h = torch.cat([state[0], state[1]], -1)[None]
        return self.decoder.loss(memory, rl.Ragged(targets), h), None
