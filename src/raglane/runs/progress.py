"""Progress of long work on a terminal, and epochs of a training as lines, as a bar and in a
logger.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raglane._utils.messages import quote, require, shorten
from raglane.data.store.conversion import Progress
from raglane.errors import ArgumentError, MissingExtraError
from raglane.training.folder import LOGS
from raglane.training.settings import Settings
from raglane.training.state import Callback, Totals, TrainingState

# The longest quotation of another package's message, in characters.
_LONGEST = 300
# The modules of each logger, any of which suffices.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


def epoch_line(row: dict[str, float], epochs: int) -> str:
    """Return an epoch of the history as a line."""
    width = len(str(epochs))
    parts = [f"epoch {int(row['epoch']):{width}d}/{epochs}"]
    for key, value in row.items():
        if key not in ("epoch", "seconds", "elements_per_second"):
            digits = 4 if key.endswith("loss") else 3
            parts.append(f"{key.removeprefix('train_').replace('_', ' ')} {value:.{digits}f}")
    return "  ".join([*parts, f"{row['elements_per_second']:,.0f} elements/s"])


# Seconds between the lines of a long epoch, or of short ones that do not improve.
_LINE_EVERY = 30.0
# Up to this number each epoch has a line.
_MOST_LINES = 20
# In longer trainings each tenth epoch has one, also without improvement.
_EVERY = 10


class LineWatcher(Callback):
    """Prints epochs as lines, for logs and pipes, and a line every 30 seconds within a long one.

    Of more than 20 epochs those that improve have a line, each tenth, and the last.
    """

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: ARG002, D102
        self._epochs = epochs
        self._batches = batches
        self._printed = time.monotonic()

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """Print a line if the last one is old."""
        if time.monotonic() - self._printed < _LINE_EVERY or batch == self._batches:
            return
        self._printed = time.monotonic()
        done = f"epoch {epoch}/{self._epochs}  batch {batch:,}/{self._batches:,}  loss {totals.mean_loss:.4f}"
        print(f"{done}  {totals.speed:,.0f} elements/s", flush=True)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:  # noqa: D102
        epoch = int(row["epoch"])
        is_listed = self._epochs <= _MOST_LINES or epoch % _EVERY == 0 or epoch == self._epochs
        is_old = time.monotonic() - self._printed >= _LINE_EVERY
        if not (is_best or is_listed or is_old):
            return
        self._printed = time.monotonic()
        print(epoch_line(row, self._epochs) + ("  best" if is_best else ""), flush=True)


class BarWatcher(Callback):
    """A progress bar over all batches, with epoch, loss, metric and real elements per second."""

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

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: D102
        self._epochs = epochs
        self._batches = batches
        done = state.epoch * batches + state.batch
        self._progress.update(
            self._task, total=epochs * batches, completed=done, epoch=f"{state.epoch + 1}/{epochs}"
        )
        self._progress.start()

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:
        """Update the numbers at most five times a second, since reading them waits for a GPU."""
        fields: dict[str, Any] = {}
        if time.monotonic() - self._shown >= 0.2:
            self._shown = time.monotonic()
            metric = f"{self._metric} {totals.mean_metric:.3f}"
            numbers = f"loss {totals.mean_loss:.4f}  {metric}  {totals.speed:,.0f} elements/s"
            fields = {"epoch": f"{epoch}/{self._epochs}", "numbers": numbers}
        self._progress.update(self._task, completed=(epoch - 1) * self._batches + batch, **fields)

    def close(self) -> None:
        """Stop the bar and leave it on the terminal."""
        self._progress.stop()


def pick_watcher(metric: str) -> LineWatcher | BarWatcher:
    """Return a bar for a terminal that can draw one, else lines."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return (
        BarWatcher(metric)
        if console.is_terminal and not console.is_dumb_terminal
        else LineWatcher()
    )


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """Show a bar below the printed lines if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

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


class AnnouncedProgress(Progress):
    """Progress that prints a line when the work of a stage begins, if there is any.

    Args:
        inner: what shows the progress.
        name: the stage.
        announce: called once, before the first share of the stage.
    """

    def __init__(self, inner: Progress, name: str, announce: Callable[[], object]) -> None:
        self.inner = inner
        self.name = name
        self.announce: Callable[[], object] | None = announce
        self.current = ""

    def stage(self, name: str) -> None:  # noqa: D102
        self.current = name
        self.inner.stage(name)

    def done(self, share: float) -> None:  # noqa: D102
        if self.current == self.name and self.announce is not None:
            self.announce()
            self.announce = None
        self.inner.done(share)


def check_logger(name: str | None) -> None:
    """Raise if the package of a logger is not installed."""
    if name is None:
        return
    if not any(importlib.util.find_spec(module) is not None for module in _PACKAGES[name]):
        raise MissingExtraError(
            f"{name} is not installed, which --logger {name} requires. Run pip install {name}."
        )
    if importlib.util.find_spec("lightning") is None:
        raise MissingExtraError(
            f"lightning is not installed, which --logger {name} requires. Run pip install 'raglane[logs]'."
        )


class CallingWatcher(Callback):
    """Calls another watcher, and after each epoch a function, which ends the training by returning
    True.
    """

    def __init__(
        self, watcher: Callback | None, function: Callable[[dict[str, float]], Any] | None = None
    ) -> None:
        self._watcher = Callback() if watcher is None else watcher
        self._function = function

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: D102
        self._watcher.started(state, epochs, batches)

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:  # noqa: D102
        self._watcher.batch_done(epoch, batch, totals)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> bool | None:  # noqa: D102
        ends = self._watcher.epoch_done(row, is_best) is True
        return (self._function is not None and self._function(dict(row)) is True) or ends

    def close(self) -> None:
        """Close the other watcher."""
        self._watcher.close()


class LoggingWatcher(CallingWatcher):
    """Logs each epoch with a logger of Lightning, and calls another watcher."""

    def __init__(self, settings: Settings, folder: Path, watcher: Any = None) -> None:
        super().__init__(watcher)
        check_logger(settings.logger)
        self._settings = settings
        self._folder = folder
        self._logger: Any = None

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: D102
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loggers = require("lightning.pytorch.loggers", "logs")
        try:
            self._logger = self._create(loggers)
            self._logger.log_hyperparams(self._settings.to_config())
        except Exception as error:
            # The package lacks e.g. an account, a server or a database.
            got = f"{quote(self._settings.logger)}, which failed: {shorten(' '.join(str(error).split()), _LONGEST)}"
            raise ArgumentError(
                "logger", got, "a logger that can start", "configure it, or leave it out"
            ) from error
        super().started(state, epochs, batches)

    def _create(self, loggers: Any) -> Any:
        """Create the logger, which writes to the folder of the run."""
        directory = (self._folder / LOGS).absolute()
        name = self._folder.name
        directory.mkdir(exist_ok=True)
        if self._settings.logger == "tensorboard":
            return loggers.TensorBoardLogger(str(directory), name="", version="")
        if self._settings.logger == "wandb":
            return loggers.WandbLogger(name=name, save_dir=str(directory), project="raglane")
        # MLflow 3 no longer supports Lightning's default, a store of plain files.
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        more = {} if "MLFLOW_TRACKING_URI" in os.environ else {"artifact_location": str(directory)}
        return loggers.MLFlowLogger(
            experiment_name="raglane", run_name=name, tracking_uri=where, **more
        )

    def epoch_done(self, row: dict[str, float], is_best: bool) -> bool | None:  # noqa: D102
        self._logger.log_metrics(
            {name: value for name, value in row.items() if name != "epoch"}, int(row["epoch"])
        )
        self._logger.save()
        return super().epoch_done(row, is_best)

    def close(self) -> None:
        """Finish the logger and the other watcher."""
        if self._logger is not None:
            self._logger.finalize("success")
        super().close()
