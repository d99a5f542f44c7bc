"""The frames of a run, in the units of its data: its streams include its preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.messages import quote, quote_all
from raglane.data.prepare.encoders import END
from raglane.data.prepare.missing import since_observed
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.splitting import split_texts
from raglane.errors import ArgumentTypeError, DispatchError
from raglane.kernels.cpu.prepared import Kernel, Rows
from raglane.nn.linear import row_sigmoid
from raglane.streams.frames import Frames
from raglane.streams.prepare import prepare
from raglane.streams.prepared import Prepared
from raglane.streams.stages import Stage, digest_of
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import check_options
from raglane.training.model import END_TOKEN, UNKNOWN_TOKEN
from raglane.training.tasks import make_task
from raglane.training.tasks.numbers import Forecast, Regress, by_quantile


class _Scaling(Kernel):
    """The preprocessing of numbers: scales, and filled missing values, which continue from the
    previous chunk.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        count = len(preprocessor.channels)
        self._has_times = preprocessor.missing == "elapsed"
        starts: list[Tensor] = []
        if preprocessor.missing in ("forward", "elapsed"):
            starts.append(torch.full((count,), torch.nan))  # the last observed numbers
        if self._has_times:
            # The times since then, and 1 before the first row, whose time gap is ignored.
            starts.append(torch.cat([torch.zeros(count), torch.ones(1)]).double())
        self._season = preprocessor.season
        self._is_filled = bool(starts)
        if self._season:
            # The elements of the last season, scaled and filled.
            starts.append(torch.full((self._season * count,), torch.nan))
        self.starts = starts
        super().__init__(preprocessor.input_size, torch.float32, [len(start) for start in starts])

    def pools(self, slots: int) -> list[Tensor]:
        """See :class:`raglane.kernels.cpu.prepared.Kernel`."""
        return [start.new_empty(slots, len(start)) for start in self.starts]

    def run(self, rows: Rows) -> None:
        """See :class:`raglane.kernels.cpu.prepared.Kernel`."""
        values = rows.inputs[0].numpy()
        bounds = rows.offsets.numpy()
        output = rows.output.numpy()
        filled = (
            self._filled(rows, values, bounds)
            if self._is_filled
            else self._preprocessor.scaled(values, bounds)
        )
        output[:, : filled.shape[1]] = filled
        if self._season:
            output[:, filled.shape[1] :] = self._differences(
                rows, filled[:, : values.shape[1]], bounds
            )

    def _differences(
        self, rows: Rows, values: npt.NDArray[np.float32], bounds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return the channels of seasons, which continue from the elements of the last season."""
        season = self._season
        pool = rows.pools[-1]
        state = pool[rows.slots].numpy().reshape(-1, values.shape[1])
        extended = bounds + season * np.arange(len(bounds))
        is_row = np.zeros(int(extended[-1]), dtype=np.bool_)
        for start, end in zip(extended[:-1] + season, extended[1:], strict=True):
            is_row[start:end] = True
        longer = np.empty((len(is_row), values.shape[1]), np.float32)
        longer[is_row] = values
        longer[~is_row] = state
        places = np.flatnonzero(is_row)
        before = longer[places - season]
        following = longer[places + 1 - season]
        exists = ~np.isnan(before).any(axis=1, keepdims=True)
        parts = (np.where(exists, values - before, 0), np.where(exists, following - values, 0))
        lasts = extended[1:, None] - season + np.arange(season)
        pool[rows.slots] = torch.from_numpy(longer[lasts].reshape(len(lasts), -1))
        return np.concatenate([*parts, exists], axis=1).astype(np.float32)

    def _filled(
        self, rows: Rows, values: npt.NDArray[np.float32], bounds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return scaled values, of which missing ones are filled from the previous chunk."""
        # Each sequence is preceded by the row of its state.
        is_full = np.diff(bounds) > 0
        extended = bounds + np.arange(len(bounds))
        is_row = np.ones(int(extended[-1]), bool)
        is_row[extended[:-1]] = False
        longer = np.empty((len(is_row), values.shape[1]), np.float32)
        longer[is_row] = values
        longer[~is_row] = rows.pools[0][rows.slots].numpy()
        filled = self._preprocessor.scaled(longer, extended)
        absent = ~np.isfinite(longer)
        last = np.maximum.accumulate(np.where(absent, -1, np.arange(len(longer))[:, None]), axis=0)
        ends = (extended[1:] - 1)[is_full]
        starts = extended[:-1][is_full]
        slots = rows.slots[torch.from_numpy(is_full)]
        if self._has_times:
            gaps = self._preprocessor.gaps(longer)
            gaps = np.ones(len(longer)) if gaps is None else gaps
            state = rows.pools[1][rows.slots].numpy()
            gaps[starts[state[is_full, -1] == 1] + 1] = 0
            times = since_observed(absent, extended, gaps, state[:, :-1])
            with np.errstate(over="ignore"):
                filled[:, -values.shape[1] :] = times
            times = np.where(absent[ends], times[ends], 0)
            rows.pools[1][slots] = torch.from_numpy(
                np.append(times, np.zeros((len(times), 1)), axis=1)
            )
        rows_of = np.maximum(last[ends], starts[:, None])
        rows.pools[0][slots] = torch.from_numpy(np.take_along_axis(longer, rows_of, axis=0))
        return filled[is_row]


class RunFrames(Frames):
    """The frames of a run, in the units of its data or as tokens."""

    def __init__(self, saved: SavedModel, dtype: torch.dtype | None, passes_nan: bool) -> None:
        self._model = saved.model
        self._preprocessor = saved.preprocessor
        # run.predict raises for infinite numbers too. They would make the rest of the stream NaN.
        super().__init__(
            _prepare_run(saved, dtype),
            passes_nan or self._preprocessor.missing != "raise",
            passes_infinite=False,
        )
        preprocessor = self._preprocessor
        self.names = (
            preprocessor.task,
            preprocessor.channels,
            preprocessor.vocabulary,
            preprocessor.labels,
            preprocessor.target_names,
        )
        if preprocessor.channels:
            names = quote_all(preprocessor.channels)
            self._rule = f"{self._rule}: one for each channel of {names}"
        self._task = make_task(preprocessor, self._model.config)
        self._indexes = {token: index for index, token in enumerate(preprocessor.vocabulary or ())}
        if saved.task == "language":
            self._indexes.pop(END, None)  # this token in a text is unknown, not the end

    def rows(self, frames: Any, check_count: Callable[[int], object] | None = None) -> Tensor:
        """See :meth:`Frames.rows`; a text or a list of tokens becomes their indexes in the
        vocabulary.
        """
        if self._indexes and not isinstance(frames, Tensor | np.ndarray):
            if isinstance(frames, str):
                frames = split_texts([frames], self._preprocessor.split or "words")[0].tolist()
            if not isinstance(frames, Sequence) or not all(
                isinstance(token, str) for token in frames
            ):
                rule = "a text, a list of tokens, or a tensor of places in the vocabulary"
                raise ArgumentTypeError("frames", quote(frames), rule, "pass one of them")
            frames = torch.tensor(
                [self._indexes.get(token, UNKNOWN_TOKEN) for token in frames], dtype=torch.int64
            )
        return super().rows(frames, check_count)

    def in_units(self, rows: Tensor) -> Tensor:
        """Return results in the units of the data, or as probabilities of a binary forecast."""
        task = self._task
        if not isinstance(task, Regress | Forecast):
            return rows
        if self._preprocessor.task == "forecast" and self._model.is_binary:
            return row_sigmoid(rows)
        scaled = by_quantile(rows, task.settings).double() * task.std + task.mean
        return scaled.flatten(1).to(rows.dtype)

    def columns(
        self, rows: Tensor, *, probabilities: bool = False, top: int = 1
    ) -> dict[str, list[Any]]:
        """Return the columns of predictions, an entry per row."""
        check_options(self._task, horizon=1, probabilities=probabilities, top=top)
        options = {"top": top} if top > 1 else {}
        if self._preprocessor.task == "language":
            rows = rows.clone()
            rows[:, UNKNOWN_TOKEN] = -torch.inf
            rows = torch.stack([torch.zeros(len(rows)), rows.argmax(-1).float()], 1)
        if self._preprocessor.task == "forecast":
            rows = (row_sigmoid(rows) if self._model.is_binary else rows).unsqueeze(1)
        columns = self._task.columns(rows, self._model, probabilities=probabilities, **options)
        columns.pop("bits", None)  # of a whole text
        return columns


def _prepare_run(saved: SavedModel, dtype: torch.dtype | None) -> Prepared:
    """Return the stages of a run, which begin with its preprocessing."""
    preprocess = saved.preprocessor
    if saved.task == "transcribe":
        rule = "a run of a task other than transcribe, whose predictions are of whole sequences"
        raise DispatchError("model", "a run of the task transcribe", rule, "call run.predict")
    if saved.model.config.bidirectional:
        got = "a run in both directions, which reads sequences from the end"
        fix = "train with bidirectional=False (--no-bidirectional), or call run.predict"
        raise DispatchError("model", got, "a run in one direction", fix)
    if preprocess.features:
        got = (
            f"a run with the features {quote_all(encoder.name for encoder in preprocess.features)}"
        )
        rule = "a run of tokens, or of channels without further features"
        raise DispatchError("model", got, rule, "call run.predict on whole sequences")
    prepared = prepare(saved.model, None if preprocess.is_tokens else preprocess.input_size, dtype)
    if preprocess.is_tokens:
        return _after_end(prepared) if saved.task == "language" else prepared
    kernel = _Scaling(preprocess)
    scaling = Stage(kernel, [0], kernel.starts, repr(preprocess.to_config()))
    return replace(
        prepared,
        stages=(scaling, *[stage.after_another() for stage in prepared.stages]),
        features=(len(preprocess.channels),),
        output=prepared.output + 1,
        digest=digest_of([scaling], prepared.digest.hex()),
    )


def _after_end(prepared: Prepared) -> Prepared:
    """Return the stages of a language model whose streams begin after the token that precedes each
    text.
    """
    pools = prepared.pools(1)
    prepared.begin(pools)
    runner = prepared.runner(pools)
    runner.reserve(1, 1)
    runner.rows[0][:] = END_TOKEN
    runner.offsets[1] = 1
    runner.run(1, 1)
    stages = [
        stage.with_starts([state[0] for state in states])
        for stage, states in zip(prepared.stages, pools, strict=True)
    ]
    digest = digest_of([], prepared.digest.hex())
    return replace(prepared, stages=tuple(stages), digest=digest)
