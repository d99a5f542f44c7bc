"""Mistakes of users that type checkers find. An ignore that is not needed is an error."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import torch
from torch import Tensor

import raglane as rl
from raglane import Ragged


def attributes(r: Ragged) -> None:
    print(r.lenghts)  # type: ignore[attr-defined]
    r.revers()  # type: ignore[attr-defined]
    r.mean(1, emty=0.0)  # type: ignore[call-overload]
    r.clamp(mni=0.0)  # type: ignore[call-overload]
    r.last(2)  # type: ignore[call-arg]
    r.truncate("3")  # type: ignore[arg-type]
    print(r.mean(1).lengths)  # type: ignore[attr-defined]
    print(r[:, -1].lengths)  # type: ignore[attr-defined]
    torch.relu(r, True)  # type: ignore[call-arg]


def options(cells: list[Tensor]) -> None:
    rl.nn.LSTM(3, 4, schedule="bogus")  # type: ignore[arg-type]
    rl.nn.LSTM(3, 4, schedul="packed")  # type: ignore[call-arg]
    rl.nn.GRU(3, 4, backend="gpu")  # type: ignore[arg-type]
    rl.nn.RNN(3, 4, nonlinearity="sigmoid")  # type: ignore[arg-type]
    rl.nn.GRU(3, 4, initial_state="ones")  # type: ignore[arg-type]
    rl.nn.GRUD(3, 4, heads=3)  # type: ignore[call-arg]
    rl.nn.SLSTM(3, 4, clip=3.0)  # type: ignore[call-arg]
    rl.nn.CfC(3, 4, gap_colum=2)  # type: ignore[call-arg]
    rl.nn.SequenceEncoder(3, 4, "lstmm")  # type: ignore[arg-type]
    rl.nn.SequenceEncoder(3, 4, pooling="attn")  # type: ignore[arg-type]
    rl.nn.SequenceEncoder(3, 4, zoneot=0.1)  # type: ignore[call-arg]
    rl.transduction.AttentionDecoder(3, 4, 5, "gruu")  # type: ignore[arg-type]
    rl.nn.Conv1d(3, 4, 3, padding="sames")  # type: ignore[arg-type]
    rl.nn.Conv1d(3, 4, 3, strid=2)  # type: ignore[call-arg]
    rl.nn.Pooling("median")  # type: ignore[arg-type]
    rl.fit(cells, patiance=3)  # type: ignore[call-arg]
    rl.fit(cells, optimizer="adamax")  # type: ignore[arg-type]
    rl.fit(cells, epochs="3")  # type: ignore[arg-type]
    rl.fit(cells).predict(cells, colum="a")  # type: ignore[call-arg]


def states(batch: Ragged) -> None:
    _, h = rl.nn.LSTM(3, 4)(batch)
    h.relu()  # type: ignore[attr-defined]
    rl.nn.GRU(3, 4)(batch, (h, h), lenghts=3)  # type: ignore[call-overload]
    rl.nn.GRU(3, 4).step(torch.ones(3), h)  # type: ignore[arg-type]
    rl.transduction.ctc_loss(batch, batch, reduction="avg")  # type: ignore[arg-type]
    rl.distributions.Normal(batch, sigma=1.0)  # type: ignore[call-arg]
    Ragged.from_flat(h, [1, 2])  # type: ignore[call-arg]
    rl.nn.Attention(4)(batch, memori=batch)  # type: ignore[call-arg]
