"""The network of a run: an encoder and a linear head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raglane._utils.checks import check_count
from raglane._utils.json import build
from raglane._utils.messages import quote
from raglane.data.prepare import seasons
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import TIME_GAP
from raglane.errors import ArgumentError
from raglane.nn.embeddings import Mixed, with_dropout
from raglane.nn.encoder import SequenceEncoder
from raglane.nn.linear import RowLinear, row_linear, row_sigmoid
from raglane.ragged import Ragged
from raglane.tasks import TASKS
from raglane.training.own_cell import is_own, load_cell
from raglane.training.settings import ModelSettings
from raglane.training.tasks import CLASSES

if TYPE_CHECKING:
    from raglane.nn.transduction.hypotheses import Hypotheses
    from raglane.training.decoders import Decoder

# The positions of the two special tokens in the vocabulary.
UNKNOWN_TOKEN = 0
END_TOKEN = 1


# The number of weights of a model that no machine can store, for which torch counts no bytes.
_MORE_THAN_FIT = 2**61


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """The settings of a :class:`SequenceModel`, with the sizes that follow from its data."""

    # The number of channels, or of tokens in the vocabulary.
    input_size: int
    # The number of classes, labels, targets or channels.
    output_size: int
    # The size of embeddings of tokens, and the maximum for categories; None without tokens and
    # categories.
    embedding: int | None = None
    # True for an output per element; None follows from the task.
    per_element: bool | None = None
    # The channel with the time since the previous element, for cells that read times.
    gap_column: int | None = None
    # The number of categories of each of the last channels.
    categories: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_element is None:
            object.__setattr__(self, "per_element", TASKS[self.task].is_per_element)
        self._refuse_pooling(bool(self.per_element))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration of a dictionary that ``to_config`` made; raise a ValueError if
        it is damaged.
        """
        for name in ("task", "cell"):
            # Their defaults are for new models, not for stored ones.
            if isinstance(config, dict) and name not in config:
                raise ValueError(f"model without the entry {name!r}")
        return build(cls, config, "model")

    @classmethod
    def of(cls, settings: ModelSettings, preprocessor: Preprocessor) -> ModelConfig:
        """Return the configuration for settings and a preprocessor that was fitted to the training
        data.
        """
        chosen: dict[str, Any] = {
            field.name: getattr(settings, field.name, None) for field in dataclasses.fields(cls)
        }
        if settings.cell == "grud" and (preprocessor.is_tokens or preprocessor.features):
            rule = "a cell other than grud for tokens, categories and features of whole sequences"
            raise ArgumentError(
                "cell", quote(settings.cell), rule, "choose another cell or other columns"
            )
        return cls(**chosen | _sizes(settings, preprocessor, chosen["embedding"]))

    @property
    def embeddings(self) -> list[tuple[int, int]]:
        """The shape of each embedding of categories: half as many columns as categories, at most
        ``embedding``.
        """
        return [(count, min(self.embedding or 1, count // 2 + 1)) for count in self.categories]

    @property
    def has_plain_tokens(self) -> bool:
        """True if elements are tokens without further features."""
        return self.embedding is not None and not self.categories

    @property
    def width(self) -> int:
        """The input size of the recurrent layer."""
        if self.has_plain_tokens:
            return self.embedding or 0
        read = self.read_size - len(self.categories)
        return read + sum(size for _, size in self.embeddings)

    @property
    def channels(self) -> int:
        """The number of outputs per quantile."""
        return self.output_size // len(self.quantiles)

    @property
    def read_size(self) -> int:
        """The number of channels that the encoder reads."""
        if not self.has_season:
            return self.input_size
        # In place of the elements it reads their seasonal differences.
        return self.input_size - seasons.width(self.channels, self.season or 0)

    def encoder(self) -> SequenceEncoder:
        """Return the encoder of the model; its arguments have the names of the settings."""
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ModelSettings)
        }
        for name in (
            "task",
            "loss",
            "quantile",
            "embedding_dropout",
            "tie_weights",
            "season",
            "decoder",
        ):
            del options[name]
        if self.per_element:
            options["pooling"] = None
        if self.gap_column is not None:
            options["gap_column"] = self.gap_column
        if is_own(self.cell):
            options["cell"] = load_cell(self.cell)
        if self.has_plain_tokens:
            return SequenceEncoder(self.width, num_embeddings=self.input_size, **options)
        encoder = SequenceEncoder(self.width, **options)
        if self.categories:
            encoder.embedding = Mixed(self.read_size - len(self.categories), self.embeddings)
        return encoder

    def count(self) -> tuple[int, int]:
        """Return the numbers of weights and of weight tensors, without building the model."""
        for name in ("input_size", "output_size", "hidden_size"):
            check_count(name, getattr(self, name))
        num_layers = check_count("num_layers", self.num_layers)
        numbers, tensors = self._count_on_meta(1)
        if num_layers == 1:
            return numbers, tensors
        # All layers above the first have the same shapes.
        numbers_of_two, tensors_of_two = self._count_on_meta(2)
        above = num_layers - 1
        return (
            numbers + above * (numbers_of_two - numbers),
            tensors + above * (tensors_of_two - tensors),
        )

    def _count_on_meta(self, num_layers: int) -> tuple[int, int]:
        """Count the weights of a model of some layers, which has no memory."""
        config = dataclasses.replace(self, num_layers=num_layers)
        try:
            with torch.device("meta"), _WithoutNumbers():
                model = SequenceModel(config)
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            return _MORE_THAN_FIT, 1  # A weight has more bytes than an int64 can count.
        weights = list(model.parameters())
        return sum(weight.numel() for weight in weights), len(weights)

    def check_fits(self, preprocessor: Preprocessor) -> None:
        """Raise a ValueError unless the sizes are those of a preprocessor."""
        # The size of embeddings does not follow from the data.
        sizes = _sizes(self, preprocessor, self.embedding or 1)
        for name, value in {"task": preprocessor.task, **sizes}.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"model.{name} = {getattr(self, name)!r} with a preprocessor that gives {value!r}"
                )


class _WithoutNumbers(TorchFunctionMode):
    """Skips initialisations, because that of a tensor on the device meta imports torch._dynamo,
    which takes seconds.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return function(*args, **kwargs or {})


def _sizes(
    settings: ModelSettings, preprocessor: Preprocessor, embedding: int | None
) -> dict[str, Any]:
    """Return the fields of a :class:`ModelConfig` that follow from the data."""
    channels = preprocessor.channels
    # A cell needs an input in addition to times.
    reads_times = settings.cell == "cfc" and TIME_GAP in channels and preprocessor.input_size > 1
    return {
        "embedding": embedding if preprocessor.is_tokens or preprocessor.categories else None,
        "input_size": preprocessor.input_size,
        "output_size": CLASSES[settings.task].output_size(preprocessor) * len(settings.quantiles),
        "per_element": preprocessor.per_element or TASKS[settings.task].is_per_element,
        "gap_column": channels.index(TIME_GAP) if reads_times else None,
        "categories": list(preprocessor.categories),
    }


class SequenceModel(nn.Module):
    """A recurrent network with a linear head, for one of the tasks: the ``model`` of a
    :class:`raglane.Run`.

    The output of the head for a forecast is the difference to the previous element. So an untrained
    model predicts about the previous element.

    Args:
        config: a ``ModelConfig``, the settings of the model with ``input_size`` and
            ``output_size``.

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
            # The head outputs an embedding, which is compared with those of all tokens (Press and
            # Wolf, 2017).
            answers = config.embedding
            self.tied_bias = nn.Parameter(torch.zeros(config.output_size))
        # Weights of the activation and temporal penalties of language models.
        self.penalties: tuple[float, float] = (0.0, 0.0)
        self.penalty: Tensor | None = None
        size = self.encoder.output_size
        name = config.decoder_name
        self.decoder = None if name is None else _decoder(name, config, size)
        has_head = self.decoder is None or self.decoder.has_head
        # Any, because nn.Identity has no weights.
        self.head: Any = RowLinear(size, answers) if has_head else nn.Identity()
        for name, start in CLASSES[config.task].kept.items():
            self.register_buffer(name, torch.full((config.output_size,), start))
        if torch.get_default_dtype() is not torch.float32:
            self.float()  # as the data

    def forward(self, inputs: Ragged) -> Tensor | Ragged:
        """Run the network on a batch.

        Args:
            inputs: sequences of ``(L, input_size)`` float32, or of ``(L,)`` int64 tokens.

        Returns:
            Logits of classes or labels, or scaled numbers, ``(B, output_size)`` for a task with an
            output per sequence, else a Ragged of ``(L, output_size)``. An element of a forecast
            predicts the next element.
        """
        if self.training and any(self.penalties):
            out, _ = self.encoder.recurrent(self.encoder.embed(inputs))
            return self._changed(inputs, self._dropped(out).map(self.answers))
        encoded: Tensor | Ragged = self.encoder(self._read(inputs))
        if not isinstance(encoded, Ragged):
            return self.answers(encoded)
        return self._changed(inputs, encoded.map(self.answers))

    def _changed(self, inputs: Ragged, scores: Ragged) -> Ragged:
        """Add the previous elements to a forecast of numbers; return other outputs unchanged."""
        if self.config.task != "forecast" or self.is_binary:
            return scores
        rows = inputs.values
        return scores.map(lambda change: self._next(rows, change))

    def _read(self, inputs: Ragged) -> Ragged:
        """Return what the encoder reads of a batch: with seasons, differences for the elements."""
        return inputs.map(self._read_rows) if self.config.has_season else inputs

    def _read_rows(self, rows: Tensor) -> Tensor:
        """Return the seasonal differences ``(M, C)`` and the further channels of inputs."""
        size = self.channels
        end = rows.shape[1] - 2 * size - 1
        return torch.cat([rows[:, end : end + size], rows[:, size:end]], dim=1)

    @property
    def channels(self) -> int:
        """The number of outputs per quantile."""
        return self.config.channels

    def answers(self, encoded: Tensor) -> Tensor:
        """Return the outputs of the head, ``(M, output_size)``."""
        answers: Tensor = self.head(encoded)
        if self.tied_bias is None or self.encoder.embedding is None:
            return answers
        product = F.linear if self.training else row_linear
        return product(answers, self.encoder.embedding.weight, self.tied_bias)

    def run_chunk(self, inputs: Ragged, state: Any, begins: Tensor) -> tuple[Ragged, Any]:
        """Run the next chunks of ``B`` sequences from the state that the previous call returned.

        Args:
            inputs: ``B`` chunks, as for :meth:`forward`.
            state: of the previous call; None for the first.
            begins: ``(B,)`` bool on the CPU, True for chunks that begin a sequence.

        Returns:
            The output of each element, and the state.
        """
        embedded = self.encoder.embed(self._read(inputs))
        recurrent: Any = self.encoder.recurrent
        out, state = recurrent(embedded, state, begins=begins)
        return self._changed(inputs, self._dropped(out).map(self.answers)), state

    def _dropped(self, out: Ragged) -> Ragged:
        """Return the outputs of the layer after dropout, and set ``penalty`` in training."""
        dropped = out.map(self.encoder.dropout)
        if self.training and any(self.penalties):
            self.penalty = activity(out, dropped, *self.penalties)
        return dropped

    @property
    def is_binary(self) -> bool:
        """True if a forecast is a logit, not the difference to the previous element."""
        return self.config.task == "forecast" and self.config.loss_name == "bce"

    def forecast(self, inputs: Ragged, horizon: int = 1, static_size: int = 0) -> Tensor:
        """Forecast the next elements of each sequence; each forecast is the input of the next.

        Args:
            inputs: sequences of ``(L, input_size)`` float32.
            horizon: the number of elements.
            static_size: the number of last channels that are features of the sequence and stay constant.

        Returns:
            ``(B, horizon, output_size)``; NaN for an empty sequence. With the loss bce these are
            probabilities, and the likelier of 0 and 1 is fed back. Of several quantiles the middle
            one is fed back.
        """
        size = self.channels
        middle = slice(self.config.middle * size, (self.config.middle + 1) * size)
        recurrent: Any = self.encoder.recurrent
        out, state = recurrent(self.encoder.embed(self._read(inputs)))
        last = inputs.last(empty=float("nan"))
        forecast = self._next(last, self.head(self.encoder.dropout(out.last())))
        forecasts = [forecast]
        season = self.config.season or 0
        plain = last.shape[1] - seasons.width(size, season)
        # The was-missing channels of a forecast are 0.
        flags = torch.zeros_like(last[:, size : plain - static_size])
        same = last[:, plain - static_size : plain]
        past = seasons.Past(inputs.values[:, :size], inputs.offsets, season, horizon)
        for _ in range(1, horizon):
            # 0 * forecast keeps NaN.
            fed_back = (
                torch.where(forecast > 0.5, 1.0, 0 * forecast) if self.is_binary else forecast
            )
            fed_back = fed_back[:, middle]
            element = torch.cat([fed_back, flags, same, *past.add(fed_back)], dim=1)
            read = self._read_rows(element) if self.config.has_season else element
            embedded = read if self.encoder.embedding is None else self.encoder.embedding(read)
            output, state = recurrent.step(embedded, state)
            forecast = self._next(element, self.head(self.encoder.dropout(output)))
            forecasts.append(forecast)
        return torch.stack(forecasts, dim=1)

    def generate(self, inputs: Ragged, max_length: int, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Generate the next tokens of each text; each token is the input of the next step.

        Args:
            inputs: texts of ``(L,)`` int64 tokens.
            max_length: the number of tokens.
            pick: chooses tokens ``(B,)`` by their logits ``(B, V)``.

        Returns:
            ``(B, max_length)`` int64, filled with the end token after the end of a text.

        Raises:
            ArgumentError: the model does not read tokens.
        """
        encoder = self.encoder
        recurrent: Any = encoder.recurrent
        if encoder.embedding is None:
            raise ArgumentError(
                "model", "a model of numbers", "a language model", "pass a language model"
            )
        out, state = recurrent(encoder.embed(inputs))
        output = out.last()
        tokens = torch.full(
            (len(inputs), max_length), END_TOKEN, dtype=torch.int64, device=inputs.device
        )
        ended = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        for step in range(max_length):
            logits = self.answers(encoder.dropout(output))
            logits[:, UNKNOWN_TOKEN] = -torch.inf
            tokens[:, step] = torch.where(ended, END_TOKEN, pick(logits))
            ended = ended | (tokens[:, step] == END_TOKEN)
            if step + 1 == max_length or bool(ended.all()):
                break
            output, state = recurrent.step(encoder.embedding(tokens[:, step]), state)
        return tokens

    def search(
        self, inputs: Ragged, max_length: int, beam_size: int, n_best: int = 1
    ) -> Hypotheses:
        """Search the likeliest next tokens of each text, up to its end.

        Args:
            inputs: texts of ``(L,)`` int64 tokens, L at least 1.
            max_length: the largest number of tokens.
            beam_size: the number of continuations that run at once.
            n_best: the number of continuations per text, at most ``beam_size``.

        Raises:
            ArgumentError: the model does not read tokens, or ``beam_size`` or ``n_best`` is out of its
                range.
        """
        from raglane.nn.transduction.search import beam_search, layers_first, rows_first

        encoder = self.encoder
        recurrent: Any = encoder.recurrent
        if encoder.embedding is None:
            raise ArgumentError(
                "model", "a model of numbers", "a language model", "pass a language model"
            )
        _, state = recurrent(
            encoder.embed(inputs._slices(inputs.offsets[:-1], inputs.lengths_cpu - 1))
        )

        def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            output, hx = recurrent.step(encoder.embedding(tokens), layers_first(state))
            logits = self.answers(encoder.dropout(output))
            logits[:, UNKNOWN_TOKEN] = -torch.inf
            return logits.log_softmax(-1), rows_first(hx)

        options: dict[str, Any] = {
            "beam_size": beam_size,
            "max_length": max_length,
            "end": END_TOKEN,
            "n_best": n_best,
        }
        return beam_search(step, inputs.last(), rows_first(state), **options)

    def _next(self, rows: Tensor, answer: Tensor) -> Tensor:
        """Return the next elements ``(M, output_size)`` from inputs ``(M, input_size)`` and the
        outputs of the head; NaN after NaN.
        """
        size = self.channels
        before = rows[:, :size]
        count = len(self.config.quantiles)
        if self.is_binary:
            return row_sigmoid(answer) + 0 * before
        if self.config.has_season:
            # The element one season before the next; in the first season that before the next.
            before = before + rows[:, -size - 1 : -1]
            answer = answer * rows[:, -1:]
        return (before if count == 1 else torch.cat([before] * count, 1)) + answer


def _decoder(name: str, config: ModelConfig, size: int) -> Decoder:
    from raglane.training.decoders import DECODERS  # one task has decoders

    return DECODERS[name](config, size)


def activity(outputs: Ragged, dropped: Ragged, large: float, changing: float) -> Tensor:
    """Return activation plus temporal activation regularisation (Merity and others, 2017), summed
    over elements.
    """
    values = outputs.values
    owners = outputs.segment_ids
    changes = values.diff(dim=0).square().mean(1) * (owners[1:] == owners[:-1])
    return large * dropped.values.square().mean(1).sum() + changing * changes.sum()
