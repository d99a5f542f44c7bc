"""The epochs of a run, logged elsewhere too: by Lightning's own loggers, where their packages are installed."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raglane.errors import ArgumentError, MissingExtraError, message, quote, require, shorten
from raglane.training.folder import LOGS

if TYPE_CHECKING:
    from raglane.training.settings import Settings


# Characters of a message that is not our own.
_LONGEST = 300
# The modules of which one must be there, by what is to be installed.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}


def check_logger(name: str | None) -> None:
    """Refuse a logger whose package is not installed, before anything is read."""
    if name is None:
        return
    if not any(importlib.util.find_spec(module) is not None for module in _PACKAGES[name]):
        raise MissingExtraError(f"{name} is not installed, which --logger {name} needs. Fix: pip install {name}.")
    if importlib.util.find_spec("lightning") is None:
        raise MissingExtraError(
            f"lightning is not installed, which --logger {name} needs. Fix: pip install 'raglane[logs]'."
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
            got = f"{quote(self._settings.logger)}, which says: {shorten(' '.join(str(error).split()), _LONGEST)}"
            raise ArgumentError(
                message("logger", got, "a logger that can begin", "set it up, or leave it out")
            ) from error
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
