"""What is told how far a long work has come."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """What is told how far the work has come; this one keeps it to itself."""

    def stage(self, name: str) -> None:
        """The next part of the work begins."""

    def done(self, share: float) -> None:
        """So much of the part is done, from 0 to 1."""
