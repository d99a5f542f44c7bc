"""Applications on a port, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from raglane.serve.app import settings


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application on a port, with the settings of the command that matter; yield host and
    port.
    """
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **settings(app)))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{port}"
    finally:  # else a test that fails would not end
        server.should_exit = True
        thread.join()
