"""The history of a run as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence


def curves_csv(history: Sequence[dict[str, float]]) -> bytes:
    """The rows of a history as the bytes of a CSV file, one per epoch."""
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
    return text.getvalue().encode()
