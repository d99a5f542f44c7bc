"""The learning rate of each batch: a function of where a run stands, so that a run that goes on has the same."""

from __future__ import annotations

import math

from raglane.training.settings import Settings
from raglane.training.state import TrainingState

# After so many epochs without a lower loss the rate of the schedule plateau is halved.
_PATIENT = 2


def rate_of(settings: Settings, state: TrainingState, batches: int) -> float:
    """The learning rate of the next batch."""
    done = state.epoch + state.batch / max(batches, 1)
    if done < settings.warmup:
        return settings.lr * (done + 1 / max(batches, 1)) / settings.warmup
    if settings.schedule == "cosine":
        share = (done - settings.warmup) / max(settings.epochs - settings.warmup, 1)
        return settings.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    if settings.schedule == "plateau":
        return math.ldexp(settings.lr, -_plateaus(state))
    return settings.lr


def _plateaus(state: TrainingState) -> int:
    """How often the loss that decides which epoch is best has stood still."""
    lowest, waited, halvings = math.inf, 0, 0
    for row in state.history:
        loss = row.get("validation_loss", row["train_loss"])
        if loss < lowest:
            lowest, waited = loss, 0
            continue
        waited += 1
        if waited == _PATIENT:
            waited, halvings = 0, halvings + 1
    return halvings
