"""What a training run can be told: every choice, its default and its rule, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raglane.errors import ArgumentError, message, quote
from raglane.training.stored import build

__all__ = [
    "CELLS",
    "DEVICES",
    "INITIAL_STATES",
    "MISSING",
    "NORMALISED_CELLS",
    "OPTIMIZERS",
    "POOLINGS",
    "TASKS",
    "Settings",
]

TASKS = ("classify", "tag", "forecast")
# The names in raglane.nn, which is not imported here: that would import torch.
CELLS = ("lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm", "peephole_lstm", "coupled_lstm")
NORMALISED_CELLS = ("lstm", "gru")
POOLINGS = ("last", "first", "mean", "max", "logsumexp", "attention")
INITIAL_STATES = ("zeros", "learned", "lengths")
OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop")
MISSING = ("error", "zero", "forward")
DEVICES = ("auto", "cpu", "cuda")

# Whole numbers from 1; what is beyond the largest is a slip of the finger, and PyTorch's sizes end at 2**63 - 1.
_COUNTS = ("hidden", "layers", "epochs", "batch_size", "embedding", "patience", "threads")
_LARGEST = 2**31 - 1
# Weights have 32 bits, and PyTorch stops at a number that they cannot hold.
_HIGHEST = 3.4e38
_WITHIN = "and at most 3.4e38, where numbers of 32 bits end"
_SHARES = ("dropout", "input_dropout", "state_dropout", "weight_dropout", "zoneout")
_CHOICES = {
    "task": TASKS,
    "cell": CELLS,
    "pooling": POOLINGS,
    "initial_state": INITIAL_STATES,
    "optimizer": OPTIMIZERS,
    "missing": MISSING,
    "device": DEVICES,
}


@dataclass(frozen=True)
class Settings:
    """The choices of one training run.

    Args:
        task: ``classify`` (one label a sequence), ``tag`` (one an element) or ``forecast`` (the next element).
        cell: one of ``CELLS``.
        hidden: units of a layer and direction.
        layers: layers on top of each other.
        bidirectional: also run from the end to the start; not for ``forecast``, which would see its target.
        layer_norm: normalise inside the recurrence of an ``lstm`` or a ``gru``.
        initial_state: ``zeros``, ``learned``, or a learned function of ``lengths``.
        pooling: how the elements of a sequence become one vector, for ``classify``: one of ``POOLINGS``.
        dropout: share of units that is zeroed between layers and before the head while training.
        input_dropout, state_dropout, weight_dropout, zoneout: regularisation inside the recurrence while training; see
            :class:`raglane.nn.recurrent.regularisation.Regularisation`.
        embedding: size of a token's embedding; for token sequences only.
        missing: what to do with NaN and infinity in the features: ``error``, ``zero`` or ``forward``.
        epochs: passes over the training part.
        batch_size: sequences of a batch.
        lr: learning rate.
        optimizer: ``adam``, ``adamw``, ``sgd`` (momentum 0.9) or ``rmsprop``.
        weight_decay: of the optimizer.
        clip: largest norm of the gradient of all weights together; None for no limit.
        patience: stop after so many epochs without a lower validation loss; None to run them all.
        validation_fraction: share of the training sequences that is held out when no validation data is given.
        bucket: batches of similar lengths.
        seed: of weights, order, dropout and the held-out part.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: of the CPU; None for PyTorch's own choice.
        workers: processes that prepare batches; 0 prepares them in the training process.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> Settings(cell="lstm", hidden=100).hidden
        100
        >>> Settings(hidden=0)
        Traceback (most recent call last):
        raglane.errors.ArgumentError: hidden: got 0; the rule: at least 1. Fix: pass a whole number above 0.
    """

    task: str = "classify"
    cell: str = "gru"
    hidden: int = 64
    layers: int = 1
    bidirectional: bool = False
    layer_norm: bool = False
    initial_state: str = "zeros"
    pooling: str = "last"
    dropout: float = 0.0
    input_dropout: float = 0.0
    state_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float = 0.0
    embedding: int = 32
    missing: str = "error"
    epochs: int = 30
    batch_size: int = 32
    lr: float = 0.003
    optimizer: str = "adam"
    weight_decay: float = 0.0
    clip: float | None = None
    patience: int | None = None
    validation_fraction: float = 0.1
    bucket: bool = False
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ArgumentError(message(name, quote(value), "one of " + ", ".join(choices), f"pass {choices[0]}"))
        for name in _COUNTS:
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "at least 1", "pass a whole number above 0")
            self._check(name, value is None or value <= _LARGEST, "at most 2**31 - 1", "pass a smaller one")
        self._check("lr", 0 < self.lr <= _HIGHEST, f"a number above 0, {_WITHIN}", "pass 0.003, say")
        self._check(
            "weight_decay", 0 <= self.weight_decay <= _HIGHEST, f"a number of at least 0, {_WITHIN}", "pass 0.01, say"
        )
        self._check(
            "clip",
            self.clip is None or 0 < self.clip <= _HIGHEST,
            f"a number above 0, {_WITHIN}",
            "pass 1.0, say, or leave it out",
        )
        for name in _SHARES:
            self._check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1", "pass 0.2, say")
        self._check("validation_fraction", 0 <= self.validation_fraction < 1, "at least 0 and below 1", "pass 0.1, say")
        self._check("seed", 0 <= self.seed < 2**63, "a whole number from 0 to 2**63 - 1", "pass 0, say")
        self._check("workers", self.workers >= 0, "at least 0", "pass 0, or the number of processes")
        self._check(
            "bidirectional",
            not (self.bidirectional and self.task == "forecast"),
            "a forecast runs forwards only; the backward direction would see the element it has to predict",
            "leave it out for the task forecast",
        )
        self._check(
            "layer_norm",
            not self.layer_norm or self.cell in NORMALISED_CELLS,
            f"the cells {' and '.join(NORMALISED_CELLS)} can be normalised, and this is {self.cell}",
            "choose another cell, or leave it out",
        )
        self._check(
            "pooling",
            self.pooling == "last" or self.task == "classify",
            f"the task {self.task} has an answer for each element: there is nothing to pool",
            "leave it out",
        )
        self._check(
            "initial_state",
            not (self.initial_state == "lengths" and self.task == "forecast"),
            "a forecast must not know how long its sequence will be",
            "pass learned or zeros",
        )

    def _check(self, name: str, holds: bool, rule: str, fix: str) -> None:
        if not holds:
            raise ArgumentError(message(name, quote(getattr(self, name)), rule, fix))

    def to_config(self) -> dict[str, Any]:
        """The settings as a dictionary that JSON can hold.

        Example:
            >>> Settings(seed=3).to_config()["seed"]
            3
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """The settings that :meth:`to_config` wrote.

        Example:
            >>> Settings.from_config(Settings(seed=3).to_config()) == Settings(seed=3)
            True

        Raises:
            ValueError: an entry is missing, unknown or of another type.
            ArgumentError: a value breaks its rule.
        """
        return build(cls, config, "settings")
