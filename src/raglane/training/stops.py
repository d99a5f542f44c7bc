"""Ctrl-C and SIGTERM while a run trains."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Stops:
    """The first Ctrl-C or SIGTERM asks the run to stop at the next batch; a second one stops it at once."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take the two signals; in a thread that is not the main one, which gets none, do nothing."""
        if threading.current_thread() is not threading.main_thread() or self.asked is not None:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self.asked = number
        signal.signal(number, self._before[number])

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
