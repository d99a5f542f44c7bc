"""Recurrent layers for ragged batches: torch's layers, and layers of cells that torch does not
have.
"""

from __future__ import annotations

from raglane.nn import init, losses
from raglane.nn.attention import Attention
from raglane.nn.convolution import CausalConv1d, Conv1d
from raglane.nn.crf import CRF
from raglane.nn.encoder import SequenceEncoder
from raglane.nn.losses.ctc import ctc_loss
from raglane.nn.pooling import AttentionPooling, Pooling
from raglane.nn.recurrences.attention import linear_attention
from raglane.nn.recurrences.selective import selective_scan
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.nn.recurrent.cell_layers import (
    GRUD,
    SLSTM,
    CfC,
    CoupledLSTM,
    LayerNormGRU,
    LayerNormLSTM,
    PeepholeLSTM,
)
from raglane.nn.recurrent.elementwise_layers import QRNN, SRU, IndRNN, MinGRU, MinLSTM
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN
from raglane.nn.transduction.ctc import CTCBeamSearch, ctc_align, ctc_greedy_search
from raglane.nn.transduction.decoder import AttentionDecoder
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.ngram import NGram
from raglane.nn.transduction.pairs import edit_distance, soft_dtw
from raglane.nn.transduction.rnnt import rnnt_loss
from raglane.nn.transduction.search import beam_search
from raglane.nn.transduction.transducer import Transducer
from raglane.nn.windows import AvgPool1d, MaxPool1d

__all__ = [
    "CRF",
    "GRU",
    "GRUD",
    "LSTM",
    "QRNN",
    "RNN",
    "SLSTM",
    "SRU",
    "Attention",
    "AttentionDecoder",
    "AttentionPooling",
    "AvgPool1d",
    "CTCBeamSearch",
    "CausalConv1d",
    "CfC",
    "Conv1d",
    "CoupledLSTM",
    "Hypotheses",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "MaxPool1d",
    "MinGRU",
    "MinLSTM",
    "NGram",
    "PeepholeLSTM",
    "Pooling",
    "Recurrent",
    "SequenceEncoder",
    "Transducer",
    "beam_search",
    "ctc_align",
    "ctc_greedy_search",
    "ctc_loss",
    "edit_distance",
    "init",
    "linear_attention",
    "losses",
    "rnnt_loss",
    "selective_scan",
    "soft_dtw",
]
