"""A number, or several, per sequence or per element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Score, Task, targets_of, values_of

# Pairs of true and predicted numbers that a picture shows.
_POINTS = 2000


def loss_of_errors(errors: Tensor, name: str, quantile: float = 0.5) -> Tensor:
    """The loss of each error."""
    if name == "mse":
        return errors.square()
    sizes = errors.abs()
    if name == "huber":
        return torch.where(sizes <= 1, 0.5 * errors.square(), sizes - 0.5)
    if name == "quantile":
        return torch.maximum((1 - quantile) * errors, -quantile * errors)
    return sizes


class Regress(Task):
    """Errors of scaled numbers, and the mean absolute error in the data's units."""

    metric = "MAE"
    baseline = "mean"

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        super().__init__(preprocessor, settings)
        self.mean = torch.tensor(preprocessor.target_mean, dtype=torch.float64)
        self.std = torch.tensor(preprocessor.target_std, dtype=torch.float64)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of targets."""
        return len(preprocessor.target_names)

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Compare numbers ``(M, T)`` with those of the batch; the baseline is the mean of the training part."""
        targets = targets_of(batch)
        errors, scale = values_of(output) - targets, self.std.to(targets.device)
        return Score(
            loss_of_errors(errors, self.settings.loss_name, self.settings.quantile).sum(),
            (errors.detach().abs() * scale).sum(),
            torch.as_tensor(targets.numel()),
            (targets.abs() * scale).sum(),
        )

    def meter(self, model: Any, records: Records | Dataset) -> _Errors:  # noqa: ARG002
        """R2, errors, and those of the mean of the training part."""
        return _Errors(self)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """For each row a number in the data's units, or a list of them."""
        rows = output.double() * self.std + self.mean
        return {"prediction": (rows[:, 0] if rows.shape[1] == 1 else rows).tolist()}


class _Errors:
    """Sums of errors, per number to learn, in the data's units."""

    def __init__(self, task: Regress) -> None:
        self.task = task
        self.pairs: list[Tensor] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        both = torch.stack([targets_of(batch), output]).cpu().double()
        self.pairs.append(both * self.task.std + self.task.mean)

    def measured(self) -> Measured:
        """Means over the numbers to learn, and a row for each where there are several."""
        names = self.task.preprocessor.target_names
        pairs = torch.cat(self.pairs, dim=1) if self.pairs else torch.zeros(2, 0, len(names), dtype=torch.float64)
        targets, answers = pairs
        error = answers - targets
        spread = (targets - targets.mean(0)).square().sum(0)
        # Of numbers that are all the same nothing is explained.
        explained = torch.where(spread > 0, 1 - error.square().sum(0) / spread, torch.nan)
        parts = {
            "R2": explained,
            "MAE": error.abs().mean(0),
            "RMSE": error.square().mean(0).sqrt(),
            "mean_MAE": (targets - self.task.mean).abs().mean(0),
        }
        if self.task.settings.loss_name == "quantile":
            parts["share_below"] = (targets <= answers).double().mean(0)
        numbers = {name: float(part.mean()) for name, part in parts.items()}
        table = [
            {"number": name, **{key: float(part[place]) for key, part in parts.items()}}
            for place, name in enumerate(names)
        ]
        step = max(1, -(-targets.numel() // _POINTS))
        points = pairs.flatten(1)[:, ::step].T.tolist()
        return Measured(
            numbers, table=tuple(table) if len(names) > 1 else (), points=tuple((true, told) for true, told in points)
        )
