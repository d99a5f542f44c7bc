"""Predictions, evaluations and generated texts of a stored model."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import fmean
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from raglane._utils.checks import check_kind, check_real, check_whole
from raglane._utils.memory import check_memory
from raglane._utils.messages import (
    argument,
    count_of,
    message,
    metric_words,
    quote,
    quote_all,
    require,
    shorten,
)
from raglane.data.dataset import Dataset
from raglane.data.holdout import elements_held_out
from raglane.data.order import BatchLimit
from raglane.data.prepare.encoders import END
from raglane.data.splitting import join_tokens, split_texts
from raglane.errors import ArgumentError, DataError
from raglane.native.library import has_cell
from raglane.nn.linear import RowByRow
from raglane.ragged import Ragged
from raglane.training.batches import in_order
from raglane.training.checkpoint import SavedModel
from raglane.training.model import END_TOKEN, UNKNOWN_TOKEN, SequenceModel
from raglane.training.settings import DEVICES
from raglane.training.state import Totals
from raglane.training.stored import finite
from raglane.training.tasks import CLASSES, Measured, Task, make_task
from raglane.training.tasks.base import values_of

# Bytes per forecast number: in float32 and float64 tensors, and in a Python list.
_FORECAST = 48

# The most hypotheses of a beam search: more take the memory of the machine.
_MOST_BEAM = 1_000

# The most steps ahead that are measured unasked.
_FURTHEST = 48

# Rows, and characters per entry, in the repr of a table.
_SHOWN = 10
_WIDEST = 40


# Metrics that are compared with simple rules and are better if higher; those of other tasks are
# errors.
SCORES = ("accuracy", "micro_f1", "exact_match")


@dataclass(frozen=True, repr=False)
class Predictions:
    """A table of predictions in the order of the data.

    Args:
        columns: lists with one entry per sequence: ``id``, ``prediction``, ``probability`` and,
            with ``probabilities=True``, ``p_<label>`` for each class. With an output per element an
            entry is a list with a value per element. For ``forecast``, ``prediction`` is a list of
            ``horizon`` lists of ``C`` numbers in the units of the data (None for an empty
            sequence), without a probability.
        id_names: the names of the user's columns of ids, which :meth:`named` has in place of
            ``id``; several together are the ids of sequences.

    Example:
        >>> predictions = Predictions({"id": [0, 1], "prediction": ["a", "b"], "probability": [0.75, 1.0]})
        >>> predictions
        Predictions of 2 sequences
        id  prediction  probability
        0  a  0.75
        1  b  1
        >>> predictions["prediction"], len(predictions)
        (['a', 'b'], 2)
        >>> predictions[0]
        {'id': 0, 'prediction': 'a', 'probability': 0.75}
    """

    columns: dict[str, list[Any]]
    id_names: tuple[str, ...] = ("id",)

    def __len__(self) -> int:
        return len(self.columns["id"])

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    def __getitem__(self, key: str | int) -> Any:
        """Return a column by its name, or a row by its number as a dictionary."""
        if isinstance(key, str) and key in self.columns:
            return self.columns[key]
        if isinstance(key, str):
            rule = f"one of {quote_all(self.columns)}"
            raise ArgumentError("column", quote(key), rule, "choose one of them")
        row = check_whole("row", key)
        if not -len(self) <= row < len(self):
            rule = f"from {-len(self)} to {len(self) - 1}, for {len(self)} rows"
            raise IndexError(message("row", f"{row}", rule, "use a number below len(predictions)"))
        return {name: column[row] for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries."""
        return (self[row] for row in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """Return True for the name of a column."""
        return name in self.columns

    def keys(self) -> KeysView[str]:
        """Return the names of the columns."""
        return self.columns.keys()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the table to a package that reads Arrow, such as polars or DuckDB."""
        table = require("pyarrow", "data").table(self.named())
        return table.__arrow_c_stream__(requested_schema)

    def named(self) -> dict[str, list[Any]]:
        """Return the columns as in a file: the ids have the names of the user's columns.

        Example:
            >>> Predictions({"id": ["a/u"], "prediction": [1]}, ("store", "item")).named()
            {'store': ['a'], 'item': ['u'], 'prediction': [1]}
        """
        ids = self.columns["id"]
        others = {name: column for name, column in self.columns.items() if name != "id"}
        names = self.id_names
        if len(names) == 1:
            return {(names[0] if names[0] not in others else "id"): ids, **others}
        parts = [str(name).split("/") for name in ids]
        is_clear = all(len(each) == len(names) for each in parts)
        if not is_clear or others.keys() & set(names):
            return self.columns
        split = zip(*parts, strict=True) if parts else ([] for _ in names)
        return {**dict(zip(names, map(list, split), strict=True)), **others}

    def __repr__(self) -> str:
        rows = "\n".join(
            "  ".join(shorten(_short(entry), _WIDEST) for entry in row)
            for row in islice(zip(*self.columns.values(), strict=True), _SHOWN)
        )
        more = f"\n... {len(self) - _SHOWN:,} more" if len(self) > _SHOWN else ""
        return f"Predictions of {count_of(len(self), 'sequence')}\n{'  '.join(self.columns)}\n{rows}{more}"

    def to_pandas(self) -> Any:
        """Return the table as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return require("pandas", "data").DataFrame(self.named())


@dataclass(frozen=True, repr=False)
class Evaluation(Mapping[str, float]):
    """The quality of a model on data that has targets: a mapping from names to numbers.

    Args:
        task: the name of the task.
        sequences: the number of sequences.
        count: the number of targets that were averaged: sequences, elements or numbers.
        numbers: ``loss`` and the metrics and baselines of the task, by name.
        measured: the classes, confusion matrix, table and points of the task.
    """

    task: str
    sequences: int
    count: int
    numbers: dict[str, float]
    measured: Measured

    def __getitem__(self, name: str) -> float:
        """Return one of the numbers."""
        if name not in self.numbers:
            raise ArgumentError(
                "number", quote(name), f"one of {quote_all(self.numbers)}", "choose one of them"
            )
        return self.numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def get(self, name: str, default: Any = None) -> Any:
        """Return one of the numbers, or the default for another name."""
        return self.numbers.get(name, default)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.numbers.items())
        return f"Evaluation({self.task}, {count_of(self.sequences, 'sequence')}: {numbers})"

    def better_rule(self) -> str | None:
        """Return the metric and the best simple rule in words, if the model is not better than this
        rule.
        """
        rule = self.rule_not_beaten()
        return None if rule is None else str(rule)

    def rule_not_beaten(self) -> BetterRule | None:
        """Return the best simple rule, if the model is not better than this rule."""
        rule = _rule_not_beaten(self.numbers)
        if rule is not None:
            return rule
        steps = [row for row in self.measured.table if "step" in row]
        if not steps:
            return None
        ahead = {name: fmean(row[name] for row in steps) for name in steps[0] if name != "step"}
        rule = _rule_not_beaten(ahead)
        return None if rule is None else rule._replace(steps=len(steps))

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; empty for tasks without classes."""
        return self.measured.labels

    @property
    def confusion(self) -> Tensor | None:
        """The confusion matrix ``(K, K)`` int64, with a row per true class; None for tasks without
        classes.
        """
        return self.measured.confusion

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary, with None for numbers that are not finite."""
        return {
            "task": self.task,
            "sequences": self.sequences,
            "count": self.count,
            **finite(self.numbers),
            "labels": list(self.labels),
            "confusion": None if self.confusion is None else self.confusion.tolist(),
            "table": finite(list(self.measured.table)),
        }


class BetterRule(NamedTuple):
    """A simple rule that a model does not beat: its metric, the model's value, the rule's name and
    value, and the number of steps ahead of which they are means.
    """

    metric: str
    reached: float
    name: str
    value: float
    steps: int | None = None

    def is_beaten_by(self, reached: float) -> bool:
        """Return True if a value of the metric is better than the rule's, or without errors."""
        if self.metric in SCORES:
            return reached > self.value or reached == 1
        return reached < self.value or reached == 0

    def __str__(self) -> str:
        words = f"{metric_words(self.metric)} {self.reached:.3f}"
        words += f", {metric_words(self.name)} {self.value:.3f}"
        return words if self.steps is None else f"{words}, as the mean of {self.steps} steps ahead"


def _rule_not_beaten(numbers: Mapping[str, float]) -> BetterRule | None:
    # The share of right classes among the likeliest, top2_accuracy, is of the model too.
    others = {name: number for name, number in numbers.items() if not name.startswith("top")}
    for metric, reached in numbers.items():
        rules = {name: number for name, number in others.items() if name.endswith(f"_{metric}")}
        if not rules:
            continue
        best = max if metric in SCORES else min
        name = best(rules, key=rules.__getitem__)
        rule = BetterRule(metric, reached, name, rules[name])
        return None if rule.is_beaten_by(reached) else rule
    return None


def steps_ahead(saved: SavedModel, records: Dataset) -> int:
    """Return the horizon that measures forecasts of one series whose end is held out, 1 for other
    data.
    """
    if any(not encoder.per_sequence for encoder in saved.preprocessor.features):
        return 1
    return min(max(elements_held_out(records), 1), _FURTHEST)


def pick_device(name: str) -> torch.device:
    """Return the device for ``auto`` (a GPU if available), ``cpu`` or ``cuda``; raise if it does
    not exist.
    """
    if name not in DEVICES:
        fix = "pass auto; the environment variable CUDA_VISIBLE_DEVICES selects one of several GPUs"
        raise ArgumentError("device", quote(name), f"one of {', '.join(DEVICES)}", fix)
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise ArgumentError(
            "device",
            "'cuda'",
            "auto or cpu, because PyTorch has no CUDA device",
            "pass auto or cpu",
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def predict(
    saved: SavedModel,
    records: Dataset,
    *,
    batch_size: int = 256,
    probabilities: bool = False,
    top: int = 1,
    horizon: int = 1,
    beam_size: int | None = None,
    n_best: int = 1,
    device: torch.device | None = None,
) -> Predictions:
    """Return the predictions of a model, with one row per sequence; labels are ignored.
    ``device=None`` is the CPU.
    """
    check_whole("batch_size", batch_size, 1)
    task = make_task(saved.preprocessor, saved.model.config, saved.model)
    check_options(
        task,
        horizon=horizon,
        probabilities=probabilities,
        top=top,
        beam_size=beam_size,
        n_best=n_best,
    )
    dataset = saved.preprocessor.apply(records, require_targets=False)
    ids = list(dataset.ids)
    numbers = len(ids) * horizon * len(saved.preprocessor.channels)
    check_memory(f"{numbers:,} numbers of forecasts", _FORECAST * numbers, "pass a smaller horizon")
    device = device or torch.device("cpu")
    model = saved.model.to(device)
    with answering(model):
        # Without targets a forecast reads the whole sequence.
        batches = (
            batch.inputs.to(device) for batch in in_order(dataset, BatchLimit(sequences=batch_size))
        )
        options = {"top": top, "beam_size": beam_size, "n_best": n_best}
        options = {name: value for name, value in options.items() if name in task.options}
        columns = task.predict(
            model, batches, horizon=horizon, probabilities=probabilities, **options
        )
    if task.is_per_element:
        slices = [slice(start, end) for start, end in pairwise(dataset.tensors().offsets.tolist())]
        columns = {name: [values[rows] for rows in slices] for name, values in columns.items()}
    name = records.columns.id
    return Predictions({"id": ids, **columns}, ("id",) if name is None else tuple(name.split(",")))


def evaluate(
    saved: SavedModel,
    records: Dataset,
    *,
    batch_size: int = 256,
    top: int = 1,
    horizon: int = 1,
    backtests: int = 1,
    beam_size: int | None = None,
    device: torch.device | None = None,
) -> Evaluation:
    """Return loss, metrics and baselines of a model on data with targets. ``device=None`` is the
    CPU.

    With ``horizon`` above 1 the last elements of each sequence are also forecast, from ``backtests``
    elements, and measured step by step.
    """
    check_whole("batch_size", batch_size, 1)
    device = device or torch.device("cpu")
    preprocessor = saved.preprocessor
    dataset = preprocessor.apply(records)
    task = make_task(preprocessor, saved.model.config, saved.model)
    check_options(task, horizon=horizon, top=top, beam_size=beam_size)
    check_whole("backtests", backtests, 1)
    if backtests > 1 and horizon == 1:
        fix = f"pass {argument('horizon')} too, or leave it out"
        raise ArgumentError("backtests", f"{backtests}", "1 for forecasts of one step", fix)
    task.check(records)
    model = saved.model.to(device)
    options = {
        name: value
        for name, value in (("top", top), ("beam_size", beam_size))
        if name in task.options
    }
    totals = Totals()
    meter = task.meter(model, records, **options)
    with answering(model):
        for batch in in_order(dataset, BatchLimit(sequences=batch_size)):
            moved = batch.to(device)
            output = values_of(model(moved.inputs))
            totals.add(task.score(output, moved), batch.inputs.values.shape[0])
            meter.add(output, moved)
    count = int(float(totals.count))
    if count == 0:
        raise DataError(
            str(records.source), "no targets", "at least one target", "pass sequences with elements"
        )
    measured = meter.measured()
    if horizon > 1:
        whole = preprocessor.apply(records, require_targets=False)
        with answering(model):
            batches = (
                batch.inputs.to(device)
                for batch in in_order(whole, BatchLimit(sequences=batch_size))
            )
            measured = replace(measured, table=task.ahead(model, batches, horizon, backtests))
    return Evaluation(
        saved.task, len(dataset), count, {"loss": totals.mean_loss, **measured.numbers}, measured
    )


def sample(
    saved: SavedModel,
    *,
    prompt: str = "",
    count: int = 1,
    max_length: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    beam_size: int | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Draw ``count`` texts from a language model, each at most ``max_length`` tokens longer than
    ``prompt``.

    Logits are divided by ``temperature``; 0 chooses the likeliest token. The same seed gives the
    same texts. With ``beam_size`` nothing is drawn: the texts are the likeliest that a beam search
    finds, at most ``beam_size``, the likeliest first. ``device=None`` is the CPU.
    """
    if saved.task != "language":
        fix = "train a model with the task language"
        raise ArgumentError(
            "run", f"a model of the task {saved.task}", "a model of the task language", fix
        )
    check_kind("prompt", prompt, str, "a text", "pass a str")
    for name, number, least in (
        ("count", count, 1),
        ("max_length", max_length, 1),
        ("seed", seed, 0),
    ):
        check_whole(name, number, least, most=2**63 - 1)
    rule = "at least 0, and finite"
    check_real(
        "temperature", temperature, rule, lambda number: 0 <= number < float("inf"), "pass e.g. 0.8"
    )
    if beam_size is not None:
        check_whole("beam_size", beam_size, 1, most=_MOST_BEAM)
        if temperature != 1:
            rule = "1, its default, with a beam, which searches the likeliest texts"
            raise ArgumentError("temperature", quote(temperature), rule, "leave it out")
    device = device or torch.device("cpu")
    words = saved.preprocessor.vocabulary or ()
    split = saved.preprocessor.split
    positions = {token: index for index, token in enumerate(words) if token != END}
    prefix = split_texts([prompt], split or "words")[0].tolist()
    start = torch.tensor(
        [END_TOKEN, *(positions.get(token, UNKNOWN_TOKEN) for token in prefix)], device=device
    )
    # On the CPU, so that the texts of a seed do not depend on the device.
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        # A denormal temperature would give infinity.
        shares = (logits.cpu().double() / max(temperature, 1e-300)).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator).squeeze(1).to(logits.device)

    model = saved.model.to(device)
    with answering(model):
        if beam_size is None:
            drawn = model.generate(Ragged([start] * count), max_length, pick).tolist()
        else:
            hypotheses = model.search(Ragged([start]), max_length, beam_size, min(count, beam_size))
            drawn = [tokens.tolist() for tokens in hypotheses.tokens]
    texts = []
    for row in drawn:
        end = row.index(END_TOKEN) if END_TOKEN in row else len(row)
        texts.append(join_tokens([*prefix, *(words[index] for index in row[:end])], split))
    return texts


@contextmanager
def answering(model: SequenceModel) -> Iterator[None]:
    """Compute without gradients, and on a CPU with the same bits in any batch and for any number of
    threads.

    The cpu kernels have this property; for other cells, torch's products with a matrix are computed
    row by row.
    """
    has_kernel = has_cell(model.encoder.recurrent.cell.name)
    with torch.no_grad(), nullcontext() if has_kernel else RowByRow():
        yield


def check_options(
    task: Task,
    *,
    horizon: int = 1,
    top: int = 1,
    probabilities: bool = False,
    beam_size: int | None = None,
    n_best: int = 1,
) -> None:
    """Raise if an option of a prediction is invalid or does not exist for the task."""
    numbers = {"horizon": horizon, "top": top, "n_best": n_best}
    for name, value, is_set in (
        *((name, check_whole(name, number, 1), number != 1) for name, number in numbers.items()),
        ("probabilities", probabilities, probabilities),
        ("beam_size", beam_size, beam_size is not None),
    ):
        if is_set and name not in task.options:
            tasks = [task for task, kind in CLASSES.items() if name in kind.options]
            rule = f"left out except for the task {' or '.join(tasks)}"
            raise ArgumentError(name, quote(value), rule, "leave it out")
    check_whole("n_best", n_best, 1, most=_MOST_BEAM)
    if beam_size is not None and check_whole("beam_size", beam_size, 1, most=_MOST_BEAM) < n_best:
        fix = f"pass a larger {argument('beam_size')}, or leave it out"
        raise ArgumentError("n_best", f"{n_best}", f"at most the beam size, {beam_size}", fix)


def _short(entry: Any) -> str:
    if isinstance(entry, list):
        return f"[{', '.join(map(_short, entry[:_SHOWN]))}{', ...' if len(entry) > _SHOWN else ''}]"
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)
