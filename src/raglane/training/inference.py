"""A saved model at work: predictions, and how good they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from raglane._utils.memory import check_memory
from raglane._utils.messages import message, quote, quote_all, require, shorten
from raglane.data.dataset import Dataset
from raglane.data.epochs import check_least
from raglane.data.order import BatchLimit
from raglane.errors import ArgumentError, DataError
from raglane.native.library import has_cell
from raglane.nn.linear import RowByRow
from raglane.training.batches import in_order
from raglane.training.checkpoint import SavedModel
from raglane.training.model import SequenceModel
from raglane.training.settings import DEVICES
from raglane.training.state import Totals
from raglane.training.stored import finite
from raglane.training.tasks import TASKS, Measured, Task, make_task
from raglane.training.tasks.base import values_of

# The bytes of a number of a forecast on its way: in tensors of 32 and of 64 bits, and in a list of Python's.
_FORECAST = 48

# Rows that a table of predictions shows of itself, and characters of an entry.
_SHOWN, _WIDEST = 10, 40


@dataclass(frozen=True, repr=False)
class Predictions:
    """A table of predictions in the order of the data.

    Args:
        columns: ``id``, ``prediction``, ``probability`` and, where asked for, one ``p_<label>`` per class; each a list
            with one entry per sequence. For ``tag`` an entry is a list with one value per element; for ``forecast``
            ``prediction`` is a list of ``horizon`` lists of ``C`` numbers in the data's units (None for an empty
            sequence), and there is no probability.

    Example:
        >>> predictions = Predictions({"id": [0, 1], "prediction": ["a", "b"], "probability": [0.75, 1.0]})
        >>> predictions
        Predictions of 2 sequences
        id  prediction  probability
        0  a  0.75
        1  b  1
        >>> predictions["prediction"], len(predictions)
        (['a', 'b'], 2)
    """

    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["id"])

    def __getitem__(self, name: str) -> list[Any]:
        """A column."""
        if name not in self.columns:
            rule = f"one of the columns {quote_all(self.columns)}"
            raise ArgumentError(message("column", quote(name), rule, "choose one of them"))
        return self.columns[name]

    def __repr__(self) -> str:
        rows = "\n".join(
            "  ".join(shorten(_short(entry), _WIDEST) for entry in row)
            for row in islice(zip(*self.columns.values(), strict=True), _SHOWN)
        )
        more = f"\n... {len(self) - _SHOWN:,} more" if len(self) > _SHOWN else ""
        return f"Predictions of {len(self):,} sequences\n{'  '.join(self.columns)}\n{rows}{more}"

    def frame(self) -> Any:
        """The table as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return require("pandas", "data").DataFrame(self.columns)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The quality of a model on data that has targets.

    Args:
        task: the name of the task.
        sequences: how many sequences were run.
        count: what was averaged over: sequences, elements, or numbers.
        numbers: ``loss`` and the task's metrics and baselines by name.
        measured: what the task has to say beside them: classes, their confusion, tables, points.
    """

    task: str
    sequences: int
    count: int
    numbers: dict[str, float]
    measured: Measured

    def __getitem__(self, name: str) -> float:
        """One of the numbers."""
        if name not in self.numbers:
            rule = f"one of the numbers {quote_all(self.numbers)}"
            raise ArgumentError(message("number", quote(name), rule, "choose one of them"))
        return self.numbers[name]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.numbers.items())
        return f"Evaluation({self.task}, {self.sequences:,} sequences: {numbers})"

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; () where there are none."""
        return self.measured.labels

    @property
    def confusion(self) -> Tensor | None:
        """``(K, K)`` int64, row the true class and column the predicted one; None where there are no classes."""
        return self.measured.confusion

    def to_config(self) -> dict[str, Any]:
        """Everything as a dictionary that JSON can hold; a number that is not finite is None."""
        return {
            "task": self.task,
            "sequences": self.sequences,
            "count": self.count,
            **finite(self.numbers),
            "labels": list(self.labels),
            "confusion": None if self.confusion is None else self.confusion.tolist(),
            "table": finite(list(self.measured.table)),
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
        fix = "pass auto; set CUDA_VISIBLE_DEVICES to choose among several GPUs"
        raise ArgumentError(message("device", quote(name), f"one of {', '.join(DEVICES)}", fix))
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        rule = "auto or cpu, since PyTorch finds no CUDA device"
        raise ArgumentError(message("device", "'cuda'", rule, "pass auto or cpu"))
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def predict(
    saved: SavedModel,
    records: Dataset,
    *,
    batch_size: int = 256,
    probabilities: bool = False,
    top: int = 1,
    horizon: int = 1,
    device: torch.device | None = None,
) -> Predictions:
    """Say what a saved model makes of data.

    Args:
        saved: of :func:`~raglane.training.checkpoint.load_model`.
        records: of the kind that the model was trained on; labels are not looked at.
        batch_size: sequences of a batch.
        probabilities: add one column per class.
        top: above 1, add the so many likeliest classes and their probabilities, as lists.
        horizon: how many elements to forecast; for the task ``forecast`` only.
        device: where to run; None for the CPU.

    Returns:
        One row per sequence, in the order of ``records``.

    Raises:
        ArgumentError: ``batch_size`` or ``horizon`` is below 1, or one asked for does not go with the task.
        DataError: the data does not fit the model.
    """
    check_least("batch_size", batch_size, 1)
    task = make_task(saved.preprocessor, saved.model.config)
    _check_options(task, horizon=horizon, probabilities=probabilities, top=top)
    dataset = saved.preprocessor.apply(records, require_targets=False)
    ids = list(dataset.ids)
    numbers = len(ids) * horizon * len(saved.preprocessor.channels)
    check_memory(f"{numbers:,} numbers of forecasts", _FORECAST * numbers, "pass a smaller horizon")
    device = device or torch.device("cpu")
    model = saved.model.to(device)
    with answering(model):
        # Without targets the whole sequence goes in.
        batches = (batch.inputs.to(device) for batch in in_order(dataset, BatchLimit(sequences=batch_size)))
        parts = [task.answer(model, inputs, horizon).cpu() for inputs in batches]
    answers = torch.cat(parts) if parts else torch.zeros(0, model.config.output_size)
    columns = task.columns(answers, saved.model, probabilities=probabilities, **({"top": top} if top > 1 else {}))
    if task.is_per_element:
        own = [slice(start, end) for start, end in pairwise(dataset.tensors().offsets.tolist())]
        columns = {name: [values[part] for part in own] for name, values in columns.items()}
    return Predictions({"id": ids, **columns})


def evaluate(
    saved: SavedModel,
    records: Dataset,
    *,
    batch_size: int = 256,
    top: int = 1,
    horizon: int = 1,
    device: torch.device | None = None,
) -> Evaluation:
    """Measure a saved model on data that has targets.

    Args:
        saved: of :func:`~raglane.training.checkpoint.load_model`.
        records: with labels or tags; to forecast, the sequences themselves. Of a :class:`~raglane.data.Dataset` only
            batches are in memory.
        batch_size: sequences of a batch.
        top: above 1, also how often the class is among the so many likeliest.
        horizon: above 1, the last so many elements of each sequence are forecast too, and measured step by step; for
            the task ``forecast`` only.
        device: where to run; None for the CPU.

    Returns:
        ``loss``, and the task's metrics beside those of simple rules.

    Raises:
        ArgumentError: ``batch_size`` or ``horizon`` is below 1, or ``horizon`` does not go with the task.
        DataError: the data does not fit the model, has no labels, or one that training has not seen.
    """
    check_least("batch_size", batch_size, 1)
    device = device or torch.device("cpu")
    preprocessor = saved.preprocessor
    dataset = preprocessor.apply(records)
    task = make_task(preprocessor, saved.model.config)
    _check_options(task, horizon=horizon, top=top)
    where = str(records.source)
    task.check(records)
    model = saved.model.to(device)
    totals, meter = Totals(), task.meter(model, records, **({"top": top} if top > 1 else {}))
    with answering(model):
        for batch in in_order(dataset, BatchLimit(sequences=batch_size)):
            moved = batch.to(device)
            output = values_of(model(moved.inputs))
            totals.add(task.score(output, moved), batch.inputs.values.shape[0])
            meter.add(output, moved)
    count = int(float(totals.count))
    if count == 0:
        raise DataError(message(where, "no targets", "data with at least one target", "pass sequences with elements"))
    measured = meter.measured()
    if horizon > 1:
        whole = preprocessor.apply(records, require_targets=False)
        with answering(model):
            batches = (batch.inputs.to(device) for batch in in_order(whole, BatchLimit(sequences=batch_size)))
            measured = replace(measured, table=task.ahead(model, batches, horizon))
    numbers = {"loss": totals.mean_loss, **measured.numbers}
    return Evaluation(saved.task, len(dataset), count, numbers, measured)


@contextmanager
def answering(model: SequenceModel) -> Iterator[None]:
    """Within it a model's answer to a sequence has the same bits in any batch and at any number of threads, on a CPU.

    The cpu kernels promise it of the cells that they run; what torch computes of the others is done row by row. No
    gradients are recorded.
    """
    has_kernel = has_cell(model.encoder.recurrent.cell.name)
    with torch.no_grad(), nullcontext() if has_kernel else RowByRow():
        yield


def _check_options(task: Task, *, horizon: int, top: int, probabilities: bool = False) -> None:
    """Refuse what does not go with a task."""
    check_least("horizon", horizon, 1)
    check_least("top", top, 1)
    for name, value, given in (
        ("horizon", horizon, horizon != 1),
        ("top", top, top != 1),
        ("probabilities", probabilities, probabilities),
    ):
        if given and name not in task.options:
            tasks = [known for known, kind in TASKS.items() if name in kind.options]
            raise ArgumentError(
                message(name, quote(value), f"left out, except for the task {' or '.join(tasks)}", "leave it out")
            )


def _short(entry: Any) -> str:
    if isinstance(entry, list):
        return f"[{', '.join(map(_short, entry[:_SHOWN]))}{', ...' if len(entry) > _SHOWN else ''}]"
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)
