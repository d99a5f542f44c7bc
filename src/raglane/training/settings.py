"""The settings of a training: every choice, its default, its rule and its help, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raglane._utils.messages import argument, message, quote
from raglane.errors import ArgumentError
from raglane.training.options import DATA, MODEL, RUN, TRAINING, Rule, check, option
from raglane.training.own_cell import is_own
from raglane.training.stored import build

TASKS = ("classify", "tag", "regress", "multilabel", "forecast", "language")
# Those that have an answer for each element, whatever the data.
ALWAYS_PER_ELEMENT = ("tag", "forecast", "language")
# Those that tell what comes next, and so read forwards only.
FORWARDS = ("forecast", "language")
# The losses of each task, its default first.
LOSSES = {
    "classify": ("cross_entropy",),
    "tag": ("cross_entropy",),
    "regress": ("mse", "mae", "huber", "quantile"),
    "multilabel": ("bce",),
    "forecast": ("mse", "mae", "huber", "bce"),
    "language": ("cross_entropy",),
}
# The names in raglane.nn, which is not imported here: that would import torch.
LAYERS = (
    *("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm"),
    *("peephole_lstm", "coupled_lstm", "slstm", "grud", "cfc"),
)
NORMALISED_LAYERS = ("lstm", "gru")
POOLINGS = ("summary", "last", "first", "mean", "max", "logsumexp", "attention")
INITIAL_STATES = ("zeros", "learned", "lengths")
SCHEDULES = ("constant", "cosine", "plateau")
CLASS_WEIGHTS = ("none", "balanced")
OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop")
MISSING = ("error", "zero", "forward", "elapsed")
# The words of raglane.data.BatchLimit, which is not imported here either.
TOO_LONG = ("refuse", "drop", "split", "alone")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("processes", "ray")
# The names of Lightning's loggers.
LOGGERS = ("tensorboard", "wandb", "mlflow")


# Anything beyond is a typing mistake, and PyTorch's sizes end at 2**63 - 1.
_LARGEST = 2**31 - 1
# Weights have 32 bits, and PyTorch stops at a number that they cannot hold.
_HIGHEST = 3.4e38
_WITHIN = "and at most 3.4e38, the limit of 32 bits"

# Whole numbers from 1.
_COUNT = (
    Rule(lambda count: count >= 1, "at least 1", "pass a whole number above 0"),
    Rule(lambda count: count <= _LARGEST, "at most 2**31 - 1", "pass a smaller one"),
)


def _share(example: str) -> Rule:
    return Rule(lambda share: 0 <= share < 1, "at least 0 and below 1", f"pass {example}, say")


_SHARE = _share("0.2")
_WEIGHT = Rule(lambda weight: 0 <= weight <= _HIGHEST, f"a number of at least 0, {_WITHIN}", "pass 2, say")


@dataclass(frozen=True)
class ModelSettings:
    """The choices that shape a model. Each field states its default, its rule and, as its help, what it is.

    Raises:
        ArgumentError: a value breaks its rule, or two do not go together.

    Example:
        >>> ModelSettings(cell="lstm").hidden_size
        64
    """

    task: str = option(
        "classify",
        "classify, tag: a class per sequence, per element; regress, multilabel: numbers, any number of labels, "
        "for either; forecast: the next element; language: the next token. Where it is not given, the label tells.",
        MODEL,
        choices=TASKS,
    )
    cell: str = option(
        "gru",
        f"The recurrent cell: {', '.join(LAYERS)}; or a class of your own, path/to/file.py:MyCell.",
        MODEL,
        choices=LAYERS,
        or_else=Rule(is_own, "a class in a file, path/to/file.py:MyCell", ""),
        metavar="NAME",
    )
    hidden_size: int = option(64, "Units of a layer and direction.", MODEL, *_COUNT)
    num_layers: int = option(1, "Layers on top of each other.", MODEL, *_COUNT)
    bidirectional: bool = option(False, "Also run from end to start.", MODEL)
    layer_norm: bool = option(False, f"Normalise inside the recurrence ({' and '.join(NORMALISED_LAYERS)}).", MODEL)
    initial_state: str = option(
        "zeros",
        "What a sequence begins with; lengths: a learned function of its length.",
        MODEL,
        choices=INITIAL_STATES,
    )
    pooling: str = option(
        "summary",
        "How the elements of a sequence become one vector (classify); summary: the last state of each direction.",
        MODEL,
        choices=POOLINGS,
    )
    dropout: float = option(0.0, "Share of units dropped between layers and before the head.", MODEL, _SHARE)
    input_dropout: float = option(0.0, "Share of a layer's inputs dropped for a whole sequence.", MODEL, _SHARE)
    state_dropout: float = option(
        0.0, "Share of the state dropped for a whole sequence, where weights read it.", MODEL, _SHARE
    )
    weight_dropout: float = option(0.0, "Share of the recurrent weights dropped for a batch.", MODEL, _SHARE)
    zoneout: float = option(0.0, "Share of units that keep their value for a step.", MODEL, _SHARE)
    embedding_dropout: float = option(
        0.0, "Share of the tokens of the vocabulary whose embedding is dropped for a batch.", MODEL, _SHARE
    )
    tie_weights: bool = option(False, "Score tokens with the weights of their embedding (language).", MODEL)
    loss: str | None = option(
        None,
        "What training makes smaller: mse, mae, huber or quantile of numbers, bce of what is 0 or 1.",
        MODEL,
        choices=tuple(dict.fromkeys(name for names in LOSSES.values() for name in names)),
        metavar="NAME",
        unset="by the task",
    )
    quantile: float = option(
        0.5,
        "Share of the numbers that are to lie below the prediction (loss quantile).",
        MODEL,
        Rule(lambda share: 0 < share < 1, "above 0 and below 1", "pass 0.9, say"),
    )

    def __post_init__(self) -> None:
        check(self)
        forwards, losses = self.task in FORWARDS, LOSSES[self.task]
        rule = "False for a forecast, since the backward direction would see the element to predict"
        fix = f"leave it out for the task {self.task}"
        self._refuse("bidirectional", self.bidirectional and forwards, rule, fix)
        rule = f"False for the cell {self.cell}; {' and '.join(NORMALISED_LAYERS)} can be normalised"
        fix = "choose another cell, or leave it out"
        self._refuse("layer_norm", self.layer_norm and self.cell not in NORMALISED_LAYERS, rule, fix)
        self._refuse_pooling(self.task in ALWAYS_PER_ELEMENT)
        rule = f"another cell for the task {self.task}, since grud requires the time of each observation"
        self._refuse("cell", self.cell == "grud" and forwards, rule, "choose another cell")
        rule = "another choice for a forecast, which does not know the length"
        self._refuse("initial_state", self.initial_state == "lengths" and forwards, rule, "pass learned or zeros")
        rule = "False except for a language model"
        self._refuse("tie_weights", self.tie_weights and self.task != "language", rule)
        rule, fix = (
            f"one of the losses of the task {self.task}: {', '.join(losses)}",
            "choose one of them, or leave it out",
        )
        self._refuse("loss", self.loss is not None and self.loss not in losses, rule, fix)
        rule, fix = (
            "left out except with the loss quantile",
            f"pass {argument('loss', 'quantile')} too, or leave it out",
        )
        self._refuse("quantile", self.quantile != 0.5 and self.loss != "quantile", rule, fix)

    def to_config(self) -> dict[str, Any]:
        """The settings as a dictionary that JSON can hold.

        Example:
            >>> Settings(seed=3).to_config()["seed"]
            3
        """
        return dataclasses.asdict(self)

    @property
    def loss_name(self) -> str:
        """The loss that was chosen, or else the task's own."""
        return self.loss or LOSSES[self.task][0]

    def _refuse_pooling(self, is_per_element: bool) -> None:
        rule = f"left out for the task {self.task}, which has an output for each element"
        self._refuse("pooling", self.pooling != "summary" and is_per_element, rule)

    def _refuse(self, name: str, is_broken: bool, rule: str, fix: str = "leave it out") -> None:
        if is_broken:
            raise ArgumentError(message(name, quote(getattr(self, name)), rule, fix))


@dataclass(frozen=True)
class Settings(ModelSettings):
    """The choices of one training run: those of the model, and these. ``raglane train`` makes its options of them.

    Raises:
        ArgumentError: a value breaks its rule, or two do not go together.

    Example:
        >>> Settings(cell="lstm", hidden_size=100).hidden_size
        100
        >>> Settings(hidden_size=0)
        Traceback (most recent call last):
        raglane.errors.ArgumentError: hidden_size must be at least 1, got 0. Pass a whole number above 0.
    """

    embedding: int = option(32, "Size of a token's embedding (token sequences only).", MODEL, *_COUNT)
    epochs: int = option(30, "Passes over the training part.", TRAINING, *_COUNT)
    batch_size: int = option(
        32, "Sequences of a batch; auto: measure, and take what is fast.", TRAINING, *_COUNT, also="auto"
    )
    batch_elements: int | None = option(
        None,
        "Elements of a batch at most, however many sequences these are; auto: measure, and take what is fast.",
        TRAINING,
        *_COUNT,
        also="auto",
        unset="--batch-size decides",
    )
    too_long: str = option(
        "refuse",
        "What becomes of a training sequence with more than --batch-elements.",
        TRAINING,
        choices=TOO_LONG,
    )
    accumulate: int = option(1, "Batches of which the gradients make one step of the optimizer.", TRAINING, *_COUNT)
    lr: float = option(
        0.003,
        "Learning rate.",
        TRAINING,
        Rule(lambda lr: 0 < lr <= _HIGHEST, f"a number above 0, {_WITHIN}", "pass 0.003, say"),
    )
    optimizer: str = option("adam", "The optimizer; sgd with momentum 0.9.", TRAINING, choices=OPTIMIZERS)
    weight_decay: float = option(
        0.0,
        "Weight decay.",
        TRAINING,
        Rule(lambda decay: 0 <= decay <= _HIGHEST, f"a number of at least 0, {_WITHIN}", "pass 0.01, say"),
    )
    grad_clip: float | None = option(
        1.0,
        "Largest norm of the gradient; 0: no limit.",
        TRAINING,
        Rule(lambda norm: 0 <= norm <= _HIGHEST, f"a number of at least 0, {_WITHIN}", "pass 1.0, or 0 for no limit"),
    )
    lr_schedule: str = option(
        "constant",
        "How the learning rate changes: cosine falls to 0 at the last epoch; plateau halves it after 2 epochs without "
        "a lower validation loss.",
        TRAINING,
        choices=SCHEDULES,
    )
    warmup: int = option(
        0,
        "Epochs over which the learning rate rises from 0.",
        TRAINING,
        Rule(lambda epochs: 0 <= epochs <= _LARGEST, "at least 0", "pass 1, say"),
    )
    class_weights: str = option(
        "none",
        "balanced: rare classes count as much as frequent ones (classify, tag, multilabel).",
        TRAINING,
        choices=CLASS_WEIGHTS,
    )
    label_smoothing: float = option(
        0.0, "Share of a class's weight that is given to all classes (classify, tag).", TRAINING, _share("0.1")
    )
    activation_penalty: float = option(
        0.0, "Weight of large outputs of the layer in the loss (language).", TRAINING, _WEIGHT
    )
    temporal_penalty: float = option(
        0.0, "Weight of their changes from token to token in the loss (language).", TRAINING, _WEIGHT
    )
    unk_dropout: float = option(
        0.5,
        "Share of the tokens that occur once in training that are read as unknown, so that the unknown is learned.",
        TRAINING,
        Rule(lambda share: 0 <= share <= 1, "from 0 to 1", "pass 0.5, or 0 for none"),
    )
    bptt_steps: int | None = option(
        None,
        "Train on chunks of this many elements; gradients end there, states are carried on (tag, forecast, language).",
        TRAINING,
        *_COUNT,
        unset="whole sequences",
    )
    patience: int | None = option(
        None,
        "Stop after this many epochs without a lower validation loss.",
        TRAINING,
        *_COUNT,
        unset="run all epochs",
    )
    bucket: bool = option(False, "Make batches of similar lengths.", TRAINING)
    largest_first: bool = option(
        False, "Begin with the longest sequences, so that memory runs out at once or never.", TRAINING
    )
    seed: int = option(
        0,
        "Of weights, order, dropout and the held-out part.",
        TRAINING,
        Rule(lambda seed: 0 <= seed < 2**63, "a whole number from 0 to 2**63 - 1", "pass 0, say"),
    )
    validation_fraction: float = option(
        0.1, "Share held out for validation when none is given; 0 holds out none.", DATA, _share("0.1")
    )
    missing: str = option(
        "error",
        "NaN or infinite features: refuse them, or fill them and add a was-missing channel each; elapsed: and how long "
        "ago each was seen, which --cell grud reads.",
        DATA,
        choices=MISSING,
    )
    device: str = option("auto", "Where to run; auto takes a GPU.", RUN, choices=DEVICES)
    ranks: int = option(1, "Processes that share each batch, on this machine; torchrun starts more.", RUN, *_COUNT)
    engine: str = option(
        "processes",
        "Who starts the ranks; ray: a Ray cluster, that of RAY_ADDRESS or of this machine.",
        RUN,
        choices=ENGINES,
    )
    threads: int | None = option(None, "Threads of the CPU, for each rank.", RUN, *_COUNT, unset="PyTorch's choice")
    workers: int = option(
        0,
        "Processes that prepare batches; 0: the training one.",
        RUN,
        Rule(lambda workers: workers >= 0, "at least 0", "pass 0, or the number of processes"),
    )
    logger: str | None = option(
        None,
        "Also log each epoch to TensorBoard, Weights & Biases or MLflow, where that package is installed.",
        RUN,
        choices=LOGGERS,
        unset="curves.csv alone",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = argument("batch_elements")
        rule = f"left out without {limit}"
        is_unlimited = self.too_long != "refuse" and self.batch_elements is None
        self._refuse("too_long", is_unlimited, rule, f"give {limit}, or leave it out")
        rule, fix = (
            "elapsed for the cell grud, which reads the time since each observation",
            argument("missing", "elapsed"),
        )
        is_untold = self.cell == "grud" and self.missing != "elapsed"
        self._refuse("missing", is_untold, rule, f"pass {fix}, or choose another cell")
        rule = f"another choice for the task {self.task}, which predicts elements without observation times"
        is_foretold = self.missing == "elapsed" and self.task in FORWARDS
        self._refuse("missing", is_foretold, rule, "pass forward or zero")
        for is_broken, rule in (
            (
                self.task not in ALWAYS_PER_ELEMENT,
                f"left out for the task {self.task}, whose output is at the end of a sequence",
            ),
            (self.bidirectional, "left out for bidirectional layers: the reverse direction would begin at the end"),
            (
                self.initial_state == "lengths",
                "left out with initial_state lengths, since lengths are unknown at the first chunk",
            ),
            (
                self.bucket or self.batch_elements is not None,
                "left out with bucket or batch_elements, since all chunks have one length",
            ),
        ):
            self._refuse("bptt_steps", self.bptt_steps is not None and is_broken, rule)
        for name in ("activation_penalty", "temporal_penalty"):
            self._refuse(name, getattr(self, name) > 0 and self.task != "language", "0 except for a language model")
        tells_classes, rule = self.task in ("classify", "tag"), "left out except for the tasks that predict classes"
        is_weighed = tells_classes or self.task == "multilabel"
        self._refuse("class_weights", self.class_weights != "none" and not is_weighed, rule)
        self._refuse("label_smoothing", self.label_smoothing > 0 and not tells_classes, rule)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """The settings that ``to_config`` wrote.

        Example:
            >>> Settings.from_config(Settings(seed=3).to_config()) == Settings(seed=3)
            True

        Raises:
            ValueError: an entry is missing, unknown or of another type.
            ArgumentError: a value breaks its rule.
        """
        return build(cls, config, "settings")


PLANNED = ("batch_size", "batch_elements")
"""The settings that may be ``"auto"``."""

# Until it is planned: what goes with a limit by elements, goes with this one.
_ANY = 2**31 - 1


def left_to_plan(chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Choices without what is to be planned, and which one of ``PLANNED`` that is; None of none."""
    names = [name for name in PLANNED if chosen.get(name) == "auto"]
    if not names:
        return dict(chosen), None
    if len(names) > 1:
        got, rule = (
            f"'auto', with {argument('batch_size', 'auto')}",
            "left out with batch_size auto, since only one of them limits a batch",
        )
        raise ArgumentError(message("batch_elements", got, rule, "leave one of them out"))
    rest = {name: value for name, value in chosen.items() if name != names[0]}
    return rest | ({"batch_elements": _ANY} if names == ["batch_elements"] else {}), names[0]
