"""Conversions in small steps, so that a few rows make several pieces and several shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from raglane.data import shards
from raglane.data.formats import csv, ipc, pieces

__all__ = ["small_steps"]


@contextmanager
def small_steps(rows: int = 4, shard: int = 200) -> Iterator[None]:
    """Let pieces have a few rows, and shards a few bytes."""
    patches = [mock.patch.object(module, "ROWS", rows) for module in (pieces, ipc, csv)]
    patches.append(mock.patch.object(shards, "SHARD", shard))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
