"""Predictions, evaluations and generated texts of a stored model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_kind, check_real, check_whole
from raglane._utils.memory import check_memory
from raglane._utils.messages import (
    argument,
    quote,
)
from raglane.data.dataset import Dataset
from raglane.data.holdout import elements_held_out
from raglane.data.order import BatchLimit
from raglane.data.prepare.encoders import END
from raglane.data.splitting import join_tokens, split_texts
from raglane.data.typed.calendars import following, without_clock
from raglane.errors import ArgumentError, DataError
from raglane.native.library import has_cell
from raglane.nn.linear import RowByRow
from raglane.ragged import Ragged
from raglane.training.batches import in_order
from raglane.training.checkpoint import SavedModel
from raglane.training.model import END_TOKEN, UNKNOWN_TOKEN, SequenceModel
from raglane.training.results import Evaluation, Predictions
from raglane.training.settings import DEVICES
from raglane.training.state import Totals
from raglane.training.tasks import CLASSES, Task, make_task
from raglane.training.tasks.base import values_of

# Bytes per forecast number: in float32 and float64 tensors, and in a Python list.
_FORECAST = 48

# The most hypotheses of a beam search: more take the memory of the machine.
_MOST_BEAM = 1_000

# The most steps ahead that are measured unasked.
FURTHEST = 48


def steps_ahead(saved: SavedModel, records: Dataset) -> int:
    """Return the horizon that measures forecasts of series whose ends are held out, 1 for other
    data.
    """
    if any(not encoder.per_sequence for encoder in saved.preprocessor.features):
        return 1
    return min(max(elements_held_out(records), 1), FURTHEST)


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


def predict(saved: SavedModel, records: Dataset, **options: Any) -> Predictions:
    """Return the predictions of a model, with one row per sequence, as :func:`predict_in_parts`."""
    (whole,) = predict_in_parts(saved, records, part_size=None, **options)
    return whole


def predict_in_parts(
    saved: SavedModel,
    records: Dataset,
    *,
    part_size: int | None,
    batch_size: int = 256,
    probabilities: bool = False,
    top: int = 1,
    horizon: int = 1,
    beam_size: int | None = None,
    n_best: int = 1,
    device: torch.device | None = None,
) -> Iterator[Predictions]:
    """Yield the predictions of ``part_size`` sequences after the other, None for all; labels are
    ignored. ``device=None`` is the CPU.

    All data is read and checked before the first part.
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
    count = len(dataset)
    numbers = count * horizon * len(saved.preprocessor.channels)
    check_memory(f"{numbers:,} numbers of forecasts", _FORECAST * numbers, "pass a smaller horizon")
    device = device or torch.device("cpu")
    model = saved.model.to(device)
    options = {"top": top, "beam_size": beam_size, "n_best": n_best}
    options = {name: value for name, value in options.items() if name in task.options}
    limit = BatchLimit(sequences=batch_size)

    def predicted(data: Dataset, part: Dataset) -> Predictions:
        with answering(model):
            # Without targets a forecast reads the whole sequence.
            batches = (batch.inputs.to(device) for batch in in_order(part, limit))
            columns = task.predict(
                model, batches, horizon=horizon, probabilities=probabilities, **options
            )
        return _table(saved, task, data, part, columns, horizon)

    if part_size is None or count <= part_size:
        yield predicted(records, dataset)
        return
    for rows in torch.arange(count).split(part_size):
        yield predicted(records.subset(rows), dataset.subset(rows))


def _table(
    saved: SavedModel,
    task: Task,
    records: Dataset,
    dataset: Dataset,
    columns: dict[str, list[Any]],
    horizon: int,
) -> Predictions:
    """Return the predictions of sequences with what describes them: ids, times and words."""
    if task.is_per_element:
        slices = [slice(start, end) for start, end in pairwise(dataset.tensors().offsets.tolist())]
        columns = {name: [values[rows] for rows in slices] for name, values in columns.items()}
    columns = {"id": list(dataset.ids), **columns}
    name = records.columns.id
    names = ("id",) if name is None else tuple(name.split(","))
    if saved.task == "forecast":
        dates = _dates_after(records, columns["prediction"], horizon)
        return Predictions(columns, names, dates, saved.preprocessor.channels, per_element=True)
    elements = _elements_of(records) if task.is_per_element else {}
    return Predictions(columns, names, elements, per_element=task.is_per_element)


def _dates_after(
    records: Dataset, forecasts: list[Any], horizon: int
) -> dict[str, list[list[Any]]]:
    """Return the times of the steps of forecasts; {} for data without times."""
    times = records.records.times if records.is_in_memory else None
    if times is None:
        return {}
    bounds = pairwise(records.offsets.tolist())
    after = [
        [] if forecast is None else following(times[start:end], horizon)
        for (start, end), forecast in zip(bounds, forecasts, strict=True)
    ]
    return {records.records.time_name or "time": without_clock(after)}


def _elements_of(records: Dataset) -> dict[str, list[list[Any]]]:
    """Return the times and the words of sequences in memory, if they have them."""
    if not records.is_in_memory:
        return {}
    bounds = list(pairwise(records.offsets.tolist()))
    elements = {}
    times = records.records.times
    if times is not None:
        each = times.astype("datetime64[us]") if times.dtype.kind == "M" else times
        parts = [each[start:end].tolist() for start, end in bounds]
        elements[records.records.time_name or "time"] = without_clock(parts)
    if records.is_tokens:
        name = records.columns.sequence or next(iter(records.columns.features or ()), "word")
        elements[name] = [records.values[start:end].tolist() for start, end in bounds]
    return elements


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
