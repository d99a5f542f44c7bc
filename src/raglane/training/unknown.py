"""Rare tokens that training reads as unknown, so that the unknown token is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raglane.data.dataset import SequenceDataset
from raglane.data.preprocess import Preprocessor
from raglane.data.stored_dataset import Dataset
from raglane.training.batches import Batch
from raglane.training.settings import Settings


@dataclass
class RareTokens:
    """The tokens and categories that occur once in training."""

    rare: list[Tensor]
    rate: float
    in_targets: bool

    @classmethod
    def of(
        cls, training: SequenceDataset | Dataset, preprocessor: Preprocessor, settings: Settings
    ) -> RareTokens | None:
        """Those of the training part; None where there are none, or none is to be hidden."""
        if settings.unknown_rate == 0:
            return None
        if isinstance(training, Dataset):
            rare = [_once(counts, words) for counts, words in _counted(training)]
        else:
            rare = _once_in(training, preprocessor)
        for words in rare:
            # The unknown token itself.
            words[0] = False
        is_any = any(bool(words.any()) for words in rare)
        return cls(rare, settings.unknown_rate, settings.task == "language") if is_any else None

    def hidden_in(self, batch: Batch) -> Batch:
        """The batch with some of them, drawn anew, as the unknown token."""
        inputs = batch.inputs.map(self._hidden if batch.inputs.values.dim() == 1 else self._hidden_columns)
        targets = batch.targets
        if self.in_targets and targets is not None:
            targets = self._hidden(targets)
        return replace(batch, inputs=inputs, targets=targets)

    def _hidden_columns(self, values: Tensor) -> Tensor:
        """The same of rows of numbers, whose last columns are places of categories."""
        first = values.shape[1] - len(self.rare)
        columns = [self._hidden(values[:, first + place].long(), place) for place in range(len(self.rare))]
        return torch.cat([values[:, :first], torch.stack(columns, dim=1).to(values.dtype)], dim=1)

    def _hidden(self, tokens: Tensor, column: int = 0) -> Tensor:
        rare = self.rare[column] = self.rare[column].to(tokens.device)
        drawn = torch.rand(tokens.shape, device=tokens.device) < self.rate
        return tokens.masked_fill(rare[tokens] & drawn, 0)


def _once_in(training: SequenceDataset, preprocessor: Preprocessor) -> list[Tensor]:
    """The same of a dataset in memory; what a sequence has once is counted once, on however many elements it stands."""
    coded = [encoder for encoder in preprocessor.features if encoder.vocabulary is not None]
    sizes = [len(encoder.vocabulary or ()) for encoder in coded]
    columns = [training.values]
    if training.values.dim() == 2:
        sizes += [] if preprocessor.vocabulary is None else [len(preprocessor.vocabulary)]
        columns = list(training.values[:, training.values.shape[1] - len(sizes) :].long().unbind(1))
    elif preprocessor.vocabulary is not None:
        sizes = [len(preprocessor.vocabulary)]
    first = training.offsets[:-1][training.lengths > 0]
    for place, encoder in enumerate(coded):
        columns[place] = columns[place][first] if encoder.per_sequence else columns[place]
    return [torch.bincount(column, minlength=size) == 1 for column, size in zip(columns, sizes, strict=True)]


def _once(counts: Mapping[str, int], words: Sequence[str]) -> Tensor:
    return torch.tensor([counts.get(word, 0) == 1 for word in words])


def _counted(training: Dataset) -> Iterator[tuple[Mapping[str, int], Sequence[str]]]:
    """How often the words of each vocabulary come, in the order of the columns of inputs."""
    known, preprocessor = training.statistics, training.preprocessor
    for encoder in preprocessor.features:
        if encoder.vocabulary is not None:
            yield known.features[encoder.name].words, encoder.vocabulary
    if preprocessor.vocabulary is not None:
        yield known.tokens, preprocessor.vocabulary
