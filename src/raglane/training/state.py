"""Where a training run stands: everything that lets it go on as if it had never stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane.training.checkpoint import check_format, read_tensors, to_safetensors
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

    # Complete epochs, and batches of the next one that are done, with the state of the batch sampler and the sums there.
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
    config = read_json(folder / NUMBERS)
    check_format(folder / NUMBERS, config, FORMAT, FORMAT_VERSION)
    tensors = read_tensors(folder / TENSORS)
    with reading(folder / NUMBERS):
        state = build(TrainingState, config["state"], "state")
        _check_state(state)
        optimizer = {
            "param_groups": config["optimizer"]["param_groups"],
            "state": _optimizer_state(config["optimizer"]["numbers"], tensors),
        }
        carried = {name: value for name, value in tensors.items() if name.startswith("carried.")}
    return state, optimizer, tuple(carried[name] for name in sorted(carried))


def load_progress(folder: Path) -> TrainingState:
    """Read where a run stands, without what it would need to go on."""
    config = read_json(folder / NUMBERS)
    check_format(folder / NUMBERS, config, FORMAT, FORMAT_VERSION)
    with reading(folder / NUMBERS):
        state = build(TrainingState, config["state"], "state")
        _check_state(state)
        if not state.history:
            raise ValueError("no epoch that is complete")
    return state


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
    """Whether what an optimizer keeps of a weight can be its own: a number, or one for each of the weight's."""
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
