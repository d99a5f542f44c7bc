"""A run from Python: its best model, and what turns data into its inputs and its answers into words."""

from __future__ import annotations

import os
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from raglane._utils.files import as_path, check_place, write_folder
from raglane._utils.messages import count_of, message, quote, quote_all
from raglane.data.dataset import Dataset
from raglane.data.preprocess import Preprocessor
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.runs.sources import ColumnNames, SavedSource, Source, chosen_columns, renamed
from raglane.runs.tables import TablePredictor
from raglane.training import inference
from raglane.training.checkpoint import SavedModel, describe, load_model, model_files, read_model
from raglane.training.folder import DESCRIPTION, find, tidy
from raglane.training.inference import Evaluation, Predictions
from raglane.training.model import SequenceModel
from raglane.training.own_cell import NamedCode, named_code, take_code
from raglane.training.run import TrainingResult, load_description
from raglane.training.stored import build, reading

if TYPE_CHECKING:
    from raglane.export import Exported


# What a pickle calls the model it could not read, in place of a folder.
_PICKLE = Path("a pickled run")


def load(path: str | os.PathLike[str], *, cell: str | type | None = None) -> Run:
    """Read a run, to predict with its best model.

    Args:
        path: the folder of a run, or of a model: a copy of the ``best/`` of a run.
        cell: of a model with a cell of one's own, the class or ``"path/to/file.py:MyCell"``. Its file must be the one
            of the training. No code is run because a run names it: None allows what was named in this process before.

    Raises:
        ArgumentError: the file of ``cell`` cannot be read.
        ArgumentTypeError: ``path`` is not a path, or ``cell`` no cell.
        CheckpointError: no such folder, no model in it, a file that is damaged, or a newer format; or a cell that
            nobody named, or another one.
        MissingExtraError: safetensors is not installed.

    Example:
        >>> import raglane as rl
        >>> rl.load("no/such/folder")
        Traceback (most recent call last):
        ...
        raglane.errors.CheckpointError: no/such/folder must be the folder of a run or of a model, \
got no such folder. Pass the folder that raglane train wrote.
    """
    folder = as_path(path)
    tidy(folder)
    return Run(load_model(folder, cell), folder)


class Run:
    """A trained model with what turns data into its inputs and its answers into words.

    :func:`raglane.load` and :func:`raglane.fit` make one. Its predictions have the bits of ``raglane predict``. Any
    number of threads may use it at once. It can be pickled and copied: it then holds the model alone, not its folder.

    Args:
        saved: the model and its preprocessing.
        folder: of the run or of the model; None where it is in memory alone.
        result: how training went; None for a run that was read.
        notes: what was guessed of the training data, and how it was divided.
        test: what to measure on where no data is given.

    Attributes:
        folder: as above.
        result: as above.
        notes: as above.

    Example:
        >>> import raglane as rl
        >>> rising, falling = [[0.1, 0.5, 0.9], [0.2, 0.7]], [[0.9, 0.4], [0.8, 0.3, 0.1]]
        >>> options = {"epochs": 60, "hidden_size": 8, "validation_fraction": 0}
        >>> run = rl.fit(rising + falling, ["up", "up", "down", "down"], **options)
        >>> run
        Run(classify, GRU, 8 units, 1 layer, 282 weights; 1 channel to 2 classes; in memory)
        >>> run.predict([[0.3, 0.6, 0.8], [0.7, 0.2]])["prediction"]
        ['up', 'down']
    """

    def __init__(
        self,
        saved: SavedModel,
        folder: Path | None = None,
        result: TrainingResult | None = None,
        notes: tuple[str, ...] = (),
        test: Dataset | None = None,
    ) -> None:
        self.saved = saved
        self.folder = folder
        self.result = result
        self.notes = notes
        self._test = test
        self._lock = threading.Lock()
        self._moved: dict[torch.device, SavedModel] = {}

    def __repr__(self) -> str:
        preprocess = self.preprocess
        inputs = f"{preprocess.input_size:,} tokens"
        if not preprocess.is_tokens:
            inputs = count_of(len(preprocess.channels), "channel")
        classes = len(self.labels)
        outputs = f" to {classes:,} class{'es' * (classes > 1)}" if classes else ""
        place = "in memory" if self.folder is None else str(self.folder)
        return f"Run({self.task}, {describe(self.model)}; {inputs}{outputs}; {place})"

    def __reduce__(self) -> tuple[Any, ...]:
        files = model_files(self.model, self.preprocess, self.saved.columns)
        return _from_files, (files, self.notes, named_code(self.model.config.cell))

    @property
    def model(self) -> SequenceModel:
        """The network, a ``torch.nn.Module``, in evaluation mode, on the CPU."""
        return self.saved.model

    @property
    def preprocess(self) -> Preprocessor:
        """What was learned of the training part, such as vocabulary, scaling and labels."""
        return self.saved.preprocessor

    @property
    def task(self) -> str:
        """What the model was trained for."""
        return self.saved.task

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes or labels, in the order of their probabilities; () where there are none."""
        return self.preprocess.labels or ()

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the feature columns; () for tokens."""
        return self.preprocess.channels

    def predict(
        self,
        data: Any,
        *,
        probabilities: bool = False,
        top: int = 1,
        horizon: int = 1,
        batch_size: int = 256,
        device: str = "auto",
        format: str | None = None,
        **columns: Any,
    ) -> Predictions:
        """Predict, as ``raglane predict`` does.

        Args:
            data: a file or folder, or what :func:`raglane.data.read` takes: a list, an array, a table, a
                Ragged. Channels without names are those of the training data, in their order.
            probabilities: add one column per class.
            top: above 1, add the so many likeliest classes and their probabilities, as lists.
            horizon: how many elements to forecast; for the task ``forecast`` only.
            batch_size: sequences of a batch.
            device: ``"auto"`` (a GPU where there is one), ``"cpu"`` or ``"cuda"``.
            format: of a file; None goes by the suffix.
            **columns: which columns hold what, ``sequence``, ``label``, ``id``, ``time`` and ``features``, and how
                texts and whole numbers are read, ``split`` and ``tokens``; those that are left out are the ones of
                the training data.

        Returns:
            One row per sequence, in the order of the data.

        Raises:
            ArgumentError: an option out of its range, or one that does not go with the task.
            ArgumentTypeError: data or a column's name of the wrong kind.
            DataError: the data cannot be read, or does not fit the model.
        """
        where = inference.pick_device(device)
        records = self.read(data, need_labels=False, format=format, **columns)
        return inference.predict(
            self._on(where),
            records,
            batch_size=batch_size,
            probabilities=probabilities,
            top=top,
            horizon=horizon,
            device=where,
        )

    def predictor(self, **options: Any) -> TablePredictor:
        """A function from a table to a table of predictions, for the processes of Spark, Dask or Ray.

        Args:
            **options: of :meth:`predict`, such as ``probabilities``.

        Example:
            >>> import raglane as rl
            >>> run = rl.fit([[0.1, 0.9], [0.8, 0.2]] * 4, ["up", "down"] * 4, epochs=60, hidden_size=8)
            >>> run.predictor()({"walk": [[0.2, 0.7]]})["prediction"]
            ['up']
        """
        return TablePredictor(self, load, **options)

    def evaluate(
        self,
        data: Any = None,
        labels: Any = None,
        *,
        top: int = 1,
        horizon: int = 1,
        batch_size: int = 256,
        device: str = "auto",
        format: str | None = None,
        **columns: Any,
    ) -> Evaluation:
        """Measure the model on data with labels, as ``raglane evaluate`` does; nothing is written.

        Args:
            data: as :meth:`predict` takes it; None takes what the run was to be tested on.
            labels: one entry per sequence, where ``data`` does not have them.
            top: above 1, also how often the class is among the so many likeliest.
            horizon: above 1, the last so many elements of each sequence are forecast too; for the task ``forecast``.
            batch_size: sequences of a batch.
            device: as in :meth:`predict`.
            format: of a file; None goes by the suffix.
            **columns: as in :meth:`predict`.

        Raises:
            ArgumentError: an option out of its range, or no data and none to fall back on.
            DataError: the data cannot be read, does not fit the model, or has a label that training has not seen.
        """
        where = inference.pick_device(device)
        records = self.test_part() if data is None else self.read(data, labels, format=format, **columns)
        return inference.evaluate(
            self._on(where), records, batch_size=batch_size, top=top, horizon=horizon, device=where
        )

    def read(
        self, data: Any, labels: Any = None, *, need_labels: bool = True, format: str | None = None, **columns: Any
    ) -> Dataset:
        """Data for this model as records: the columns of a file are those of training, where none are named.

        Args:
            data: as :meth:`predict` takes it.
            labels: one entry per sequence, where ``data`` does not have them.
            need_labels: whether data without labels is an error.
            format: of a file; None goes by the suffix.
            **columns: as in :meth:`predict`.

        Raises:
            ArgumentTypeError: data or a column's name of the wrong kind.
            CheckpointError: the columns that are kept with the model are damaged.
            DataError: the data cannot be read.
        """
        with reading(self.folder or _PICKLE):
            trained = build(ColumnNames, self.saved.columns, "columns")
        source = Source(None, format, renamed(trained, chosen_columns(columns)))
        if isinstance(data, (str, os.PathLike)):
            if labels is not None:
                rule = "the name of a column, for a file"
                raise ArgumentTypeError(message("labels", quote(labels), rule, "name the column, as label='kind'"))
            return replace(source, path=as_path(data)).read(self.task, need_labels=need_labels)
        records = source.take(data, labels, self.task, need_labels=need_labels)
        if records is data or records.channels != tuple(f"x{place}" for place in range(len(records.channels))):
            return records
        # Channels without names are those of training, in their order: as many as there were.
        if records.channels and self.channels and len(records.values) and len(records.channels) != len(self.channels):
            got = f"{count_of(len(records.channels), 'channel')} without names"
            rule = f"sequences of {len(self.channels)} channels, as in training: {quote_all(self.channels)}"
            raise DataError(message("data", got, rule, "pass sequences (steps, channels) with these channels"))
        if len(records.channels) != len(self.channels):
            return records
        return Dataset(replace(records.records, channels=self.channels))

    def test_part(self) -> Dataset:
        """What the run was to be tested on: its test data, or the official test part of the default data.

        Raises:
            ArgumentError: the run names no test data.
            CheckpointError: the run's description is damaged.
            DataError: the data cannot be read.
        """
        if self._test is not None:
            return self._test
        # A folder may hold a model alone, and a run that no command has made need not say where its data came from.
        folder = self.folder
        kept = None
        if folder is not None and find(folder, DESCRIPTION).is_file():
            kept = load_description(folder).data
        if folder is not None and kept:
            data = SavedSource.load(folder, kept)
            if data.test is not None:
                return data.source(data.test).read(self.task)
            if data.path is None:
                return Source(None, None).read(self.task, part="test")
        raise ArgumentError(message("data", "nothing", "given, since this run has no test data", "pass DATA"))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a folder of its own, for :func:`raglane.load` and the commands.

        Args:
            folder: a new one.

        Raises:
            ArgumentError: something is there already, or nothing can be written there.
            OSError: the disk is full.
        """
        path = as_path(folder)
        if os.path.lexists(path):
            raise ArgumentError(message("folder", quote(str(path)), "a new folder", "name another folder"))
        check_place("folder", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_folder(path, model_files(self.model, self.preprocess, self.saved.columns))

    def export(
        self, path: str | os.PathLike[str], *, layout: Literal["padded", "flat"] = "padded", verify: bool = True
    ) -> Exported:
        """Write the model with its preprocessing as an ONNX file, as ``raglane export`` does.

        Args:
            path: of the file, ``.onnx``; what a program must know to use it is written beside it as ``.json``, and is
                in the file's metadata.
            layout: as :func:`raglane.export.onnx` takes it.
            verify: alike.

        Raises:
            ArgumentError: another suffix, or a place that nothing can be written to.
            ExportError: a part that cannot be exported; nothing is written.
            MissingExtraError: onnx, onnxscript or, to verify, onnxruntime is not installed.
        """
        from raglane.runs.exported import export_run

        return export_run(self.model, self.preprocess, as_path(path), layout=layout, verify=verify)

    def _on(self, device: torch.device) -> SavedModel:
        """The model on a device: on another than the CPU a copy, so that no thread moves what another uses."""
        if device.type == "cpu":
            return self.saved
        with self._lock:
            if device not in self._moved:
                self._moved[device] = replace(self.saved, model=deepcopy(self.model).to(device))
            return self._moved[device]


def _from_files(files: dict[str, bytes], notes: tuple[str, ...], code: NamedCode | None = None) -> Run:
    take_code(code)
    return Run(read_model(files, _PICKLE), notes=notes)
