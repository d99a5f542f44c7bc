"""The order of an epoch is a function: which sequences come in which batch, on which rank.

``limit.py`` says how large a batch is, ``order.py`` in which order sequences come. ``Arrangement`` is the function: it
answers for any part of an epoch. ``batches.py`` hands the batches to a DataLoader, and shares them out to ranks.
"""

from __future__ import annotations

from raglane.data.order.batches import BatchSampler
from raglane.data.order.limit import BatchLimit
from raglane.data.order.order import EpochOrder

__all__ = ["BatchLimit", "BatchSampler", "EpochOrder"]
