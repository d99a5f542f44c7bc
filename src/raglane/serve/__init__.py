"""A server of live streams, whose engine is in :mod:`raglane.streams`, and its clients.

app.py is a server of engines over HTTP. rounds.py steps an engine in its event loop;
conversations.py and gateways.py talk with clients over a WebSocket, which wire.py carries for
uvicorn, and relay.py for other servers. live.py has limits of clients, and sequences over HTTP;
served.py is a model with its batches. client.py is the other side, and continued.py its streams
without a connection; events.py finds starts and ends in results; hosts.py has the names by which
clients reach a server, and ray_replicas.py runs replicas of it on a Ray cluster.
"""

from __future__ import annotations

from raglane.serve.client import AsyncClient, Client
from raglane.serve.events import Events
from raglane.serve.ray_replicas import deployment
from raglane.streams import Engine

__all__ = ["AsyncClient", "Client", "Engine", "Events", "deployment"]
