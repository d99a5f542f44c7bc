"""A model under a name: its frames and results as JSON and bytes, and whole sequences in
batches.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from raglane._utils.json import finite
from raglane._utils.messages import quote
from raglane.data.sources.frames import arrow_errors
from raglane.errors import ArgumentError, BusyError, DispatchError, ShapeError
from raglane.kernels.cpu.prepared import as_array
from raglane.ragged import Ragged
from raglane.serve.rounds import Rounds
from raglane.streams.engine import Engine
from raglane.streams.frames import numbers

DATATYPES = {
    torch.float32: "FP32",
    torch.float64: "FP64",
    torch.bfloat16: "BF16",
    torch.int64: "INT64",
}
"""The names of dtypes in the Open Inference Protocol."""

_COLUMNS = {str: "BYTES", float: "FP64", int: "INT64"}  # those of predictions

_MOST_WAITING = 1024  # requests that wait
_MOST_TOGETHER = 256  # sequences of a batch


def to_json(content: Any) -> str:
    """Return JSON with null in place of numbers that are not finite."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(content), separators=(",", ":"))


class _WholeSequences(NamedTuple):
    """Whole sequences of a client."""

    sequences: list[Any]
    columns: Future[dict[str, list[Any]]]


class Served:
    """A run, an engine or modules under a name. A run without an engine has a reason, and predicts
    whole sequences.
    """

    def __init__(
        self, name: str, model: Any, *, period: float | None = None, **options: Any
    ) -> None:
        self.name = name
        self.reason = ""
        self.run = None if isinstance(model, Engine | nn.Module | list | tuple) else model
        self.engine = model if isinstance(model, Engine) else None
        if self.engine is None:
            try:
                self.engine = Engine(model, **options)
            except DispatchError as error:
                if self.run is None:
                    raise
                self.reason = str(error)
        if self.engine is not None:
            self.rounds = Rounds(self.engine, period)
        self._forms: dict[Any, JsonColumns | Binary] = {}
        # The last batch of each kind, which a request may join.
        self._batches: dict[Any, list[_WholeSequences]] = {}
        self._lock = threading.Lock()  # of the batches
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, f"raglane {name}")

    def start(self) -> None:
        """Step the engine in the running event loop."""
        if self.engine is not None:
            self.rounds.start()

    def stop(self) -> None:
        """Stop the steps, and the thread of whole sequences."""
        if self.engine is not None:
            self.rounds.stop()
        self._pool.shutdown()

    def expire(self) -> None:
        """Close idle streams."""
        if self.engine is not None:
            self.rounds.expire()

    # Frames and results of streams.

    @property
    def streams(self) -> Engine:
        """The engine of a model that has one."""
        assert self.engine is not None, "the caller checks that the model is live"  # noqa: S101
        return self.engine

    def frames(self, content: Any) -> Any:
        """Return frames of JSON or bytes in a form that the engine accepts, or refuses."""
        prepared = self.streams.accepts.prepared
        if isinstance(content, bytes | bytearray | memoryview):
            size = self.frame_bytes
            if len(content) % size:
                kind = DATATYPES[prepared.dtype]
                got = f"{len(content)} bytes"
                rule = f"whole frames of {size} bytes, {kind} in little endian"
                raise ShapeError("frames", got, rule, "send whole frames")
            flat = (
                torch.frombuffer(bytearray(content), dtype=prepared.dtype)
                if content
                else torch.empty(0, dtype=prepared.dtype)
            )
            return flat.reshape(-1, *prepared.features)
        is_numbers = isinstance(content, list) and not (content and isinstance(content[0], str))
        # A list of whole numbers is one of indexes in the vocabulary.
        return (
            numbers(content, prepared.dtype)
            if is_numbers and prepared.dtype is torch.int64
            else content
        )

    @property
    def frame_bytes(self) -> int:
        """The size of a frame in a binary message."""
        prepared = self.streams.accepts.prepared
        return math.prod(prepared.features) * prepared.dtype.itemsize

    def rows(self, content: Any) -> npt.NDArray[Any]:
        """Return frames of JSON or bytes that the engine accepts, ``(n, width)``, bfloat16 as int16;
        raise if it does not.
        """
        accepts = self.streams.accepts
        # Fast path: the frames of most messages are only read once.
        if (
            accepts.plain is not None
            and isinstance(content, bytes | bytearray | memoryview)
            and not len(content) % (accepts.width * accepts.plain.itemsize)
        ):
            array = np.frombuffer(content, accepts.plain).reshape(-1, accepts.width)
            return accepts.array(array, _any_count)
        rows = self.checked(self.frames(content))
        return as_array(rows.reshape(rows.shape[0], accepts.width))

    def form(self, is_binary: bool, options: Mapping[str, Any]) -> JsonColumns | Binary:
        """Return how results are written; raise if an option does not apply to the model."""
        prepared = self.streams.accepts.prepared
        key = is_binary, *sorted(options.items())
        if key not in self._forms:
            nothing = torch.empty(0, *prepared.output_features, dtype=prepared.output_dtype)
            self.answer(nothing, **options)
            self._forms[key] = Binary(self) if is_binary else JsonColumns(self, dict(options))
        return self._forms[key]

    def checked(self, frames: Any) -> Tensor:
        """Return frames that the engine accepts, ``(n, *features)``; raise if it does not."""
        return self.streams.accepts.rows(frames).reshape(-1, *self.streams.feature_shape)

    def tensor(self, shape: Sequence[int], datatype: str, data: list[Any]) -> Tensor:
        """Return a tensor of the Open Inference Protocol as frames; its data is flat or nested."""
        dtype = self.streams.accepts.prepared.dtype
        is_text = (
            datatype == "BYTES"
            and dtype is torch.int64
            and all(isinstance(entry, str) for entry in data)
        )
        if not is_text and datatype != DATATYPES[dtype]:
            raise ArgumentError("datatype", quote(datatype), DATATYPES[dtype], "convert the data")
        entries = data if is_text else numbers(data, dtype, "data").reshape(-1)
        features = self.streams.feature_shape
        if tuple(shape[1:]) != features or len(entries) != math.prod(shape):
            got = f"{len(entries)} entries for the shape {tuple(shape)}"
            rule = (
                f"one entry for each number of the shape ({', '.join(map(str, ('n', *features)))})"
            )
            raise ShapeError("data", got, rule, "correct the shape")
        return self.checked(
            entries if isinstance(entries, list) else entries.reshape(-1, *features)
        )

    def tensors(self, rows: Tensor) -> list[dict[str, Any]]:
        """Return results as tensors of the Open Inference Protocol; for a run, its predictions
        too.
        """
        tensors = [
            {
                "name": "outputs",
                "shape": list(rows.shape),
                "datatype": DATATYPES[rows.dtype],
                "data": self.streams.accepts.in_units(rows).flatten().tolist(),
            }
        ]
        for name, column in {} if self.run is None else self.answer(rows).items():
            kinds = {type(entry) for entry in column}
            if len(kinds) == 1 and (kind := kinds.pop()) in _COLUMNS:
                tensors.append(
                    {
                        "name": name,
                        "shape": [len(column)],
                        "datatype": _COLUMNS[kind],
                        "data": column,
                    }
                )
        return tensors

    def answer(self, rows: Tensor, *, outputs: bool = False, **options: Any) -> dict[str, Any]:
        """Return results of streams as columns, an entry per row: predictions of a run, otherwise
        the outputs.
        """
        self._check_options(options)
        columns = {} if self.run is None else self.streams.columns(rows, **options)
        if columns and not outputs:
            return columns
        return {**columns, "outputs": self.streams.accepts.in_units(rows).tolist()}

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if self.run is None and options:
            raise ArgumentError(
                "options",
                ", ".join(options),
                "left out for a model without a task",
                "leave them out",
            )

    # Whole sequences.

    async def predict(
        self, sequences: list[Any], options: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Return the columns of predictions of whole sequences; requests that wait together run in
        one batch.
        """
        if self._waiting >= _MOST_WAITING:
            rule = f"at most {_MOST_WAITING} requests that wait"
            raise BusyError(
                "predict", f"{self._waiting} requests", rule, "repeat the request later"
            )
        self._check_options(options)
        request = _WholeSequences([self._sequence(sequence) for sequence in sequences], Future())
        # Readers of data differ by the kind of a sequence.
        kinds = sorted({_kind(sequence) for sequence in request.sequences}) or id(request)
        key = str((sorted(options.items()), kinds))
        with self._lock:
            batch = self._batches.get(key)
            together = len(request.sequences) + sum(len(other.sequences) for other in batch or ())
            if batch is None or together > _MOST_TOGETHER:
                batch = self._batches[key] = []
                self._pool.submit(self._work, key, batch, options)
            batch.append(request)
        self._waiting += 1
        try:
            return await asyncio.wrap_future(request.columns)
        finally:
            self._waiting -= 1

    async def table(
        self, columns: dict[str, list[Any]], options: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Return the predictions of a table, a column per name."""
        if self.run is None:
            raise ArgumentError(
                "table", "a table", "left out for a model without columns", "pass sequences"
            )
        with arrow_errors("table") as arrow:
            table = arrow.table(columns)
        job = self._pool.submit(self.run.predict, table, device="cpu", **options)
        return (await asyncio.wrap_future(job)).columns

    def _sequence(self, content: Any) -> Any:
        """Return a sequence in the one form that cannot be misread in a batch with others."""
        if self.run is None:
            return self.checked(self.frames(content))
        if self.run.preprocessor.is_tokens:
            return content
        count = len(self.run.channels)
        values = numbers(content, torch.float32, "sequences")
        if values.dim() == 1 and (count == 1 or not values.numel()):
            values = values.reshape(-1, count)
        if values.dim() != 2 or values.shape[1] != count:
            got = f"shape {tuple(values.shape)}"
            rule = f"sequences of shape (n, {count}), one number per channel"
            raise ShapeError("sequences", got, rule, "pass one list per element")
        return values.numpy()

    def _work(self, key: str, batch: list[_WholeSequences], options: Mapping[str, Any]) -> None:
        """Answer a batch in the thread of the pool."""
        with self._lock:
            if self._batches.get(key) is batch:
                del self._batches[key]
        # The other clients are gone.
        self._answer(
            [request for request in batch if request.columns.set_running_or_notify_cancel()],
            options,
        )

    def _answer(self, batch: list[_WholeSequences], options: Mapping[str, Any]) -> None:
        try:
            columns = self._columns(
                [sequence for request in batch for sequence in request.sequences], options
            )
        except Exception as error:
            # An invalid request is the only one that fails.
            for request in batch if len(batch) > 1 else ():
                self._answer([request], options)
            if len(batch) == 1:
                batch[0].columns.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + len(request.sequences)
            request.columns.set_result(
                {name: column[start:end] for name, column in columns.items()}
            )
            start = end

    def _columns(self, sequences: list[Any], options: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the predictions of sequences, without the column of their ids."""
        if self.run is not None:
            columns = self.run.predict(sequences, device="cpu", **options).columns
            return {name: column for name, column in columns.items() if name != "id"}
        outputs = self.streams.run(Ragged(sequences)) if sequences else ()
        return {"outputs": [rows.tolist() for rows in outputs]}

    def shapes(self) -> dict[str, Any]:
        """Return the name of the model, and the shapes and dtypes of its frames and results."""
        prepared = self.streams.accepts.prepared
        return {
            "model": self.name,
            "frames": {"shape": prepared.features, "datatype": DATATYPES[prepared.dtype]},
            "results": {
                "shape": prepared.output_features,
                "datatype": DATATYPES[prepared.output_dtype],
            },
        }

    def for_page(self) -> dict[str, Any]:
        """Return the metadata with what a page needs to show it."""
        metadata = self.description()
        facts = metadata["parameters"]
        facts["sample"] = self._sample()
        if self.run is not None:
            facts["targets"] = list(self.run.preprocessor.target_names or ())
            facts["split"] = self.run.preprocessor.split
        return metadata

    def _sample(self) -> str | list[list[float]]:
        """Return a sequence at the scale of the training data."""
        if self.run is None or not self.run.preprocessor.is_tokens:
            preprocess = None if self.run is None else self.run.preprocessor
            width = (
                math.prod(self.streams.feature_shape)
                if self.run is None
                else len(self.run.channels)
            )
            middle = np.array(getattr(preprocess, "mean", None) or (0.0,) * width)
            spread = np.array(getattr(preprocess, "std", None) or (1.0,) * width)
            steps = np.arange(max(4, min(40, 2000 // width)))[:, None]
            waves = np.sin(steps / (3.0 + np.arange(width) % 7))
            if width > 16:  # an element is e.g. a part of a sound
                waves = 0.3 * np.sin((steps * width + np.arange(width)) / 9)
            return [[float(f"{number:.4g}") for number in row] for row in middle + spread * waves]
        words = [
            word for word in self.run.preprocessor.vocabulary or () if not word.startswith("<")
        ]
        return ("" if self.run.preprocessor.split == "characters" else " ").join(words[:8])

    def description(self) -> dict[str, Any]:
        """Return the metadata of the Open Inference Protocol."""
        facts: dict[str, Any] = {"live": self.engine is not None, "reason": self.reason}
        metadata: dict[str, Any] = {
            "name": self.name,
            "versions": ["1"],
            "platform": "raglane",
            "inputs": [],
            "outputs": [],
            "parameters": facts,
        }
        if self.engine is not None:
            prepared = self.engine.accepts.prepared
            for kind, name, shape, dtype in (
                ("inputs", "frames", prepared.features, prepared.dtype),
                ("outputs", "outputs", prepared.output_features, prepared.output_dtype),
            ):
                metadata[kind].append(
                    {"name": name, "datatype": DATATYPES[dtype], "shape": [-1, *shape]}
                )
        if self.run is not None:
            facts |= {
                "task": self.run.task,
                "channels": list(self.run.channels),
                "labels": list(self.run.labels),
            }
            facts["tokens"] = self.run.preprocessor.is_tokens
        return metadata


class Binary:
    """Results as bytes, in little endian."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def encode(self, rows: Tensor) -> Callable[[int, int], bytes]:
        """See :class:`raglane.serve.rounds.Form`."""
        rows = self._served.streams.accepts.in_units(rows).flatten(1)
        size = rows.shape[1] * rows.dtype.itemsize
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        return lambda begin, end: data[begin * size : end * size]


class JsonColumns:
    """Results as columns in JSON, an entry per row."""

    def __init__(self, served: Served, options: Mapping[str, Any]) -> None:
        self._served = served
        self._options = options

    def encode(self, rows: Tensor) -> Callable[[int, int], dict[str, list[Any]]]:
        """See :class:`raglane.serve.rounds.Form`."""
        columns = self._served.answer(rows, **self._options)
        return lambda begin, end: {name: column[begin:end] for name, column in columns.items()}


def _any_count(count: int) -> None:
    """Accept any number of frames; those that do not fit a queue wait."""


def _kind(sequence: Any) -> str:
    if isinstance(sequence, list):
        return f"list of {type(sequence[0]).__name__ if sequence else 'nothing'}"
    return type(sequence).__name__
