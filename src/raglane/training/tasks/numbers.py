"""Numbers: one or several per sequence or per element, and the next element."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.messages import argument, message, quote, quote_all
from raglane.data.dataset import Dataset
from raglane.data.preprocess import Preprocessor
from raglane.errors import DataError
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Meter, Score, Task, targets_of, values_of

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

    def meter(self, model: Any, records: Dataset) -> _Errors:  # noqa: ARG002
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


class Forecast(Task):
    """Errors of scaled channels, and the mean absolute error in the data's units; or binary cross-entropy, in nats.

    Channels beyond those of the data say "was missing"; what was missing is not a target.
    """

    metric = "MAE"
    baseline = "persistence"
    options: ClassVar[tuple[str, ...]] = ("horizon",)

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        super().__init__(preprocessor, settings)
        self.is_binary = settings.loss_name == "bce"
        size = len(preprocessor.channels)
        # Without scaling the data's units are those of the loss. In float64: the data's units can be so large that
        # their products are infinite in float32.
        self.mean = torch.tensor(preprocessor.mean or (0.0,) * size, dtype=torch.float64)
        self.std = torch.tensor(preprocessor.std or (1.0,) * size, dtype=torch.float64)

    @classmethod
    def terms(cls, settings: ModelSettings) -> tuple[str, str | None]:
        """Nats per frame for binary channels; what is simpler is measured afterwards, of the whole data."""
        return ("nats", None) if settings.loss_name == "bce" else ("MAE", "persistence")

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of channels."""
        if preprocessor.is_tokens:
            rule = "classify or tag for token sequences, since a forecast predicts numbers"
            raise DataError(message("task", "'forecast'", rule, "use classify or tag"))
        return len(preprocessor.channels)

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Compare forecasts ``(N, C)``, or logits of a 1, with the elements that came."""
        forecasts = values_of(output)
        known, real = self.parts(targets_of(batch))
        if self.is_binary:
            losses = F.binary_cross_entropy_with_logits(forecasts, known, reduction="none") * real
            frames = self.std.shape[0]
            return Score(losses.sum(), losses.detach().double().sum() * frames, real.sum(), torch.zeros(()))
        scale = self.std.to(known.device)
        error = (forecasts - known) * real
        change = (self.parts(batch.inputs.values)[0] - known) * real
        return Score(
            (loss_of_errors(error, self.settings.loss_name) * real).sum(),
            (error.detach().abs() * scale).sum(),
            real.sum(),
            (change.abs() * scale).sum(),
        )

    def parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The channels of elements ``(N, C or more)``, and for each number 1, or 0 where it was missing."""
        channels = self.std.shape[0]
        known = values[..., :channels]
        # All ones where the data has no flags. Behind them stands what is no target.
        if self.preprocessor.missing == "error":
            return known, torch.ones_like(known)
        return known, 1 - values[..., channels : 2 * channels]

    def meter(self, model: Any, records: Dataset) -> Meter:  # noqa: ARG002
        """The errors, and those of simple rules."""
        return _Nats(self) if self.is_binary else _ForecastErrors(self)

    def check(self, records: Dataset) -> None:
        """Raise a DataError where binary cross-entropy cannot be taken: of numbers that are neither 0 nor 1."""
        known = records.statistics.channels if self.is_binary else {}
        for name in self.preprocessor.channels if self.is_binary else ():
            if not known[name].is_binary:
                got = f"numbers between {known[name].low:g} and {known[name].high:g} in the channel {quote(name)}"
                rule = "data with channels of 0 or 1, for binary cross-entropy"
                fix = f"correct them, or train with {argument('loss', 'mse')}"
                raise DataError(message(str(records.source), got, rule, fix))

    def ahead(self, model: Any, batches: Iterable[Ragged], horizon: int) -> tuple[dict[str, Any], ...]:
        """A row per step: the error of the forecast, and of telling the last known element, and the mean, again."""
        sums = torch.zeros(4, horizon, dtype=torch.float64)
        for batch in batches:
            sequences = [sequence for sequence in batch if len(sequence) > horizon]
            if not sequences:
                continue
            heads = Ragged([sequence[:-horizon] for sequence in sequences])
            known, real = self.parts(torch.stack([sequence[-horizon:] for sequence in sequences]).cpu())
            last = self.parts(heads.last())[0].cpu().unsqueeze(1)
            scale = self.std * real
            told = self.answer(model, heads, horizon).cpu()
            rules: tuple[Any, ...] = (told, last, 0.0 if not self.is_binary else 0.5)
            for place, answer in enumerate(rules):
                sums[place] += ((answer - known).abs() * scale).sum((0, 2))
            sums[3] += real.sum((0, 2))
        if not sums[3].any():
            rule = "less than the length of a sequence, of which the last elements are held out"
            raise DataError(message("horizon", f"{horizon}", rule, "pass a smaller one, or longer sequences"))
        names = ("MAE", "persistence_MAE", "even_MAE" if self.is_binary else "mean_MAE")
        means = (sums[:3] / sums[3]).T.tolist()
        return tuple({"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(means, start=1))

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:
        """``(B, horizon, C)``, scaled; NaN for an empty sequence."""
        fed_back = [encoder.name for encoder in self.preprocessor.features if not encoder.per_sequence]
        if horizon > 1 and fed_back:
            got = f"{horizon}, and the features {quote_all(fed_back)}"
            rule = "1 with features of elements, which are unknown for future elements"
            raise DataError(message("horizon", got, rule, "pass 1, or train without these features"))
        forecasts: Tensor = model.forecast(inputs, horizon, kept=self.preprocessor.features_size)
        return forecasts

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """For each sequence ``horizon`` lists of ``C`` numbers in the data's units, or of probabilities of a 1.

        It is None for an empty sequence.
        """
        rows = output.double() if self.is_binary else output.double() * self.std + self.mean
        nothing = output.isnan().flatten(1).all(1).tolist()
        return {"prediction": [None if empty else row for row, empty in zip(rows.tolist(), nothing, strict=True)]}


class _ForecastErrors:
    """The errors of a forecast, of the element before, and of the mean of the training part, in the data's units."""

    def __init__(self, task: Forecast) -> None:
        self.task = task
        self.sums = torch.zeros(4, dtype=torch.float64)

    def add(self, output: Tensor, batch: Batch) -> None:
        score = self.task.score(output, batch)
        known, real = self.task.parts(targets_of(batch))
        # Scaled, the mean is 0; without a scale the data's own mean is not known.
        mean = (known.abs() * real * self.task.std.to(known.device)).sum()
        parts = (score.metric, score.baseline, mean, score.count)
        self.sums += torch.stack([part.double() for part in parts]).cpu()

    def measured(self) -> Measured:
        model, persistence, mean, count = self.sums.tolist()
        count = count or float("nan")
        return Measured({"MAE": model / count, "persistence_MAE": persistence / count, "mean_MAE": mean / count})


class _Nats:
    """The cross-entropy of a frame, and of the two simplest rules at their best.

    The rules know the frequencies of this very data: how often each channel is 1, and how often after a 0 and after a
    1. No such rule from other data can do better.
    """

    def __init__(self, task: Forecast) -> None:
        self.task = task
        self.loss = self.count = 0.0
        # By what was before, 0 or 1, and by what came: how often, per channel.
        self.counts = torch.zeros(2, 2, task.std.shape[0], dtype=torch.float64)

    def add(self, output: Tensor, batch: Batch) -> None:
        score = self.task.score(output, batch)
        self.loss, self.count = self.loss + float(score.loss), self.count + float(score.count)
        known, real = self.task.parts(targets_of(batch))
        before = self.task.parts(batch.inputs.values)[0]
        for old, new in product((0, 1), repeat=2):
            self.counts[old, new] += ((before == old) * (known == new) * real).sum(0).double().cpu()

    def measured(self) -> Measured:
        frames = self.count / self.task.std.shape[0] or float("nan")
        independent, persistent = _entropy(self.counts.sum(0)), _entropy(self.counts[0]) + _entropy(self.counts[1])
        nats = {"nats": self.loss, "independent_nats": independent, "persistence_nats": persistent}
        return Measured({name: total / frames for name, total in nats.items()})


def _entropy(counts: Tensor) -> float:
    """The cross-entropy of outcomes ``(2, C)`` that occur so often, told by their own frequencies; the sum, in nats."""
    return float(-torch.special.xlogy(counts, counts / counts.sum(0).clamp(min=1)).sum())
