"""Embeddings of categories, and dropout of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """Concatenates numbers, unchanged, with an embedding of each column of categories."""

    def __init__(self, numbers: int, tables: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.numbers = numbers
        self.tables = nn.ModuleList(nn.Embedding(count, size) for count, size in tables)

    def forward(self, elements: Tensor) -> Tensor:
        """Map ``(N, columns)`` float32 to ``(N, width)``."""
        categories = elements[:, self.numbers :].long()
        embedded = [table(categories[:, column]) for column, table in enumerate(self.tables)]
        return torch.cat([elements[:, : self.numbers], *embedded], dim=1)


class _DroppedEmbedding(nn.Embedding):
    """An embedding that drops random tokens of the vocabulary in a whole batch (Gal and Ghahramani,
    2016).
    """

    def __init__(self, whole: nn.Embedding, share: float) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, _weight=whole.weight.data)
        self.share = share

    def forward(self, input: Tensor) -> Tensor:
        """Return embeddings; in training, those of dropped tokens are zero."""
        embedded = super().forward(input)
        if not self.training:
            return embedded
        keep = (torch.rand(self.num_embeddings, device=embedded.device) >= self.share).to(
            embedded.dtype
        )
        return embedded * (keep / (1 - self.share))[input].unsqueeze(-1)


def with_dropout(embedding: Mixed | nn.Embedding, share: float) -> Mixed | nn.Embedding:
    """Add dropout of tokens to an embedding, or to each embedding of :class:`Mixed`."""
    if isinstance(embedding, Mixed):
        # Any, because a ModuleList has no element type.
        tables: Any = embedding.tables
        embedding.tables = nn.ModuleList(_DroppedEmbedding(table, share) for table in tables)
        return embedding
    return _DroppedEmbedding(embedding, share)
