"""The caller of an engine's steps: its own thread, a server, or the user."""

from __future__ import annotations

import threading
from typing import Any

from raglane.errors import ArgumentError


class Driver:
    """Wakes what steps an engine; the engine's lock is held in all calls but :meth:`stop`."""

    def __init__(self) -> None:
        self.event: Any = threading.Event()  # set while there may be frames
        self._thread: threading.Thread | None = None
        self._is_adopted = False

    def adopt(self, wake: Any) -> None:
        """Let a server step, which ``wake.set()`` tells about frames."""
        if self._thread is not None:
            rule = "an engine without a thread of its own"
            raise ArgumentError("engine", "a running engine", rule, "call stop() first")
        self._is_adopted = True
        self.event = wake

    def release(self) -> None:
        """End what :meth:`adopt` began."""
        self._is_adopted = False
        self.event = threading.Event()

    def start(self, engine: Any) -> None:
        """Start a thread that steps while there are frames."""
        if self._is_adopted:
            got = "an engine that a server steps"
            raise ArgumentError("start", got, "called without a server", "leave it out")
        if self._thread is not None:
            raise ArgumentError("start", "a running engine", "called once", "call stop() first")
        self._thread = threading.Thread(
            target=self._loop, args=(engine,), name="raglane engine", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its step."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self.event.set()
            if thread is not threading.current_thread():  # on_idle may call stop
                thread.join()

    @property
    def is_running(self) -> bool:
        """True if the engine has a thread of its own."""
        return self._thread is not None

    def _loop(self, engine: Any) -> None:
        pause = None if engine.idle is None else min(1.0, engine.idle / 4)
        try:
            while True:
                self.event.clear()
                # After clear, which would otherwise undo the wake of a stop in between.
                if self._thread is not threading.current_thread():
                    return
                if not engine.step():
                    self.event.wait(pause)
                    engine.expire()
        except BaseException as error:
            engine._fail(error)
            raise
