"""The model card of a run: what is known at the end of a training, put together."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raglane.planner import machine
from raglane.data.lengths import Distribution, summary
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import DataError, count_of, shorten
from raglane._utils.files import write_files
from raglane.runs.configuration import entries
from raglane.runs.sources import DEFAULT_DATA
from raglane.planner.words import seconds_in_words
from raglane.report.card import Card, Table, as_markdown, as_page, table_of
from raglane.report.tables import class_rows
from raglane.training.checkpoint import SavedModel, describe, load_model
from raglane.training.each import Each, drawn, measure_each
from raglane.training.folder import CARD, REPORT, SKIPPED
from raglane.training.inference import Evaluation, evaluate, pick_device
from raglane.training.own_cell import is_own, label_of
from raglane.training.run import TrainingResult, left_out
from raglane.training.settings import Settings


# Labels and classes that a card lists, and characters of one.
_LISTED, _LONGEST = 100, 40
# What a model is trained for, where the name of its task is no verb.
_PURPOSES = {
    "language": "as a language model of",
    "multilabel": "to give sets of labels to",
    "regress": "to tell numbers of",
}


@dataclass(frozen=True)
class Parts:
    """The sequences of a run."""

    training: Records | Dataset
    validation: Records | Dataset | None
    test: Records | None
    where: str | None = None
    in_memory: bool = False

    @property
    def name(self) -> str:
        """The data in a word."""
        return "data in memory" if self.in_memory else DEFAULT_DATA if self.where is None else Path(self.where).name

    @property
    def known(self) -> dict[str, Records | Dataset]:
        """The parts that there are, by name."""
        parts = {"training": self.training, "validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def measured(self) -> tuple[str, Records | Dataset]:
        """The part that says most of the model: what it has not seen, if there is any."""
        return next(((name, part) for name, part in reversed(self.known.items()) if len(part)), ("", self.training))


def about(parts: Parts, settings: Settings) -> str:
    """The data, the cell and the counts in a line, for the titles of pictures."""
    counts = ", ".join(f"{len(part):,} {name}" for name, part in parts.known.items())
    cell = label_of(settings.layer) if is_own(settings.layer) else settings.layer.upper().replace("_", " ")
    return f"{parts.name}: {cell}, {settings.task}\n{counts} sequences"


def write_card(folder: Path, settings: Settings, result: TrainingResult, parts: Parts) -> None:
    """Write ``card.md`` and ``report.html`` in the folder of a run that has come to its end."""
    card = make_card(folder, settings, result, parts)
    content = as_page(card)
    write_files({folder / CARD: as_markdown(card).encode(), folder / REPORT: content})


def make_card(folder: Path, settings: Settings, result: TrainingResult, parts: Parts) -> Card:
    """What there is to say of a run, measured on the part that the model has not seen."""
    saved, device = load_model(folder), pick_device(settings.device)
    notes: list[str] = []
    evaluation, each = None, None
    on, records = parts.measured
    if on:
        try:
            if isinstance(records, Dataset) and len(rows := drawn(records, settings.seed)) < len(records):
                # To read all of them can take as long as an epoch.
                notes.append(f"Measured on {len(rows):,} of the {len(records):,} sequences of the {on} part.")
                records = records.subset(rows)
            evaluation = evaluate(saved, records, device=device)
            each = measure_each(saved, records, device, settings.seed)
        except DataError as error:
            # A test part may have labels that training has not seen: the model is there all the same.
            notes.append(f"Not measured on the {on} part: {error}")
    if on == "training":
        notes.append("Nothing was held out: these numbers are those of the sequences that the model has seen.")
    measured = Measured(saved, result, evaluation, each, on)
    skipped = left_out(*parts.known.values())
    if skipped:
        notes.append(f"Rows left out, because they break a rule: {len(skipped):,}; {SKIPPED} lists them.")
    card = _written(folder, settings, result, parts, measured)
    return replace(card, notes=(*notes, *card.notes), hardest=measured.hardest(device))


@dataclass(frozen=True)
class Measured:
    """What was measured of a model, and on which part."""

    saved: SavedModel
    result: TrainingResult
    evaluation: Evaluation | None
    each: Each | None
    on: str

    @property
    def row(self) -> dict[str, float]:
        """Of the history, the best epoch."""
        return self.result.state.history[self.result.state.best_epoch - 1]

    def results(self) -> Table:
        """The numbers of each part."""
        metric = self.result.metric
        found: dict[str, dict[str, float]] = {}
        for part, key in (("training", "train"), ("validation", "validation")):
            if f"{key}_loss" in self.row:
                found[part] = {"loss": self.row[f"{key}_loss"], metric: self.row[f"{key}_{metric}"]}
        if self.evaluation is not None:
            found[self.on] = found.get(self.on, {}) | self.evaluation.numbers
        names = dict.fromkeys(name for numbers in found.values() for name in numbers)
        nothing = float("nan")
        rows = ((name.replace("_", " "), *(part.get(name, nothing) for part in found.values())) for name in names)
        caption = "The best model; what is a dash was not measured there"
        return Table(caption, ("metric", *found), tuple(rows))

    def classes(self) -> Table | None:
        """The numbers of each class or label."""
        if self.evaluation is None:
            return None
        if self.evaluation.confusion is not None:
            listed = class_rows(self.evaluation.confusion.tolist(), self.evaluation.labels)
        else:
            listed = list(self.evaluation.measured.table)
        short = [{key: _short(value) for key, value in row.items()} for row in listed[:_LISTED]]
        more = f", the first {_LISTED} of {len(listed):,}" if len(listed) > _LISTED else ""
        return table_of(f"On the {self.on} part{more}", short)

    def by_length(self) -> Table | None:
        """The loss and the metric of each range of lengths."""
        if self.each is None or not len(self.each.rows):
            return None
        metric, fewer = self.result.metric, len(self.each.rows) < len(self.each.records)
        caption = f"On the {self.on} part" + (f", {len(self.each.rows):,} sequences drawn by chance" if fewer else "")
        rows = [
            {"lengths": str(one), "sequences": one.sequences, "loss": one.loss, metric: one.metric}
            for one in self.each.ranges()
        ]
        return table_of(caption, rows)

    def hardest(self, device: Any) -> Table | None:
        """The sequences with the largest losses."""
        if self.each is None:
            return None
        found = self.each.hardest(self.saved, device)
        metric = self.result.metric.replace("_", " ")
        told = any(one.predicted for one in found)
        # Without ids, rows of the part: counted from 0, as the part has them.
        first = "row of the part" if self.each.records.ids is None else "id"
        columns = (first, *(("true", "predicted") if told else ()), "steps", "loss", metric)
        rows = (
            (
                _short(one.id),
                *((_short(one.true), _short(one.predicted)) if told else ()),
                one.length,
                one.loss,
                one.metric,
            )
            for one in found
        )
        what = f"The largest losses of the {self.on} part"
        return Table(what, columns, tuple(rows), words=3 if told else 1) if found else None


def _written(folder: Path, settings: Settings, result: TrainingResult, parts: Parts, measured: Measured) -> Card:
    state, saved, evaluation = result.state, measured.saved, measured.evaluation
    metric = result.metric.replace("_", " ")
    seconds = sum(row["seconds"] for row in state.history)
    numbers = evaluation.numbers if evaluation is not None else {}
    on = measured.on if evaluation is not None else "validation" if "validation_loss" in measured.row else "training"
    value = numbers.get(
        result.metric, measured.row.get(f"{on}_{result.metric}", measured.row[f"train_{result.metric}"])
    )
    weights = sum(parameter.numel() for parameter in saved.model.parameters())
    versions = machine.facts(("numpy",))
    points = evaluation.measured.points if evaluation is not None else ()
    matrix = evaluation.confusion.tolist() if evaluation is not None and evaluation.confusion is not None else ()
    by_length = measured.by_length()
    purpose = _PURPOSES.get(settings.task, f"to {settings.task}")
    return Card(
        name=folder.name,
        sentence=f"{describe(saved.model)}, trained {purpose} {parts.name}: {metric} {value:.3f} on the {on} part.",
        about=about(parts, settings),
        facts=(
            (f"{metric}, {on}", f"{value:.3f}"),
            ("training sequences", f"{len(parts.training):,}"),
            ("weights", f"{weights:,}"),
            ("best epoch", f"{state.best_epoch} of {state.epoch}"),
            ("training time", seconds_in_words(seconds)),
            ("seed", f"{settings.seed}"),
        ),
        results=measured.results(),
        classes=measured.classes(),
        by_length=by_length,
        hardest=None,
        data=_data(parts, saved),
        labels=_labels(parts),
        model=_model(saved, weights),
        settings=_settings(settings),
        time=_time(result, seconds, versions),
        shell=_shell(folder, settings),
        python=_python(folder, settings),
        lengths={name: np.asarray(part.lengths).tolist() for name, part in parts.known.items()},
        history=state.history,
        metric=result.metric,
        best_epoch=state.best_epoch,
        drawn=("loss", result.metric),
        confusion=matrix,
        names=tuple(_short(name) for name in evaluation.labels) if evaluation is not None and len(matrix) else (),
        points=points,
        version=versions["raglane"],
    )


def _data(parts: Parts, saved: SavedModel) -> Table:
    """Where the data is from, and the lengths of each part."""
    rows: list[tuple[Any, ...]] = []
    for name, part in parts.known.items():
        lengths = np.asarray(part.lengths)
        if len(lengths) and lengths.sum():
            found = summary(Distribution.of(lengths))
            numbers = (found.count, found.elements, found.minimum, found.median, found.p95, found.maximum, found.fill)
        else:
            numbers = (len(lengths), 0, 0, 0, 0, 0, float("nan"))
        rows.append((name, *numbers))
    where = "memory" if parts.in_memory else parts.where or f"{DEFAULT_DATA}, the embedded default"
    preprocessor = saved.preprocessor
    what = f"{preprocessor.input_size:,} tokens" if preprocessor.is_tokens else _channels(preprocessor.channels)
    columns = ("part", "sequences", "elements", "shortest", "median", "95 %", "longest", "real if padded")
    return Table(f"From {where}; {what}", columns, tuple(rows))


def _channels(names: tuple[str, ...]) -> str:
    listed = ", ".join(map(_short, names[:10]))
    return f"{count_of(len(names), 'channel')}: {listed}" + (", ..." if len(names) > 10 else "")


def _labels(parts: Parts) -> Table | None:
    """How often each label occurs in the training part."""
    training = parts.training
    if isinstance(training, Dataset):
        classes = training.labels()
        names = training.preprocessor.labels
        counts = Counter() if classes is None or not names else Counter(names[int(place)] for place in classes)
    elif training.labels is not None:
        counts = Counter(training.labels)
    elif training.tags is not None:
        counts = Counter(training.tags.tolist())
    elif training.targets is not None and not training.targets.is_numbers:
        counts = Counter(label for labels in training.targets.values for label in labels)
    else:
        return None
    total = counts.total()
    rows = [
        {"label": _short(label), "count": count, "share": f"{count / total:.1%}"}
        for label, count in counts.most_common(_LISTED)
    ]
    more = f", the {_LISTED} most frequent of {len(counts):,}" if len(counts) > _LISTED else ""
    return table_of(f"Labels of the training part{more}", rows)


def _model(saved: SavedModel, weights: int) -> Table:
    config = saved.model.config
    rows = (
        ("network", describe(saved.model)),
        ("task", config.task),
        ("inputs", f"{config.input_size:,}"),
        ("outputs", f"{config.output_size:,}"),
        ("weights", f"{weights:,}"),
        ("size of the file", f"{4 * weights / 1e6:,.2f} MB"),
    )
    return Table("The network", ("what", "value"), rows, words=2)


def _settings(settings: Settings) -> Table:
    default = {entry.key: entry.value for entry in entries(Settings(task=settings.task))}
    rows = tuple(
        (
            entry.key,
            entry.unset if entry.value is None else str(entry.value),
            "" if entry.value == default[entry.key] else "chosen",
        )
        for entry in entries(settings)
    )
    return Table("Every option, and which differ from their defaults", ("option", "value", "chosen"), rows, words=3)


def _time(result: TrainingResult, seconds: float, versions: Mapping[str, str]) -> Table:
    history = result.state.history
    elements = sum(row["elements_per_second"] * row["seconds"] for row in history)
    rows = (
        ("epochs", f"{len(history):,}"),
        ("training", seconds_in_words(seconds)),
        ("an epoch", seconds_in_words(seconds / len(history))),
        ("elements per second", f"{elements / seconds:,.0f}"),
        *((name, value) for name, value in versions.items()),
    )
    return Table("Time and speed of training, the machine, and versions", ("what", "value"), rows, words=2)


def _shell(folder: Path, settings: Settings) -> tuple[str, ...]:
    run = shlex.quote(str(folder))
    use = (
        f"raglane sample {run}" if settings.task == "language" else f"raglane predict {run} DATA -o predictions.parquet"
    )
    return (
        f"{use}",
        f"raglane evaluate {run} DATA",
        f"raglane train --config {shlex.quote(str(folder / 'run.toml'))} --out FOLDER",
    )


def _python(folder: Path, settings: Settings) -> tuple[str, ...]:
    what = 'run.predict("DATA")["bits"]' if settings.task == "language" else 'run.predict("DATA")["prediction"]'
    return "import raglane as rl", "", f"run = rl.load({str(folder)!r})", what, 'run.evaluate("DATA")'


def _short(value: Any) -> Any:
    return shorten(value, _LONGEST) if isinstance(value, str) else value
