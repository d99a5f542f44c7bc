"""What a model makes of tokens and categories before its recurrent layer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """Numbers as they are, and beside them an embedding for each column of categories."""

    def __init__(self, numbers: int, tables: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.numbers = numbers
        self.tables = nn.ModuleList(nn.Embedding(count, size) for count, size in tables)

    def forward(self, elements: Tensor) -> Tensor:
        """From ``(N, columns)`` float32 to ``(N, width)``."""
        places = elements[:, self.numbers :].long()
        embedded = [table(places[:, column]) for column, table in enumerate(self.tables)]
        return torch.cat([elements[:, : self.numbers], *embedded], dim=1)


class _DroppedEmbedding(nn.Embedding):
    """An embedding that drops tokens of the vocabulary, each everywhere in a batch (Gal and Ghahramani, 2016)."""

    def __init__(self, whole: nn.Embedding, share: float) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, _weight=whole.weight.data)
        self.share = share

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings of tokens, in training with those that are dropped as zeros."""
        embedded = super().forward(input)
        if not self.training:
            return embedded
        kept = torch.rand(self.num_embeddings, device=embedded.device) >= self.share
        return embedded * (kept / (1 - self.share))[input].unsqueeze(-1)


def with_dropout(embedding: Mixed | nn.Embedding, share: float) -> Mixed | nn.Embedding:
    """An embedding, or each of several, that drops some of its tokens in training."""
    if isinstance(embedding, Mixed):
        # A list of modules does not say of what kind they are.
        tables: Any = embedding.tables
        embedding.tables = nn.ModuleList(_DroppedEmbedding(table, share) for table in tables)
        return embedding
    return _DroppedEmbedding(embedding, share)
