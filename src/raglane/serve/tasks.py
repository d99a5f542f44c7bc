"""A stored run on streams: its preprocessing, and its answers as ``Run.predict`` returns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.messages import message, quote, quote_all
from raglane.data.encoders import END
from raglane.data.preprocess import Preprocessor
from raglane.data.splitting import split_texts
from raglane.errors import ArgumentTypeError, DispatchError
from raglane.runs.run import Run
from raglane.serve.prepare import Prepared, prepare
from raglane.serve.stages import Stage, digest_of
from raglane.training.inference import _check_options
from raglane.training.model import END_TOKEN, UNKNOWN_TOKEN
from raglane.training.tasks import make_task


class _Scaling(Stage):
    """The preprocessing of numbers: scales, and filled missing values, which continue from the previous chunk."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        count = len(preprocessor.channels)
        # The last row, with the last observed numbers.
        super().__init__((0,), (torch.full((count,), torch.nan),) if preprocessor.missing == "forward" else ())

    def run(self, held: list[Tensor], offsets: Tensor, slots: Tensor | None, pools: Sequence[Tensor]) -> Tensor:
        """See :class:`Stage`."""
        rows, bounds = held[0].numpy(), offsets.numpy()
        if not pools or slots is None:
            return torch.from_numpy(np.ascontiguousarray(self._preprocessor.scaled(rows, bounds)))
        # Each sequence is preceded by the row of its state.
        lengths = np.diff(bounds)
        own = bounds + np.arange(len(bounds))
        kept = np.ones(int(own[-1]), bool)
        kept[own[:-1]] = False
        longer = np.empty((len(kept), rows.shape[1]), np.float32)
        longer[kept] = rows
        longer[~kept] = pools[0][slots].numpy()
        filled = self._preprocessor.scaled(longer, own)
        absent = ~np.isfinite(longer)
        last = np.maximum.accumulate(np.where(absent, -1, np.arange(len(longer))[:, None]), axis=0)
        ends, starts = (own[1:] - 1)[lengths > 0], own[:-1][lengths > 0]
        rows_of = np.maximum(last[ends], starts[:, None])
        pools[0][slots[torch.from_numpy(lengths > 0)]] = torch.from_numpy(np.take_along_axis(longer, rows_of, axis=0))
        return torch.from_numpy(filled[kept])

    def facts(self) -> Iterable[bytes]:
        """See :class:`Stage`."""
        yield repr(self._preprocessor.to_config()).encode()


class TaskModel:
    """The frames and answers of a run."""

    def __init__(self, run: Run) -> None:
        self._model, self._preprocessor = run.model, run.preprocess
        self._task = make_task(run.preprocess, run.model.config)
        self.fills = run.preprocess.missing != "error"
        words = run.preprocess.vocabulary or ()
        self._places = {token: place for place, token in enumerate(words)}
        if run.task == "language":
            self._places.pop(END, None)  # this token in a text is unknown, not the end

    def frames(self, frames: Any) -> Any:
        """Return tokens as their places in the vocabulary; other frames unchanged."""
        if not self._places or isinstance(frames, Tensor | np.ndarray):
            return frames
        split = self._preprocessor.split
        if isinstance(frames, str):
            frames = split_texts([frames], split or "words")[0].tolist()
        if not isinstance(frames, Sequence) or not all(isinstance(token, str) for token in frames):
            rule = "a text, a list of tokens, or a tensor of places in the vocabulary"
            raise ArgumentTypeError(message("frames", quote(frames), rule, "pass one of them"))
        return torch.tensor([self._places.get(token, UNKNOWN_TOKEN) for token in frames], dtype=torch.int64)

    def columns(self, rows: Tensor, *, probabilities: bool = False, top: int = 1) -> dict[str, list[Any]]:
        """Return the columns of predictions, an entry per row."""
        _check_options(self._task, horizon=1, probabilities=probabilities, top=top)
        options = {"top": top} if top > 1 else {}
        task = self._preprocessor.task
        if task == "language":
            logits = rows.clone()
            logits[:, UNKNOWN_TOKEN] = -torch.inf
            rows = torch.stack([torch.zeros(len(rows)), logits.argmax(-1).float()], 1)
        if task == "forecast":
            rows = (rows.sigmoid() if self._model.is_binary else rows).unsqueeze(1)
        columns = self._task.columns(rows, self._model, probabilities=probabilities, **options)
        columns.pop("bits", None)
        return columns


def prepare_run(run: Run, features: Any = None, dtype: torch.dtype | None = None) -> tuple[Prepared, TaskModel]:  # noqa: ARG001
    """Return the stages of a run, which begin with its preprocessing, and its task."""
    preprocess = run.preprocess
    if preprocess.features:
        got = f"a run with the features {quote_all(encoder.name for encoder in preprocess.features)}"
        raise DispatchError(message("model", got, "a run without further features", "call run.predict"))
    if preprocess.missing == "elapsed":
        got = "a run with missing='elapsed'"
        raise DispatchError(message("model", got, "a run with another treatment", "call run.predict"))
    if preprocess.is_tokens:
        found = prepare(run.model, None, dtype)
        if run.task == "language":
            found = _after_end(found)
        return found, TaskModel(run)
    found = prepare(run.model, preprocess.input_size, dtype)
    scaling = _Scaling(preprocess)
    # The rows of every other stage are one further.
    for stage in found.stages:
        stage.shift()
    stages = (scaling, *found.stages)
    return (
        replace(
            found,
            stages=stages,
            features=(len(preprocess.channels),),
            dtype=torch.float32,
            output=found.output + 1,
            digest=digest_of([scaling], found.digest.hex()),
        ),
        TaskModel(run),
    )


def _after_end(found: Prepared) -> Prepared:
    """Return the stages of a language model whose streams begin after the token that precedes each text."""
    pools = found.pools(1)
    for pool, start in zip(pools, found.starts, strict=True):
        pool[:] = start
    one = torch.zeros(1, dtype=torch.int64)
    found.run(torch.tensor([END_TOKEN]), torch.tensor([0, 1]), one, pools)
    own = iter(pools)
    for stage in found.stages:
        stage.starts = tuple([next(own)[0] for _ in stage.starts])
    return replace(found, digest=digest_of([], found.digest.hex()))
