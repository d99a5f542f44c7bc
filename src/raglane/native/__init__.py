"""What is compiled from ``csrc``: the library, what may be handed to it, and rows that it moves."""

from __future__ import annotations

from raglane.native.library import missing_kernels

__all__ = ["missing_kernels"]
