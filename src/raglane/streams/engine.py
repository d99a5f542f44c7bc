"""The engine: one model, prepared once, and the states and queues of many streams."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
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
from raglane.streams.frames import Frames, frames_of
from raglane.streams.queues import Integers, RowQueues
from raglane.streams.renewal import renewal
from raglane.streams.stages import digest_of
from raglane.streams.states import packed, unpacked
from raglane.streams.stream import AsyncStream, Stream, Waiters

_MEASUREMENTS = 4096  # for statistics
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
        self._renewal = renewal(renew, warm_up)
        self._options = feature_shape, dtype, nan == "pass"
        self._accept(frames_of(model, *self._options))
        self._new_pools()
        slots = 2 * self.max_streams
        self._new_runner()
        # The first states are still to be written, at the next step.
        self._is_fresh = np.zeros(slots, bool)
        self._ages = np.zeros(slots, np.int64)  # frames since the first state began, to be renewed
        self._frames = RowQueues(slots, self.accepts.width, self._prepared.dtype)
        self._results = RowQueues(
            slots, math.prod(self._prepared.output_features), self._prepared.output_dtype
        )
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._streams: list[Stream | None] = [None] * slots
        self._open = 0  # the number of open streams
        self._free: list[int] = []
        self._used = 0  # slots from here on were never used
        # Counts resets and closes, which discard results of a running step.
        self._epochs = np.zeros(slots, np.int64)
        self._since = np.zeros(slots)
        self._touched = np.zeros(slots)
        # Slots that have frames, and ``_listed``; some lost theirs since.
        self._ready: list[int] = []
        self._listed = np.zeros(slots, bool)
        self._running = False  # a step is between reading frames and writing results
        self._is_interrupted = False  # a stream was closed or reset during the step
        self._epochs_before = self._epochs[:0]
        self._in_step = self._epochs[:0]  # the slots of the running step
        # Slots closed during their step, which still writes their states.
        self._closed_late: list[int] = []
        self._waiters = Waiters()
        self._wake: Any = threading.Event()
        self._is_adopted = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._counts = dict.fromkeys(("steps", "frames", "opened", "late", "refused", "evicted"), 0)
        self._busy = 0.0  # seconds of the processor in which the model ran
        self._sizes = deque[float](maxlen=_MEASUREMENTS)  # of steps
        self._step_times = deque[float](maxlen=_MEASUREMENTS)
        self._waits = deque[float](maxlen=_MEASUREMENTS)
        # The first step is not slower than others.
        self._runner.arrays[0][0] = 0
        self._runner.offsets[1] = 1
        self._runner.run(1, 1)

    def __repr__(self) -> str:
        stages = count_of(len(self._prepared.stages), "stage")
        return f"Engine({self._open} of {self.max_streams} streams, {stages})"

    def _accept(self, accepts: Frames) -> None:
        self.accepts = accepts
        self._prepared = accepts.prepared
        self.feature_shape = self._prepared.features
        self.digest = self._prepared.digest
        self._starts = self._prepared.starts
        if self._renewal is not None:
            # The second state, and the age of the first one.
            self._starts += (*self._starts, torch.zeros(1, dtype=torch.int64, device="cpu"))
            self.digest = digest_of([], self.digest.hex() + repr(self._renewal))

    def _new_pools(self) -> None:
        # A slot that is closed during its step is free after it, so there are more slots than
        # streams. The second state of a slot is in a row after those of all slots.
        rows = 2 * self.max_streams
        self._pools = self._prepared.pools(rows if self._renewal is None else 2 * rows)
        self._states = [pool for pools in self._pools for pool in pools]

    def _new_runner(self) -> None:
        self._runner = self._prepared.runner(self._pools, self.threads)
        self._runner.reserve(1, 1)

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
            if self._open >= self.max_streams:
                self._counts["refused"] += 1
                got = f"{self.max_streams} open streams"
                fix = "close a stream, or pass a larger number"
                raise BusyError("max_streams", got, "more than the number of open streams", fix)
            rows = None if state is None else unpacked(state, self._starts, self.digest)
            if rows is not None and self._renewal is not None:
                self._renewal.check_age(int(rows[-1]))
            slot = self._free.pop() if self._free else self._used
            self._used = max(self._used, slot + 1)
            self._open += 1
            stream = self._streams[slot] = Stream(self, slot)
            self._touched[slot] = time.perf_counter()
            self._counts["opened"] += 1
            self._is_fresh[slot] = rows is None
            self._ages[slot] = 0
            if rows is not None:
                self._write(slot, rows)
            return stream

    def _write(self, slot: int, rows: Sequence[Tensor]) -> None:
        """Write the states of a slot."""
        count = len(self._states)
        for pool, row in zip(self._states, rows, strict=False):
            pool[slot] = row
        if self._renewal is not None:
            for pool, row in zip(self._states, rows[count:], strict=False):
                pool[slot + 2 * self.max_streams] = row
            self._ages[slot] = int(rows[-1])

    def stream(self, state: bytes | None = None) -> AsyncStream:
        """Open a stream for asyncio, which ``async with`` closes; see :meth:`open`."""
        return AsyncStream(self.open(state))

    def _close(self, slot: int, reason: str = "a closed stream") -> None:
        """Close a stream; the lock is held."""
        self._streams[slot]._end(reason)  # type: ignore[union-attr]
        self._streams[slot] = None
        self._open -= 1
        self._frames.drop(slot)
        self._results.drop(slot)
        self._epochs[slot] += 1
        self._is_interrupted = self._running
        # Other slots are free at once: more streams may be opened and closed during a step than
        # there are slots.
        (self._closed_late if self._running and slot in self._in_step else self._free).append(slot)
        self._waiters.wake((slot,))

    def _state_of(self, stream: Stream) -> bytes:
        with self._stepping, self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            if self._is_fresh[slot]:
                return packed(self._starts, self.digest)
            rows = [pool[slot] for pool in self._states]
            if self._renewal is not None:
                age = int(self._ages[slot])
                second = slot + 2 * self.max_streams
                is_warming = age > self._renewal.begin
                rows += (
                    [pool[second] for pool in self._states] if is_warming else self._prepared.starts
                )
                rows.append(torch.tensor([age], device="cpu"))
            return packed(rows, self.digest)

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
        count = rows.shape[0]
        with self._lock:
            queued = self._queued(stream, count)
            slot = stream._slot
            now = self._touched[slot] = time.perf_counter()
            if not count:
                return
            self._frames.append(slot, rows)
            if queued:
                self._counts["late"] += 1
            else:
                self._since[slot] = now
            if not self._listed[slot]:
                self._listed[slot] = True
                self._ready.append(slot)
        if not self._wake.is_set():
            self._wake.set()

    def _check_count(self, stream: Stream, count: int) -> None:
        """Raise if no step makes room for so many frames."""
        if count > self.max_queue:
            with self._lock:
                self._queued(stream, count)

    def _queued(self, stream: Stream, count: int) -> int:
        """Return the number of frames in the queue of a stream; raise if ``count`` more do not fit.
        The lock is held.
        """
        slot = stream._open_slot()
        self._raise_failure()
        queued = self._frames.counts.item(slot)
        if queued + count > self.max_queue:
            self._counts["refused"] += 1
            got = f"{count} frames, with {queued} in the queue"
            rule = f"at most max_queue = {self.max_queue} frames together"
            fix = "push again after a step and a pull, or pass a larger max_queue"
            raise BusyError("frames", got, rule, fix)
        return queued

    def _pull(self, stream: Stream, most: int | None = None, waiter: Any = None) -> Tensor:
        if most is not None:
            # A task that waits for no result would wait for ever.
            most = check_whole("max_items", most, 0 if waiter is None else 1)
        with self._lock:
            slot = stream._open_slot()
            self._raise_failure()
            ready = self._results.counts.item(slot)
            count = ready if most is None else min(most, ready)
            if count:
                self._touched[slot] = time.perf_counter()
            elif waiter is not None:
                self._waiters.add(slot, waiter)
            rows = self._results.take_one(slot, count)
        if ready >= self.max_queue and not self._wake.is_set():
            self._wake.set()
        features = self._prepared.output_features
        return rows if len(features) == 1 else rows.reshape(-1, *features)

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
            queued = self._frames.counts[slots]
            if (queued >= self.max_queue).any():
                self._counts["refused"] += 1
                got = f"{self.max_queue} frames in the queue of a stream"
                rule = f"below max_queue = {self.max_queue}"
                raise BusyError("frames", got, rule, "push again after a step and a pull")
            now = time.perf_counter()
            self._frames.extend(slots, 1, rows)
            self._touched[slots] = self._since[slots[queued == 0]] = now
            self._counts["late"] += int(np.count_nonzero(queued))
            new = slots[~self._listed[slots]]
            self._listed[new] = True
            self._ready += new.tolist()
        self._wake.set()

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
            counts = self._results.counts[slots]
            if not counts.all():
                got = f"{len(slots) - np.count_nonzero(counts)} without a result"
                raise ArgumentError("streams", got, "streams with a result", "pull after a step")
            prepared = self._prepared
            rows = torch.empty(
                len(slots), *prepared.output_features, dtype=prepared.output_dtype, device="cpu"
            )
            self._results.take(slots, 1, rows.flatten(1))
            self._touched[slots] = time.perf_counter()
        self._wake.set()
        return rows

    def push_rows(self, slots: Integers, lengths: Integers, rows: Tensor) -> None:
        """Queue ``lengths`` checked frames, each at least 1, for each of different open slots that
        have room for them.
        """
        with self._lock:
            self._raise_failure()
            is_late = self._frames.counts[slots] > 0
            now = time.perf_counter()
            self._frames.extend(slots, lengths, rows)
            self._touched[slots] = now
            self._since[slots[~is_late]] = now
            self._counts["late"] += int(np.count_nonzero(is_late))
            new = slots[~self._listed[slots]]
            self._listed[new] = True
            self._ready += new.tolist()

    def pull_rows(self, slots: Integers) -> tuple[Tensor, Integers]:
        """Remove all results of different open slots; return them in order, and their numbers."""
        with self._lock:
            self._raise_failure()
            counts = self._results.counts[slots]
            rows = torch.empty(
                int(counts.sum()),
                math.prod(self._prepared.output_features),
                dtype=self._prepared.output_dtype,
                device="cpu",
            )
            if rows.shape[0]:
                is_filled = counts > 0
                self._results.take(slots[is_filled], counts[is_filled], rows)
            self._touched[slots] = time.perf_counter()
        return rows.reshape(-1, *self._prepared.output_features), counts

    def queued(self, slots: Integers) -> Integers:
        """Return the numbers of frames in the queues of slots."""
        return self._frames.counts[slots]

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
        return self._in_step

    @property
    def has_frames(self) -> bool:
        """True if frames may wait for a step."""
        return bool(self._ready)

    def step(self) -> int:
        """Run all streams that have frames, at most ``chunk`` frames each, and whose results fit
        their queues.

        Returns:
            The number of these streams.
        """
        with self._stepping:
            with self._lock:
                self._raise_failure()
                step = self._gather()
                if step is None:
                    return 0
                self._running = True
            start = time.perf_counter()
            busy = time.thread_time()
            try:
                self._compute(step)
                self._busy += time.thread_time() - busy
                with self._lock:
                    self._scatter(step)
                    self._step_times.append(time.perf_counter() - start)
            except Exception as error:
                self._fail(error)
                raise
        self.expire()
        return len(step.slots)

    def _compute(self, step: _Step) -> None:
        """Run the stages; close the streams of the step if it is interrupted."""
        try:
            self._runner.run(
                step.elements + step.warming_elements, len(step.slots) + len(step.warming)
            )
        except Exception:
            raise
        except BaseException:
            # Between two stages, of which only some have written their states.
            reason = "a stream whose step was interrupted, so that its states are incomplete"
            with self._lock:
                alive = self._finished(step)
                for slot in step.slots[alive].tolist():
                    self._close(slot, reason)
            raise

    def _gather(self) -> _Step | None:
        """Take the frames of a step; the lock is held."""
        ready = self._ready
        frames = self._frames
        runner = self._runner
        now = time.perf_counter()
        if (
            len(ready) == 1
            and self._renewal is None
            and frames.counts[ready[0]] == 1
            and self._results.counts[ready[0]] < self.max_queue
        ):
            # Fast path for one stream: NumPy's index arithmetic would take most of the step.
            runner.reserve(1, 1)
            slot = ready.pop()
            self._listed[slot] = False
            runner.arrays[0][0] = frames.pop(slot)
            runner.slots[0] = slot
            runner.offsets[1] = 1
            step = _Step(runner.slots[:1], 1, 1)
            self._waits.append(now - self._since.item(slot))
            if self._is_fresh[slot]:
                self._begin(step.slots)
        elif ready:
            slots = np.array(ready)
            counts = frames.counts[slots]
            lengths = np.minimum(
                np.minimum(counts, self.chunk), self.max_queue - self._results.counts[slots]
            )
            if self._renewal is not None:
                # A step ends where a second state begins or takes over.
                lengths = np.minimum(lengths, self._renewal.left(self._ages[slots]))
            elements = int(lengths.sum())
            # First, because memory may be missing.
            factor = 1 if self._renewal is None else 2
            runner.reserve(factor * elements, factor * len(slots))
            self._listed[slots] = False
            ready.clear()
            left = slots[counts > lengths]
            self._listed[left] = True
            ready += left.tolist()
            runs = lengths > 0
            if not runs.all():
                slots = slots[runs]
                lengths = lengths[runs]
            if not len(slots):
                return None
            self._waits.extend((now - self._since[slots]).tolist())
            self._since[slots] = now
            if (fresh := slots[self._is_fresh[slots]]).size:
                self._begin(fresh)
            step = _Step(slots, 1 if elements == len(slots) else lengths, elements)
            lengths.cumsum(out=runner.offsets[1 : len(slots) + 1])
            runner.slots[: len(slots)] = slots
            frames.take(slots, step.lengths, runner.rows[0][:elements])
            if self._renewal is not None:
                step = self._warmed(step)
        else:
            return None
        self._in_step = step.slots
        self._epochs_before = self._epochs[step.slots]
        self._counts["steps"] += 1
        self._counts["frames"] += step.elements
        self._sizes.append(len(step.slots))
        return step

    def _begin(self, slots: Integers) -> None:
        self._is_fresh[slots] = False
        self._prepared.begin(self._pools, torch.from_numpy(slots))

    def _warmed(self, step: _Step) -> _Step:
        """Return a step in which the second states of its slots run over the same frames too."""
        assert self._renewal is not None  # noqa: S101
        ages = self._ages[step.slots]
        warms = ages >= self._renewal.begin
        slots = step.slots[warms]
        if not len(slots):
            return step
        first = slots[ages[warms] == self._renewal.begin] + 2 * self.max_streams
        if len(first):
            self._prepared.begin(self._pools, torch.from_numpy(first))
        runner = self._runner
        lengths = np.broadcast_to(step.lengths, len(step.slots))
        rows = torch.from_numpy(np.flatnonzero(np.repeat(warms, lengths)))
        elements = len(rows)
        end = step.elements + elements
        runner.rows[0][step.elements : end] = runner.rows[0][rows]
        count = len(step.slots)
        runner.slots[count : count + len(slots)] = slots + 2 * self.max_streams
        ends = step.elements + lengths[warms].cumsum()
        runner.offsets[count + 1 : count + len(slots) + 1] = ends
        return step._replace(warming=slots, warming_elements=elements)

    def _renew(self, slots: Integers, lengths: Integers | int) -> None:
        """Count the frames of slots; replace states that are old enough by their second ones. The
        lock is held.
        """
        assert self._renewal is not None  # noqa: S101
        self._ages[slots] += lengths
        old = slots[self._ages[slots] == self._renewal.most]
        if len(old):
            self._ages[old] = self._renewal.warm_up
            rows = torch.from_numpy(old)
            for pool in self._states:
                pool[rows] = pool[rows + 2 * self.max_streams]

    def _finished(self, step: _Step) -> npt.NDArray[np.bool_] | slice:
        """End a step; return which of its streams were neither closed nor reset. The lock is
        held.
        """
        was_interrupted = self._is_interrupted
        self._running = False
        self._is_interrupted = False
        self._free += self._closed_late
        self._closed_late.clear()
        return self._epochs[step.slots] == self._epochs_before if was_interrupted else slice(None)

    def _scatter(self, step: _Step) -> None:
        """Queue the results of a step; the lock is held."""
        slots = step.slots
        lengths = step.lengths
        alive = self._finished(step)
        runner = self._runner
        output = self._prepared.output
        if step.elements == 1 and isinstance(alive, slice):
            self._results.append(slots.item(), runner.arrays[output][:1])
        else:
            outputs = runner.rows[output][: step.elements]
            if not isinstance(alive, slice):
                outputs = outputs[torch.from_numpy(np.repeat(alive, lengths))]
                slots = slots[alive]
                lengths = lengths if isinstance(lengths, int) else lengths[alive]
            if len(slots):
                self._results.extend(slots, lengths, outputs)
        if self._renewal is not None and len(slots):
            self._renew(slots, lengths)
        if self._waiters:
            self._waiters.wake(slots.tolist())

    def run(self, batch: Ragged) -> Ragged:
        """Run the model on whole sequences, with the bits of streams.

        Args:
            batch: sequences of ``(L, *features)``.

        Returns:
            The outputs, one per element.
        """
        check_ragged("batch", batch)
        rows = self.accepts.rows(batch.values)
        if self._renewal is None:
            outputs = self._prepared.run_whole(rows, batch.offsets, self.threads)
        else:
            check_unchanged(batch.offsets, rows.shape[0], rows.device)
            parts = self._renewal.parts(batch.offsets.diff().numpy(), batch.offsets.numpy())
            outputs = self._prepared.run_whole(rows[parts.rows], parts.offsets, self.threads)
            outputs = outputs[parts.answers]
        return batch._like(outputs.reshape(-1, *self._prepared.output_features))

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
            if self._thread is not None:
                rule = "an engine without a thread of its own"
                raise ArgumentError("engine", "a running engine", rule, "call stop() first")
            self._is_adopted = True
            self._wake = wake

    def release(self) -> None:
        """End what :meth:`adopt` began."""
        with self._lock:
            self._is_adopted = False
            self._wake = threading.Event()

    def start(self) -> Engine:
        """Start a thread that steps while streams have frames; return the engine."""
        with self._lock:
            self._raise_failure()
            if self._is_adopted:
                got = "an engine that a server steps"
                raise ArgumentError("start", got, "called without a server", "leave it out")
            if self._thread is not None:
                raise ArgumentError("start", "a running engine", "called once", "call stop() first")
            self._thread = threading.Thread(target=self._loop, name="raglane engine", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread after its step; streams stay open."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._wake.set()
            if thread is not threading.current_thread():  # on_idle may call stop
                thread.join()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _loop(self) -> None:
        pause = None if self.idle is None else min(1.0, self.idle / 4)
        try:
            while True:
                self._wake.clear()
                # After clear, which would otherwise undo the wake of a stop in between.
                if self._thread is not threading.current_thread():
                    return
                if not self.step():
                    self._wake.wait(pause)
                    self.expire()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Record an error, so that later calls and waiting tasks raise."""
        with self._lock:
            self._error = error
            self._waiters.wake(None)

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
            late = np.flatnonzero(
                self._touched[: self._used] < time.perf_counter() - limit
            ).tolist()
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
        old = self._prepared
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
            self._accept(accepts)
            if restart:
                self._is_fresh[:] = True
                self._ages[:] = 0
                self._new_pools()
            self._new_runner()

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
            statistics: dict[str, Any] = {
                "works": self._error is None,
                "streams": self._open,
                "slots": self.max_streams,
                "ready": int(np.count_nonzero(self._frames.counts[: self._used])),
                "queued": len(self._frames),
                "results": len(self._results),
                "longest": int(self._frames.counts[: self._used].max(initial=0)),
                "busy_seconds": self._busy,
                **self._counts,
            }
            statistics["step_streams"] = _summary(self._sizes, 1)
            statistics["step_ms"] = _summary(self._step_times, 1e3)
            statistics["queue_ms"] = _summary(self._waits, 1e3)
        return statistics


class _Step(NamedTuple):
    """The frames of one step."""

    slots: Integers
    lengths: Integers | int  # 1 for one frame each
    elements: int
    warming: Integers = np.empty(0, np.int64)  # slots whose second states run too
    warming_elements: int = 0


def _seconds(idle: Any) -> float:
    """Return a time after which streams are closed."""
    return check_real(
        "idle",
        idle,
        "a number of seconds above 0, or None",
        lambda number: number > 0,
        "pass e.g. 60",
    )


def _summary(numbers: Iterable[float], scale: float) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum; zeros without numbers."""
    values = scale * np.fromiter(numbers, np.float64)
    middle, high = np.percentile(values, (50, 99)) if len(values) else (0.0, 0.0)
    return {"p50": float(middle), "p99": float(high), "most": float(values.max(initial=0.0))}
