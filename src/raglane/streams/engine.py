"""The engine: one model, prepared once, and the states and queues of many streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import (
    check_choice,
    check_count,
    check_kind,
    check_real,
    check_unchanged,
    check_whole,
)
from raglane._utils.messages import count_of, quote
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, ShapeError
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged
from raglane.streams.driver import Driver
from raglane.streams.frames import frames_of
from raglane.streams.pools import StatePools
from raglane.streams.queues import Integers
from raglane.streams.renewal import renewal
from raglane.streams.slots import Slots
from raglane.streams.statistics import StepCounts
from raglane.streams.steps import FrameStep, Stepper
from raglane.streams.stream import AsyncStream, Stream

_MOST_THREADS = 4096  # that the kernels accept


class Engine:
    """Runs one model on many live streams, each with the results of the whole sequence so far.

    Frames are pushed to streams, and :meth:`step` runs all streams that have frames in one call of
    the kernels. The outputs of a stream have the bits of :meth:`run` on its whole sequence, for any
    division of its frames among steps, and with any other streams.

    Args:
        model: a :class:`raglane.Run`, a recurrent layer, a list of modules that run one after the
            other, or a module that maps a Ragged batch to a Ragged or a tensor, element by element.
            A vector per sequence, e.g. of a pooling, becomes the vector of the elements so far. The
            engine copies what it needs.
        max_streams: the largest number of open streams.
        threads: the threads of a step.
        max_queue: the most frames of a stream that wait, and the most results.
        chunk: the most frames of a stream in one step; None for all.
        feature_shape: the shape of a frame, if it does not follow from the first module.
        dtype: ``torch.int8`` for int8 weights of RNN, LSTM and GRU, as :func:`raglane.pack_weights`; None
            for those of the model.
        nan: ``"raise"`` to raise an error for frames with NaN, or ``"pass"``. A run trained with
            ``missing`` passes them.
        renew: for streams without an end: the most frames that a state remembers. Before it is so old, a
            second state begins, which runs over the same ``warm_up`` frames, and then takes over. The
            results after ``renew`` frames are those of a stream that began at least ``warm_up`` frames
            before. None for one state from the first frame on.
        warm_up: the frames of a second state before it takes over, at most half of ``renew``.
        idle: seconds after which an idle stream is closed; None for never.
        on_idle: a function of the stream that was closed. If it raises in the engine's thread,
            later calls raise ClosedError.

    Raises:
        DispatchError: the model does not run element by element; the message names the module.
        ArgumentError, ArgumentTypeError: another argument is invalid.

    Example:
        >>> engine = Engine(rl.nn.LSTM(3, 4).eval(), max_streams=100)
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
        max_streams: int,
        threads: int = 1,
        max_queue: int = 1024,
        chunk: int | None = None,
        feature_shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        nan: Literal["raise", "pass"] = "raise",
        renew: int | None = None,
        warm_up: int | None = None,
        idle: float | None = None,
        on_idle: Callable[[Stream], object] | None = None,
    ) -> None:
        self.max_streams = check_count("max_streams", max_streams)
        self.threads = check_whole("threads", threads, 1, most=_MOST_THREADS)
        self.max_queue = check_count("max_queue", max_queue)
        self.chunk = self.max_queue if chunk is None else check_count("chunk", chunk)
        self.nan = check_choice("nan", nan, ("raise", "pass"))
        self.idle = None if idle is None else _seconds(idle)
        if on_idle is not None:
            check_kind(
                "on_idle", on_idle, Callable, "a function of a stream, or None", "pass a function"
            )
        self._on_idle = on_idle
        renewing = renewal(renew, warm_up)
        self._options = feature_shape, dtype, nan == "pass"
        self.accepts = frames_of(model, *self._options)
        prepared = self.accepts.prepared
        self._statistics = StepCounts()
        self._slots = Slots(self.max_streams, prepared, self._statistics)
        self._pools = StatePools(prepared, 2 * self.max_streams, renewing)
        self._stepper = Stepper(
            self._slots, self._statistics, self.threads, self.chunk, self.max_queue
        )
        self._stepper.accept(prepared, self._pools)
        self._stepper.run_once()
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._driver = Driver()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        stages = count_of(len(self.accepts.prepared.stages), "stage")
        return f"Engine({self._slots.open} of {self.max_streams} streams, {stages})"

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The shape of a frame."""
        return self.accepts.prepared.features

    @property
    def digest(self) -> bytes:
        """The digest of the model, which states contain."""
        return self._pools.digest

    @property
    def works(self) -> bool:
        """False after a step has failed."""
        return self._error is None

    # Streams.

    def open(self, state: bytes | None = None) -> Stream:
        """Open a stream.

        Args:
            state: of :meth:`raglane.streams.Stream.state`, of this or another engine with the
                same model; None for a new sequence.

        Raises:
            BusyError: no slot is left.
            CheckpointError: the state is that of another model, or damaged.
        """
        with self._lock:
            self._raise_failure()
            if self._slots.open >= self.max_streams:
                self._statistics.refused += 1
                got = f"{self.max_streams} open streams"
                fix = "close a stream, or pass a larger number"
                raise BusyError("max_streams", got, "more than the number of open streams", fix)
            rows = None if state is None else self._pools.unpacked(state)
            slot = self._slots.take(is_fresh=rows is None)
            self._pools.ages[slot] = 0
            if rows is not None:
                self._pools.write(slot, rows)
            stream = Stream(self, slot)
            self._slots.streams[slot] = stream
            return stream

    def stream(self, state: bytes | None = None) -> AsyncStream:
        """Open a stream for asyncio, which ``async with`` closes; see :meth:`open`."""
        return AsyncStream(self.open(state))

    def _close(self, stream: Stream) -> None:
        with self._lock:
            if not stream.closed:
                self._slots.close(stream._slot)

    def _reset(self, stream: Stream) -> int:
        with self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            self._pools.ages[slot] = 0
            return self._slots.restart(slot)

    def _state_of(self, stream: Stream) -> bytes:
        with self._stepping, self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            is_fresh = self._slots.is_fresh(slot)
            return self._pools.first() if is_fresh else self._pools.packed(slot)

    # Frames and results.

    def _push(self, stream: Stream, frames: Any) -> None:
        accepts = self.accepts
        if (
            type(frames) is np.ndarray
            and frames.dtype is accepts.plain
            and frames.shape == accepts.one
            and accepts.are_accepted(frames)
        ):
            # Fast path: one frame of a stream, which is most of the time of live streams.
            rows = frames
        else:
            rows = accepts.array(frames, partial(self._check_count, stream))
        with self._lock:
            self._slots.push(self._slot_with_room(stream, rows.shape[0]), rows)
        if rows.shape[0] and not self._driver.event.is_set():
            self._driver.event.set()

    def _check_count(self, stream: Stream, count: int) -> None:
        """Raise if no step makes room for so many frames."""
        if count > self.max_queue:
            with self._lock:
                self._slot_with_room(stream, count)

    def _slot_with_room(self, stream: Stream, count: int) -> int:
        """Return the slot of a stream; raise if ``count`` more frames do not fit its queue. The
        lock is held.
        """
        slot = stream._open_slot()
        self._raise_failure()
        queued = self._slots.frames.counts.item(slot)
        if queued + count > self.max_queue:
            self._statistics.refused += 1
            got = f"{count} frames, with {queued} in the queue"
            rule = f"at most max_queue = {self.max_queue} frames together"
            fix = "push again after a step and a pull, or pass a larger max_queue"
            raise BusyError("frames", got, rule, fix)
        return slot

    def _pull(self, stream: Stream, most: int | None = None, waiter: Any = None) -> Tensor:
        if most is not None:
            # A task that waits for no result would wait for ever.
            most = check_whole("max_items", most, 0 if waiter is None else 1)
        with self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            rows, ready = self._slots.pull(slot, most)
            if waiter is not None and not rows.shape[0]:
                self._slots.waiters.add(slot, waiter)
        if ready >= self.max_queue and not self._driver.event.is_set():
            self._driver.event.set()
        return self._shaped(rows)

    def _shaped(self, rows: Tensor) -> Tensor:
        """Return results ``(n, width)`` in their shape."""
        features = self.accepts.prepared.output_features
        return rows if len(features) == 1 else rows.reshape(rows.shape[0], *features)

    def push(self, streams: Sequence[Stream], frames: Any) -> None:
        """Queue one frame for each of many streams, in less time than
        :meth:`raglane.streams.Stream.push` of each.

        Args:
            streams: different open streams of this engine.
            frames: ``(len(streams), *features)``, as for :meth:`raglane.streams.Stream.push`.

        Raises:
            BusyError: the queue of a stream is full; no frame was added.
            ArgumentError, ArgumentTypeError, ClosedError, ShapeError: a stream or the frames are
                invalid.
        """

        def check_count(count: int) -> None:
            if hasattr(streams, "__len__") and count == len(streams):
                return
            with self._lock:
                slots = self._slots_of(streams)
            rule = f"one frame for each of the {len(slots)} streams"
            fix = "call push of a stream for several frames"
            raise ShapeError("frames", f"{count} frames", rule, fix)

        rows = self.accepts.rows(frames, check_count)
        with self._lock:
            slots = self._slots_of(streams)
            if (self._slots.frames.counts[slots] >= self.max_queue).any():
                self._statistics.refused += 1
                got = f"{self.max_queue} frames in the queue of a stream"
                rule = f"below max_queue = {self.max_queue}"
                raise BusyError("frames", got, rule, "push again after a step and a pull")
            self._slots.push_many(slots, 1, rows)
        self._driver.event.set()

    def pull(self, streams: Sequence[Stream]) -> Tensor:
        """Return one result of each of many streams, ``(len(streams), *features)``; see
        :meth:`raglane.streams.Stream.pull`.

        Args:
            streams: different open streams of this engine, each with a result.

        Raises:
            ArgumentError, ArgumentTypeError, ClosedError: a stream is invalid, or has no result;
                none was removed.

        Example:
            >>> engine = Engine(rl.nn.LSTM(3, 4).eval(), max_streams=100)
            >>> streams = [engine.open() for _ in range(50)]
            >>> engine.push(streams, torch.randn(50, 3))
            >>> engine.step()
            50
            >>> engine.pull(streams).shape
            torch.Size([50, 4])
        """
        with self._lock:
            slots = self._slots_of(streams)
            counts = self._slots.results.counts[slots]
            if not counts.all():
                got = f"{len(slots) - np.count_nonzero(counts)} without a result"
                raise ArgumentError("streams", got, "streams with a result", "pull after a step")
            rows = self._slots.pull_many(slots, 1)
        self._driver.event.set()
        return self._shaped(rows)

    def push_rows(self, slots: Integers, lengths: Integers, rows: Tensor) -> None:
        """Queue ``lengths`` checked frames, each at least 1, for each of different open slots that
        have room for them.
        """
        with self._lock:
            self._raise_failure()
            self._slots.push_many(slots, lengths, rows)

    def pull_rows(self, slots: Integers) -> tuple[Tensor, Integers]:
        """Remove all results of different open slots; return them in order, and their numbers."""
        with self._lock:
            self._raise_failure()
            counts = self._slots.results.counts[slots]
            return self._shaped(self._slots.pull_many(slots, counts)), counts

    def queued(self, slots: Integers) -> Integers:
        """Return the numbers of frames in the queues of slots."""
        return self._slots.frames.counts[slots]

    def _slots_of(self, streams: Sequence[Stream]) -> Integers:
        """Return the slots of different open streams; the lock is held."""
        self._raise_failure()
        if not hasattr(streams, "__len__"):
            raise ArgumentTypeError(
                "streams", quote(streams), "a list of streams", "pass what Engine.open returned"
            )
        slots = [
            stream._slot
            for stream in streams
            if isinstance(stream, Stream) and stream._engine is self
        ]
        if len(slots) < len(streams):
            got = f"{len(streams) - len(slots)} others"
            rule = "streams of this engine"
            raise ArgumentTypeError("streams", got, rule, "pass what Engine.open returned")
        if len({*slots}) < len(slots) or -1 in slots:
            for stream in streams:
                stream._open_slot()
            raise ArgumentError(
                "streams", "a stream twice", "different streams", "call push of the stream"
            )
        return np.array(slots, np.int64)

    # Steps.

    @property
    def stepped(self) -> Integers:
        """The slots of the last step."""
        return self._stepper.last

    @property
    def has_frames(self) -> bool:
        """True if frames may wait for a step."""
        return bool(self._slots.ready)

    def step(self) -> int:
        """Run all streams that have frames, at most ``chunk`` frames each, and whose results fit
        their queues.

        Returns:
            The number of these streams.
        """
        with self._stepping:
            with self._lock:
                self._raise_failure()
                step = self._stepper.gather()
                if step is None:
                    return 0
            start = time.perf_counter()
            busy = time.thread_time()
            try:
                self._compute(step)
                self._statistics.busy_seconds += time.thread_time() - busy
                with self._lock:
                    self._stepper.scatter(step)
                    self._statistics.step_times.append(time.perf_counter() - start)
            except Exception as error:
                self._fail(error)
                raise
        self.expire()
        return len(step.slots)

    def _compute(self, step: FrameStep) -> None:
        """Run the stages; close the streams of the step if it is interrupted."""
        try:
            self._stepper.compute(step)
        except Exception:
            raise
        except BaseException:
            # Between two stages, of which only some have written their states.
            reason = "a stream whose step was interrupted, so that its states are incomplete"
            with self._lock:
                alive = self._slots.finish_step(step.slots)
                for slot in step.slots[alive].tolist():
                    self._slots.close(slot, reason)
            raise

    def run(self, batch: Ragged) -> Ragged:
        """Run the model on whole sequences, with the bits of streams.

        Args:
            batch: sequences of ``(L, *features)``.

        Returns:
            The outputs, one per element.
        """
        check_ragged("batch", batch)
        rows = self.accepts.rows(batch.values)
        prepared = self.accepts.prepared
        renewal = self._pools.renewal
        if renewal is None:
            outputs = prepared.run_whole(rows, batch.offsets, self.threads)
        else:
            check_unchanged(batch.offsets, rows.shape[0], rows.device)
            parts = renewal.parts(batch.offsets.diff().numpy(), batch.offsets.numpy())
            outputs = prepared.run_whole(rows[parts.rows], parts.offsets, self.threads)
            outputs = outputs[parts.answers]
        return batch._like(self._shaped(outputs))

    def columns(self, rows: Tensor, **options: Any) -> dict[str, list[Any]]:
        """Return results of a run as the columns of :meth:`raglane.Run.predict`, an entry per row.

        Args:
            rows: of :meth:`raglane.streams.Stream.pull`.
            **options: ``probabilities`` and ``top``, as in :meth:`raglane.Run.predict`.

        Raises:
            ArgumentError: the model of the engine is not a run, or an option does not apply to its
                task.
        """
        return self.accepts.columns(rows, **options)

    # The engine's own thread.

    def adopt(self, wake: Any) -> None:
        """Let another owner call :meth:`step`: ``wake.set()`` is called when there are frames."""
        with self._lock:
            self._raise_failure()
            self._driver.adopt(wake)

    def release(self) -> None:
        """End what :meth:`adopt` began."""
        with self._lock:
            self._driver.release()

    def start(self) -> Engine:
        """Start a thread that steps while streams have frames; return the engine."""
        with self._lock:
            self._raise_failure()
            self._driver.start(self)
        return self

    def stop(self) -> None:
        """Stop the thread after its step; streams stay open."""
        self._driver.stop()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _fail(self, error: BaseException) -> None:
        """Record an error, so that later calls and waiting tasks raise."""
        with self._lock:
            self._error = error
            self._slots.waiters.wake(None)

    def _raise_failure(self) -> None:
        if self._error is not None:
            got = f"an engine whose step raised {quote(str(self._error))}"
            raise ClosedError(
                "engine", got, "a working engine", "make a new engine"
            ) from self._error

    # Care.

    def expire(self, idle: float | None = None) -> int:
        """Close the streams that were idle for ``idle`` seconds, by default those of the engine;
        return their number.

        A stream is idle between calls of ``push`` and ``pull``.

        Raises:
            ArgumentTypeError: ``idle`` is not a number above 0.
        """
        limit = self.idle if idle is None else _seconds(idle)
        if limit is None:
            return 0
        with self._lock:
            closed = self._slots.idle(limit)
            for stream in closed:
                self._slots.close(stream._slot)
            self._statistics.evicted += len(closed)
        if self._on_idle is not None:
            for stream in closed:
                self._on_idle(stream)
        return len(closed)

    def swap(self, model: Any, *, restart: bool = False) -> None:
        """Replace the model between two steps.

        Args:
            model: as for the engine, with the same frames and results.
            restart: True if all streams begin a new sequence; otherwise their states continue with
                the new weights.

        Raises:
            ShapeError: frames or results have another shape, dtype or meaning (of a run the task,
                channels, vocabulary and labels), or the states have another shape or dtype, without
                ``restart``.
            ClosedError: a step has raised.
        """
        self._raise_failure()
        accepts = frames_of(model, *self._options)
        new = accepts.prepared
        old = self.accepts.prepared
        if new.facts != old.facts:
            got = f"frames and results {new.facts}"
            rule = f"a model with frames and results {old.facts}"
            raise ShapeError("model", got, rule, "make a new engine")
        if accepts.names != self.accepts.names:
            rule = "a run with the same task, channels, tokens and labels"
            raise ShapeError("model", "one with others", rule, "make a new engine")
        shapes = [
            [(start.shape, start.dtype) for start in prepared.starts] for prepared in (new, old)
        ]
        if not restart and shapes[0] != shapes[1]:
            got = f"{len(shapes[0])} states of other shapes"
            raise ShapeError("model", got, "a model with the same states", "pass restart=True")
        with self._stepping, self._lock:
            self._raise_failure()
            self.accepts = accepts
            if restart:
                self._slots.restart_all()
                self._pools = StatePools(new, self._pools.slots, self._pools.renewal)
            else:
                self._pools.accept(new)
            self._stepper.accept(new, self._pools)

    def stats(self) -> dict[str, Any]:
        """Return statistics: counts since the start, and percentiles of the last steps.

        Returns:
            ``works`` (False after a step has failed); ``streams``, ``slots``, ``ready`` (streams
            with frames), ``queued`` (frames), ``longest`` (frames of the longest queue),
            ``results`` (not pulled); ``busy_seconds`` (time of the calling thread's processor in
            which the model ran); ``steps``, ``frames``,
            ``opened``; ``late`` (pushes while earlier frames of the stream waited), ``refused``
            (pushes and opens), ``evicted``; and ``p50``, ``p99`` and ``most`` of ``step_streams``,
            ``step_ms`` and ``queue_ms``, the time from push to step.
        """
        with self._lock:
            return {
                "works": self.works,
                "streams": self._slots.open,
                "slots": self.max_streams,
                **self._slots.statistics(),
                **self._statistics.counts(),
                **self._statistics.summaries(),
            }


def _seconds(idle: Any) -> float:
    """Return a time after which streams are closed."""
    return check_real(
        "idle",
        idle,
        "a number of seconds above 0, or None",
        lambda number: number > 0,
        "pass e.g. 60",
    )
