"""Detect a fork of this process after PyTorch may have started threads.

Threads do not survive a fork, and OpenMP waits for them forever, even if only torch's own
operations started them.
"""

from __future__ import annotations

import os
import sys

threads_before: int | None = None
"""Number of torch's threads at the fork of this process; None without a fork, or without torch."""


def _note() -> None:
    global threads_before
    torch = sys.modules.get("torch")
    threads_before = None if torch is None else torch.get_num_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note)
