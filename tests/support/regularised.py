"""Regularisation that tests give to layers."""

from __future__ import annotations

from typing import Any

from every_layer import (
    READING,
)

__all__ = ["READ", "SINGLE", "options_of"]

ZONEOUT: dict[str, Any] = {"input_dropout": 0.3, "zoneout": 0.4}


READ: dict[str, Any] = {"state_dropout": 0.3, "weight_dropout": 0.2}


SINGLE: list[dict[str, Any]] = [
    {"input_dropout": 0.4},
    {"state_dropout": 0.4},
    {"weight_dropout": 0.4},
    {"zoneout": 0.4},
    {"weight_dropout": 0.4, "dropout": 0.3},
]


def options_of(name: str, **others: Any) -> dict[str, Any]:
    """All of regularisation that a layer can have."""
    return {**ZONEOUT, **(READ if name in READING else {}), **others}
