"""Settings that break a rule are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from raglane.data.missing import MISSING as MISSING_OF_DATA
from raglane.data.order.limit import TOO_LONG as TOO_LONG_OF_DATA
from raglane.data.records import TASKS as TASKS_OF_DATA
from raglane.errors import ArgumentError
from raglane.nn.encoder import LAYERS as LAYERS_OF_NN
from raglane.nn.encoder import SequenceEncoder
from raglane.nn.pooling import POOLINGS as POOLINGS_OF_NN
from raglane.training.settings import (
    CLASS_WEIGHTS,
    DEVICES,
    INITIAL_STATES,
    LAYERS,
    MISSING,
    NORMALISED_LAYERS,
    OPTIMIZERS,
    POOLINGS,
    SCHEDULES,
    TASKS,
    TOO_LONG,
    Settings,
)

_CHOICES: dict[str, tuple[str, ...]] = {
    "task": TASKS,
    "cell": LAYERS,
    "pooling": POOLINGS,
    "initial_state": INITIAL_STATES,
    "optimizer": OPTIMIZERS,
    "lr_schedule": SCHEDULES,
    "class_weights": CLASS_WEIGHTS,
    "missing": MISSING,
    "device": DEVICES,
    "too_long": TOO_LONG,
}
_SHARES = ("dropout", "input_dropout", "state_dropout", "weight_dropout", "zoneout", "validation_fraction")
_BAD: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("hidden_size", "num_layers", "epochs", "batch_size", "embedding")
        for value in (0, -1)
    ),
    *(("batch_elements", value) for value in (0, -1, 2**31)),
    *((name, value) for name in ("threads", "patience") for value in (0, -3)),
    *(
        (name, 2**31)
        for name in ("hidden_size", "num_layers", "epochs", "batch_size", "embedding", "threads", "patience")
    ),
    *(("lr", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
    *(("weight_decay", value) for value in (-0.1, float("nan"), float("inf"))),
    *(("grad_clip", value) for value in (-1.0, float("nan"), float("inf"))),
    *((name, value) for name in _SHARES for value in (-0.1, 1.0, 2.0, float("nan"))),
    *(("seed", value) for value in (-1, 2**63)),
    ("workers", -1),
    *((name, "other") for name in _CHOICES),
]


@pytest.mark.parametrize(("name", "value"), _BAD)
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be .*, got . "):
        Settings(**{name: value})


def test_forecast_runs_forwards_only() -> None:
    with pytest.raises(ArgumentError, match="bidirectional"):
        Settings(task="forecast", bidirectional=True)


@pytest.mark.parametrize(("name", "choices"), _CHOICES.items())
def test_every_choice_is_accepted_and_kept(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        needed: dict[str, Any] = {"batch_elements": 64} if name == "too_long" else {}
        needed |= {"missing": "elapsed"} if choice == "grud" else {}
        settings = Settings(**needed | {name: choice})
        assert getattr(Settings.from_config(settings.to_config()), name) == choice


def test_the_names_are_those_of_the_library() -> None:
    assert set(LAYERS) == set(LAYERS_OF_NN)
    assert set(POOLINGS) == {"summary", *POOLINGS_OF_NN}
    assert tuple(TASKS_OF_DATA) == TASKS
    assert MISSING == MISSING_OF_DATA
    assert TOO_LONG == TOO_LONG_OF_DATA
    for layer in NORMALISED_LAYERS:
        SequenceEncoder(3, 4, layer, layer_norm=True)
    for initial_state in INITIAL_STATES:
        SequenceEncoder(3, 4, initial_state=initial_state)


@pytest.mark.parametrize(
    "given",
    [
        {"layer_norm": True, "cell": "sru"},
        {"pooling": "mean", "task": "tag"},
        {"initial_state": "lengths", "task": "forecast"},
        {"too_long": "drop", "batch_size": 8},
        {"missing": "forward", "cell": "grud"},
        {"cell": "grud", "missing": "elapsed", "task": "language"},
        {"missing": "elapsed", "task": "forecast"},
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(given))} must be .*, got . "):
        Settings(**given)
