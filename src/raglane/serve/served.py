"""A model under a name: its frames and results as JSON and bytes, and whole sequences in batches."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.messages import message, quote, require
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, DispatchError, RaglaneError, ShapeError
from raglane.ragged import Ragged
from raglane.runs.run import Run
from raglane.serve.engine import Engine
from raglane.training.stored import finite

DATATYPES = {torch.float32: "FP32", torch.float64: "FP64", torch.bfloat16: "BF16", torch.int64: "INT64"}
"""The names of dtypes in the Open Inference Protocol."""

_COLUMNS = {str: "BYTES", float: "FP64", int: "INT64"}  # those of predictions

_MOST_WAITING, _MOST_TOGETHER = 1024, 256  # requests that wait; sequences of a batch


def to_json(content: Any) -> str:
    """Return JSON with null in place of numbers that are not finite."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(content), separators=(",", ":"))


@dataclass
class _Request:
    """Whole sequences of a client; requests with the same key run in one batch."""

    sequences: list[Any]
    options: Mapping[str, Any]
    key: Any
    future: asyncio.Future[dict[str, list[Any]]]


class Served:
    """A run or an engine under a name. A run without an engine has a reason, and predicts whole sequences."""

    def __init__(self, name: str, model: Run | Engine, **options: Any) -> None:
        self.name, self.reason = name, ""
        self.run = model if isinstance(model, Run) else None
        self.engine = model if isinstance(model, Engine) else None
        if self.run is not None:
            try:
                self.engine = Engine(self.run, **options)
            except DispatchError as error:
                self.reason = str(error)
        self._waiting: list[_Request] = []
        self._task: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, f"raglane {name}")

    def start(self) -> None:
        """Start the thread of the engine, unless it runs."""
        if self.engine is not None and self.engine._thread is None:
            self.engine.start()

    def stop(self) -> None:
        """Stop the threads."""
        if self.engine is not None:
            self.engine.stop()
        self._pool.shutdown()

    # Frames and results of streams.

    @property
    def streams(self) -> Engine:
        """The engine of a model that has one."""
        assert self.engine is not None, "the caller checks that the model is live"  # noqa: S101
        return self.engine

    def frames(self, given: Any) -> Tensor:
        """Return frames of JSON, bytes or a tensor as a tensor ``(n, *features)`` that the engine accepts."""
        engine = self.streams
        dtype, features = engine._prepared.dtype, engine.features
        if isinstance(given, bytes):
            size = math.prod(features) * dtype.itemsize
            if len(given) % size:
                got, rule = f"{len(given)} bytes", f"whole frames of {size} bytes, {DATATYPES[dtype]} in little endian"
                raise ShapeError(message("frames", got, rule, "send whole frames"))
            flat = torch.frombuffer(bytearray(given), dtype=dtype) if given else torch.empty(0, dtype=dtype)
            given = flat.reshape(-1, *features)
        elif not isinstance(given, Tensor) and not (is_text(given) and dtype is torch.int64):
            given = _numbers(given, dtype)
            given = given if given.numel() or given.dim() > 1 else given.reshape(0, *features)
        rows = torch.from_numpy(engine._accepts.array(given, engine.nan == "pass"))
        return (rows.view(dtype) if dtype is torch.bfloat16 else rows).reshape(-1, *features)

    def tensor(self, shape: Sequence[int], datatype: str, data: list[Any]) -> Tensor:
        """Return a tensor of the Open Inference Protocol as frames; its data is flat or nested."""
        dtype = self.streams._prepared.dtype
        if datatype == "BYTES" and dtype is torch.int64 and all(isinstance(one, str) for one in data):
            return self.frames(data)
        if datatype != DATATYPES[dtype]:
            raise ArgumentError(message("datatype", quote(datatype), DATATYPES[dtype], "convert the data"))
        numbers = _numbers(data, dtype, "data")
        if numbers.numel() != math.prod(shape):
            got, rule = f"{numbers.numel()} numbers", f"one number per entry of the shape {tuple(shape)}"
            raise ShapeError(message("data", got, rule, "correct the shape"))
        return self.frames(numbers.reshape(*shape))

    def tensors(self, rows: Tensor) -> list[dict[str, Any]]:
        """Return results as tensors of the Open Inference Protocol; for a run, its predictions too."""
        shape, datatype = list(rows.shape), DATATYPES[rows.dtype]
        found = [{"name": "outputs", "shape": shape, "datatype": datatype, "data": rows.flatten().tolist()}]
        for name, column in {} if self.run is None else self.answer(rows).items():
            kinds = {type(one) for one in column}
            if len(kinds) == 1 and (kind := kinds.pop()) in _COLUMNS:
                found.append({"name": name, "shape": [len(column)], "datatype": _COLUMNS[kind], "data": column})
        return found

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if options do not apply to the results of the model."""
        own = self.streams._prepared
        if self.run is None and set(options) - {"outputs"}:
            rule = "left out for a model without a task"
            raise ArgumentError(message("options", ", ".join(options), rule, "leave them out"))
        self.answer(torch.empty(0, *own.output_features, dtype=own.output_dtype), **options)

    def answer(self, rows: Tensor, *, outputs: bool = False, **options: Any) -> dict[str, Any]:
        """Return results of streams as columns, an entry per row: predictions of a run, otherwise the outputs."""
        columns = {} if self.run is None else self.streams.columns(rows, **options)
        return {**columns, "outputs": rows.tolist()} if outputs or not columns else columns

    # Whole sequences.

    async def predict(self, sequences: list[Any], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the columns of predictions of whole sequences; requests that wait together run in one batch."""
        if len(self._waiting) >= _MOST_WAITING:
            rule = f"at most {_MOST_WAITING} requests that wait"
            raise BusyError(message("predict", f"{len(self._waiting)} requests", rule, "repeat the request later"))
        found = [self._sequence(sequence) for sequence in sequences]
        key = (sorted(options.items()), sorted({_kind(sequence) for sequence in found}) or id(sequences))
        future: asyncio.Future[dict[str, list[Any]]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(found, options, key, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await future

    async def table(self, columns: dict[str, list[Any]], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the predictions of a table, a column per name."""
        run = self.run
        if run is None:
            raise ArgumentError(message("table", "a table", "left out for a model without columns", "pass sequences"))
        try:
            table = require("pyarrow", "data").table(columns)
        except (ValueError, TypeError, OverflowError) as error:
            rule = "columns of equal lengths, each of one type"
            raise ArgumentError(message("table", str(error), rule, "correct the columns")) from error
        job = asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: run.predict(table, device="cpu", **options).columns
        )
        return await job

    def _sequence(self, given: Any) -> Any:
        """Return a sequence in the one form that cannot be misread in a batch with others."""
        if self.run is None:
            return self.frames(given)
        if self.run.preprocess.is_tokens:
            return given
        count = len(self.run.channels)
        numbers = _numbers(given, torch.float32, "sequences")
        if numbers.dim() == 1 and (count == 1 or not numbers.numel()):
            numbers = numbers.reshape(-1, count)
        if numbers.dim() != 2 or numbers.shape[1] != count:
            got, rule = f"shape {tuple(numbers.shape)}", f"sequences of shape (n, {count}), one number per channel"
            raise ShapeError(message("sequences", got, rule, "pass one list per element"))
        return numbers.numpy()

    async def _work(self) -> None:
        """Answer the requests that wait, batch by batch."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch: list[_Request] = []
            kept: list[_Request] = []
            count = 0
            for request in self._waiting:
                fits = not batch or count + len(request.sequences) <= _MOST_TOGETHER
                if fits and request.key == self._waiting[0].key:
                    batch.append(request)
                    count += len(request.sequences)
                else:
                    kept.append(request)
            self._waiting = kept
            answers = await loop.run_in_executor(self._pool, self._answers, batch)
            for request, answer in zip(batch, answers, strict=True):
                if request.future.done():
                    continue  # its client is gone
                if isinstance(answer, Exception):
                    request.future.set_exception(answer)
                else:
                    request.future.set_result(answer)
        self._task = None

    def _answers(self, batch: Sequence[_Request]) -> list[dict[str, list[Any]] | Exception]:
        """Return the predictions, or the error, of each request."""
        bounds = [0, *accumulate(len(request.sequences) for request in batch)]
        try:
            columns = self._columns([one for request in batch for one in request.sequences], batch[0].options)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # An invalid request is the only one that fails.
            return [answer for request in batch for answer in self._answers([request])]
        return [{name: own[start:end] for name, own in columns.items()} for start, end in pairwise(bounds)]

    def _columns(self, sequences: list[Any], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the predictions of sequences, without the column of their ids."""
        if self.run is not None:
            columns = self.run.predict(sequences, device="cpu", **options).columns
            return {name: own for name, own in columns.items() if name != "id"}
        if any(options.values()):
            got = ", ".join(name for name, value in options.items() if value)
            raise ArgumentError(message("options", got, "left out for a model without a task", "leave them out"))
        if not sequences:
            return {"outputs": []}
        return {"outputs": [part.tolist() for part in self.streams.run(Ragged(sequences))]}

    # Descriptions.

    def description(self) -> dict[str, Any]:
        """Return the metadata of the Open Inference Protocol."""
        found: dict[str, Any] = {"name": self.name, "versions": ["1"], "platform": "raglane", "inputs": []}
        found["outputs"] = []
        if (engine := self.engine) is not None:
            own = engine._prepared
            shapes = [("inputs", "frames", engine.features, own.dtype)]
            shapes.append(("outputs", "outputs", own.output_features, own.output_dtype))
            for kind, name, shape, dtype in shapes:
                found[kind].append({"name": name, "datatype": DATATYPES[dtype], "shape": [-1, *shape]})
        facts: dict[str, Any] = {"live": self.engine is not None, "reason": self.reason}
        if self.run is not None:
            facts |= {"task": self.run.task, "channels": list(self.run.channels), "labels": list(self.run.labels)}
            facts["tokens"] = self.run.preprocess.is_tokens
        return {**found, "parameters": facts}


def is_text(frames: Any) -> bool:
    """Return True for a text or a list of tokens."""
    return isinstance(frames, str) or (isinstance(frames, list) and len(frames) > 0 and isinstance(frames[0], str))


def _kind(sequence: Any) -> str:
    """Return the kind of a sequence, by which readers of data differ."""
    if isinstance(sequence, list):
        return f"list of {type(sequence[0]).__name__ if sequence else 'nothing'}"
    return type(sequence).__name__


def _numbers(given: Any, dtype: torch.dtype, name: str = "frames") -> Tensor:
    """Return lists of numbers, with None for NaN, as a tensor."""
    try:
        array = np.array(given)
        if array.dtype.kind == "O" and all(one is None or type(one) in (int, float) for one in array.flat):
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError, RecursionError):
        array = np.array("")
    if array.dtype.kind not in ("iu" if dtype is torch.int64 and array.size else "iuf"):
        rule = "lists of whole numbers" if dtype is torch.int64 else "lists of numbers, of equal lengths"
        raise ArgumentTypeError(message(name, quote(given), rule, "send one list per element"))
    with np.errstate(over="ignore"):
        if dtype is torch.float32:
            array = array.astype(np.float32)
    return torch.from_numpy(array.copy() if array.dtype.kind != "u" else array.astype(np.int64)).to(dtype)


def error_text(error: Exception) -> str:
    """Return the message of an error for a client."""
    return str(error) if isinstance(error, RaglaneError) else "internal error; the log of the server shows it"
