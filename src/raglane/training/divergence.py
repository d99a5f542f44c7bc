"""When a training has run away: what its losses say of it, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raglane.errors import DivergedError, argument, message
from raglane.training.settings import Settings
from raglane.training.state import TrainingState

# A loss that grows to this many times its first value ends a run, or is worth a warning at its end.
_LOST, _HIGH = 1000, 10


def check_losses(row: Mapping[str, float], state: TrainingState, settings: Settings) -> None:
    """Refuse to go on with a run whose loss is not finite, or has grown out of all proportion."""
    for key, name in (("train_loss", "training loss"), ("validation_loss", "validation loss")):
        if not math.isfinite(row.get(key, 0.0)):
            raise diverged(f"a {name} of {row[key]}", state, settings)
    loss, base = row["train_loss"], _base(state, row)
    # Below 1 no loss is out of proportion, whatever it began with.
    if loss > max(_LOST * base, 1.0):
        raise diverged(f"a training loss of {loss:.4g}", state, settings, f", which began at {base:.4g}")


def diverged(what: str, state: TrainingState, settings: Settings, beside: str = "") -> DivergedError:
    """The error of a run that has run away."""
    what = f"{what} in epoch {state.epoch + 1}{beside}"
    fixes = [f"a smaller {argument('lr')}, {min(settings.lr / 10, 0.003):.3g} say"]
    if not settings.clip:
        fixes.append(f"{argument('clip', 1)}, which limits the gradient")
    if settings.weight_decay > 0:
        fixes.append(f"a smaller {argument('weight_decay')}")
    kept = f"; the best model until then, of epoch {state.best_epoch}, is kept" if state.best_epoch else ""
    rule = f"the loss must stay finite, and below {_LOST:,} times what it began with"
    fix = f"train anew with {', or '.join(fixes)}{kept}"
    return DivergedError(message("lr", f"{settings.lr:g}, and {what}", rule, fix), what)


def warning(state: TrainingState) -> str | None:
    """A warning for a run that has not run away, but has not come back to where it began either; else None."""
    last = state.history[-1]
    base = _base(state, last)
    if last["train_loss"] > max(_HIGH * base, 1.0):
        seen = f"the training loss ends at {last['train_loss']:.4g} and began at {base:.4g}"
    elif state.best_loss > max(_LOST * base, 1.0):
        seen = f"the validation loss is {state.best_loss:.4g} at its best, and the training loss began at {base:.4g}"
    else:
        return None
    return f"{seen}: a smaller {argument('lr')}, or {argument('clip', 1)}, may help"


def _base(state: TrainingState, row: Mapping[str, float]) -> float:
    """What losses are compared with: that of the first epoch or, should it have run away itself, before the first step.

    There 1 is the least, since it is of one batch alone: about the loss of a model that knows nothing, of classes as
    well as of numbers that are scaled.
    """
    first = state.history[0] if state.history else row
    return min(first["train_loss"], max(state.start_loss or 0.0, 1.0))
