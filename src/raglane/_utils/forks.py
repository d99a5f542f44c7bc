"""Detects a fork of a process in which PyTorch may have had threads, which a fork leaves behind.

OpenMP waits forever for threads that are gone, whoever started them: a product of torch's in the parent is enough. So
what counts is not who uses the kernels first, but whether there was a fork since ``import raglane``.
"""

from __future__ import annotations

import os
import sys

threads_before: int | None = None
"""How many threads torch might use when this process was forked; None where it was not, or torch was not there."""


def _note() -> None:
    global threads_before
    torch = sys.modules.get("torch")
    threads_before = None if torch is None else torch.get_num_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note)
