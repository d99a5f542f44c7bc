"""Live streams: one engine holds a model and the states of thousands of streams.

prepare.py and stages.py turn a model into stages, stateful.py a model with its state as an argument
into a cell; frames.py has the frames that streams accept. queues.py holds the frames and results of
streams, states.py their states as bytes; engine.py steps them, renewal.py has the streams without an
end, and stream.py is their interface, also for asyncio.
"""

from __future__ import annotations

from raglane.streams.engine import Engine
from raglane.streams.stream import AsyncStream, Stream

__all__ = ["AsyncStream", "Engine", "Stream"]
