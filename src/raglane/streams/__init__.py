"""Live streams: one engine holds a model and the states of thousands of streams.

prepare.py traces a model, with cuts.py in place of its layers, and makes the stages of stages.py,
which prepared.py runs; stateful.py turns a model with its state as an argument into a cell.
frames.py has the frames that streams accept.

engine.py is the engine, and stream.py the streams that it opens, also for asyncio. slots.py has what
the slot of a stream is doing, with the queues of queues.py; pools.py has the states of all slots,
states.py one as bytes, and renewal.py streams without an end. steps.py runs the frames of ready
slots, driver.py is the thread that calls it, and statistics.py counts.
"""

from __future__ import annotations

from raglane.streams.engine import Engine
from raglane.streams.stream import AsyncStream, Stream

__all__ = ["AsyncStream", "Engine", "Stream"]
