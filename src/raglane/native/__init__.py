"""The library compiled from ``csrc``, and checks of the memory that it reads."""

from __future__ import annotations

from raglane.native.library import missing_kernels

__all__ = ["missing_kernels"]
