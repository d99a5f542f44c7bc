"""What task data is for, where nobody says: its labels tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raglane.errors import DataError
from raglane.training.settings import LOSSES

if TYPE_CHECKING:
    from raglane.data.records import Records


# The tasks that labels may be for where they are no classes of sequences, in the order in which they are tried.
LABELLED = ("tag", "regress", "multilabel")


def guess_task(read: Callable[[str], Records], others: tuple[str, ...], loss: str | None = None) -> tuple[Records, str]:
    """Read data for the task that its labels are for: to classify, unless that cannot be."""
    first, *rest = tasks_of(loss) or ("classify", *others)
    try:
        return read(first), first
    except DataError as error:
        for task in rest:
            try:
                return read(task), task
            except DataError:
                continue
        raise error


def tasks_of(loss: str | None) -> list[str]:
    """The tasks that a loss is for, where it says more than that classes are told."""
    if loss is None or loss in LOSSES["classify"]:
        return []
    return [task for task, losses in LOSSES.items() if loss in losses]
