"""Recurrent layers for ragged batches: torch's names, arguments and weights."""

from __future__ import annotations

from raglane.nn.recurrent import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN"]
