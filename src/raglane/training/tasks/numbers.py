"""Regression and forecasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.messages import argument, quote, quote_all
from raglane.data.dataset import Dataset
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import DataError
from raglane.ragged import Ragged
from raglane.training.batches import Batch, targets_of
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Meter, Score, Task, values_of
from raglane.training.tasks.season import season_of

# The maximum number of points of a picture of true and predicted numbers.
_POINTS = 2000


def by_quantile(output: Tensor, settings: ModelSettings) -> Tensor:
    """Return outputs ``(..., Q * C)`` as ``(..., Q, C)``, for Q quantiles."""
    count = len(settings.quantiles)
    return output.reshape(*output.shape[:-1], count, output.shape[-1] // count)


def mean_loss(errors: Tensor, settings: ModelSettings) -> Tensor:
    """Return the losses of errors ``(..., Q, C)``, as means over the quantiles, ``(..., C)``."""
    quantiles = torch.tensor(
        settings.quantiles, dtype=errors.dtype, device=errors.device
    ).unsqueeze(1)
    return loss_of_errors(errors, settings.loss_name, quantiles).mean(-2)


def loss_of_errors(errors: Tensor, name: str, quantile: float | Tensor = 0.5) -> Tensor:
    """Return the loss of each error (prediction - target)."""
    if name == "mse":
        return errors.square()
    sizes = errors.abs()
    if name == "huber":
        return torch.where(sizes <= 1, 0.5 * errors.square(), sizes - 0.5)
    if name == "quantile":
        return torch.maximum((1 - quantile) * errors, -quantile * errors)
    return sizes


class Regress(Task):
    """Numbers: a loss of scaled errors, and the mean absolute error in the units of the data."""

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        super().__init__(preprocessor, settings)
        self.mean = torch.tensor(preprocessor.target_mean, dtype=torch.float64)
        self.std = torch.tensor(preprocessor.target_std, dtype=torch.float64)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of targets."""
        return len(preprocessor.target_names)

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Return loss and error of numbers ``(M, T)``; the baseline is the mean of the training
        data.
        """
        targets = targets_of(batch)
        errors = by_quantile(values_of(output), self.settings) - targets.unsqueeze(1)
        scale = self.std.to(targets.device)
        return Score(
            mean_loss(errors, self.settings).sum(),
            (errors[:, self.settings.middle].detach().abs() * scale).sum(),
            torch.as_tensor(targets.numel()),
            (targets.abs() * scale).sum(),
        )

    def meter(self, model: Any, records: Dataset) -> _Residuals:  # noqa: ARG002
        """Return a meter of R2 and errors; the baseline is the mean of the training data."""
        return _Residuals(self)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """Return a number, or a list of numbers, per row and quantile, in the units of the data."""
        rows = by_quantile(output, self.settings).double() * self.std + self.mean
        return named(rows[..., 0] if rows.shape[2] == 1 else rows, self.settings)


def named(rows: Tensor, settings: ModelSettings) -> dict[str, list[Any]]:
    """Return the predictions ``(B, Q, ...)`` of the middle quantile and, if there are several, of
    each, as columns.
    """
    columns = {"prediction": rows[:, settings.middle].tolist()}
    if len(settings.quantiles) > 1:
        columns |= {
            f"q{share:g}": rows[:, column].tolist()
            for column, share in enumerate(settings.quantiles)
        }
    return columns


class _Residuals:
    """Collects pairs of targets and predictions in the units of the data."""

    def __init__(self, task: Regress) -> None:
        self.task = task
        self.pairs: list[Tensor] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        answers = by_quantile(output, self.task.settings).unbind(1)
        self.pairs.append(
            torch.stack([targets_of(batch), *answers]).cpu().double() * self.task.std
            + self.task.mean
        )

    def measured(self) -> Measured:
        """Return means over the targets and, for several targets, a row for each."""
        names = self.task.preprocessor.target_names
        shares = self.task.settings.quantiles
        none = torch.zeros(1 + len(shares), 0, len(names), dtype=torch.float64)
        targets, *each = torch.cat(self.pairs, dim=1) if self.pairs else none
        answers = each[self.task.settings.middle]
        pairs = torch.stack([targets, answers])
        error = answers - targets
        spread = (targets - targets.mean(0)).square().sum(0)
        # R2 is not defined for constant targets.
        explained = torch.where(spread > 0, 1 - error.square().sum(0) / spread, torch.nan)
        errors = {
            "r2": explained,
            "mae": error.abs().mean(0),
            "rmse": error.square().mean(0).sqrt(),
            "mean_mae": (targets - self.task.mean).abs().mean(0),
        }
        if self.task.settings.loss_name == "quantile":
            for share, below in zip(shares, each, strict=True):
                name = f"share_below_q{share:g}" if len(shares) > 1 else "share_below"
                errors[name] = (targets <= below).double().mean(0)
        numbers = {name: float(column_errors.mean()) for name, column_errors in errors.items()}
        table = [
            {
                "number": name,
                **{key: float(column_errors[column]) for key, column_errors in errors.items()},
            }
            for column, name in enumerate(names)
        ]
        step = max(1, -(-targets.numel() // _POINTS))
        points = tuple(
            (true, predicted) for true, predicted in pairs.flatten(1)[:, ::step].T.tolist()
        )
        return Measured(numbers, table=tuple(table) if len(names) > 1 else (), points=points)


class Forecast(Task):
    """The next element: a loss of scaled errors, or binary cross-entropy in nats per step.

    With ``missing``, the channels of the data are followed by their was-missing flags; missing
    values are not targets.
    """

    options: ClassVar[tuple[str, ...]] = ("horizon",)
    # The season of the longest sequence of the last meter; 0 without one.
    season = 0

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        super().__init__(preprocessor, settings)
        self.is_binary = settings.loss_name == "bce"
        size = len(preprocessor.channels)
        # float64, because products of large numbers in the units of the data can overflow in
        # float32.
        self.mean = torch.tensor(preprocessor.mean or (0.0,) * size, dtype=torch.float64)
        self.std = torch.tensor(preprocessor.std or (1.0,) * size, dtype=torch.float64)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of channels."""
        if preprocessor.is_tokens:
            rule = "a task for tokens"
            raise DataError(
                "task", "'forecast' with token sequences", rule, "use language, classify or tag"
            )
        return len(preprocessor.channels)

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Return loss and error of forecasts or logits ``(N, C)``; the baseline is the previous
        element.
        """
        forecasts = values_of(output)
        targets, real = self.parts(targets_of(batch))
        if self.is_binary:
            losses = F.binary_cross_entropy_with_logits(forecasts, targets, reduction="none") * real
            channels = self.std.shape[0]
            return Score(
                losses.sum(), losses.detach().double().sum() * channels, real.sum(), torch.zeros(())
            )
        scale = self.std.to(targets.device)
        errors = (by_quantile(forecasts, self.settings) - targets.unsqueeze(1)) * real.unsqueeze(1)
        error = errors[:, self.settings.middle]
        change = (self.parts(batch.inputs.values)[0] - targets) * real
        return Score(
            (mean_loss(errors, self.settings) * real).sum(),
            (error.detach().abs() * scale).sum(),
            real.sum(),
            (change.abs() * scale).sum(),
        )

    def parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the channels of elements ``(..., C or more)``, and a mask that is 0 for missing
        values and for NaN.
        """
        channels = self.std.shape[0]
        entries = values[..., :channels]
        flags = (
            0.0 if self.preprocessor.missing == "raise" else values[..., channels : 2 * channels]
        )
        return entries.nan_to_num(), torch.where(entries.isnan(), 0.0, 1.0 - flags)

    def meter(self, model: Any, records: Dataset) -> Meter:  # noqa: ARG002
        """Return a meter of errors, with those of baselines."""
        if not self.is_binary and len(records):
            longest = self.preprocessor.apply(
                records.subset([int(records.element_counts.argmax())])
            )
            self.season = season_of(self.parts(longest[0]["inputs"])[0])
        return _Nats(self) if self.is_binary else _ForecastErrors(self)

    def check(self, records: Dataset) -> None:
        """Raise a DataError if the loss is bce, and a channel has numbers other than 0 and 1."""
        channels = records.statistics.channels if self.is_binary else {}
        for name in self.preprocessor.channels if self.is_binary else ():
            if not channels[name].is_binary:
                got = f"numbers between {channels[name].low:g} and {channels[name].high:g} in the channel {quote(name)}"
                rule = "0 or 1 for the loss bce"
                fix = f"correct them, or train with {argument('loss', 'mse')}"
                raise DataError(str(records.source), got, rule, fix)

    def ahead(
        self, model: Any, batches: Iterable[Ragged], horizon: int, origins: int = 1
    ) -> tuple[dict[str, Any], ...]:
        """Return a row per step: the error of the forecast, of the last known element, of the mean,
        and of a season.
        """
        names = ["mae", "persistence_mae", "even_mae" if self.is_binary else "mean_mae"]
        names += [f"season_{self.season}_mae"] if self.season else []
        sums = torch.zeros(len(names) + 1, horizon, dtype=torch.float64)
        for batch in batches:
            sequences = [
                sequence for sequence in _cut(batch, horizon, origins) if len(sequence) > horizon
            ]
            if sequences:
                sums += self._errors_ahead(model, sequences, horizon)
        if not sums[-1].any():
            rule = "smaller than the length of a sequence"
            raise DataError(
                "horizon", f"{horizon}", rule, "pass a smaller horizon, or longer sequences"
            )
        means = (sums[:-1] / sums[-1]).T.tolist()
        return tuple(
            {"step": step, **dict(zip(names, row, strict=True))}
            for step, row in enumerate(means, start=1)
        )

    def _errors_ahead(self, model: Any, sequences: list[Tensor], horizon: int) -> Tensor:
        """Return the sums of absolute errors of each rule, and the number of entries, per step."""
        heads = Ragged([sequence[:-horizon] for sequence in sequences])
        ends = torch.stack([sequence[-horizon:] for sequence in sequences]).cpu()
        targets, real = self.parts(ends)
        last = self.parts(heads.last())[0].cpu().unsqueeze(1)
        answers = self.answer(model, heads, horizon).cpu()
        forecasts = by_quantile(answers, self.settings)[..., self.settings.middle, :]
        rules: list[Any] = [forecasts, last, 0.5 if self.is_binary else 0.0]
        if self.season:
            rules.append(torch.stack([self._repeated(head.cpu(), horizon) for head in heads]))
        scale = self.std * real
        sums = [((forecast - targets).abs() * scale).sum((0, 2)) for forecast in rules]
        return torch.stack([*sums, real.sum((0, 2))])

    def _repeated(self, head: Tensor, horizon: int) -> Tensor:
        """Return the last season of a sequence, repeated for ``horizon`` steps; the last element if
        it is shorter.
        """
        season = self.parts(head)[0][-(self.season if len(head) >= self.season else 1) :]
        return season.repeat(-(-horizon // len(season)), 1)[:horizon]

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:
        """Return scaled forecasts ``(B, horizon, C)``; NaN for an empty sequence."""
        fed_back = [
            encoder.name for encoder in self.preprocessor.features if not encoder.per_sequence
        ]
        if horizon > 1 and fed_back:
            got = f"{horizon}, with the features {quote_all(fed_back)}"
            rule = "1 with features of elements, whose future values are unknown"
            raise DataError(
                "horizon", got, rule, "forecast one step, or train without these features"
            )
        return model.forecast(inputs, horizon, static_size=self.preprocessor.features_size)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """Return per sequence ``horizon`` lists of ``C`` numbers in the units of the data, or of
        probabilities.

        The entry of an empty sequence is None.
        """
        rows = (
            output.double()
            if self.is_binary
            else by_quantile(output, self.settings).double() * self.std + self.mean
        )
        nothing = output.isnan().flatten(1).all(1).tolist()
        columns = (
            {"prediction": rows.tolist()}
            if self.is_binary
            else named(rows.transpose(1, 2), self.settings)
        )
        return {
            name: [None if empty else row for row, empty in zip(column, nothing, strict=True)]
            for name, column in columns.items()
        }


class _ForecastErrors:
    """Accumulates the errors of the forecast and of simple rules, in the units of the data.

    The rules repeat the previous element, the training mean, or the element one season before.
    """

    def __init__(self, task: Forecast) -> None:
        self.task = task
        self.sums = torch.zeros(5, dtype=torch.float64)

    def add(self, output: Tensor, batch: Batch) -> None:
        score = self.task.score(output, batch)
        inputs = batch.inputs
        targets, real = self.task.parts(targets_of(batch))
        before = self.task.parts(inputs.values)[0]
        rows = torch.arange(len(before), device=before.device)
        season_rows = rows - self.task.season + 1
        starts = (
            inputs.offsets[:-1].to(rows.device).repeat_interleave(inputs.lengths.to(rows.device))
        )
        before = before[
            torch.where((season_rows < starts) | (season_rows > rows), rows, season_rows)
        ]
        # The mean of scaled data is 0.
        mean, season = (
            (rule * real * self.task.std.to(targets.device)).sum()
            for rule in (targets.abs(), (before - targets).abs())
        )
        sums = (score.metric, score.baseline, mean, season, score.count)
        self.sums += torch.stack([tensor.double() for tensor in sums]).cpu()

    def measured(self) -> Measured:
        means = (self.sums[:4] / self.sums[4]).tolist()
        names = ["mae", "persistence_mae", "mean_mae"]
        names += [f"season_{self.task.season}_mae"] if self.task.season else []
        return Measured(dict(zip(names, means, strict=False)))


class _Nats:
    """Accumulates the cross-entropy per step, and that of two baselines with the frequencies of the
    same data.

    The baselines are the frequency of ones per channel, and the same conditional on the previous
    value.
    """

    def __init__(self, task: Forecast) -> None:
        self.task = task
        self.loss = self.count = 0.0
        # Counts by previous value, next value and channel.
        self.counts = torch.zeros(2, 2, task.std.shape[0], dtype=torch.float64)

    def add(self, output: Tensor, batch: Batch) -> None:
        score = self.task.score(output, batch)
        self.loss = self.loss + float(score.loss)
        self.count = self.count + float(score.count)
        targets, real = self.task.parts(targets_of(batch))
        before = self.task.parts(batch.inputs.values)[0]
        for old, new in product((0, 1), repeat=2):
            self.counts[old, new] += (
                ((before == old) * (targets == new) * real).sum(0).double().cpu()
            )

    def measured(self) -> Measured:
        frames = self.count / self.task.std.shape[0] or float("nan")
        independent = _entropy(self.counts.sum(0))
        persistent = _entropy(self.counts[0]) + _entropy(self.counts[1])
        nats = {"nats": self.loss, "independent_nats": independent, "persistence_nats": persistent}
        return Measured({name: total / frames for name, total in nats.items()})


def _entropy(counts: Tensor) -> float:
    """Return the total entropy, in nats, of outcomes with counts ``(2, C)``."""
    return float(-torch.special.xlogy(counts, counts / counts.sum(0).clamp(min=1)).sum())


def _cut(batch: Iterable[Tensor], horizon: int, origins: int) -> Iterator[Tensor]:
    """Yield each sequence, then the sequence without its last ``horizon`` elements, and so on."""
    for sequence in batch:
        for back in range(origins):
            yield sequence[: max(len(sequence) - back * horizon, 0)]
