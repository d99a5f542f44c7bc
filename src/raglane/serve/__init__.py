"""Live streams: one engine holds a model and the states of thousands of streams.

prepare.py and stages.py turn a model into stages, frames.py a stored run; queues.py holds the
frames and results of streams, states.py their states, engine.py steps them, and streams.py is their
interface, also for asyncio.

app.py is a server of engines over HTTP, live.py its streams and sequences, and served.py a model
with its batches; on_ray.py runs replicas of it on a Ray cluster.
"""

from __future__ import annotations

from raglane.serve.engine import Engine
from raglane.serve.on_ray import deployment
from raglane.serve.streams import Stream

__all__ = ["Engine", "Stream", "deployment"]
