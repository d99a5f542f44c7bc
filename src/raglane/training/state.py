"""The state of a training and its files; the learning rate, divergence and curves that follow from
it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane._utils.json import build, read_json, reading, to_json
from raglane._utils.messages import argument, message
from raglane.errors import DivergedError
from raglane.training.checkpoint import check_format, read_tensors, to_safetensors
from raglane.training.settings import Settings
from raglane.training.tasks import Score

FORMAT = "raglane-training"
FORMAT_VERSION = 1
NUMBERS = "training.json"
TENSORS = "training.safetensors"


@dataclass
class Totals:
    """Sums over the batches of an epoch: float64 tensors on the device of the model, to avoid
    synchronisation.
    """

    loss: Tensor | float = 0.0
    metric: Tensor | float = 0.0
    baseline: Tensor | float = 0.0
    count: Tensor | float = 0.0
    elements: Tensor | int = 0
    seconds: float = 0.0

    def add(self, score: Score, elements: Tensor | int) -> None:
        """Add a batch."""
        self.loss = self.loss + score.loss.detach().double()
        self.metric = self.metric + score.metric.detach().double()
        self.baseline = self.baseline + score.baseline.detach().double()
        self.count = self.count + score.count.double()
        self.elements = self.elements + elements

    @property
    def mean_loss(self) -> float:
        """The mean loss, NaN without targets. Synchronises with the device, as do the other
        means.
        """
        return self._mean(self.loss)

    @property
    def mean_metric(self) -> float:
        """The mean metric."""
        return self._mean(self.metric)

    @property
    def mean_baseline(self) -> float:
        """The mean metric of the baseline."""
        return self._mean(self.baseline)

    @property
    def speed(self) -> float:
        """Elements per second."""
        return float(self.elements) / max(self.seconds, 1e-9)

    def _mean(self, total: Tensor | float) -> float:
        count = float(self.count)
        return float(total) / count if count else float("nan")

    def to_config(self) -> dict[str, Any]:
        """Return the sums as Python numbers."""
        sums = {
            name: float(getattr(self, name))
            for name in ("loss", "metric", "baseline", "count", "seconds")
        }
        return {**sums, "elements": int(self.elements)}


@dataclass
class TrainingState:
    """The state of a training, except weights and optimizer."""

    # The number of complete epochs, and of complete batches of the next, with its batch sampler and
    # sums.
    epoch: int = 0
    batch: int = 0
    order: dict[str, int] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    # The epoch (from 1) of the best model, or 0; and the number of epochs since then.
    best_epoch: int = 0
    best_loss: float = 0.0
    waited: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    # The loss of the first batch with targets, before the first step.
    start_loss: float | None = None


class Callback:
    """Receives the progress of a training, e.g. for a progress bar or a log; each method does
    nothing by default.
    """

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        """Called when training starts or resumes at ``state``; an epoch has ``batches`` batches."""

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """Called after a batch of an epoch (both from 1); reading a mean of ``totals`` synchronises
        with the device.
        """

    def epoch_done(self, row: dict[str, float], is_best: bool) -> bool | None:
        """Called after an epoch, with its row of the history; True ends a training of one
        process.
        """

    def close(self) -> None:
        """Called when the training has ended, also by an error."""


def state_files(
    state: TrainingState, optimizer: torch.optim.Optimizer, carried: Any = None
) -> dict[str, bytes]:
    """Return the files that resume a run, in addition to those of the model; none is a pickle."""
    states: tuple[Any, ...] = ()
    if carried is not None:
        states = carried if isinstance(carried, tuple) else (carried,)
    tensors = {f"carried.{index}": tensor for index, tensor in enumerate(states)}
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
        "state": dataclasses.asdict(dataclasses.replace(state, totals=Totals()))
        | {"totals": state.totals.to_config()},
        "optimizer": {"param_groups": content["param_groups"], "numbers": numbers},
    }
    return {NUMBERS: to_json(config), TENSORS: to_safetensors(tensors)}


def load_state(folder: Path) -> tuple[TrainingState, dict[str, Any], tuple[Tensor, ...]]:
    """Read the state, the optimizer's state and the carried states that :func:`state_files`
    wrote.
    """
    state, config = _read_state(folder)
    tensors = read_tensors(folder / TENSORS)
    with reading(folder / NUMBERS):
        groups = config["optimizer"]["param_groups"]
        numbers = config["optimizer"]["numbers"]
        states: dict[int, dict[str, Any]] = {
            int(index): dict(values) for index, values in numbers.items()
        }
        for key in tensors:
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                states.setdefault(int(index), {})[name] = tensors[key]
        carried = sorted(name for name in tensors if name.startswith("carried."))
    return (
        state,
        {"param_groups": groups, "state": states},
        tuple(tensors[name] for name in carried),
    )


def load_progress(folder: Path) -> TrainingState:
    """Read the state of a run with at least one complete epoch, without tensors."""
    state, _ = _read_state(folder)
    with reading(folder / NUMBERS):
        if not state.history:
            raise ValueError("no complete epoch")
    return state


def _read_state(folder: Path) -> tuple[TrainingState, dict[str, Any]]:
    config = read_json(folder / NUMBERS)
    check_format(folder / NUMBERS, config, FORMAT, FORMAT_VERSION)
    with reading(folder / NUMBERS):
        state = build(TrainingState, config["state"], "state")
        # Earlier versions wrote names such as train_MAE.
        state.history[:] = [
            {name.lower(): number for name, number in row.items()} for row in state.history
        ]
        _check_state(state)
    return state, config


def _check_state(state: TrainingState) -> None:
    """Raise a ValueError if the numbers of a state are inconsistent."""
    if min(state.epoch, state.batch, state.best_epoch, state.waited) < 0:
        raise ValueError("a state with a number below 0")
    if state.order and (state.order.get("epoch"), state.order.get("done")) != (
        state.epoch,
        state.batch,
    ):
        raise ValueError("an order at another batch than the state")
    if len(state.history) != state.epoch:
        raise ValueError(f"a history of {len(state.history)} rows and {state.epoch} epochs")
    if state.best_epoch > state.epoch or (state.epoch > 0 and state.best_epoch == 0):
        raise ValueError(f"best_epoch = {state.best_epoch} and {state.epoch} epochs")
    if any(
        row.keys() != state.history[0].keys() or "train_loss" not in row for row in state.history
    ):
        raise ValueError("a history whose rows have different columns")


def check_optimizer(content: Mapping[str, Any], fresh: torch.optim.Optimizer, folder: Path) -> None:
    """Raise if the state of an optimizer does not fit the weights and settings of its run."""
    with reading(folder / NUMBERS):
        groups = content["param_groups"]
        expected = fresh.state_dict()["param_groups"]
        if len(groups) != len(expected):
            raise ValueError("optimizer.param_groups of another number")
        for group, settings in zip(groups, expected, strict=True):
            # Versions of torch have different entries, and JSON turns tuples into lists.
            for name in settings.keys() & (group.keys() | {"params", "lr"}):
                setting = (
                    list(settings[name]) if isinstance(settings[name], tuple) else settings[name]
                )
                if group[name] != setting:
                    raise ValueError(
                        f"optimizer.param_groups with {name} = {group[name]!r} where {setting!r} was set"
                    )
        weights = [weight for group in fresh.param_groups for weight in group["params"]]
        names = {frozenset(values) for values in content["state"].values()}
        if content["state"] and (
            set(content["state"]) != set(range(len(weights))) or len(names) != 1
        ):
            raise ValueError("an optimizer with states of some weights only")
        for index, values in content["state"].items():
            for name, value in values.items():
                if not _fits(value, weights[index]):
                    raise ValueError(f"an optimizer whose {name} does not fit weight {index}")


def _fits(value: Any, weight: Tensor) -> bool:
    """Return True if an entry of an optimizer fits its weight: a number, or a tensor of its shape
    or 0-d.
    """
    if not isinstance(value, Tensor):
        return isinstance(value, int | float | None)
    # Infinity is valid: the square of a large gradient overflows, and Adam then stops to change
    # that weight.
    return (
        value.dtype == weight.dtype
        and value.shape in ((), weight.shape)
        and not bool(value.isnan().any())
    )


def curves_csv(history: Sequence[dict[str, float]]) -> bytes:
    """Return a history as the bytes of a CSV file with a row per epoch."""
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
    return text.getvalue().encode()


# The schedule plateau halves the rate after this many epochs without a lower loss.
_PATIENT = 2


def rate_of(settings: Settings, state: TrainingState, batches: int) -> float:
    """Return the learning rate of the next batch."""
    done = state.epoch + state.batch / max(batches, 1)
    if done < settings.warmup:
        return settings.lr * (done + 1 / max(batches, 1)) / settings.warmup
    if settings.lr_schedule == "cosine":
        share = (done - settings.warmup) / max((settings.epochs or 1) - settings.warmup, 1)
        return settings.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    if settings.lr_schedule == "plateau":
        return math.ldexp(settings.lr, -_plateaus(state))
    return settings.lr


def _plateaus(state: TrainingState) -> int:
    """Return how often the loss has not decreased for ``_PATIENT`` epochs."""
    lowest = math.inf
    waited = 0
    halvings = 0
    for row in state.history:
        loss = row.get("validation_loss", row["train_loss"])
        if loss < lowest:
            lowest = loss
            waited = 0
            continue
        waited += 1
        if waited == _PATIENT:
            waited = 0
            halvings = halvings + 1
    return halvings


# A training diverges if its loss grows by this factor.
_LOST = 1000
# A loss that has grown by this factor gives a warning at the end.
_HIGH = 10


def check_losses(row: Mapping[str, float], state: TrainingState, settings: Settings) -> None:
    """Raise if a loss is not finite, or has grown by the factor ``_LOST``."""
    for key, name in (("train_loss", "training loss"), ("validation_loss", "validation loss")):
        if not math.isfinite(row.get(key, 0.0)):
            raise diverged(f"a {name} of {row[key]}", state, settings)
    loss = row["train_loss"]
    base = _base(state, row)
    # A loss below 1 is never divergence.
    if loss > max(_LOST * base, 1.0):
        raise diverged(
            f"a training loss of {loss:.4g}", state, settings, f", which began at {base:.4g}"
        )


def diverged(
    symptom: str, state: TrainingState, settings: Settings, start: str = ""
) -> DivergedError:
    """Return the error of a training that diverged."""
    symptom = f"{symptom} in epoch {state.epoch + 1}{start}"
    fixes = [f"a smaller {argument('lr')}, e.g. {min(settings.lr / 10, 0.003):.3g}"]
    if not settings.grad_clip:
        fixes.append(f"{argument('grad_clip', 1)}, which limits the gradient")
    if settings.weight_decay > 0:
        fixes.append(f"a smaller {argument('weight_decay')}")
    remark = f"; the best model, of epoch {state.best_epoch}, is kept" if state.best_epoch else ""
    rule = f"small enough that the loss stays finite, and below {_LOST:,} times its first value"
    fix = f"train again with {', or '.join(fixes)}{remark}"
    return DivergedError(message("lr", f"{settings.lr:g}, and {symptom}", rule, fix), symptom)


def warning(state: TrainingState) -> str | None:
    """Return a warning if the final loss is much higher than the first one, else None."""
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
    """Return the loss of the first epoch or, if that is higher, the loss before the first step.

    The latter is at least 1, about the loss of an untrained model, because it is of a single batch.
    """
    first = state.history[0] if state.history else row
    return min(first["train_loss"], max(state.start_loss or 0.0, 1.0))
