"""Steps: the frames of ready slots become one batch, which the stages run, and its results are
queued.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from raglane.streams.pools import StatePools
from raglane.streams.prepared import Prepared
from raglane.streams.queues import Integers
from raglane.streams.renewal import Renewal
from raglane.streams.slots import Slots
from raglane.streams.statistics import StepCounts


class FrameStep(NamedTuple):
    """The frames of one step."""

    slots: Integers
    lengths: Integers | int  # 1 for one frame each
    elements: int
    warming: Integers = np.empty(0, np.int64)  # slots whose second states run too
    warming_elements: int = 0


class Stepper:
    """Gathers the frames of slots, runs them, and scatters the results.

    The engine's lock is held in all calls but :meth:`compute`.
    """

    def __init__(
        self, slots: Slots, statistics: StepCounts, threads: int, chunk: int, max_queue: int
    ) -> None:
        self._slots = slots
        self._statistics = statistics
        self._threads = threads
        self._chunk = chunk
        self._max_queue = max_queue
        self.last = np.empty(0, np.int64)  # the slots of the last step

    def accept(self, prepared: Prepared, pools: StatePools) -> None:
        """Run a model on pools from now on."""
        self._pools = pools
        self._renewal = pools.renewal
        self._output = prepared.output
        self.runner = prepared.runner(pools.by_stage, self._threads)
        self.runner.reserve(1, 1)

    def run_once(self) -> None:
        """Run the stages on a slot without a stream: the first step is not slower than others."""
        self.runner.arrays[0][0] = 0
        self.runner.offsets[1] = 1
        self.runner.run(1, 1)

    def gather(self) -> FrameStep | None:
        """Take the frames of a step; None without frames."""
        slots = self._slots
        ready = slots.ready
        if (
            len(ready) == 1
            and self._renewal is None
            and slots.frames.counts[ready[0]] == 1
            and slots.results.counts[ready[0]] < self._max_queue
        ):
            step: FrameStep | None = self._gathered_one()
        else:
            step = self._gathered() if ready else None
        if step is not None:
            self.last = step.slots
            self._statistics.steps += 1
            self._statistics.frames += step.elements
            self._statistics.sizes.append(len(step.slots))
        return step

    def _gathered_one(self) -> FrameStep:
        """Fast path for one stream: NumPy's index arithmetic would take most of the step."""
        now = time.perf_counter()
        slots = self._slots
        runner = self.runner
        runner.reserve(1, 1)
        slot, is_fresh = slots.step_one()
        runner.arrays[0][0] = slots.frames.pop(slot)
        runner.slots[0] = slot
        runner.offsets[1] = 1
        step = FrameStep(runner.slots[:1], 1, 1)
        self._statistics.waits.append(now - slots.since.item(slot))
        if is_fresh:
            self._pools.begin(step.slots)
        return step

    def _gathered(self) -> FrameStep | None:
        now = time.perf_counter()
        runner = self.runner
        slots = np.array(self._slots.ready)
        counts = self._slots.frames.counts[slots]
        room = self._max_queue - self._slots.results.counts[slots]
        lengths = np.minimum(np.minimum(counts, self._chunk), room)
        if self._renewal is not None:
            # A step ends where a second state begins or takes over.
            lengths = np.minimum(lengths, self._renewal.left(self._pools.ages[slots]))
        elements = int(lengths.sum())
        # First, because memory may be missing.
        factor = 1 if self._renewal is None else 2
        runner.reserve(factor * elements, factor * len(slots))
        is_stepping = lengths > 0
        fresh = self._slots.step_many(slots, is_stepping, counts > lengths)
        if not is_stepping.all():
            slots = slots[is_stepping]
            lengths = lengths[is_stepping]
        if not len(slots):
            return None
        since = self._slots.since
        self._statistics.waits.extend((now - since[slots]).tolist())
        since[slots] = now
        if len(fresh):
            self._pools.begin(fresh)
        step = FrameStep(slots, 1 if elements == len(slots) else lengths, elements)
        lengths.cumsum(out=runner.offsets[1 : len(slots) + 1])
        runner.slots[: len(slots)] = slots
        self._slots.frames.take(slots, step.lengths, runner.rows[0][:elements])
        return step if self._renewal is None else self._warmed(step, self._renewal)

    def _warmed(self, step: FrameStep, renewal: Renewal) -> FrameStep:
        """Return a step in which the second states of its slots run over the same frames too."""
        ages = self._pools.ages[step.slots]
        warms = ages >= renewal.begin
        slots = step.slots[warms]
        if not len(slots):
            return step
        first = slots[ages[warms] == renewal.begin]
        if len(first):
            self._pools.begin_second(first)
        runner = self.runner
        lengths = np.broadcast_to(step.lengths, len(step.slots))
        rows = torch.from_numpy(np.flatnonzero(np.repeat(warms, lengths)))
        elements = len(rows)
        end = step.elements + elements
        runner.rows[0][step.elements : end] = runner.rows[0][rows]
        count = len(step.slots)
        runner.slots[count : count + len(slots)] = slots + self._pools.slots
        ends = step.elements + lengths[warms].cumsum()
        runner.offsets[count + 1 : count + len(slots) + 1] = ends
        return step._replace(warming=slots, warming_elements=elements)

    def compute(self, step: FrameStep) -> None:
        """Run the stages."""
        self.runner.run(step.elements + step.warming_elements, len(step.slots) + len(step.warming))

    def scatter(self, step: FrameStep) -> None:
        """Queue the results of a step."""
        slots = step.slots
        lengths = step.lengths
        results = self._slots.results
        alive = self._slots.finish_step(slots)
        if step.elements == 1 and isinstance(alive, slice):
            results.append(slots.item(), self.runner.arrays[self._output][:1])
        else:
            outputs = self.runner.rows[self._output][: step.elements]
            if not isinstance(alive, slice):
                outputs = outputs[torch.from_numpy(np.repeat(alive, lengths))]
                slots = slots[alive]
                lengths = lengths if isinstance(lengths, int) else lengths[alive]
            if len(slots):
                results.extend(slots, lengths, outputs)
        if self._renewal is not None and len(slots):
            self._pools.renew(self._renewal, slots, lengths)
        if self._slots.waiters:
            self._slots.waiters.wake(slots.tolist())
