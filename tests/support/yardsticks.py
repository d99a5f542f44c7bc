"""Benchmarks with short, inaccurate timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import timing


def shorten(set_to: Callable[[Any, str, Any], None]) -> None:
    """Set samples of one call, no pauses and small yardsticks, with ``setattr`` or that of a MonkeyPatch."""
    for name in ("_SAMPLE_SECONDS", "_PAUSE_SECONDS", "_WARM_SECONDS"):
        set_to(timing, name, 0.0)
    set_to(timing, "_GEMM", (4, 4, 4))
    set_to(timing, "_COPY_BYTES", 1 << 10)
    set_to(timing, "_PEAK_ROUNDS", 1)


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In files that import this fixture, timings are short."""
    with monkeypatch.context() as patch:
        shorten(patch.setattr)
        yield
