"""What is shown of long work: a bar on a terminal; of a run that trains, a line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raglane.data.jobs import Progress
    from raglane.training.state import Totals, TrainingState


def epoch_line(row: dict[str, float], epochs: int) -> str:
    """An epoch of the history in a line."""
    width = len(str(epochs))
    parts = [f"epoch {int(row['epoch']):{width}d}/{epochs}"]
    for key, value in row.items():
        if key not in ("epoch", "seconds", "elements_per_second"):
            digits = 4 if key.endswith("loss") else 3
            parts.append(f"{key.removeprefix('train_').replace('_', ' ')} {value:.{digits}f}")
    return "  ".join([*parts, f"{row['elements_per_second']:,.0f} elements/s"])


class LineWatcher:
    """One line per epoch: for logs and pipes."""

    def __init__(self) -> None:
        self._epochs = 0

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: ARG002
        """The loop starts."""
        self._epochs = epochs

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch is done: nothing to say."""

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """An epoch is complete."""
        print(epoch_line(row, self._epochs) + ("  best" if is_best else ""), flush=True)

    def close(self) -> None:
        """The run has ended."""


class BarWatcher:
    """A bar over all batches, with epoch, loss, metric and real elements per second."""

    def __init__(self, metric: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            # Narrow, so that the numbers fit in 80 columns.
            BarColumn(bar_width=12),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
        )
        self._metric = metric
        self._task = self._progress.add_task("", epoch="", numbers="", total=None)
        self._epochs = self._batches = 0
        self._shown = 0.0

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:
        """The loop starts, or goes on."""
        self._epochs, self._batches = epochs, batches
        done = state.epoch * batches + state.batch
        self._progress.update(self._task, total=epochs * batches, completed=done, epoch=f"{state.epoch + 1}/{epochs}")
        self._progress.start()

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """A batch is done; the numbers are renewed a few times a second, since reading them waits for a GPU."""
        done = (epoch - 1) * self._batches + batch
        now = time.monotonic()
        if now - self._shown < 0.2:
            self._progress.update(self._task, completed=done)
            return
        self._shown = now
        numbers = (
            f"loss {totals.mean_loss:.4f}  {self._metric} {totals.mean_metric:.3f}  {totals.speed:,.0f} elements/s"
        )
        self._progress.update(self._task, completed=done, epoch=f"{epoch}/{self._epochs}", numbers=numbers)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """An epoch is complete: the bar has moved already."""

    def close(self) -> None:
        """The run has ended; the bar stays as it was."""
        self._progress.stop()


def pick_watcher(metric: str) -> LineWatcher | BarWatcher:
    """A bar on a terminal that can draw one, lines elsewhere."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return BarWatcher(metric) if console.is_terminal and not console.is_dumb_terminal else LineWatcher()


@contextmanager
def shown(quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, below what is printed; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from raglane.data.jobs import Progress

    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal or terminal.is_dumb_terminal:
        yield Progress()
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
    with Bar(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        class Shown(Progress):
            def stage(self, name: str) -> None:
                bar.update(task, description=name, total=None, completed=0)

            def done(self, share: float) -> None:
                bar.update(task, total=1.0, completed=share)

        yield Shown()
