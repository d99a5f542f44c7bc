"""Live streams: one engine holds a model and the states of thousands of streams.

prepare.py and stages.py turn a model into stages, stateful.py a model with its state as an argument
into a cell, frames.py a stored run; queues.py holds the frames and results of streams, states.py
their states, engine.py steps them, renewal.py has the streams without an end, and streams.py is
their interface, also for asyncio.

app.py is a server of engines over HTTP. rounds.py steps an engine in its event loop;
conversations.py and gateways.py talk with clients over a WebSocket, which wire.py carries for
uvicorn, and relay.py for other servers. live.py has limits of clients, and sequences over HTTP;
served.py is a model with its batches. client.py is the other side, and continued.py its streams
without a connection; events.py finds starts and ends in results; on_ray.py runs replicas on a Ray
cluster.
"""

from __future__ import annotations

from raglane.serve.client import AsyncClient, Client
from raglane.serve.engine import Engine
from raglane.serve.events import Events
from raglane.serve.on_ray import deployment

__all__ = ["AsyncClient", "Client", "Engine", "Events", "deployment"]
