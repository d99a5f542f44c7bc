"""The state of a run, with all that it needs to go on; and what follows from it: learning rate, divergence, curves."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from raglane._utils.messages import argument, message
from raglane.errors import DivergedError
from raglane.training.checkpoint import check_format, read_tensors, to_safetensors
from raglane.training.settings import Settings
from raglane.training.stored import build, read_json, reading, to_json
from raglane.training.tasks import Score

FORMAT = "raglane-training"
FORMAT_VERSION = 1
NUMBERS, TENSORS = "training.json", "training.safetensors"


@dataclass
class Totals:
    """Sums over the batches of an epoch.

    They are kept as float64 tensors where the model is, so that a GPU is not waited for at each batch.
    """

    loss: Tensor | float = 0.0
    metric: Tensor | float = 0.0
    baseline: Tensor | float = 0.0
    count: Tensor | float = 0.0
    elements: Tensor | int = 0
    seconds: float = 0.0

    def add(self, score: Score, elements: Tensor | int) -> None:
        """Count a batch in."""
        self.loss = self.loss + score.loss.detach().double()
        self.metric = self.metric + score.metric.detach().double()
        self.baseline = self.baseline + score.baseline.detach().double()
        self.count = self.count + score.count.double()
        self.elements = self.elements + elements

    @property
    def mean_loss(self) -> float:
        """Waits for the device. NaN where nothing was counted."""
        return self._mean(self.loss)

    @property
    def mean_metric(self) -> float:
        """Waits for the device. NaN where nothing was counted."""
        return self._mean(self.metric)

    @property
    def mean_baseline(self) -> float:
        """Waits for the device. NaN where nothing was counted."""
        return self._mean(self.baseline)

    @property
    def speed(self) -> float:
        """Elements per second; waits for the device."""
        # At the least a clock tick, so that a tiny epoch divides by something.
        return float(self.elements) / max(self.seconds, 1e-9)

    def _mean(self, total: Tensor | float) -> float:
        count = float(self.count)
        return float(total) / count if count else float("nan")

    def to_config(self) -> dict[str, Any]:
        """The sums as numbers that JSON keeps exactly."""
        return {name: float(getattr(self, name)) for name in ("loss", "metric", "baseline", "count", "seconds")} | {
            "elements": int(self.elements)
        }


@dataclass
class TrainingState:
    """The numbers of a run that change while it runs."""

    # Complete epochs, and the batches of the next that are done, with the batch sampler and the sums there.
    epoch: int = 0
    batch: int = 0
    order: dict[str, int] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    # The epoch (from 1) of the best model, 0 before the first; and epochs since then.
    best_epoch: int = 0
    best_loss: float = 0.0
    waited: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    # Of the first batch that has targets, before the first step.
    start_loss: float | None = None


class Watcher(Protocol):
    """A progress bar or a log, which follows a run."""

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        """The loop starts, or goes on, at ``state``; an epoch has ``batches`` batches."""

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch of an epoch (both from 1) is done; reading a mean from ``totals`` waits for the device."""

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """An epoch is complete, with this row of the history."""


def state_files(state: TrainingState, optimizer: torch.optim.Optimizer, carried: Any = None) -> dict[str, bytes]:
    """The files that, beside those of the model, continue a run: no pickle among them."""
    states = () if carried is None else carried if isinstance(carried, tuple) else (carried,)
    tensors = {f"carried.{place}": tensor for place, tensor in enumerate(states)}
    numbers: dict[str, dict[str, Any]] = {}
    content = optimizer.state_dict()
    for index, values in content["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "state": dataclasses.asdict(dataclasses.replace(state, totals=Totals())) | {"totals": state.totals.to_config()},
        "optimizer": {"param_groups": content["param_groups"], "numbers": numbers},
    }
    return {NUMBERS: to_json(config), TENSORS: to_safetensors(tensors)}


def load_state(folder: Path) -> tuple[TrainingState, dict[str, Any], tuple[Tensor, ...]]:
    """Read what :func:`state_files` wrote."""
    state, config = _read_state(folder)
    tensors = read_tensors(folder / TENSORS)
    with reading(folder / NUMBERS):
        optimizer = {
            "param_groups": config["optimizer"]["param_groups"],
            "state": _optimizer_state(config["optimizer"]["numbers"], tensors),
        }
        carried = {name: value for name, value in tensors.items() if name.startswith("carried.")}
    return state, optimizer, tuple(carried[name] for name in sorted(carried))


def load_progress(folder: Path) -> TrainingState:
    """Read where a run stands, without what it would need to go on."""
    state, _ = _read_state(folder)
    with reading(folder / NUMBERS):
        if not state.history:
            raise ValueError("no epoch that is complete")
    return state


def _read_state(folder: Path) -> tuple[TrainingState, dict[str, Any]]:
    config = read_json(folder / NUMBERS)
    check_format(folder / NUMBERS, config, FORMAT, FORMAT_VERSION)
    with reading(folder / NUMBERS):
        state = build(TrainingState, config["state"], "state")
        _check_state(state)
    return state, config


def _check_state(state: TrainingState) -> None:
    """Raise a ValueError unless the numbers of a state agree with each other."""
    if min(state.epoch, state.batch, state.best_epoch, state.waited) < 0:
        raise ValueError("a state with a number below 0")
    if state.order and (state.order.get("epoch"), state.order.get("done")) != (state.epoch, state.batch):
        raise ValueError("an order that stands elsewhere than the state")
    if len(state.history) != state.epoch:
        raise ValueError(f"a history of {len(state.history)} rows and {state.epoch} epochs")
    if state.best_epoch > state.epoch or (state.epoch > 0 and state.best_epoch == 0):
        raise ValueError(f"best_epoch = {state.best_epoch} and {state.epoch} epochs")
    if any(row.keys() != state.history[0].keys() or "train_loss" not in row for row in state.history):
        raise ValueError("a history whose rows have not the same columns")


def check_optimizer(content: Mapping[str, Any], fresh: torch.optim.Optimizer, folder: Path) -> None:
    """Refuse the state of an optimizer that does not belong to the weights and settings of its run."""
    with reading(folder / NUMBERS):
        groups, expected = content["param_groups"], fresh.state_dict()["param_groups"]
        if len(groups) != len(expected):
            raise ValueError("optimizer.param_groups of another number")
        for group, settings in zip(groups, expected, strict=True):
            # A later PyTorch may have entries that an earlier one has not, and JSON makes lists of tuples.
            for name in settings.keys() & (group.keys() | {"params", "lr"}):
                wanted = list(settings[name]) if isinstance(settings[name], tuple) else settings[name]
                if group[name] != wanted:
                    raise ValueError(f"optimizer.param_groups with {name} = {group[name]!r} where {wanted!r} was set")
        weights = [weight for group in fresh.param_groups for weight in group["params"]]
        names = {frozenset(values) for values in content["state"].values()}
        if content["state"] and (set(content["state"]) != set(range(len(weights))) or len(names) != 1):
            raise ValueError("the optimizer's state of some weights only")
        for index, values in content["state"].items():
            for name, value in values.items():
                if not _fits(value, weights[index]):
                    raise ValueError(f"an optimizer whose {name} does not fit weight {index}")


def _fits(value: Any, weight: Tensor) -> bool:
    """True where an entry of an optimizer fits its weight: a number, or one for each of the weight's."""
    if not isinstance(value, Tensor):
        return isinstance(value, int | float | None)
    # An infinity can be an optimizer's own, where the square of a gradient was too large: it stops that weight.
    return value.dtype == weight.dtype and value.shape in ((), weight.shape) and not bool(value.isnan().any())


def _optimizer_state(
    numbers: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in numbers.items()}
    for key, value in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            index, _, name = rest.partition(".")
            state.setdefault(int(index), {})[name] = value
    return state


def curves_csv(history: Sequence[dict[str, float]]) -> bytes:
    """The rows of a history as the bytes of a CSV file, one per epoch."""
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
    return text.getvalue().encode()


# After so many epochs without a lower loss the rate of the schedule plateau is halved.
_PATIENT = 2


def rate_of(settings: Settings, state: TrainingState, batches: int) -> float:
    """The learning rate of the next batch."""
    done = state.epoch + state.batch / max(batches, 1)
    if done < settings.warmup:
        return settings.lr * (done + 1 / max(batches, 1)) / settings.warmup
    if settings.lr_schedule == "cosine":
        share = (done - settings.warmup) / max(settings.epochs - settings.warmup, 1)
        return settings.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    if settings.lr_schedule == "plateau":
        return math.ldexp(settings.lr, -_plateaus(state))
    return settings.lr


def _plateaus(state: TrainingState) -> int:
    """The number of times that the watched loss has stood still."""
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
    if not settings.grad_clip:
        fixes.append(f"{argument('grad_clip', 1)}, which limits the gradient")
    if settings.weight_decay > 0:
        fixes.append(f"a smaller {argument('weight_decay')}")
    kept = f"; the best model until then, of epoch {state.best_epoch}, is kept" if state.best_epoch else ""
    rule = f"low enough for the loss to stay finite, and below {_LOST:,} times its first value"
    fix = f"train again with {', or '.join(fixes)}{kept}"
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
    return f"{seen}: a smaller {argument('lr')}, or {argument('grad_clip', 1)}, may help"


def _base(state: TrainingState, row: Mapping[str, float]) -> float:
    """The base of comparison: the loss of the first epoch or, if it ran away itself, that before the first step.

    There 1 is the least, since it is of one batch alone: about the loss of a model that knows nothing, of classes as
    well as of numbers that are scaled.
    """
    first = state.history[0] if state.history else row
    return min(first["train_loss"], max(state.start_loss or 0.0, 1.0))
