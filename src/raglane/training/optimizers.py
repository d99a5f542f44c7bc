"""The optimizers that a training can have."""

from __future__ import annotations

import inspect

import torch
from torch import optim

from raglane.training.model import SequenceModel
from raglane.training.settings import Settings

_KINDS = {"adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSprop, "sgd": optim.SGD}
# Methods that PyTorch keeps from torch.compile, which nobody calls here: to do so it imports all of torch._dynamo.
_KEPT = ("add_param_group", "load_state_dict", "state_dict", "step")


def make_optimizer(model: SequenceModel, settings: Settings) -> optim.Optimizer:
    """The optimizer that the settings name, for all weights of a model."""
    kind = _KINDS[settings.optimizer]
    plain = type(kind.__name__, (kind,), {name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in _KEPT})
    more = {"momentum": 0.9} if settings.optimizer == "sgd" else {}
    optimizer: optim.Optimizer = plain(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **more)
    return optimizer
