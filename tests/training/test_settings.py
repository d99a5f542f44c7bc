"""Valid and invalid settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raglane._utils.options import options
from raglane.data.order.limit import TOO_LONG as TOO_LONG_OF_DATA
from raglane.data.prepare.missing import MISSING as MISSING_OF_DATA
from raglane.errors import ArgumentError
from raglane.nn.encoder import LAYERS as LAYERS_OF_NN
from raglane.nn.encoder import SequenceEncoder
from raglane.nn.pooling import POOLINGS as POOLINGS_OF_NN
from raglane.tasks import TASKS
from raglane.training.settings import (
    INITIAL_STATES,
    LAYERS,
    MISSING,
    NORMALISED_LAYERS,
    POOLINGS,
    TOO_LONG,
    Settings,
)
from raglane.training.tasks import CLASSES

_CHOICES = {
    name: option.choices
    for name, option in options(Settings).items()
    if option.choices and name != "loss"
}
_SHARES = (
    "dropout",
    "input_dropout",
    "state_dropout",
    "weight_dropout",
    "zoneout",
    "validation_fraction",
)
_COUNTS = (
    "hidden_size num_layers epochs batch_size batch_elements embedding threads patience".split()
)
_REALS = ("lr", "weight_decay", "grad_clip", "activation_penalty", "temporal_penalty")
_BAD: list[tuple[str, Any]] = [
    *((name, value) for name in _COUNTS for value in (0, -1, 2**31)),
    *((name, value) for name in _REALS for value in (-0.1, math.nan, math.inf)),
    ("lr", 0.0),
    *((name, value) for name in _SHARES for value in (-0.1, 1.0, math.nan)),
    *(("seed", value) for value in (-1, 2**63)),
    ("workers", -1),
    *((name, "other") for name in _CHOICES),
]


@pytest.mark.parametrize(("name", "value"), _BAD)
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be .*, got "):
        Settings(**{"task": "language"} | {name: value})


@pytest.mark.parametrize(("name", "choices"), _CHOICES.items())
def test_every_choice_is_accepted_and_kept(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        needed: dict[str, Any] = {"batch_elements": 64} if name == "too_long" else {}
        needed |= {"missing": "elapsed"} if choice == "grud" else {}
        needed |= {"task": "transcribe"} if name == "decoder" else {}
        settings = Settings(**needed | {name: choice})
        assert getattr(Settings.from_config(settings.to_config()), name) == choice


def test_the_names_are_those_of_the_library() -> None:
    assert set(LAYERS) == set(LAYERS_OF_NN)
    assert set(POOLINGS) == {"final", *POOLINGS_OF_NN}
    assert tuple(CLASSES) == tuple(TASKS)
    assert MISSING == MISSING_OF_DATA
    assert TOO_LONG == TOO_LONG_OF_DATA
    layer: Any
    initial_state: Any
    for layer in NORMALISED_LAYERS:
        SequenceEncoder(3, 4, layer, layer_norm=True)
    for initial_state in INITIAL_STATES:
        SequenceEncoder(3, 4, initial_state=initial_state)


@pytest.mark.parametrize(
    "settings",
    [
        {"bidirectional": True, "task": "forecast"},
        {"bptt_steps": 3, "task": "classify"},
        {"bptt_steps": 3, "task": "tag", "bidirectional": True},
        {"tie_weights": True, "task": "classify"},
        {"activation_penalty": 1.0, "task": "tag"},
        {"loss": "mae", "task": "classify"},
        {"quantile": [0.9], "task": "regress"},
        {"layer_norm": True, "cell": "sru"},
        {"pooling": "mean", "task": "tag"},
        {"initial_state": "lengths", "task": "forecast"},
        {"too_long": "drop", "batch_size": 8},
        {"missing": "forward", "cell": "grud"},
        {"cell": "grud", "missing": "elapsed", "task": "language"},
        {"missing": "elapsed", "task": "forecast"},
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(settings))} must be .*, got "):
        Settings(**settings)
