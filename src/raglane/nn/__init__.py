"""Recurrent layers for ragged batches: torch's layers, and layers of cells that torch does not
have.

recurrent/ has the layers of cells, recurrences/ linear recurrences, and mixers/ the blocks around
them. encoder.py is an embedding, a layer and a pooling; embeddings.py, linear.py, pooling.py,
attention.py, convolution.py, row_convolution.py and windows.py have its parts, for any batch.
crf/, losses/ and transduction/ are heads, and init.py initialises weights. porting/ converts models
and weights of other libraries.

Names load their module when they are first used: a model has a few of these layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raglane._utils.lazy import lazy_names

if TYPE_CHECKING:
    from raglane.nn import init
    from raglane.nn.attention import Attention
    from raglane.nn.convolution import CausalConv1d, Conv1d
    from raglane.nn.crf import CRF
    from raglane.nn.encoder import SequenceEncoder
    from raglane.nn.mixers.gated_delta_net import GatedDeltaNet
    from raglane.nn.mixers.mamba import Mamba
    from raglane.nn.mixers.mamba2 import Mamba2
    from raglane.nn.mixers.mlstm import MLSTM
    from raglane.nn.mixers.rglru import RGLRU
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
    from raglane.nn.windows import AvgPool1d, MaxPool1d

__all__ = [
    "CRF",
    "GRU",
    "GRUD",
    "LSTM",
    "MLSTM",
    "QRNN",
    "RGLRU",
    "RNN",
    "SLSTM",
    "SRU",
    "Attention",
    "AttentionPooling",
    "AvgPool1d",
    "CausalConv1d",
    "CfC",
    "Conv1d",
    "CoupledLSTM",
    "GatedDeltaNet",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "Mamba",
    "Mamba2",
    "MaxPool1d",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
    "Pooling",
    "Recurrent",
    "SequenceEncoder",
    "init",
    "linear_attention",
    "selective_scan",
]

_HOMES = {
    "Attention": "attention",
    "AttentionPooling": "pooling",
    "AvgPool1d": "windows",
    "CRF": "crf",
    "CausalConv1d": "convolution",
    "CfC": "recurrent.cell_layers",
    "Conv1d": "convolution",
    "CoupledLSTM": "recurrent.cell_layers",
    "GRU": "recurrent.torch_layers",
    "GRUD": "recurrent.cell_layers",
    "GatedDeltaNet": "mixers.gated_delta_net",
    "IndRNN": "recurrent.elementwise_layers",
    "LSTM": "recurrent.torch_layers",
    "LayerNormGRU": "recurrent.cell_layers",
    "LayerNormLSTM": "recurrent.cell_layers",
    "MLSTM": "mixers.mlstm",
    "Mamba": "mixers.mamba",
    "Mamba2": "mixers.mamba2",
    "MaxPool1d": "windows",
    "MinGRU": "recurrent.elementwise_layers",
    "MinLSTM": "recurrent.elementwise_layers",
    "PeepholeLSTM": "recurrent.cell_layers",
    "Pooling": "pooling",
    "QRNN": "recurrent.elementwise_layers",
    "RGLRU": "mixers.rglru",
    "RNN": "recurrent.torch_layers",
    "Recurrent": "recurrent.any_cell",
    "SLSTM": "recurrent.cell_layers",
    "SRU": "recurrent.elementwise_layers",
    "SequenceEncoder": "encoder",
    "init": "",
    "linear_attention": "recurrences.attention",
    "selective_scan": "recurrences.selective",
}


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
