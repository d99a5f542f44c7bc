"""The history of a run as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

__all__ = ["curves_csv"]


def curves_csv(history: Sequence[dict[str, float]]) -> bytes:
    r"""The rows of a history as the bytes of a CSV file, one per epoch.

    Example:
        >>> curves_csv([{"epoch": 1, "train_loss": 0.5}]).decode()
        'epoch,train_loss\n1,0.5\n'
    """
    text = io.StringIO()
    if history:
        writer = csv.DictWriter(text, list(history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
    return text.getvalue().encode()
