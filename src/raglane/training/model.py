"""The model that ``raglane train`` builds: an encoder and a linear head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raglane.data.preprocess import Preprocessor
from raglane.native.cells import has_cell
from raglane.nn import SequenceEncoder
from raglane.nn.arguments import check_count
from raglane.nn.linear import RowByRow, RowLinear
from raglane.ragged import Ragged
from raglane.training.settings import ALWAYS_PER_ELEMENT, ModelSettings
from raglane.training.stored import build
from raglane.training.tasks import TASKS

__all__ = ["ModelConfig", "SequenceModel", "answering"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """Everything that decides the shapes and the equations of a :class:`SequenceModel`: its settings, and these sizes.

    Args:
        input_size: channels of an element; for token sequences the number of tokens in the vocabulary.
        output_size: classes, or the channels to forecast.
        embedding: size of a token's embedding; None where elements are float channels.
        per_element: whether the head answers for each element; None goes by the task.

    Raises:
        ArgumentError: a setting breaks its rule, or two do not go together.

    Example:
        >>> ModelConfig("classify", "gru", input_size=12, output_size=9).hidden
        64
    """

    input_size: int
    output_size: int
    embedding: int | None = None
    per_element: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_element is None:
            object.__setattr__(self, "per_element", self.task in ALWAYS_PER_ELEMENT)
        self._refuse_pooling(bool(self.per_element))

    def to_config(self) -> dict[str, Any]:
        """The configuration as a dictionary that JSON can hold.

        Example:
            >>> ModelConfig("tag", "rnn", input_size=3, output_size=2).to_config()["layer"]
            'rnn'
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The configuration that :meth:`to_config` wrote.

        Example:
            >>> config = ModelConfig("tag", "rnn", input_size=3, output_size=2)
            >>> ModelConfig.from_config(config.to_config()) == config
            True

        Raises:
            ValueError: an entry is missing, unknown or of another type.
            ArgumentError: a setting breaks its rule, or two do not go together.
        """
        for name in ("task", "layer"):
            # They have defaults for whoever trains; a model is of one kind.
            if isinstance(config, dict) and name not in config:
                raise ValueError(f"model without the entry {name!r}")
        return build(cls, config, "model")

    @classmethod
    def of(cls, settings: ModelSettings, preprocessor: Preprocessor) -> ModelConfig:
        """The model for some settings and data.

        Args:
            settings: their choices that shape a model.
            preprocessor: fitted to the training part.

        Raises:
            DataError: the data is not of the kind that the task needs.
            ArgumentError: a setting breaks its rule.
        """
        chosen = {field.name: getattr(settings, field.name, None) for field in dataclasses.fields(cls)}
        sizes = {
            "input_size": preprocessor.input_size,
            "output_size": TASKS[settings.task].output_size(preprocessor),
            "embedding": chosen["embedding"] if preprocessor.is_tokens else None,
            "per_element": preprocessor.per_element,
        }
        return cls(**chosen | sizes)

    def encoder(self) -> SequenceEncoder:
        """The encoder of the model: its arguments are called as the settings, but for the two sizes."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelSettings)}
        for name in ("task", "loss", "quantile"):
            del options[name]
        if self.per_element:
            options["pooling"] = None
        sizes = {"hidden_size": options.pop("hidden"), "num_layers": options.pop("layers")}
        return SequenceEncoder(self.input_size, embedding=self.embedding, **sizes, **options)

    def count(self) -> tuple[int, int]:
        """The number of weights, and of the tensors that hold them, without making any.

        Raises:
            ArgumentError: a size is not a whole number above 0.

        Example:
            >>> config = ModelConfig("classify", "gru", input_size=12, output_size=9)
            >>> sum(weight.numel() for weight in SequenceModel(config).parameters()), config.count()
            (15561, (15561, 6))
        """
        sizes = ["input_size", "output_size", "hidden", "layers", *(() if self.embedding is None else ("embedding",))]
        smallest: dict[str, Any] = {name: min(1, check_count(name, getattr(self, name))) for name in sizes}
        with torch.device("meta"):
            cell = SequenceModel(dataclasses.replace(self, **smallest)).encoder.recurrent.cell
        states, directions = cell.state_sizes(self.hidden), 2 if self.bidirectional else 1
        width, rows = directions * states[0], self.layers * directions
        shapes: list[tuple[int, tuple[int, ...]]] = [(1, (self.output_size, width)), (1, (self.output_size,))]
        if self.embedding is not None:
            shapes.append((1, (self.input_size, self.embedding)))
        for layers, size in ((1, self.embedding or self.input_size), (self.layers - 1, width)):
            shapes += [(layers * directions, shape) for shape in cell.shapes(size, self.hidden).values() if shape]
        if self.initial_state == "learned":
            shapes += [(1, (rows, size)) for size in states]
        if self.initial_state == "lengths":
            shapes.append((2, (rows, sum(states))))
        shapes += [(1, (self.output_size,)) for _ in TASKS[self.task].kept]
        if self.pooling == "attention" and not self.per_element:
            shapes += [(1, (width, width)), (1, (width,))]
        return sum(times * math.prod(shape) for times, shape in shapes), sum(times for times, _ in shapes)

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
            "output_size": TASKS[self.task].output_size(preprocessor),
            "per_element": preprocessor.per_element,
        }
        for name, value in fitting.items():
            if getattr(self, name) != value:
                raise ValueError(f"model.{name} = {getattr(self, name)!r} with a preprocessor that gives {value!r}")


class SequenceModel(nn.Module):
    """A recurrent network with a linear head, for one of the tasks.

    A forecast is the element before plus what the head adds to it, so that an untrained model starts close to
    "nothing changes". There is no padding index, since there is no padding.

    Args:
        config: settings and sizes.

    Example:
        >>> model = SequenceModel(ModelConfig("classify", "gru", input_size=3, output_size=5))
        >>> batch = Ragged([torch.randn(4, 3), torch.randn(2, 3)])
        >>> model(batch).shape
        torch.Size([2, 5])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = config.encoder()
        self.head = RowLinear(self.encoder.output_size, config.output_size)
        for name, start in TASKS[config.task].kept.items():
            self.register_buffer(name, torch.full((config.output_size,), start))

    def forward(self, inputs: Ragged) -> Tensor | Ragged:
        """Run a batch.

        Args:
            inputs: sequences of ``(L, input_size)`` float32, or of ``(L,)`` int64 tokens.

        Returns:
            With an answer per sequence, ``(B, output_size)``; with one per element, a Ragged of ``(L, output_size)``:
            logits of classes or labels, or scaled numbers. To forecast, an element is the forecast of the one after it.
        """
        encoded: Tensor | Ragged = self.encoder(inputs)
        if isinstance(encoded, Tensor):
            logits: Tensor = self.head(encoded)
            return logits
        scores = encoded.map(self.head)
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
        recurrent: Any = self.encoder.recurrent
        out, state = recurrent(inputs)
        known = inputs.last(empty=float("nan"))
        forecast = known[:, :size] + self.head(self.encoder.dropout(out.last()))
        forecasts = [forecast]
        # What stands beyond the forecast channels says "was missing": a forecast is not missing.
        flags = torch.zeros_like(known[:, size:])
        for _ in range(1, horizon):
            output, state = recurrent.step(torch.cat([forecast, flags], dim=1), state)
            forecast = forecast + self.head(self.encoder.dropout(output))
            forecasts.append(forecast)
        return torch.stack(forecasts, dim=1)


@contextmanager
def answering(model: SequenceModel) -> Iterator[None]:
    """Within it a model's answer to a sequence has the same bits in any batch and at any number of threads, on a CPU.

    The cpu kernels promise it of the cells that they run; what torch computes of the others is done row by row. No
    gradients are recorded.

    Args:
        model: in evaluation mode.
    """
    has_kernel = has_cell(model.encoder.recurrent.cell.name)
    with torch.no_grad(), nullcontext() if has_kernel else RowByRow():
        yield
