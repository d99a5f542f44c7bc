"""Recurrent layers for ragged batches: torch's names, arguments and weights, and the cells that torch does not have."""

from __future__ import annotations

from raglane.nn import init, losses
from raglane.nn.carry import carry
from raglane.nn.cell_layers import (
    QRNN,
    SRU,
    CoupledLSTM,
    IndRNN,
    LayerNormGRU,
    LayerNormLSTM,
    MinGRU,
    MinLSTM,
    PeepholeLSTM,
)
from raglane.nn.crf import CRF
from raglane.nn.custom import Recurrent
from raglane.nn.encoder import SequenceEncoder
from raglane.nn.pooling import AttentionPooling, Pooling
from raglane.nn.recurrent import GRU, LSTM, RNN

__all__ = [
    "CRF",
    "GRU",
    "LSTM",
    "QRNN",
    "RNN",
    "SRU",
    "AttentionPooling",
    "CoupledLSTM",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
    "Pooling",
    "Recurrent",
    "SequenceEncoder",
    "carry",
    "init",
    "losses",
]
