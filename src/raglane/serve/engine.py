"""The engine: one model, prepared once, and the states and queues of many streams."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_choice, check_count, check_kind, check_real
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, CheckpointError, ClosedError, ShapeError
from raglane.ragged import Ragged
from raglane.runs.run import Run
from raglane.serve.prepare import Prepared, prepare
from raglane.serve.queues import Integers, RowQueues
from raglane.serve.streams import AsyncStream, Stream, Waiters
from raglane.serve.tasks import TaskModel, prepare_run

_MAGIC, _HEAD = b"raglane1", struct.Struct("<8s32s")
_KEPT = 4096  # measurements for statistics


class Engine:
    """Runs one model on many live streams, each with the results of the whole sequence so far.

    Frames are pushed to streams, and :meth:`step` runs all streams that have frames in one call of the kernels. The
    outputs of a stream have the bits of :meth:`run` on its whole sequence, for any division of its frames among steps,
    and with any other streams.

    Args:
        model: a :class:`raglane.Run`, a recurrent layer, a list of modules that run one after the other, or a module
            that maps a Ragged batch to a Ragged or a tensor, element by element. A vector per sequence, e.g. of a
            pooling, becomes the vector of the elements so far. The engine copies what it needs.
        slots: the most open streams.
        threads: the threads of a step.
        max_queue: the most frames of a stream that wait, and the most results.
        chunk: the most frames of a stream in one step; None for all.
        features: the shape of a frame, if it does not follow from the first module.
        dtype: ``torch.int8`` for int8 weights of RNN, LSTM and GRU, as :func:`raglane.freeze`.
        nan: ``"refuse"`` to raise an error for frames with NaN, or ``"pass"``. A run trained with ``missing`` passes
            them.
        idle: seconds after which an idle stream is closed; None for never.
        on_idle: a function of the stream that was closed.

    Raises:
        DispatchError: the model does not run element by element; the message names the module.
        ArgumentError, ArgumentTypeError: another argument is invalid.

    Example:
        >>> engine = Engine(rl.nn.LSTM(3, 4).eval(), slots=100)
        >>> one, two = engine.open(), engine.open()
        >>> one.push(torch.randn(5, 3)), two.push(torch.randn(1, 3))
        (None, None)
        >>> engine.step()
        2
        >>> one.pull().shape, two.pull().shape
        (torch.Size([5, 4]), torch.Size([1, 4]))
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        threads: int = 1,
        max_queue: int = 1024,
        chunk: int | None = None,
        features: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        nan: Literal["refuse", "pass"] = "refuse",
        idle: float | None = None,
        on_idle: Callable[[Stream], object] | None = None,
    ) -> None:
        self.slots, self.threads = check_count("slots", slots), check_count("threads", threads)
        self.max_queue = check_count("max_queue", max_queue)
        self.chunk = self.max_queue if chunk is None else check_count("chunk", chunk)
        self.nan = check_choice("nan", nan, ("refuse", "pass"))
        rule = "a number of seconds above 0, or None"
        self.idle = None if idle is None else check_real("idle", idle, rule, lambda number: number > 0, "pass e.g. 60")
        self._on_idle = on_idle
        self._options = {"features": features, "dtype": dtype}
        self._take_model(_prepared(model, self._options))
        self._pools = self._prepared.pools(slots)
        self._width, self._outputs = map(math.prod, (self.features, self._prepared.output_features))
        self._frames = RowQueues(slots, self._width, self._prepared.dtype)
        self._results = RowQueues(slots, self._outputs, self._prepared.output_dtype)
        self._lock, self._stepping = threading.Lock(), threading.Lock()
        self._streams: list[Stream | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._used = 0  # slots from here on were never used
        self._fresh = np.zeros(slots, bool)  # begins with the first state
        self._epochs = np.zeros(slots, np.int64)  # counts resets and closes, which discard results of a running step
        self._since, self._touched = np.zeros(slots), np.zeros(slots)
        self._running = False  # a step is between reading frames and writing results
        self._closed_late: list[int] = []  # slots closed during a step, which still writes their states
        self._waiters = Waiters()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._counts = dict.fromkeys(("steps", "frames", "opened", "late", "refused", "evicted"), 0)
        self._sizes, self._step_times, self._waits = Recent(), Recent(), Recent()
        self._warm_up()

    def __repr__(self) -> str:
        return f"Engine({self.slots - len(self._free)} of {self.slots} streams, {len(self._prepared.stages)} stages)"

    def _take_model(self, found: tuple[Prepared, TaskModel | None]) -> None:
        self._prepared, self._task = found
        self.features, self.digest = self._prepared.features, self._prepared.digest

    def _warm_up(self) -> None:
        """Run one element, so that the first step is not slower than others."""
        self.run(Ragged._make(self._zeros(1), torch.tensor([0, 1], device="cpu"), None))

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, *self.features, dtype=self._prepared.dtype, device="cpu")

    # -- streams ------------------------------------------------------------------------------------------------------

    def open(self, state: bytes | None = None) -> Stream:
        """Open a stream.

        Args:
            state: of :meth:`Stream.state`, of this or another engine with the same model; None for a new sequence.

        Raises:
            BusyError: no slot is left.
            CheckpointError: the state is that of another model, or damaged.
        """
        with self._lock:
            self._raise_failure()
            if not self._free:
                self._counts["refused"] += 1
                got, fix = f"{self.slots} open streams", "close a stream, or pass more slots"
                raise BusyError(message("slots", got, "more than the number of open streams", fix))
            rows = None if state is None else self._rows_of(state)
            slot = self._free.pop()
            stream = self._streams[slot] = Stream(self, slot)
            self._used = max(self._used, slot + 1)
            self._touched[slot] = time.perf_counter()
            self._counts["opened"] += 1
            self._fresh[slot] = rows is None
            for pool, row in zip(self._pools, rows or (), strict=rows is not None):
                pool[slot] = row
            return stream

    def stream(self, state: bytes | None = None) -> AsyncStream:
        """Return a context manager that opens a stream for asyncio, and closes it; see :meth:`open`."""
        return AsyncStream(self, state)

    def _close(self, slot: int) -> None:
        """Close a stream; the lock is held."""
        self._streams[slot]._slot = -1  # type: ignore[union-attr]
        self._streams[slot] = None
        self._frames.drop(slot)
        self._results.drop(slot)
        self._epochs[slot] += 1
        (self._closed_late if self._running else self._free).append(slot)
        self._waiters.wake((slot,))

    def _rows_of(self, state: bytes) -> list[Tensor]:
        """Return the states in bytes, ``(size,)`` each."""
        check_kind("state", state, bytes, "bytes", "pass the result of Stream.state()")
        starts = self._prepared.starts
        sizes = [start.numel() * start.element_size() for start in starts]
        if len(state) != _HEAD.size + sum(sizes) or state[:8] != _MAGIC:
            got, rule = f"{len(state)} bytes", f"{_HEAD.size + sum(sizes)} bytes that Stream.state() returned"
            raise CheckpointError(message("state", got, rule, "pass the state of a stream of this model"))
        if _HEAD.unpack_from(state)[1] != self.digest:
            rule = "the state of a stream of the same model, with the same weights"
            raise CheckpointError(message("state", "the state of another model", rule, "open a stream without state"))
        rows, place = [], _HEAD.size
        for start, size in zip(starts, sizes, strict=True):
            rows.append(torch.frombuffer(bytearray(state[place : place + size]), dtype=start.dtype))
            place += size
        return rows

    def _state_of(self, stream: Stream) -> bytes:
        with self._stepping, self._lock:
            slot = stream._open_slot()
            rows = self._prepared.starts if self._fresh[slot] else [pool[slot] for pool in self._pools]
            parts = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        return _HEAD.pack(_MAGIC, self.digest) + b"".join(parts)

    # -- frames and results -------------------------------------------------------------------------------------------

    def _checked(self, frames: Any) -> npt.NDArray[Any]:
        """Return frames ``(n, width)`` as an array; bfloat16 as int16."""
        if self._task is not None:
            frames = self._task.frames(frames)
        dtype, features = self._prepared.dtype, self.features
        if not isinstance(frames, Tensor):
            try:
                frames = torch.as_tensor(frames) if not isinstance(frames, list | tuple) else _listed(frames, dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                got, rule = quote(frames), f"a tensor (n, {', '.join(map(str, features))})"
                raise ArgumentTypeError(message("frames", got, rule, "pass a tensor or an array")) from error
        shape = tuple(frames.shape)
        if len(shape) != 1 + len(features) or shape[1:] != features or frames.dtype is not dtype or not frames.is_cpu:
            sizes = ", ".join(map(str, ("n", *features)))
            got, rule = f"shape {shape} of {frames.dtype} on {frames.device}", f"a tensor ({sizes}) of {dtype} on cpu"
            raise ShapeError(message("frames", got, rule, "reshape or convert them"))
        rows = frames.detach().reshape(shape[0], self._width)
        if dtype is torch.int64:
            self._check_tokens(rows)
        elif self.nan == "refuse" and shape[0] and not self._passes_nan:
            least = rows.float().min() if dtype is torch.bfloat16 else rows.numpy().min()
            if least != least:
                step = int(rows.isnan().any(1).nonzero()[0])
                got, rule = f"NaN in frame {step}", "numbers other than NaN"
                raise ArgumentError(message("frames", got, rule, "correct them, or pass nan='pass' to the engine"))
        plain = rows.contiguous().view(torch.int16) if dtype is torch.bfloat16 else rows
        array: npt.NDArray[Any] = plain.numpy()
        return array

    @property
    def _passes_nan(self) -> bool:
        return self._task is not None and self._task.fills

    def _check_tokens(self, rows: Tensor) -> None:
        tokens = self._prepared.tokens
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < tokens):
            got = f"tokens from {int(rows.min())} to {int(rows.max())}"
            raise ArgumentError(message("frames", got, f"tokens from 0 to {tokens - 1}", "replace unknown tokens"))

    def _push(self, stream: Stream, frames: Any) -> None:
        rows = self._checked(frames)
        count = rows.shape[0]
        with self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            now = self._touched[slot] = time.perf_counter()
            if not count:
                return
            queued = int(self._frames.counts[slot])
            if queued + count > self.max_queue:
                self._counts["refused"] += 1
                got = f"{count} frames, with {queued} in the queue"
                rule = f"at most max_queue = {self.max_queue} frames together"
                fix = "push again after a step and a pull, or pass a larger max_queue"
                raise BusyError(message("frames", got, rule, fix))
            self._frames.append(slot, rows)
            if queued:
                self._counts["late"] += 1
            else:
                self._since[slot] = now
        if not self._wake.is_set():
            self._wake.set()

    def _pull(self, stream: Stream, most: int | None = None, waiter: Any = None) -> Tensor:
        with self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            count = int(self._results.counts[slot])
            count = count if most is None else min(most, count)
            if not count:
                if waiter is not None:
                    self._waiters.add(slot, *waiter)
                shape, dtype = self._prepared.output_features, self._prepared.output_dtype
                return torch.empty(0, *shape, dtype=dtype, device="cpu")
            self._touched[slot] = time.perf_counter()
            is_full = self._results.counts[slot] >= self.max_queue
            rows = self._results.take(np.array([slot]), np.array([count]))
        if is_full and not self._wake.is_set():
            self._wake.set()
        return rows.reshape(-1, *self._prepared.output_features)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Run all streams that have frames, at most ``chunk`` frames each, and whose results fit their queues.

        Returns:
            The number of these streams.
        """
        with self._stepping:
            with self._lock:
                self._raise_failure()
                found = self._gather()
                if found is None:
                    return 0
                slots, lengths, rows, epochs = found
                self._running = True
            start = time.perf_counter()
            offsets = np.zeros(len(slots) + 1, np.int64)
            lengths.cumsum(out=offsets[1:])
            places = torch.from_numpy(slots)
            try:
                with self._many(self.threads):
                    outputs = self._prepared.run(rows, torch.from_numpy(offsets), places, self._pools)
            except BaseException as error:
                self._error = error
                raise
            finally:
                with self._lock:
                    self._running = False
                    self._free += self._closed_late
                    self._closed_late.clear()
            with self._lock:
                self._scatter(slots, lengths, outputs, epochs)
                self._step_times.add(time.perf_counter() - start)
        if self.idle is not None:
            self.expire()
        return len(slots)

    def _gather(self) -> tuple[Integers, Integers, Tensor, Integers] | None:
        """Take the frames of a step; the lock is held."""
        used = self._used
        lengths = np.minimum(self._frames.counts[:used], self.max_queue - self._results.counts[:used])
        slots = np.flatnonzero(lengths > 0)
        if not len(slots):
            return None
        lengths = np.minimum(lengths[slots], self.chunk)
        now = time.perf_counter()
        self._waits.add_all(now - self._since[slots])
        self._since[slots] = now
        fresh = slots[self._fresh[slots]]
        if len(fresh):
            self._fresh[fresh] = False
            places = torch.from_numpy(fresh)
            for pool, start in zip(self._pools, self._prepared.starts, strict=True):
                pool[places] = start
        rows = self._frames.take(slots, lengths)
        self._counts["steps"] += 1
        self._counts["frames"] += rows.shape[0]
        self._sizes.add(len(slots))
        return slots, lengths, rows, self._epochs[slots]

    def _scatter(self, slots: Integers, lengths: Integers, outputs: Tensor, epochs: Integers) -> None:
        """Queue the results of a step; the lock is held."""
        alive = self._epochs[slots] == epochs
        if not alive.all():
            outputs = outputs[torch.from_numpy(np.repeat(alive, lengths))]
            slots, lengths = slots[alive], lengths[alive]
        if len(slots):
            self._results.extend(slots, lengths, outputs.reshape(-1, self._outputs))
            if self._waiters:
                self._waiters.wake(slots.tolist())

    @contextmanager
    def _many(self, threads: int) -> Iterator[None]:
        before = torch.get_num_threads()
        if before == threads:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def run(self, batch: Ragged) -> Ragged:
        """Run the model on whole sequences, with the bits of streams.

        Args:
            batch: sequences of ``(L, *features)``.

        Returns:
            The outputs, one per element.
        """
        check_kind("batch", batch, Ragged, "a Ragged", "wrap it with rl.Ragged(sequences)")
        self._checked(batch.values)
        count = len(batch)
        pools = self._prepared.pools(count)
        for pool, start in zip(pools, self._prepared.starts, strict=True):
            pool[:] = start
        with self._many(self.threads):
            outputs = self._prepared.run(
                batch.values.reshape(-1, self._width), batch.offsets, torch.arange(count, device="cpu"), pools
            )
        return batch._like(outputs.reshape(-1, *self._prepared.output_features))

    def columns(self, rows: Tensor, **options: Any) -> dict[str, list[Any]]:
        """Return results of a run as the columns of :meth:`raglane.Run.predict`, an entry per row.

        Args:
            rows: of :meth:`Stream.pull`.
            **options: ``probabilities`` and ``top``, as in :meth:`raglane.Run.predict`.

        Raises:
            ArgumentError: the model of the engine is not a run, or an option does not apply to its task.
        """
        if self._task is None:
            raise ArgumentError(message("model", "a module", "a run", "pass the result of rl.load to the engine"))
        return self._task.columns(rows, **options)

    # -- the engine's own thread --------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start a thread that steps while streams have frames; return the engine."""
        with self._lock:
            if self._thread is not None:
                raise ArgumentError(message("start", "a running engine", "called once", "call stop() first"))
            self._thread = threading.Thread(target=self._loop, name="raglane engine", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread after its step; streams stay open."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.set()
            thread.join()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _loop(self) -> None:
        pause = None if self.idle is None else min(1.0, self.idle / 4)
        try:
            while self._thread is threading.current_thread():
                self._wake.clear()
                if not self.step():
                    self._wake.wait(pause)
                    if self.idle is not None:
                        self.expire()
        except BaseException as error:
            self._error = error
            with self._lock:
                self._waiters.wake(None)
            raise

    def _raise_failure(self) -> None:
        if self._error is not None:
            got = f"an engine whose step raised {quote(str(self._error))}"
            raise ClosedError(message("engine", got, "a working engine", "make a new engine")) from self._error

    # -- care ---------------------------------------------------------------------------------------------------------

    def expire(self, idle: float | None = None) -> int:
        """Close the streams that were idle for ``idle`` seconds, by default those of the engine; return their number.

        A stream is idle between calls of ``push`` and ``pull``.
        """
        limit = self.idle if idle is None else idle
        if limit is None:
            return 0
        with self._lock:
            late = np.flatnonzero(self._touched[: self._used] < time.perf_counter() - limit).tolist()
            closed = [stream for slot in late if (stream := self._streams[slot]) is not None]
            for stream in closed:
                self._close(stream._slot)
            self._counts["evicted"] += len(closed)
        if self._on_idle is not None:
            for stream in closed:
                self._on_idle(stream)
        return len(closed)

    def swap(self, model: Any, *, restart: bool = False) -> None:
        """Replace the model between two steps.

        Args:
            model: as for the engine, with the same frames and results.
            restart: True if all streams begin a new sequence; otherwise their states continue with the new weights.

        Raises:
            ShapeError: frames or results have another shape or dtype, or the states do, without ``restart``.
        """
        found = _prepared(model, self._options)
        new, old = found[0], self._prepared
        facts = [
            (part.features, part.dtype, part.tokens, part.output_features, part.output_dtype) for part in (new, old)
        ]
        if facts[0] != facts[1]:
            got, rule = f"frames and results {facts[0]}", f"a model with frames and results {facts[1]}"
            raise ShapeError(message("model", got, rule, "make a new engine"))
        shapes = [[(start.shape, start.dtype) for start in part.starts] for part in (new, old)]
        if not restart and shapes[0] != shapes[1]:
            got = f"{len(shapes[0])} states of other shapes"
            raise ShapeError(message("model", got, "a model with the same states", "pass restart=True"))
        with self._stepping, self._lock:
            self._take_model(found)
            if restart:
                self._pools = new.pools(self.slots)
                self._fresh[:] = True

    def stats(self) -> dict[str, Any]:
        """Return statistics: counts since the start, and percentiles of the last steps.

        Returns:
            ``streams``, ``slots``, ``ready`` (streams with frames), ``queued`` (frames), ``results`` (not pulled);
            ``steps``, ``frames``, ``opened``; ``late`` (pushes while earlier frames of the stream waited), ``refused``
            (pushes and opens), ``evicted``; and ``p50``, ``p99`` and ``most`` of ``step_streams``, ``step_ms`` and
            ``queue_ms``, the time from push to step.
        """
        with self._lock:
            found: dict[str, Any] = {
                "streams": self.slots - len(self._free) - len(self._closed_late),
                "slots": self.slots,
                "ready": int(np.count_nonzero(self._frames.counts[: self._used])),
                "queued": len(self._frames),
                "results": len(self._results),
                **self._counts,
            }
            found["step_streams"] = self._sizes.summary(1)
            found["step_ms"], found["queue_ms"] = self._step_times.summary(1e3), self._waits.summary(1e3)
        return found


class Recent:
    """The last measurements of one kind."""

    def __init__(self) -> None:
        self._numbers, self._count = np.zeros(_KEPT), 0
        self._most = 0.0

    def add(self, number: float) -> None:
        """Add one measurement."""
        self._numbers[self._count % _KEPT] = number
        self._count += 1

    def add_all(self, numbers: npt.NDArray[np.float64]) -> None:
        """Add several measurements."""
        if len(numbers) == 1:
            return self.add(numbers[0])
        own = numbers[:_KEPT]
        self._numbers[np.arange(self._count, self._count + len(own)) % _KEPT] = own
        self._count += len(own)
        return None

    def summary(self, scale: float) -> dict[str, float]:
        """Return the median, the 99th percentile and the maximum; zeros without measurements."""
        own = self._numbers[: min(self._count, _KEPT)]
        if not len(own):
            return {"p50": 0.0, "p99": 0.0, "most": 0.0}
        middle, high = np.percentile(own, (50, 99))
        return {"p50": scale * float(middle), "p99": scale * float(high), "most": scale * float(own.max())}


def _listed(frames: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return lists of numbers as a tensor of the model's dtype."""
    return torch.tensor(frames, dtype=dtype, device="cpu")


def _prepared(model: Any, options: dict[str, Any]) -> tuple[Prepared, TaskModel | None]:
    """Return a model as stages, and the task of a run."""
    if isinstance(model, Run):
        return prepare_run(model, **options)
    return prepare(model, **options), None
