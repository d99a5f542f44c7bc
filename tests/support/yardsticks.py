"""A benchmark that takes no care to time well: for tests of all else in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import timing

__all__ = ["short_samples", "shorten"]


def shorten(set_to: Callable[[Any, str, Any], None]) -> None:
    """Samples of one call, without a pause before them, and small yardsticks.

    Args:
        set_to: sets an attribute of a module: ``setattr``, or a MonkeyPatch's.
    """
    for name in ("_SAMPLE_SECONDS", "_PAUSE_SECONDS", "_WARM_SECONDS"):
        set_to(timing, name, 0.0)
    set_to(timing, "_GEMM", (4, 4, 4))
    set_to(timing, "_COPY_BYTES", 1 << 10)
    set_to(timing, "_PEAK_ROUNDS", 1)


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of the files that import this."""
    with monkeypatch.context() as patch:
        shorten(patch.setattr)
        yield
