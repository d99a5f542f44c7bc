"""Recurrent networks on batches of sequences of different lengths, without padding.

>>> import torch
>>> import raglane as rl
>>> batch = rl.Ragged([torch.randn(4, 12), torch.randn(2, 12), torch.randn(8, 12)])
>>> lstm = rl.nn.LSTM(12, 64)
>>> out, (h, c) = lstm(batch)
>>> out.last().shape
torch.Size([3, 64])
"""

from __future__ import annotations

from raglane import data, errors, nn, packing
from raglane.data.collate import collate
from raglane.kernels.dispatch import using
from raglane.nn.accelerate import accelerate
from raglane.nn.explain import explain
from raglane.planning.cost import Cost, cost
from raglane.ragged import Ragged

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "Ragged",
    "__version__",
    "accelerate",
    "collate",
    "cost",
    "data",
    "errors",
    "explain",
    "nn",
    "packing",
    "using",
]
