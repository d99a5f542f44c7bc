"""One class per element."""

from __future__ import annotations

from raglane.training.tasks.classify import Classify


class Tag(Classify):
    """As :class:`~raglane.training.tasks.classify.Classify`, with an answer for each element."""
