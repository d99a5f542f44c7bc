"""Runs in Python: the best model of a training with its preprocessing."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch

from raglane._utils.files import as_path, check_writable, write_folder
from raglane._utils.json import reading
from raglane._utils.messages import count_of, quote, quote_all
from raglane.data.dataset import Dataset
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError, DataError
from raglane.runs.options import ColumnOptions
from raglane.runs.sources import SavedSource, SequenceSource
from raglane.runs.tables import TablePredictor
from raglane.training import inference
from raglane.training.checkpoint import (
    SavedModel,
    describe,
    load_model,
    model_files,
    own_version,
    read_model,
)
from raglane.training.folder import DESCRIPTION, LAST, find, tidy
from raglane.training.job import TrainingResult, load_description
from raglane.training.model import SequenceModel
from raglane.training.own_cell import NamedCode, named_code, take_code
from raglane.training.results import Evaluation, Predictions
from raglane.training.state import load_progress

if TYPE_CHECKING:
    from raglane.export import Exported
    from raglane.runs.stream_frames import RunFrames


# Replaces the folder in messages about a pickled run.
_PICKLE = Path("a pickled run")


def load(path: str | os.PathLike[str], *, cell: str | type | None = None) -> Run:
    """Load a run, to predict with its best model.

    Args:
        path: the folder of a run, or of a model, i.e. a copy of the folder ``best/`` of a run.
        cell: the user-defined cell of the model, as a class or ``"path/to/file.py:MyCell"``; its
            file must be unchanged since the training. A run never causes code to be run: None
            allows only cells named before in this process.

    Raises:
        ArgumentError: the file of ``cell`` cannot be read.
        ArgumentTypeError: ``path`` is not a path, or ``cell`` not a cell.
        CheckpointError: the folder does not exist, has no model, is damaged or of a newer format,
            with the version that wrote it; or ``cell`` is required, or is not the cell of the model.
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
    saved = load_model(folder, cell)
    notes: tuple[str, ...] = ()
    if saved.written_by != own_version():
        notes = (f"written by Raglane {saved.written_by}; this is {own_version()}",)
    return Run(saved, folder, notes=notes)


class Run:
    """A trained model with its preprocessing, returned by :func:`raglane.load` and
    :func:`raglane.fit`.

    Predictions have the same bits as those of ``raglane predict``. A run may be used by several
    threads at once. It can be pickled and copied; the copy contains the model, but not its folder.

    Args:
        saved: the model and its preprocessing.
        folder: the folder of the run or model; None if it is only in memory.
        result: the result of the training; None for a loaded run.
        notes: the guesses about the training data, its split, and advice on the model; of a loaded
            run, the other version of Raglane that wrote it.
        test: the default data of :meth:`evaluate`.

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
        preprocess = self.preprocessor
        inputs = f"{preprocess.input_size:,} tokens"
        if not preprocess.is_tokens:
            inputs = count_of(len(preprocess.channels), "channel")
        classes = len(self.labels)
        outputs = f" to {classes:,} class{'es' * (classes > 1)}" if classes else ""
        source = "in memory" if self.folder is None else str(self.folder)
        return f"Run({self.task}, {describe(self.model)}; {inputs}{outputs}; {source})"

    def __reduce__(self) -> tuple[Any, ...]:
        files = model_files(self.model, self.preprocessor, self.saved.columns)
        return _from_files, (files, self.notes, named_code(self.model.config.cell))

    def _stream_frames(self, dtype: torch.dtype | None, passes_nan: bool) -> RunFrames:
        """Return the stages of the run, and its frames and results, to an engine."""
        from raglane.runs.stream_frames import RunFrames

        return RunFrames(self.saved, dtype, passes_nan)

    @property
    def model(self) -> SequenceModel:
        """The network, in evaluation mode, on the CPU."""
        return self.saved.model

    @property
    def preprocessor(self) -> Preprocessor:
        """The preprocessing (vocabulary, scaling and labels) that was fitted to the training
        part.
        """
        return self.saved.preprocessor

    @property
    def task(self) -> str:
        """The task of the model."""
        return self.saved.task

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes or labels, in the order of their probabilities; () for tasks without."""
        return self.preprocessor.labels or ()

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the feature columns; () for tokens."""
        return self.preprocessor.channels

    @property
    def history(self) -> list[dict[str, float]]:
        """The numbers of each epoch, also of a loaded run; [] for the folder of a model."""
        if self.result is not None:
            return self.result.state.history
        if self.folder is None or not find(self.folder, LAST).is_dir():
            return []
        return load_progress(find(self.folder, LAST)).history

    def predict(
        self,
        data: Any,
        *,
        probabilities: bool = False,
        top: int = 1,
        horizon: int = 1,
        beam_size: int | None = None,
        n_best: int = 1,
        batch_size: int = 256,
        device: str = "auto",
        format: str | None = None,
        **columns: Unpack[ColumnOptions],
    ) -> Predictions:
        """Predict, as ``raglane predict`` does.

        Args:
            data: a file or folder, or data as for :func:`raglane.data.read`: a list, an array, a
                table, a Ragged. Channels without names are in the order of the training data.
            probabilities: add one column per class.
            top: above 1, add the ``top`` most likely classes and their probabilities, as lists.
            horizon: the number of elements to forecast, only for the task ``forecast``.
            beam_size: the number of hypotheses of a beam search, at most 1,000, only for the task
                ``transcribe``; None is a greedy search, or with ``n_best`` a beam of at least 16.
            n_best: above 1, add this many of the best hypotheses and their scores, as lists (task
                ``transcribe``).
            batch_size: sequences per batch.
            device: ``"auto"`` (a GPU if available), ``"cpu"`` or ``"cuda"``.
            format: the format of a file; None detects it from the suffix.
            **columns: the columns ``sequence``, ``label``, ``id``, ``time`` and ``features``, and
                the reading of texts and whole numbers, ``split`` and ``tokens``; by default those
                of the training data.

        Returns:
            One row per sequence, in the order of the data.

        Raises:
            ArgumentError: an option is out of range, or does not apply to the task.
            ArgumentTypeError: data or the name of a column has the wrong type.
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
            beam_size=beam_size,
            n_best=n_best,
            device=where,
        )

    def generate(
        self,
        prompt: str = "",
        *,
        count: int = 1,
        max_length: int = 200,
        temperature: float = 1.0,
        seed: int = 0,
        beam_size: int | None = None,
        device: str = "auto",
    ) -> list[str]:
        """Return texts of a language model, as ``raglane sample`` does.

        Args:
            prompt: the beginning of each text.
            count: the number of texts.
            max_length: the largest number of tokens after the prompt.
            temperature: logits are divided by it; 0 chooses the likeliest token.
            seed: the same seed gives the same texts.
            beam_size: the number of hypotheses of a beam search for the likeliest texts, which draws
                nothing; None draws.
            device: as for :meth:`predict`.

        Raises:
            ArgumentError: the task is not ``language``, or an option is out of range.
        """
        where = inference.pick_device(device)
        options: dict[str, Any] = {
            "count": count,
            "max_length": max_length,
            "temperature": temperature,
        }
        return inference.sample(
            self._on(where), prompt=prompt, seed=seed, beam_size=beam_size, device=where, **options
        )

    def predictor(self, **options: Any) -> TablePredictor:
        """Return a function from a table to a table of predictions, for Spark, Dask or Ray.

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
        backtests: int = 1,
        beam_size: int | None = None,
        batch_size: int = 256,
        device: str = "auto",
        format: str | None = None,
        **columns: Unpack[ColumnOptions],
    ) -> Evaluation:
        """Evaluate the model on data with labels, as ``raglane evaluate`` does, without writing
        files.

        Args:
            data: as for :meth:`predict`; None selects the test data of the run.
            labels: one entry per sequence, if ``data`` has none.
            top: above 1, add the accuracy of the ``top`` most likely classes.
            horizon: above 1, also forecast the last ``horizon`` elements of each sequence (task
                ``forecast``).
            backtests: the number of such forecasts of each sequence; each begins ``horizon`` elements
                before the next.
            beam_size: as for :meth:`predict`.
            batch_size: sequences per batch.
            device: as for :meth:`predict`.
            format: as for :meth:`predict`.
            **columns: as for :meth:`predict`.

        Raises:
            ArgumentError: an option is out of range, or the run has no test data.
            DataError: the data cannot be read, does not fit the model, or has a label unseen in
                training.
        """
        where = inference.pick_device(device)
        records = (
            self.test_part() if data is None else self.read(data, labels, format=format, **columns)
        )
        more = {"batch_size": batch_size, "top": top, "horizon": horizon, "backtests": backtests}
        return inference.evaluate(
            self._on(where), records, device=where, beam_size=beam_size, **more
        )

    def read(
        self,
        data: Any,
        labels: Any = None,
        *,
        need_labels: bool = True,
        format: str | None = None,
        **columns: Unpack[ColumnOptions],
    ) -> Dataset:
        """Read data for this model as records.

        Args:
            data: as for :meth:`predict`.
            labels: one entry per sequence, if ``data`` has none.
            need_labels: raise if the data has no labels.
            format: as for :meth:`predict`.
            **columns: as for :meth:`predict`.

        Raises:
            ArgumentTypeError: data or the name of a column has the wrong type.
            CheckpointError: the stored columns of the model are damaged.
            DataError: the data cannot be read.
        """
        with reading(self.folder or _PICKLE):
            trained = SequenceSource(None, format).chosen(self.saved.columns)
        source = trained.chosen(columns).of(data, labels)
        records = source.read(self.task, need_labels=need_labels)
        if source.held is None:
            is_named = any(columns.get(role) for role in ("sequence", "features", "static"))
            return self._renamed(records) if is_named else records
        unnamed = tuple(f"x{column}" for column in range(len(records.channels)))
        if records is data or unnamed not in (records.channels, self.channels):
            return records
        if (
            records.channels
            and self.channels
            and len(records.values)
            and len(records.channels) != len(self.channels)
        ):
            got = f"{count_of(len(records.channels), 'channel')} without names"
            rule = f"sequences of the {count_of(len(self.channels), 'channel')} {quote_all(self.channels)}"
            raise DataError("data", got, rule, "pass sequences of shape (steps, channels)")
        return self._renamed(records)

    def _renamed(self, records: Dataset) -> Dataset:
        """Give columns in the order of training their names in training."""
        data = records.records
        encoders = self.preprocessor.features
        features = data.features
        if [feature.kind for feature in features] == [encoder.kind for encoder in encoders]:
            names = in_order(
                [feature.name for feature in features], [encoder.name for encoder in encoders]
            )
            features = tuple(
                replace(feature, name=name) for feature, name in zip(features, names, strict=True)
            )
        return Dataset(
            replace(data, channels=tuple(in_order(data.channels, self.channels)), features=features)
        )

    def test_part(self) -> Dataset:
        """Read the test data of the run, or the official test part of the default data.

        Raises:
            ArgumentError: the run has no test data.
            CheckpointError: the description of the run is damaged.
            DataError: the data cannot be read.
        """
        if self._test is not None:
            return self._test
        # The folder of a model has no description, and that of a run with data in memory has no
        # sources.
        folder = self.folder
        if (
            folder is not None
            and find(folder, DESCRIPTION).is_file()
            and (data := load_description(folder).data)
        ):
            sources = SavedSource.load(folder, data)
            if sources.test is not None:
                return sources.source(sources.test).read(self.task)
            if sources.path is None:
                return SequenceSource(None, None).read(self.task, role="test")
        raise ArgumentError(
            "data", "nothing", "given, because this run has no test data", "pass DATA"
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a new folder, for :func:`raglane.load` and the commands.

        Raises:
            ArgumentError: the folder exists, or cannot be written.
            OSError: the disk is full.
        """
        path = as_path(folder)
        if os.path.lexists(path):
            raise ArgumentError("folder", quote(str(path)), "a new folder", "name another folder")
        check_writable("folder", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_folder(path, model_files(self.model, self.preprocessor, self.saved.columns))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Literal["padded", "flat"] = "padded",
        verify: bool = True,
    ) -> Exported:
        """Write the model with its preprocessing as an ONNX file, as ``raglane export`` does.

        Args:
            path: the ``.onnx`` file. A ``.json`` file next to it, and the metadata of the ``.onnx``
                file, contain vocabulary, channels, labels and the layout.
            layout: as for :func:`raglane.export.onnx`.
            verify: as for :func:`raglane.export.onnx`.

        Raises:
            ArgumentError: another suffix, or the file cannot be written.
            ExportError: the model cannot be exported; nothing is written.
            MissingExtraError: onnx, onnxscript or, to verify, onnxruntime is not installed.
        """
        from raglane.runs.exported import export_run

        return export_run(
            self.model, self.preprocessor, as_path(path), layout=layout, verify=verify
        )

    def _on(self, device: torch.device) -> SavedModel:
        """Return the model on a device; one copy per device, because other threads use the model on
        the CPU.
        """
        if device.type == "cpu":
            return self.saved
        with self._lock:
            if device not in self._moved:
                self._moved[device] = replace(self.saved, model=deepcopy(self.model).to(device))
            return self._moved[device]


def in_order(names: Sequence[str], trained: Sequence[str]) -> Sequence[str]:
    """Return the names of training for as many others in their order; a name of training must be at
    its index.
    """
    pairs = zip(names, trained, strict=False)
    fits = all(
        name == other or (name not in trained and other not in names) for name, other in pairs
    )
    return trained if fits and len(names) == len(trained) else names


def _from_files(
    files: dict[str, bytes], notes: tuple[str, ...], code: NamedCode | None = None
) -> Run:
    take_code(code)
    return Run(read_model(files, _PICKLE), notes=notes)
