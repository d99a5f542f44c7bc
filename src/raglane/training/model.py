"""The model that ``raglane train`` builds: embedding, recurrent layers, linear head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import raglane.nn
from raglane.data.preprocess import Preprocessor
from raglane.ragged import Ragged
from raglane.training.stored import build

__all__ = ["LAYERS", "ModelConfig", "SequenceModel"]

LAYERS = {"lstm": raglane.nn.LSTM, "gru": raglane.nn.GRU, "rnn": raglane.nn.RNN}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the shapes and the equations of a :class:`SequenceModel`.

    Args:
        task: ``classify``, ``tag`` or ``forecast``.
        cell: ``lstm``, ``gru`` or ``rnn``.
        input_size: channels of an element; for token sequences the number of tokens in the vocabulary.
        output_size: classes, or the channels to forecast.
        hidden: units of a layer and direction.
        layers: layers on top of each other.
        bidirectional: also run from the end to the start.
        dropout: share of units zeroed between layers and before the head while training.
        embedding: size of a token's embedding; None where elements are float channels.

    Example:
        >>> ModelConfig("classify", "gru", input_size=12, output_size=9).hidden
        64
    """

    task: str
    cell: str
    input_size: int
    output_size: int
    hidden: int = 64
    layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0
    embedding: int | None = None

    def to_config(self) -> dict[str, Any]:
        """The configuration as a dictionary that JSON can hold.

        Example:
            >>> ModelConfig("tag", "rnn", 3, 2).to_config()["cell"]
            'rnn'
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The configuration that :meth:`to_config` wrote.

        Example:
            >>> config = ModelConfig("tag", "rnn", 3, 2)
            >>> ModelConfig.from_config(config.to_config()) == config
            True

        Raises:
            ValueError: an entry is missing, unknown or of another type.
        """
        return build(cls, config, "model")

    def check_fits(self, preprocessor: Preprocessor) -> None:
        """Raise unless the model takes what a preprocessor makes, and answers with its classes or channels.

        Args:
            preprocessor: of the same run.

        Raises:
            ValueError: the two are not of one run.
        """
        # An embedding is for tokens only, but of any size.
        embedding = (self.embedding or 1) if preprocessor.is_tokens else None
        fitting = {
            "task": preprocessor.task,
            "embedding": embedding,
            "input_size": preprocessor.input_size,
            "output_size": preprocessor.class_count or len(preprocessor.channels),
        }
        for name, value in fitting.items():
            if getattr(self, name) != value:
                raise ValueError(f"model.{name} = {getattr(self, name)!r} with a preprocessor that gives {value!r}")


class SequenceModel(nn.Module):
    """A recurrent network with a linear head, for one of the three tasks.

    A forecast is the element before plus what the head adds to it, so that an untrained model starts close to
    "nothing changes". There is no padding index anywhere, since there is no padding.

    Args:
        config: sizes and cell.

    Example:
        >>> model = SequenceModel(ModelConfig("classify", "gru", input_size=3, output_size=5))
        >>> batch = Ragged([torch.randn(4, 3), torch.randn(2, 3)])
        >>> model(batch).shape
        torch.Size([2, 5])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = None
        width = config.input_size
        if config.embedding is not None:
            self.embedding = nn.Embedding(config.input_size, config.embedding)
            width = config.embedding
        self.recurrent = LAYERS[config.cell](
            width,
            config.hidden,
            num_layers=config.layers,
            bidirectional=config.bidirectional,
            # Between layers: there is no such place in a single one.
            dropout=config.dropout if config.layers > 1 else 0.0,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden * (2 if config.bidirectional else 1), config.output_size)

    def forward(self, inputs: Ragged) -> Tensor | Ragged:
        """Run a batch.

        Args:
            inputs: sequences of ``(L, input_size)`` float32, or of ``(L,)`` int64 tokens.

        Returns:
            classify: logits ``(B, output_size)``; tag: a Ragged of logits ``(L, output_size)``; forecast: a Ragged
            whose element is the forecast ``(output_size,)`` of the element after it.
        """
        embedded = inputs if self.embedding is None else inputs.map(self.embedding)
        # nn.Module gives its members no type of their own.
        recurrent: Any = self.recurrent
        out, state = recurrent(embedded)
        if self.config.task == "classify":
            logits: Tensor = self.head(self.dropout(recurrent.summary(out, state)))
            return logits
        scores: Ragged = out.map(lambda values: self.head(self.dropout(values)))
        if self.config.task == "forecast":
            known = inputs.values[:, : self.config.output_size]
            scores = scores.map(lambda change: known + change)
        return scores

    def forecast(self, inputs: Ragged, horizon: int = 1) -> Tensor:
        """The elements that follow each sequence, each fed back to forecast the next.

        Args:
            inputs: sequences of ``(L, input_size)`` float32.
            horizon: how many elements.

        Returns:
            ``(B, horizon, output_size)``; NaN for an empty sequence, from which nothing follows.
        """
        size = self.config.output_size
        recurrent: Any = self.recurrent
        out, state = recurrent(inputs)
        known = inputs.last(empty=float("nan"))
        forecast = known[:, :size] + self.head(self.dropout(out.last()))
        forecasts = [forecast]
        # What stands beyond the forecast channels says "was missing": a forecast is not missing.
        flags = torch.zeros_like(known[:, size:])
        for _ in range(1, horizon):
            output, state = recurrent.step(torch.cat([forecast, flags], dim=1), state)
            forecast = forecast + self.head(self.dropout(output))
            forecasts.append(forecast)
        return torch.stack(forecasts, dim=1)
