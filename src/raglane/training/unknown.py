"""Rare tokens that training reads as unknown, so that the unknown token is learned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raglane.data.dataset import SequenceDataset
from raglane.data.stored_dataset import Dataset
from raglane.training.batches import Batch
from raglane.training.model import ModelConfig
from raglane.training.settings import Settings

__all__ = ["RareTokens"]


@dataclass
class RareTokens:
    """The tokens that occur once in training.

    Args:
        rare: ``(V,)`` bool, where each token of the vocabulary is one.
        rate: the share of them that is hidden in a batch.
        in_targets: whether they are also told as unknown, as a language model does.
    """

    rare: Tensor
    rate: float
    in_targets: bool

    @classmethod
    def of(cls, training: SequenceDataset | Dataset, config: ModelConfig, settings: Settings) -> RareTokens | None:
        """Those of the training part; None where there are none, or none is to be hidden."""
        if config.embedding is None or settings.unknown_rate == 0:
            return None
        if isinstance(training, Dataset):
            counts = training.statistics.tokens
            rare = torch.tensor([counts[word] == 1 for word in training.preprocessor.vocabulary or ()])
        else:
            rare = torch.bincount(training.values, minlength=config.input_size) == 1
        # The unknown token itself.
        rare[0] = False
        return cls(rare, settings.unknown_rate, settings.task == "language") if bool(rare.any()) else None

    def hidden_in(self, batch: Batch) -> Batch:
        """The batch with some of them, drawn anew, as the unknown token."""
        inputs = batch.inputs.map(self._hidden)
        targets = batch.targets
        if self.in_targets and targets is not None:
            targets = self._hidden(targets)
        return replace(batch, inputs=inputs, targets=targets)

    def _hidden(self, tokens: Tensor) -> Tensor:
        self.rare = self.rare.to(tokens.device)
        drawn = torch.rand(tokens.shape, device=tokens.device) < self.rate
        return tokens.masked_fill(self.rare[tokens] & drawn, 0)
