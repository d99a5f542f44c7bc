"""Batch samplers: which sequences form a batch, in which order, on which rank.

``limit.py`` defines the size of a batch, ``order.py`` the order of the sequences in an epoch.
``batches.py`` makes the batches for a DataLoader and divides them among ranks.
"""

from __future__ import annotations

from raglane.data.order.batches import BatchSampler
from raglane.data.order.limit import BatchLimit
from raglane.data.order.order import EpochOrder

__all__ = ["BatchLimit", "BatchSampler", "EpochOrder"]
