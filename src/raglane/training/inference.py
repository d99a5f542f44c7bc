"""A saved model at work: predictions, and how good they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from raglane.data.dataset import SequenceDataset
from raglane.data.epochs import check_least
from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records
from raglane.errors import ArgumentError, DataError, message, quote
from raglane.memory import check_memory
from raglane.ragged import Ragged
from raglane.training.batches import in_order
from raglane.training.checkpoint import SavedModel
from raglane.training.metrics import accuracy, confusion_matrix, macro_f1
from raglane.training.model import answering
from raglane.training.settings import DEVICES
from raglane.training.state import Totals
from raglane.training.stored import finite
from raglane.training.tasks import make_task

__all__ = ["Evaluation", "Predictions", "evaluate", "pick_device", "predict"]

# The bytes of a number of a forecast on its way: in tensors of 32 and of 64 bits, and in a list of Python's.
_FORECAST = 48


@dataclass(frozen=True)
class Predictions:
    """A table of predictions in the order of the data.

    Args:
        columns: ``id``, ``prediction``, ``probability`` and, where asked for, one ``p_<label>`` per class; each a list
            with one entry per sequence. For ``tag`` an entry is a list with one value per element; for ``forecast``
            ``prediction`` is a list of ``horizon`` lists of ``C`` numbers in the data's units (None for an empty
            sequence), and there is no probability.

    Example:
        >>> len(Predictions({"id": [0, 1], "prediction": ["a", "b"]}))
        2
    """

    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["id"])


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on data that has targets.

    Args:
        task: ``classify``, ``tag`` or ``forecast``.
        sequences: how many sequences were run.
        count: what was averaged over: sequences, elements, or forecast numbers.
        numbers: ``loss`` and the task's metrics by name.
        confusion: ``(K, K)`` int64, row the true class and column the predicted one; None for ``forecast``.
        labels: the classes.
    """

    task: str
    sequences: int
    count: int
    numbers: dict[str, float]
    confusion: Tensor | None
    labels: tuple[str, ...]

    def to_config(self) -> dict[str, Any]:
        """Everything as a dictionary that JSON can hold; a number that is not finite is None."""
        return {
            "task": self.task,
            "sequences": self.sequences,
            "count": self.count,
            **finite(self.numbers),
            "labels": list(self.labels),
            "confusion": None if self.confusion is None else self.confusion.tolist(),
        }


def pick_device(name: str) -> torch.device:
    """The device that a name stands for.

    Args:
        name: ``auto`` (a GPU where there is one), ``cpu`` or ``cuda``.

    Raises:
        ArgumentError: an unknown name, or there is no GPU that PyTorch can use.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if name not in DEVICES:
        fix = "pass auto; of several GPUs the environment variable CUDA_VISIBLE_DEVICES names one"
        raise ArgumentError(message("device", quote(name), f"one of {', '.join(DEVICES)}", fix))
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise ArgumentError(
            message("device", "'cuda'", "PyTorch must see a CUDA device, and sees none", "pass auto or cpu")
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def predict(
    saved: SavedModel,
    records: Records,
    *,
    batch_size: int = 256,
    probabilities: bool = False,
    horizon: int = 1,
    device: torch.device | None = None,
) -> Predictions:
    """Say what a saved model makes of data.

    Args:
        saved: of :func:`~raglane.training.checkpoint.load_model`.
        records: of the kind that the model was trained on; labels are not looked at.
        batch_size: sequences of a batch.
        probabilities: add one column per class.
        horizon: how many elements to forecast; for the task ``forecast`` only.
        device: where to run; None for the CPU.

    Returns:
        One row per sequence, in the order of ``records``.

    Raises:
        ArgumentError: ``batch_size`` or ``horizon`` is below 1, or one asked for does not go with the task.
        DataError: the data does not fit the model.
    """
    check_least("batch_size", batch_size, 1)
    check_least("horizon", horizon, 1)
    for name, value, given, tasks in (
        ("horizon", horizon, horizon != 1, ("forecast",)),
        ("probabilities", probabilities, probabilities, ("classify", "tag")),
    ):
        if given and saved.task not in tasks:
            raise ArgumentError(message(name, quote(value), f"goes with the task {' or '.join(tasks)}", "leave it out"))
    dataset = saved.preprocessor.apply(records, require_targets=False)
    ids = list(dataset.ids)
    numbers = len(ids) * horizon * len(saved.preprocessor.channels)
    check_memory(f"{numbers:,} numbers of forecasts", _FORECAST * numbers, "pass a smaller horizon")
    if saved.task == "forecast":
        return Predictions({"id": ids, "prediction": _forecasts(saved, dataset, batch_size, horizon, device)})
    shares = _class_shares(saved, dataset, batch_size, device)
    best, places = shares.max(dim=1) if len(shares) else (shares.new_zeros(0), torch.zeros(0, dtype=torch.int64))
    labels = saved.preprocessor.labels or ()
    columns: dict[str, list[Any]] = {
        "prediction": [labels[place] for place in places.tolist()],
        "probability": best.tolist(),
    }
    if probabilities:
        columns |= {f"p_{label}": shares[:, place].tolist() for place, label in enumerate(labels)}
    if saved.task == "tag":
        columns = {name: _by_sequence(values, dataset.offsets) for name, values in columns.items()}
    return Predictions({"id": ids, **columns})


def evaluate(
    saved: SavedModel, records: Records, *, batch_size: int = 256, device: torch.device | None = None
) -> Evaluation:
    """Measure a saved model on data that has targets.

    Args:
        saved: of :func:`~raglane.training.checkpoint.load_model`.
        records: with labels or tags; to forecast, the sequences themselves.
        batch_size: sequences of a batch.
        device: where to run; None for the CPU.

    Returns:
        ``loss``, and ``accuracy`` and ``macro_f1``, or ``MAE`` and that of persistence.

    Raises:
        ArgumentError: ``batch_size`` is below 1.
        DataError: the data does not fit the model, has no labels, or one that training has not seen.
    """
    check_least("batch_size", batch_size, 1)
    device = device or torch.device("cpu")
    preprocessor = saved.preprocessor
    dataset = preprocessor.apply(records)
    task, classes = make_task(preprocessor), preprocessor.class_count
    model = saved.model.to(device)
    totals = Totals()
    confusion = torch.zeros((classes, classes), dtype=torch.int64)
    with answering(model):
        for batch in in_order(dataset, batch_size):
            moved = batch.to(device)
            output = model(moved.inputs)
            totals.add(task.score(output, moved), batch.inputs.values.shape[0])
            if classes and batch.targets is not None:
                confusion += confusion_matrix(batch.targets, _logits(output).argmax(-1).cpu(), classes)
    count = int(float(totals.count))
    if count == 0:
        raise DataError(
            message(str(records.source), "no targets", "at least one to measure by", "give sequences with elements")
        )
    numbers = {"loss": totals.mean_loss}
    if classes:
        numbers |= {"accuracy": accuracy(confusion), "macro_f1": macro_f1(confusion)}
    else:
        numbers |= {task.metric: totals.mean_metric, f"{task.baseline}_{task.metric}": totals.mean_baseline}
    return Evaluation(
        saved.task, len(dataset), count, numbers, confusion if classes else None, preprocessor.labels or ()
    )


def _class_shares(saved: SavedModel, dataset: SequenceDataset, batch_size: int, device: torch.device | None) -> Tensor:
    """The probability of each class, ``(B or N, K)`` float32 on the CPU."""
    device = device or torch.device("cpu")
    model = saved.model.to(device)
    parts = [torch.zeros((0, saved.preprocessor.class_count))]
    with answering(model):
        parts += [_logits(model(batch.inputs.to(device))).softmax(-1).cpu() for batch in in_order(dataset, batch_size)]
    return torch.cat(parts)


def _forecasts(
    saved: SavedModel, dataset: SequenceDataset, batch_size: int, horizon: int, device: torch.device | None
) -> list[list[list[float]] | None]:
    """What follows each sequence, in the data's units."""
    device = device or torch.device("cpu")
    model = saved.model.to(device)
    mean, std = _units(saved.preprocessor)
    forecasts: list[list[list[float]] | None] = []
    with answering(model):
        # Without targets the whole sequence goes in.
        for batch in in_order(dataset, batch_size):
            scaled = model.forecast(batch.inputs.to(device), horizon).cpu().double()
            empty = (batch.inputs.lengths == 0).tolist()
            rows = (scaled * std + mean).tolist()
            forecasts += [None if nothing else row for row, nothing in zip(rows, empty, strict=True)]
    return forecasts


def _units(preprocessor: Preprocessor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the channels, ``(C,)`` float64 each."""
    size = len(preprocessor.channels)
    return (
        torch.tensor(preprocessor.mean or (0.0,) * size, dtype=torch.float64),
        torch.tensor(preprocessor.std or (1.0,) * size, dtype=torch.float64),
    )


def _logits(output: Tensor | Ragged) -> Tensor:
    return output.values if isinstance(output, Ragged) else output


def _by_sequence(values: list[Any], offsets: Tensor) -> list[list[Any]]:
    return [values[start:end] for start, end in pairwise(offsets.tolist())]
