"""The model that ``raglane train`` builds: an encoder and a linear head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane._utils.checks import check_count
from raglane._utils.messages import message, quote
from raglane.data.preprocess import Preprocessor
from raglane.data.records import TIME_GAP
from raglane.errors import ArgumentError
from raglane.nn import SequenceEncoder, carry
from raglane.nn.linear import RowLinear, row_linear
from raglane.ragged import Ragged
from raglane.training.own_cell import is_own, load_cell
from raglane.training.settings import ALWAYS_PER_ELEMENT, ModelSettings
from raglane.training.stored import build
from raglane.training.tasks import TASKS


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


# The places of the two special tokens of the vocabulary.
UNKNOWN_TOKEN, END_TOKEN = 0, 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """Everything that decides the shapes and the equations of a :class:`SequenceModel`: its settings, and these sizes.

    Args:
        input_size: channels of an element; for token sequences the number of tokens in the vocabulary.
        output_size: classes, or the channels to forecast.
        embedding: size of a token's embedding, and the most of a category's; None where there are neither.
        per_element: whether the head answers for each element; None goes by the task.
        gap_column: the channel that holds the time since the element before, for a cell that reads times; None where
            there is none.
        categories: how many categories, or tokens, each of the last channels tells apart; [] where all are numbers.

    Raises:
        ArgumentError: a setting breaks its rule, or two do not go together.

    Example:
        >>> ModelConfig("classify", "gru", input_size=12, output_size=9).hidden_size
        64
    """

    input_size: int
    output_size: int
    embedding: int | None = None
    per_element: bool | None = None
    gap_column: int | None = None
    categories: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_element is None:
            object.__setattr__(self, "per_element", self.task in ALWAYS_PER_ELEMENT)
        self._refuse_pooling(bool(self.per_element))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The configuration that ``to_config`` wrote.

        Example:
            >>> config = ModelConfig("tag", "rnn", input_size=3, output_size=2)
            >>> ModelConfig.from_config(config.to_config()) == config
            True

        Raises:
            ValueError: an entry is missing, unknown or of another type.
            ArgumentError: a setting breaks its rule, or two do not go together.
        """
        for name in ("task", "cell"):
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
        chosen: dict[str, Any] = {field.name: getattr(settings, field.name, None) for field in dataclasses.fields(cls)}
        if settings.cell == "grud" and (preprocessor.is_tokens or preprocessor.features):
            rule = "another cell for tokens, categories or features of sequences, which grud does not read"
            raise ArgumentError(message("cell", quote(settings.cell), rule, "choose another cell, or other columns"))
        return cls(**chosen | _sizes(settings, preprocessor, chosen["embedding"]))

    @property
    def embeddings(self) -> list[tuple[int, int]]:
        """The shape of each embedding of a category, of about half as many numbers as there are of it, at most."""
        return [(count, min(self.embedding or 1, count // 2 + 1)) for count in self.categories]

    @property
    def has_plain_tokens(self) -> bool:
        """True where elements are tokens and nothing else."""
        return self.embedding is not None and not self.categories

    @property
    def width(self) -> int:
        """The numbers that the recurrent layer reads of an element."""
        if self.has_plain_tokens:
            return self.embedding or 0
        return self.input_size - len(self.categories) + sum(size for _, size in self.embeddings)

    def encoder(self) -> SequenceEncoder:
        """Return the encoder of the model; its arguments have the names of the settings, except `layer`."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelSettings)}
        for name in ("task", "loss", "quantile", "embedding_dropout", "tie_weights"):
            del options[name]
        if self.per_element:
            options["pooling"] = None
        if self.gap_column is not None:
            options["gap_column"] = self.gap_column
        cell = options.pop("cell")
        options["layer"] = load_cell(cell) if is_own(cell) else cell
        if self.has_plain_tokens:
            return SequenceEncoder(self.input_size, embedding=self.embedding, **options)
        encoder = SequenceEncoder(self.width, **options)
        if self.categories:
            encoder.embedding = Mixed(self.input_size - len(self.categories), self.embeddings)
        return encoder

    def count(self) -> tuple[int, int]:
        """The number of weights, and of the tensors that hold them, without making any.

        Raises:
            ArgumentError: a size is not a whole number above 0.

        Example:
            >>> config = ModelConfig("classify", "gru", input_size=12, output_size=9)
            >>> sum(weight.numel() for weight in SequenceModel(config).parameters()), config.count()
            (15561, (15561, 6))
        """
        if is_own(self.cell):
            with torch.device("meta"):
                weights = list(SequenceModel(self).parameters())
            return sum(weight.numel() for weight in weights), len(weights)
        sizes = [
            "input_size",
            "output_size",
            "hidden_size",
            "num_layers",
            *(() if self.embedding is None else ("embedding",)),
        ]
        smallest: dict[str, Any] = {name: min(1, check_count(name, getattr(self, name))) for name in sizes}
        del smallest["input_size"]  # some cells read their columns in blocks
        if self.categories:
            smallest |= {"categories": [], "embedding": None}
        with torch.device("meta"):
            cell = SequenceModel(dataclasses.replace(self, **smallest)).encoder.recurrent.cell
        states, directions = cell.state_sizes(self.hidden_size), 2 if self.bidirectional else 1
        width, rows = directions * states[0], self.num_layers * directions
        answers = self.output_size
        if self.tie_weights and self.embedding is not None:
            answers = self.embedding
        shapes: list[tuple[int, tuple[int, ...]]] = [(1, (answers, width)), (1, (answers,))]
        shapes += [(1, (self.output_size,))] if self.tie_weights else []
        if self.embedding is not None and self.has_plain_tokens:
            shapes.append((1, (self.input_size, self.embedding)))
        shapes += [(1, shape) for shape in self.embeddings]
        for layers, spec, size in ((1, cell, self.width), (self.num_layers - 1, cell.above(), width)):
            shapes += [(layers * directions, shape) for shape in spec.shapes(size, self.hidden_size).values() if shape]
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
        sizes = _sizes(self, preprocessor, self.embedding or 1)
        for name, value in {"task": preprocessor.task, **sizes}.items():
            if getattr(self, name) != value:
                raise ValueError(f"model.{name} = {getattr(self, name)!r} with a preprocessor that gives {value!r}")


def _sizes(settings: ModelSettings, preprocessor: Preprocessor, embedding: int | None) -> dict[str, Any]:
    """The fields of a :class:`ModelConfig` that follow from the data."""
    channels = preprocessor.channels
    # A cell cannot read times alone.
    reads_times = settings.cell == "cfc" and TIME_GAP in channels and preprocessor.input_size > 1
    return {
        "embedding": embedding if preprocessor.is_tokens or preprocessor.categories else None,
        "input_size": preprocessor.input_size,
        "output_size": TASKS[settings.task].output_size(preprocessor),
        "per_element": preprocessor.per_element,
        "gap_column": channels.index(TIME_GAP) if reads_times else None,
        "categories": list(preprocessor.categories),
    }


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
        if config.embedding_dropout and self.encoder.embedding is not None:
            self.encoder.embedding = with_dropout(self.encoder.embedding, config.embedding_dropout)
        self.tied_bias: nn.Parameter | None = None
        answers = config.output_size
        if config.tie_weights and config.embedding is not None:
            # The head turns a state into the embedding of the token that is to come (Press and Wolf, 2017).
            answers = config.embedding
            self.tied_bias = nn.Parameter(torch.zeros(config.output_size))
        # What training asks for with a language model: weights of large outputs and of their changes.
        self.penalties: tuple[float, float] = (0.0, 0.0)
        self.penalty: Tensor | None = None
        self.head = RowLinear(self.encoder.output_size, answers)
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
        if self.training and any(self.penalties):
            out, _ = self.encoder.recurrent(self.encoder.embed(inputs))
            return self._changed(inputs, self._dropped(out).map(self.answers))
        encoded: Tensor | Ragged = self.encoder(inputs)
        if isinstance(encoded, Tensor):
            return self.answers(encoded)
        scores = encoded.map(self.answers)
        return self._changed(inputs, scores)

    def _changed(self, inputs: Ragged, scores: Ragged) -> Ragged:
        """A forecast of numbers is a change of what was there before; other answers stay."""
        if self.config.task != "forecast" or self.is_binary:
            return scores
        known = inputs.values[:, : self.config.output_size]
        return scores.map(lambda change: known + change)

    def answers(self, encoded: Tensor) -> Tensor:
        """The head's answers to what the encoder gave, ``(M, output_size)``."""
        answers: Tensor = self.head(encoded)
        if self.tied_bias is None or self.encoder.embedding is None:
            return answers
        product = F.linear if self.training else row_linear
        return product(answers, self.encoder.embedding.weight, self.tied_bias)

    def go_on(self, inputs: Ragged, state: Any, begins: Tensor) -> tuple[Ragged, Any]:
        """Run the next chunk of some sequences, from where the last one ended.

        Args:
            inputs: as for :meth:`forward`, ``B`` pieces.
            state: what the call before gave; None at first.
            begins: ``(B,)`` bool on the CPU, the pieces that begin a sequence.

        Returns:
            The answers to each element, and the state.
        """
        embedded = self.encoder.embed(inputs)
        recurrent: Any = self.encoder.recurrent
        out, state = recurrent(embedded, carry(recurrent, embedded, state, begins))
        return self._changed(inputs, self._dropped(out).map(self.answers)), state

    def _dropped(self, out: Ragged) -> Ragged:
        """The layer's outputs after dropout; what they cost in training is kept until the step is done."""
        dropped = out.map(self.encoder.dropout)
        if self.training and any(self.penalties):
            self.penalty = activity(out, dropped, *self.penalties)
        return dropped

    @property
    def is_binary(self) -> bool:
        """True where a forecast is the logit of a 1, and no change of the element before."""
        return self.config.task == "forecast" and self.config.loss_name == "bce"

    def forecast(self, inputs: Ragged, horizon: int = 1, kept: int = 0) -> Tensor:
        """The elements that follow each sequence, each fed back to forecast the next.

        Args:
            inputs: sequences of ``(L, input_size)`` float32.
            horizon: how many elements.
            kept: how many of the last channels stay as they are, since they are the sequence's own.

        Returns:
            ``(B, horizon, output_size)``; NaN for an empty sequence, from which nothing follows. Of what is 0 or 1,
            the probability of a 1; then the likelier of the two is fed back.
        """
        size = self.config.output_size
        recurrent: Any = self.encoder.recurrent
        out, state = recurrent(self.encoder.embed(inputs))
        known = inputs.last(empty=float("nan"))
        forecast = self._next(known[:, :size], self.head(self.encoder.dropout(out.last())))
        forecasts = [forecast]
        # What stands beyond the forecast channels says "was missing": a forecast is not missing.
        flags = torch.zeros_like(known[:, size : known.shape[1] - kept])
        same = known[:, known.shape[1] - kept :]
        for _ in range(1, horizon):
            # NaN, from which nothing follows, stays.
            told = torch.where(forecast > 0.5, 1.0, 0 * forecast) if self.is_binary else forecast
            element = torch.cat([told, flags, same], dim=1)
            embedded = element if self.encoder.embedding is None else self.encoder.embedding(element)
            output, state = recurrent.step(embedded, state)
            forecast = self._next(forecast, self.head(self.encoder.dropout(output)))
            forecasts.append(forecast)
        return torch.stack(forecasts, dim=1)

    def generate(self, inputs: Ragged, most: int, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens that follow each text, at most ``most``, each fed back to tell the next: ``(B, most)`` int64.

        ``pick`` chooses ``(B,)`` tokens by their logits ``(B, V)``. After the end of a text come ends.
        """
        encoder = self.encoder
        recurrent: Any = encoder.recurrent
        if encoder.embedding is None:
            raise ArgumentError(message("model", "a model of numbers", "a language model", "pass a language model"))
        out, state = recurrent(encoder.embed(inputs))
        output = out.last()
        tokens = torch.full((len(inputs), most), END_TOKEN, dtype=torch.int64, device=inputs.device)
        ended = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        for step in range(most):
            logits = self.answers(encoder.dropout(output))
            logits[:, UNKNOWN_TOKEN] = -torch.inf
            tokens[:, step] = torch.where(ended, END_TOKEN, pick(logits))
            ended = ended | (tokens[:, step] == END_TOKEN)
            if step + 1 == most or bool(ended.all()):
                break
            output, state = recurrent.step(encoder.embedding(tokens[:, step]), state)
        return tokens

    def _next(self, before: Tensor, answer: Tensor) -> Tensor:
        """The next element by the head's answer; NaN after NaN."""
        return answer.sigmoid() + 0 * before if self.is_binary else before + answer


def activity(outputs: Ragged, dropped: Ragged, large: float, changing: float) -> Tensor:
    """Activation regularisation, and the temporal one (Merity, McCann and Socher, 2017), summed over elements."""
    values, owners = outputs.values, outputs.segment_ids
    changes = values.diff(dim=0).square().mean(1) * (owners[1:] == owners[:-1])
    return large * dropped.values.square().mean(1).sum() + changing * changes.sum()
