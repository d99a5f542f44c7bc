"""How far nested results are from others."""

from __future__ import annotations

from typing import Any

__all__ = ["largest_difference"]


def largest_difference(found: Any, wanted: Any) -> float:
    if isinstance(found, list | tuple):
        return max(largest_difference(a, b) for a, b in zip(found, wanted, strict=True))
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found - wanted).detach().abs().max())
