"""The optimizers that a training can have."""

from __future__ import annotations

from typing import Any

import torch

from raglane.training.model import SequenceModel
from raglane.training.settings import Settings

__all__ = ["make_optimizer"]


def make_optimizer(model: SequenceModel, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that the settings name, for all weights of a model.

    Args:
        model: on the device it trains on.
        settings: name, learning rate and weight decay.
    """
    parameters, decay = model.parameters(), settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=0.9, weight_decay=decay)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }
    optimizer: torch.optim.Optimizer = kinds[settings.optimizer](parameters, lr=settings.lr, weight_decay=decay)
    return optimizer
