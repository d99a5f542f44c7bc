"""Progress of long work on a terminal; the epochs of a run in lines, in a bar, and in a logger of another package."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raglane._utils.messages import message, quote, require, shorten
from raglane.errors import ArgumentError, MissingExtraError
from raglane.training.folder import LOGS

if TYPE_CHECKING:
    from raglane.data.conversion import Progress
    from raglane.training.settings import Settings
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

    _epochs = 0

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

    from raglane.data.conversion import Progress

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


# Characters of a message that is not our own.
_LONGEST = 300
# The modules of which one must be there, by what is to be installed.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}


def check_logger(name: str | None) -> None:
    """Refuse a logger whose package is not installed, before anything is read."""
    if name is None:
        return
    if not any(importlib.util.find_spec(module) is not None for module in _PACKAGES[name]):
        raise MissingExtraError(f"{name} is not installed, but --logger {name} requires it. Run pip install {name}.")
    if importlib.util.find_spec("lightning") is None:
        raise MissingExtraError(
            f"lightning is not installed, but --logger {name} requires it. Run pip install 'raglane[logs]'."
        )


class LoggingWatcher:
    """Tells a logger of each epoch, and another watcher of everything."""

    def __init__(self, settings: Settings, folder: Path, watcher: Any = None) -> None:
        check_logger(settings.logger)
        self._settings, self._folder, self._watcher = settings, folder, watcher
        self._logger: Any = None

    def started(self, state: Any, epochs: int, batches: int) -> None:
        """The logger begins, with the settings of the run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loggers = require("lightning.pytorch.loggers", "logs")
        try:
            self._logger = self._made(loggers)
            self._logger.log_hyperparams(self._settings.to_config())
        except Exception as error:
            # What its package finds missing: an account, a server, a database.
            got = f"{quote(self._settings.logger)}, which failed: {shorten(' '.join(str(error).split()), _LONGEST)}"
            rule, fix = "a logger that starts", "configure it, or leave it out"
            raise ArgumentError(message("logger", got, rule, fix)) from error
        if self._watcher is not None:
            self._watcher.started(state, epochs, batches)

    def _made(self, loggers: Any) -> Any:
        """The logger, with its files in the folder of the run."""
        place, name = (self._folder / LOGS).absolute(), self._folder.name
        place.mkdir(exist_ok=True)
        if self._settings.logger == "tensorboard":
            return loggers.TensorBoardLogger(str(place), name="", version="")
        if self._settings.logger == "wandb":
            return loggers.WandbLogger(name=name, save_dir=str(place), project="raglane")
        # In files alone, as Lightning would have it, MLflow 3 no longer logs.
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"
        more = {} if "MLFLOW_TRACKING_URI" in os.environ else {"artifact_location": str(place)}
        return loggers.MLFlowLogger(experiment_name="raglane", run_name=name, tracking_uri=where, **more)

    def batch_done(self, epoch: int, batch: int, totals: Any) -> None:
        """Told to the other watcher alone."""
        if self._watcher is not None:
            self._watcher.batch_done(epoch, batch, totals)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:
        """The numbers of the epoch are logged."""
        self._logger.log_metrics({name: value for name, value in row.items() if name != "epoch"}, int(row["epoch"]))
        self._logger.save()
        if self._watcher is not None:
            self._watcher.epoch_done(row, is_best)

    def close(self) -> None:
        """The logger writes what it has."""
        if self._logger is not None:
            self._logger.finalize("success")
        if self._watcher is not None:
            self._watcher.close()
