"""A small case of the benchmark, and benchmarks with short, inaccurate timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness import timing
from harness.cases import Case, Size
from harness.lengths import Lengths

_MIXED = Lengths(
    "mixed", "unsorted, with ties and a one", lambda count: [3, 1, 5, 3, 7, 1, 5][:count]
)


def a_case(cell: str = "gru", mode: str = "train", dtype: str = "float32", **other: Any) -> Case:
    """Return a case of seven short sequences."""
    return replace(Case("grid", cell, Size(7, 6, 4), _MIXED, mode, dtype, 1), **other)


def shorten(set_to: Callable[[Any, str, Any], None]) -> None:
    """Set samples of one call, no pauses and small yardsticks, with ``setattr`` or that of a
    MonkeyPatch.
    """
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
