"""Imports of many modules in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules without collections of garbage, and leave them out of later ones.

    Modules are many objects that all stay. Walking them again and again would take a fifth of the
    time from a command to its first row.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
