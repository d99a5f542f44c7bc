"""The frames that streams accept; of a stored run with its preprocessing, and its answers as in ``Run.predict``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.messages import message, quote, quote_all
from raglane.data.encoders import END
from raglane.data.preprocess import Preprocessor
from raglane.data.splitting import split_texts
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError, ShapeError
from raglane.runs.run import Run
from raglane.serve.prepare import Prepared, prepare
from raglane.serve.stages import Stage, digest_of
from raglane.training.inference import check_options
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


class Frames:
    """The frames of a model, as arrays of rows."""

    passes_nan = False

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._width = prepared, math.prod(prepared.features)

    def array(self, frames: Any, passes_nan: bool) -> npt.NDArray[Any]:
        """Return frames ``(n, width)``, bfloat16 as int16; raise if they do not fit the model."""
        dtype, features = self._prepared.dtype, self._prepared.features
        if not isinstance(frames, Tensor):
            try:
                is_list = isinstance(frames, list | tuple)
                frames = torch.tensor(frames, dtype=dtype, device="cpu") if is_list else torch.as_tensor(frames)
            except (TypeError, ValueError, RuntimeError) as error:
                rule = f"a tensor (n, {', '.join(map(str, features))})"
                raise ArgumentTypeError(message("frames", quote(frames), rule, "pass a tensor or an array")) from error
        if frames.shape[1:] != features or not frames.dim() or frames.dtype is not dtype or not frames.is_cpu:
            got = f"shape {tuple(frames.shape)} of {frames.dtype} on {frames.device}"
            rule = f"a tensor ({', '.join(map(str, ('n', *features)))}) of {dtype} on cpu"
            raise ShapeError(message("frames", got, rule, "reshape or convert them"))
        rows = frames.detach() if frames.requires_grad else frames
        if len(features) != 1:
            rows = rows.reshape(frames.shape[0], self._width)
        array = as_array(rows)
        if dtype is torch.int64:
            self._check_tokens(rows)
        elif len(array) and not (passes_nan or self.passes_nan):
            least = rows.float().min() if dtype is torch.bfloat16 else array.min()
            if least != least:
                got = f"NaN in frame {int(rows.isnan().any(1).nonzero()[0])}"
                fix = "correct them, or pass nan='pass' to the engine"
                raise ArgumentError(message("frames", got, "numbers other than NaN", fix))
        return array

    def _check_tokens(self, rows: Tensor) -> None:
        tokens = self._prepared.tokens
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < tokens):
            got = f"tokens from {int(rows.min())} to {int(rows.max())}"
            raise ArgumentError(message("frames", got, f"tokens from 0 to {tokens - 1}", "replace unknown tokens"))

    def columns(self, rows: Tensor, *, probabilities: bool = False, top: int = 1) -> dict[str, list[Any]]:  # noqa: ARG002
        """Return results as columns of predictions; only a run has them."""
        raise ArgumentError(message("model", "a module", "a run", "pass the result of rl.load to the engine"))


class _RunFrames(Frames):
    """The frames of a run, in the units of its data or as tokens."""

    def __init__(self, prepared: Prepared, run: Run) -> None:
        super().__init__(prepared)
        self._model, self._preprocessor = run.model, run.preprocess
        self._task = make_task(run.preprocess, run.model.config)
        self.passes_nan = run.preprocess.missing != "error"
        self._places = {token: place for place, token in enumerate(run.preprocess.vocabulary or ())}
        if run.task == "language":
            self._places.pop(END, None)  # this token in a text is unknown, not the end

    def array(self, frames: Any, passes_nan: bool) -> npt.NDArray[Any]:
        """See :meth:`Frames.array`; a text or a list of tokens becomes their places in the vocabulary."""
        if self._places and not isinstance(frames, Tensor | np.ndarray):
            if isinstance(frames, str):
                frames = split_texts([frames], self._preprocessor.split or "words")[0].tolist()
            if not isinstance(frames, Sequence) or not all(isinstance(token, str) for token in frames):
                rule = "a text, a list of tokens, or a tensor of places in the vocabulary"
                raise ArgumentTypeError(message("frames", quote(frames), rule, "pass one of them"))
            frames = torch.tensor([self._places.get(token, UNKNOWN_TOKEN) for token in frames], dtype=torch.int64)
        return super().array(frames, passes_nan)

    def columns(self, rows: Tensor, *, probabilities: bool = False, top: int = 1) -> dict[str, list[Any]]:
        """Return the columns of predictions, an entry per row."""
        check_options(self._task, horizon=1, probabilities=probabilities, top=top)
        options = {"top": top} if top > 1 else {}
        task = self._preprocessor.task
        if task == "language":
            rows = rows.clone()
            rows[:, UNKNOWN_TOKEN] = -torch.inf
            rows = torch.stack([torch.zeros(len(rows)), rows.argmax(-1).float()], 1)
        if task == "forecast":
            rows = (rows.sigmoid() if self._model.is_binary else rows).unsqueeze(1)
        columns = self._task.columns(rows, self._model, probabilities=probabilities, **options)
        columns.pop("bits", None)  # of a whole text
        return columns


def as_array(rows: Tensor) -> npt.NDArray[Any]:
    """Return rows as an array, int16 for bfloat16, which NumPy does not have."""
    array: npt.NDArray[Any] = (rows.contiguous().view(torch.int16) if rows.dtype is torch.bfloat16 else rows).numpy()
    return array


def prepare_model(model: Any, features: Any, dtype: torch.dtype | None) -> tuple[Prepared, Frames]:
    """Return a model or a run as stages, and its frames."""
    if not isinstance(model, Run):
        found = prepare(model, features, dtype)
        return found, Frames(found)
    found = _prepare_run(model, dtype)
    return found, _RunFrames(found, model)


def _prepare_run(run: Run, dtype: torch.dtype | None) -> Prepared:
    """Return the stages of a run, which begin with its preprocessing."""
    preprocess = run.preprocess
    if preprocess.features or preprocess.missing == "elapsed":
        names = quote_all(encoder.name for encoder in preprocess.features)
        got = f"a run with the features {names}" if names else "a run with missing='elapsed'"
        rule = "a run of tokens, or of channels without further features and times"
        raise DispatchError(message("model", got, rule, "call run.predict on whole sequences"))
    found = prepare(run.model, None if preprocess.is_tokens else preprocess.input_size, dtype)
    if preprocess.is_tokens:
        return _after_end(found) if run.task == "language" else found
    scaling = _Scaling(preprocess)
    for stage in found.stages:
        stage.shift()
    return replace(
        found,
        stages=(scaling, *found.stages),
        features=(len(preprocess.channels),),
        output=found.output + 1,
        digest=digest_of([scaling], found.digest.hex()),
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
