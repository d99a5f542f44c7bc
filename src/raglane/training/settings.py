"""The settings of a training, each with its default, rules and help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raglane._utils.json import build
from raglane._utils.messages import argument, quote, same_word
from raglane._utils.options import DATA, MODEL, RUN, TRAINING, Rule, check, option
from raglane.errors import ArgumentError
from raglane.tasks import TASKS, Terms
from raglane.training.own_cell import is_own

# The decoders of the task transcribe, the default first.
DECODERS = ("ctc", "transducer", "attention")
# Not read from raglane.nn, which would import torch.
LAYERS = (
    *("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm"),
    *("peephole_lstm", "coupled_lstm", "slstm", "grud", "cfc"),
    *("mamba", "mamba2", "gated_delta_net", "mlstm", "rglru"),
)
NORMALISED_LAYERS = ("lstm", "gru")
POOLINGS = ("final", "last", "first", "mean", "max", "logsumexp", "attention")
INITIAL_STATES = ("zeros", "learned", "lengths")
SCHEDULES = ("constant", "cosine", "plateau")
CLASS_WEIGHTS = ("none", "balanced")
OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop")
MISSING = ("raise", "zero", "forward", "elapsed")
# The values of BatchLimit(too_long=...).
TOO_LONG = ("raise", "drop", "chunk", "alone")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("processes", "ray")
LOGGERS = ("tensorboard", "wandb", "mlflow")


# The largest count: larger ones are typing mistakes.
_LARGEST = 2**31 - 1
# The range of float32, the dtype of weights.
_HIGHEST = 3.4e38
_WITHIN = "and at most 3.4e38, the range of float32"

_COUNT = (
    Rule(lambda count: count >= 1, "at least 1", "pass a whole number above 0"),
    Rule(lambda count: count <= _LARGEST, "at most 2**31 - 1", "pass a smaller number"),
)


def _share(example: str) -> Rule:
    return Rule(lambda share: 0 <= share < 1, "at least 0 and below 1", f"pass e.g. {example}")


def _not_negative(fix: str) -> Rule:
    return Rule(lambda number: 0 <= number <= _HIGHEST, f"at least 0 {_WITHIN}", fix)


_SHARE = _share("0.2")
_WEIGHT = _not_negative("pass e.g. 2")


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model. ``raglane train --help`` describes each.

    Raises:
        ArgumentError: a value is invalid, or does not go with another.

    Example:
        >>> ModelSettings(cell="lstm").hidden_size
        64
    """

    task: str = option(
        "classify",
        "classify, tag: a class per sequence, per element; regress, multilabel: numbers, or any number of labels, "
        "per sequence or element; forecast: the next element; language: the next token; transcribe: a sequence of "
        "labels, such as a text.",
        MODEL,
        choices=tuple(TASKS),
        unset="guessed from the labels, except transcribe",
    )
    cell: str = option(
        "gru",
        f"The recurrent cell: {', '.join(LAYERS)}; or a user-defined class, path/to/file.py:MyCell.",
        MODEL,
        choices=LAYERS,
        or_else=Rule(is_own, "a class in a file, path/to/file.py:MyCell", ""),
        metavar="NAME",
    )
    hidden_size: int = option(64, "Hidden units of each layer and direction.", MODEL, *_COUNT)
    num_layers: int = option(1, "Number of stacked recurrent layers.", MODEL, *_COUNT)
    bidirectional: bool = option(
        False, "Run in both directions; to tag, unless --bptt-steps is passed, the default.", MODEL
    )
    layer_norm: bool = option(
        False, f"Normalise inside the recurrence ({' and '.join(NORMALISED_LAYERS)}).", MODEL
    )
    initial_state: str = option(
        "zeros",
        "Initial state of a sequence; lengths: a learned function of its length.",
        MODEL,
        choices=INITIAL_STATES,
    )
    pooling: str = option(
        "final",
        "How the outputs of a sequence become one vector; final: the final state of each direction.",
        MODEL,
        choices=POOLINGS,
    )
    dropout: float = option(
        0.0, "Share of units dropped between layers and before the head.", MODEL, _SHARE
    )
    input_dropout: float = option(
        0.0,
        "Share of a layer's inputs dropped, the same at all steps of a sequence.",
        MODEL,
        _SHARE,
    )
    state_dropout: float = option(
        0.0,
        "Share of the state dropped before the recurrent product, the same at all steps of a sequence.",
        MODEL,
        _SHARE,
    )
    weight_dropout: float = option(
        0.0, "Share of the recurrent weights dropped per batch.", MODEL, _SHARE
    )
    zoneout: float = option(
        0.0, "Share of units that keep their previous state at a step.", MODEL, _SHARE
    )
    embedding_dropout: float = option(
        0.0, "Share of the vocabulary whose embeddings are dropped per batch.", MODEL, _SHARE
    )
    tie_weights: bool = option(False, "Share the weights of embedding and head (language).", MODEL)
    loss: str | None = option(
        None,
        "Loss: mse, mae, huber or quantile for numbers, bce for zeros and ones.",
        MODEL,
        choices=tuple(dict.fromkeys(name for task in TASKS.values() for name in task.losses)),
        metavar="NAME",
        unset="by the task",
    )
    quantile: list[float] | None = option(
        None,
        "Quantile to predict, the share of targets below it (loss quantile); several: repeat it, or 0.1,0.9.",
        MODEL,
        Rule(
            lambda shares: (
                all(0 < share < 1 for share in shares) and sorted(set(shares)) == list(shares) != []
            ),
            "above 0 and below 1, in ascending order",
            "pass e.g. 0.1, 0.5 and 0.9",
        ),
        unset="0.5",
    )
    season: int | None = option(
        None,
        "Steps of a season, such as 12 for months: the model reads the differences to the element one season before, "
        "and predicts those of the next (forecast); 0: none.",
        MODEL,
        Rule(lambda steps: steps != 1, "0, or at least 2", "pass 12, or 0 for none"),
        Rule(lambda steps: 0 <= steps <= _LARGEST, "0, or at least 2", "pass 12, or 0 for none"),
        unset="that of the data, if the held-out part repeats it; else 0",
    )
    decoder: str | None = option(
        None,
        "How outputs become labels (transcribe); ctc: at most one label per element, in their order; transducer: any "
        "number, in their order; attention: any number, in any order.",
        MODEL,
        choices=DECODERS,
        unset="ctc for transcribe",
    )

    def __post_init__(self) -> None:
        if isinstance(self.cell, str):
            object.__setattr__(self, "cell", same_word(self.cell, LAYERS))
        check(self)
        is_forwards = TASKS[self.task].is_forwards
        losses = TASKS[self.task].losses
        rule = f"False for the task {self.task}: the backward direction would see the element to predict"
        self._refuse("bidirectional", self.bidirectional and is_forwards, rule)
        rule = f"False for the cell {self.cell}; layer normalisation exists for {' and '.join(NORMALISED_LAYERS)}"
        self._refuse("layer_norm", self.layer_norm and self.cell not in NORMALISED_LAYERS, rule)
        self._refuse_pooling(TASKS[self.task].is_per_element)
        rule = f"another cell for the task {self.task}, since grud reads when each channel was observed"
        self._refuse("cell", self.cell == "grud" and is_forwards, rule, "choose another cell")
        rule = (
            "learned or zeros for a forecast, which must not depend on the length of its sequence"
        )
        self._refuse(
            "initial_state",
            self.initial_state == "lengths" and is_forwards,
            rule,
            "pass learned or zeros",
        )
        rule = "False for all tasks except language, whose outputs are the tokens that it reads"
        self._refuse("tie_weights", self.tie_weights and self.task != "language", rule)
        rule = f"a loss of the task {self.task}: {', '.join(losses)}"
        fix = "choose one of them, or leave it out"
        self._refuse("loss", self.loss is not None and self.loss not in losses, rule, fix)
        rule = "unset for all losses except quantile"
        fix = f"pass {argument('loss', 'quantile')} too, or leave it out"
        self._refuse("quantile", self.quantile is not None and self.loss != "quantile", rule, fix)
        rule = "unset for all tasks except forecast, and for its loss bce"
        is_numbers = self.task == "forecast" and self.loss != "bce"
        self._refuse("season", bool(self.season) and not is_numbers, rule)
        is_invalid = self.decoder is not None and self.task != "transcribe"
        self._refuse("decoder", is_invalid, "unset for all tasks except transcribe")

    def to_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-serialisable dictionary.

        Example:
            >>> Settings(seed=3).to_config()["seed"]
            3
        """
        return dataclasses.asdict(self)

    @property
    def loss_name(self) -> str:
        """The chosen loss, or the default of the task."""
        return self.loss or TASKS[self.task].losses[0]

    @property
    def terms(self) -> Terms:
        """The names of metric and baseline."""
        facts = TASKS[self.task]
        return facts.terms_by_loss.get(self.loss_name, facts.terms)

    @property
    def decoder_name(self) -> str | None:
        """The chosen decoder, or the default of the task transcribe; None for other tasks."""
        return (self.decoder or DECODERS[0]) if self.task == "transcribe" else None

    @property
    def has_season(self) -> bool:
        """True if the model reads differences to the element one season before."""
        return bool(self.season)

    @property
    def quantiles(self) -> list[float]:
        """The quantiles to predict; [0.5] for other losses."""
        return self.quantile or [0.5]

    @property
    def middle(self) -> int:
        """The index of the quantile that is the prediction, the nearest to 0.5."""
        return min(range(len(self.quantiles)), key=lambda index: abs(self.quantiles[index] - 0.5))

    def _refuse_pooling(self, is_per_element: bool) -> None:
        rule = f"final for the task {self.task}, which has an output per element"
        self._refuse("pooling", self.pooling != "final" and is_per_element, rule)

    def _refuse(self, name: str, is_invalid: bool, rule: str, fix: str = "leave it out") -> None:
        if is_invalid:
            raise ArgumentError(name, quote(getattr(self, name)), rule, fix)


@dataclass(frozen=True)
class Settings(ModelSettings):
    """The settings of a training: those of the model, and these. They are the options of ``raglane
    train``.

    Raises:
        ArgumentError: a value is invalid, or does not go with another.

    Example:
        >>> Settings(cell="lstm", hidden_size=100).hidden_size
        100
        >>> Settings(hidden_size=0)
        Traceback (most recent call last):
        raglane.errors.ArgumentError: hidden_size must be at least 1, got 0. Pass a whole number above 0.
    """

    embedding: int = option(32, "Size of the embedding of tokens and categories.", MODEL, *_COUNT)
    epochs: int | None = option(
        None, "Passes over the training data.", TRAINING, *_COUNT, unset="by the size of the data"
    )
    batch_size: int = option(
        32, "Sequences per batch; auto: the fastest measured size.", TRAINING, *_COUNT, also="auto"
    )
    batch_elements: int | None = option(
        None,
        "Maximum elements per batch, in place of --batch-size; auto: the fastest measured size.",
        TRAINING,
        *_COUNT,
        also="auto",
        unset="--batch-size decides",
    )
    too_long: str = option(
        "raise",
        "Treatment of training sequences with more than --batch-elements elements.",
        TRAINING,
        choices=TOO_LONG,
    )
    accumulate: int = option(
        1, "Batches per optimizer step (gradient accumulation).", TRAINING, *_COUNT
    )
    lr: float = option(
        0.003,
        "Learning rate.",
        TRAINING,
        Rule(lambda lr: 0 < lr <= _HIGHEST, f"above 0 {_WITHIN}", "pass e.g. 0.003"),
    )
    optimizer: str = option(
        "adam", "The optimizer; sgd with momentum 0.9.", TRAINING, choices=OPTIMIZERS
    )
    weight_decay: float = option(0.0, "Weight decay.", TRAINING, _not_negative("pass e.g. 0.01"))
    grad_clip: float | None = option(
        1.0,
        "Largest norm of the gradient (gradient clipping); 0: no limit.",
        TRAINING,
        _not_negative("pass 1.0, or 0 for no limit"),
    )
    lr_schedule: str | None = option(
        None,
        "Learning rate schedule: cosine decreases to 0 at the last epoch; plateau halves the rate after 2 epochs "
        "without a lower validation loss.",
        TRAINING,
        choices=SCHEDULES,
        unset="constant with --epochs, else cosine",
    )
    warmup: int = option(
        0,
        "Epochs over which the learning rate rises from 0.",
        TRAINING,
        Rule(lambda epochs: 0 <= epochs <= _LARGEST, "at least 0", "pass e.g. 1"),
    )
    class_weights: str = option(
        "none",
        "balanced: all classes have the same total weight in the loss (classify, tag, multilabel).",
        TRAINING,
        choices=CLASS_WEIGHTS,
    )
    label_smoothing: float = option(
        0.0,
        "Share of the target probability that is spread over all classes (classify, tag).",
        TRAINING,
        _share("0.1"),
    )
    activation_penalty: float = option(
        0.0, "Weight of the squared outputs of the layer in the loss (language).", TRAINING, _WEIGHT
    )
    temporal_penalty: float = option(
        0.0,
        "Weight of the squared changes of the outputs between tokens in the loss (language).",
        TRAINING,
        _WEIGHT,
    )
    unk_dropout: float = option(
        0.5,
        "Share of the tokens occurring once in training that are replaced by the unknown token, so that it is learned.",
        TRAINING,
        Rule(lambda share: 0 <= share <= 1, "from 0 to 1", "pass 0.5, or 0 for none"),
    )
    bptt_steps: int | None = option(
        None,
        "Elements per chunk of truncated backpropagation; states are carried over (tag, forecast, language).",
        TRAINING,
        *_COUNT,
        unset="20 to 100 for a forecast of one series, else whole sequences",
    )
    patience: int | None = option(
        None,
        "Epochs without a lower validation loss before training stops (early stopping).",
        TRAINING,
        *_COUNT,
        unset="by the size of the data without --epochs, else run all epochs",
    )
    bucket: bool = option(False, "Make batches of similar lengths (bucketing).", TRAINING)
    largest_first: bool = option(
        False, "Begin with the longest sequences, so that a lack of memory shows at once.", TRAINING
    )
    seed: int = option(
        0,
        "Seed of weights, order, dropout and the validation split.",
        TRAINING,
        Rule(lambda seed: 0 <= seed < 2**63, "a whole number from 0 to 2**63 - 1", "pass e.g. 0"),
    )
    validation_fraction: float = option(
        0.1,
        "Share of the training data held out for validation if no validation data is given.",
        DATA,
        _share("0.1"),
    )
    missing: str = option(
        "raise",
        "Treatment of NaN or infinite features: an error, or fill them and add a was-missing channel each; elapsed: "
        "also add the time since the last observation, which --cell grud reads.",
        DATA,
        choices=MISSING,
    )
    checkpoint_minutes: float = option(
        1.0,
        "Minutes between checkpoints within an epoch, from which --resume continues after a kill.",
        RUN,
        _not_negative("pass e.g. 1"),
    )
    device: str = option("auto", "Device; auto: a GPU if available.", RUN, choices=DEVICES)
    processes: int = option(1, "Processes on this machine that share each batch.", RUN, *_COUNT)
    engine: str = option(
        "processes",
        "Launcher of the processes; ray: the Ray cluster at RAY_ADDRESS, or on this machine.",
        RUN,
        choices=ENGINES,
    )
    threads: int | None = option(
        None, "CPU threads per process.", RUN, *_COUNT, unset="PyTorch's choice"
    )
    workers: int = option(
        0,
        "DataLoader workers; 0: batches are prepared in the training process.",
        RUN,
        Rule(lambda workers: workers >= 0, "at least 0", "pass e.g. 0"),
    )
    logger: str | None = option(
        None,
        "Log each epoch to TensorBoard, Weights & Biases or MLflow; requires that package.",
        RUN,
        choices=LOGGERS,
        unset="only curves.csv",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = argument("batch_elements")
        is_unlimited = self.too_long != "raise" and self.batch_elements is None
        self._refuse(
            "too_long", is_unlimited, f"raise without {limit}", f"pass {limit}, or leave it out"
        )
        is_cut = self.too_long == "chunk" and self.task == "transcribe"
        self._refuse(
            "too_long",
            is_cut,
            "another choice for the task transcribe, whose targets cannot be cut",
        )
        fix = f"pass {argument('missing', 'elapsed')}, or choose another cell"
        self._refuse(
            "missing",
            self.cell == "grud" and self.missing != "elapsed",
            "elapsed for the cell grud",
            fix,
        )
        rule = f"raise, zero or forward for the task {self.task}"
        self._refuse(
            "missing",
            self.missing == "elapsed" and TASKS[self.task].is_forwards,
            rule,
            "pass forward or zero",
        )
        for is_invalid, why in (
            (
                not TASKS[self.task].is_per_element,
                f"the task {self.task} has one output per sequence",
            ),
            (self.task == "transcribe", "the target of a chunk is not known"),
            (self.bidirectional, "a bidirectional layer needs whole sequences"),
            (self.initial_state == "lengths", "chunks do not have the length of their sequence"),
            (self.bucket or self.batch_elements is not None, "all chunks have the same length"),
        ):
            self._refuse(
                "bptt_steps", self.bptt_steps is not None and is_invalid, f"None, because {why}"
            )
        for name in ("activation_penalty", "temporal_penalty"):
            is_invalid = getattr(self, name) > 0 and self.task != "language"
            self._refuse(name, is_invalid, "0 for all tasks except language")
        has_classes = self.task in ("classify", "tag")
        is_invalid = self.class_weights != "none" and not has_classes and self.task != "multilabel"
        self._refuse("class_weights", is_invalid, "none for tasks without classes or labels")
        self._refuse(
            "label_smoothing",
            self.label_smoothing > 0 and not has_classes,
            "0 for tasks without classes",
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Return the settings of a dictionary that ``to_config`` made.

        Raises:
            ValueError: an entry is missing, unknown or of the wrong type.
            ArgumentError: a value is invalid.

        Example:
            >>> Settings.from_config(Settings(seed=3).to_config()) == Settings(seed=3)
            True
        """
        return build(cls, config, "settings")


def task_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices with the defaults of their task: to tag, both directions, unless chunks of
    sequences are read.
    """
    if chosen.get("task") != "tag" or chosen.get("bptt_steps") is not None:
        return dict(chosen)
    return {"bidirectional": True, **chosen}


def without_task(chosen: Mapping[str, Any]) -> Settings:
    """Return the settings for the first task that allows them, while the task is not known; raise
    if none does.
    """
    refused: list[ArgumentError] = []
    for task in [chosen["task"]] if "task" in chosen else TASKS:
        try:
            return Settings(**task_defaults({**chosen, "task": task}))
        except ArgumentError as error:
            refused.append(error)
    raise refused[0]


PLANNED = ("batch_size", "batch_elements")
"""The settings that may be ``"auto"``."""


def left_to_plan(chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the choices without ``"auto"``, and the name of the setting in ``PLANNED`` that was
    auto, or None.
    """
    names = [name for name in PLANNED if chosen.get(name) == "auto"]
    if not names:
        return dict(chosen), None
    if len(names) > 1:
        got = f"'auto', with {argument('batch_size', 'auto')}"
        rule = "the only setting that is auto"
        raise ArgumentError("batch_elements", got, rule, "leave one of them out")
    rest = {name: value for name, value in chosen.items() if name != names[0]}
    # A placeholder until the batch is planned.
    return rest | ({"batch_elements": _LARGEST} if names == ["batch_elements"] else {}), names[0]
