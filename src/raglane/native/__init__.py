"""What is compiled from ``csrc``: the library, and the memory that it may be handed."""

from __future__ import annotations

from raglane.native.library import missing_kernels

__all__ = ["missing_kernels"]
