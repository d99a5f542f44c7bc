"""The next element."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.errors import DataError, message
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Score, Task, targets_of, values_of

__all__ = ["Forecast"]


class Forecast(Task):
    """Squared error of scaled channels, and the mean absolute error in the data's units.

    Channels beyond those of the data say "was missing"; what was missing is not a target.

    Example:
        >>> fitted = Preprocessor("forecast", ("x",), mean=(0.0,), std=(10.0,))
        >>> task = Forecast(fitted, ModelSettings("forecast"))
        >>> batch = Batch(Ragged([torch.tensor([[1.0]])]), torch.tensor([[4.0]]), torch.tensor([0]))
        >>> score = task.score(Ragged([torch.tensor([[3.0]])]), batch)
        >>> float(score.loss), float(score.metric), float(score.baseline)
        (1.0, 10.0, 30.0)
    """

    metric = "MAE"
    baseline = "persistence"
    options: ClassVar[tuple[str, ...]] = ("horizon",)

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        super().__init__(preprocessor, settings)
        size = len(preprocessor.channels)
        # Without scaling the data's units are those of the loss. In float64: the data's units can be so large that
        # their products are infinite in float32.
        self.mean = torch.tensor(preprocessor.mean or (0.0,) * size, dtype=torch.float64)
        self.std = torch.tensor(preprocessor.std or (1.0,) * size, dtype=torch.float64)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of channels.

        Raises:
            DataError: elements are tokens.
        """
        if preprocessor.is_tokens:
            rule = "a forecast is of numbers"
            raise DataError(message("task", "'forecast' and token sequences", rule, "use classify or tag"))
        return len(preprocessor.channels)

    @property
    def is_per_element(self) -> bool:
        """A forecast goes on from the end of a sequence."""
        return False

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Compare forecasts ``(N, C)`` with the elements that came."""
        forecasts = values_of(output)
        channels = self.std.shape[0]
        targets = targets_of(batch)
        known = targets[:, :channels]
        # All ones where the data has no flags.
        real = 1 - targets[:, channels : 2 * channels] if targets.shape[1] > channels else torch.ones_like(known)
        scale = self.std.to(known.device)
        error = (forecasts - known) * real
        change = (batch.inputs.values[:, :channels] - known) * real
        return Score(
            error.square().sum(),
            (error.detach().abs() * scale).sum(),
            real.sum(),
            (change.abs() * scale).sum(),
        )

    def meter(self, model: Any) -> _Errors:  # noqa: ARG002
        """The mean absolute error, and that of persistence."""
        return _Errors(self)

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:
        """``(B, horizon, C)``, scaled; NaN for an empty sequence."""
        forecasts: Tensor = model.forecast(inputs, horizon)
        return forecasts

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """For each sequence ``horizon`` lists of ``C`` numbers in the data's units; None for an empty sequence."""
        rows = output.double() * self.std + self.mean
        nothing = output.isnan().flatten(1).all(1).tolist()
        return {"prediction": [None if empty else row for row, empty in zip(rows.tolist(), nothing, strict=True)]}


class _Errors:
    """The errors of a forecast, in the data's units."""

    def __init__(self, task: Forecast) -> None:
        self.task = task
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Count a batch in."""
        score = self.task.score(output, batch)
        self.sums += torch.stack([part.double() for part in (score.metric, score.baseline, score.count)]).cpu()

    def measured(self) -> Measured:
        """The two means."""
        model, persistence, count = self.sums.tolist()
        count = count or float("nan")
        return Measured({"MAE": model / count, "persistence_MAE": persistence / count})
