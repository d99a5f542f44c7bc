"""Settings that break a rule are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from raglane.errors import ArgumentError
from raglane.training.settings import CELLS, DEVICES, MISSING, OPTIMIZERS, TASKS, Settings

_BAD: list[tuple[str, Any]] = [
    *((name, value) for name in ("hidden", "layers", "epochs", "batch_size", "embedding") for value in (0, -1)),
    *((name, value) for name in ("threads", "patience") for value in (0, -3)),
    *((name, 2**31) for name in ("hidden", "layers", "epochs", "batch_size", "embedding", "threads", "patience")),
    *(("lr", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
    *(("weight_decay", value) for value in (-0.1, float("nan"), float("inf"))),
    *(("clip", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
    *((name, value) for name in ("dropout", "validation_fraction") for value in (-0.1, 1.0, 2.0, float("nan"))),
    *(("seed", value) for value in (-1, 2**63)),
    ("workers", -1),
    *((name, "other") for name in ("task", "cell", "optimizer", "missing", "device")),
]


@pytest.mark.parametrize(("name", "value"), _BAD)
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: got .*the rule: .*Fix: "):
        Settings(**{name: value})


def test_forecast_runs_forwards_only() -> None:
    with pytest.raises(ArgumentError, match="bidirectional"):
        Settings(task="forecast", bidirectional=True)


@pytest.mark.parametrize(
    ("name", "choices"),
    [("task", TASKS), ("cell", CELLS), ("optimizer", OPTIMIZERS), ("missing", MISSING), ("device", DEVICES)],
)
def test_every_choice_is_accepted_and_kept(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        settings = Settings(**{name: choice})  # type: ignore[arg-type]
        assert getattr(Settings.from_config(settings.to_config()), name) == choice
