"""The model card of a run, as Markdown and as a page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raglane._utils.files import write_files
from raglane._utils.messages import count_of, metric_words, shorten
from raglane._utils.table import PrintedTable, escaped
from raglane._utils.words import seconds_in_words
from raglane.data.assemble.errors import attempt
from raglane.data.dataset import Dataset
from raglane.data.prepare.lengths import LengthCounts, summary
from raglane.data.splitting import join_tokens
from raglane.errors import DataError
from raglane.native import machine
from raglane.report.figures import class_rows, curve_svg, lengths_svg, points, rows_svg
from raglane.report.page import Block, CommandLines, CountMatrix, Page, Part, picture
from raglane.runs.advice import advise
from raglane.runs.configuration import entries, words_of
from raglane.runs.forecast_pictures import forecast_pictures
from raglane.runs.sources import DEFAULT_DATA
from raglane.training.checkpoint import SavedModel, describe, load_model
from raglane.training.folder import CARD, REPORT, SKIPPED
from raglane.training.inference import evaluate, pick_device, predict, steps_ahead
from raglane.training.own_cell import is_own, label_of
from raglane.training.per_sequence import SequenceScores, measure_sequences, sampled_rows
from raglane.training.results import Evaluation
from raglane.training.run import TrainingResult, left_out
from raglane.training.settings import Settings

# The most listed labels or classes.
_LISTED = 100
# The most characters of a label.
_LONGEST = 40
# The most classes of a confusion matrix.
_WIDEST = 30
# The number of examples of a transcription.
_EXAMPLES = 8
# The purposes of models whose task is not a verb.
_PURPOSES = {
    "language": "as a language model of",
    "multilabel": "to assign sets of labels to",
    "regress": "to predict numbers of",
    "transcribe": "to transcribe the sequences of",
}


class DataParts(NamedTuple):
    """The parts of the data of a run."""

    training: Dataset
    validation: Dataset | None
    test: Dataset | None
    where: str | None = None
    in_memory: bool = False

    @property
    def name(self) -> str:
        """The name of the data."""
        if self.in_memory:
            return "data in memory"
        return DEFAULT_DATA if self.where is None else Path(self.where).name

    @property
    def is_default(self) -> bool:
        """True for the data of raglane demo."""
        return self.where is None and not self.in_memory

    @property
    def known(self) -> dict[str, Dataset]:
        """The existing parts, by name."""
        parts = {"training": self.training, "validation": self.validation, "test": self.test}
        return {name: dataset for name, dataset in parts.items() if dataset is not None}

    @property
    def measured(self) -> tuple[str, Dataset]:
        """The part to evaluate on, with its name: test, else validation, else training."""
        return next(
            ((name, dataset) for name, dataset in reversed(self.known.items()) if len(dataset)),
            ("", self.training),
        )


def about(parts: DataParts, settings: Settings) -> str:
    """Return data, cell, task and counts, for the titles of pictures."""
    counts = ", ".join(f"{len(dataset):,} {name}" for name, dataset in parts.known.items())
    cell = (
        label_of(settings.cell)
        if is_own(settings.cell)
        else settings.cell.upper().replace("_", " ")
    )
    return f"{parts.name}: {cell}, {settings.task}\n{counts} sequences"


def write_card(
    folder: Path, settings: Settings, result: TrainingResult, parts: DataParts
) -> str | None:
    """Write ``card.md`` and ``report.html`` to the folder of a finished run; return advice on
    it.
    """
    measured, notes = _measure(folder, settings, result, parts)
    advice = advise(settings, result, measured.evaluation, measured.on, parts.training)
    card = make_card(
        folder, settings, parts, measured, notes if advice is None else [*notes, f"{advice}."]
    )
    write_files({folder / CARD: card.markdown().encode(), folder / REPORT: card.html()})
    return advice


def _measure(
    folder: Path, settings: Settings, result: TrainingResult, parts: DataParts
) -> tuple[_MeasuredPart, list[str]]:
    """Evaluate the model of a run; return the results, and notes on them."""
    saved = load_model(folder)
    device = pick_device(settings.device)
    notes: list[str] = []
    evaluation = None
    each = None
    forecasts: list[Block] = []
    on, records = parts.measured
    if on:
        rows = None if records.is_in_memory else sampled_rows(records, settings.seed)
        if rows is not None and len(rows) < len(records):
            # Reading all of them can take as long as an epoch.
            notes.append(
                f"Measured on {len(rows):,} of the {len(records):,} sequences of the {on} part."
            )
            records = records.subset(rows)
        results = attempt(_scores, saved, records, device, settings.seed)
        if isinstance(results, DataError):
            # E.g. a label unseen in training, which must not prevent a card.
            notes.append(f"Not measured on the {on} part: {results}")
        else:
            evaluation, each = results
            forecasts = forecast_pictures(saved, records, device, on)
    if on == "training":
        notes.append("Nothing was held out: these are the results on the training part.")
    skipped = left_out(*parts.known.values())
    if skipped:
        notes.append(f"Invalid rows left out: {len(skipped):,}; {SKIPPED} lists them.")
    return _MeasuredPart(saved, result, evaluation, each, on, forecasts), notes


def _scores(
    saved: SavedModel, records: Dataset, device: Any, seed: int
) -> tuple[Evaluation, SequenceScores | None]:
    """Return the results on some data, and those of single sequences."""
    evaluation = evaluate(saved, records, device=device, horizon=steps_ahead(saved, records))
    return evaluation, measure_sequences(saved, records, device, seed)


class _MeasuredPart(NamedTuple):
    """The results of a model, and the part on which they were measured."""

    saved: SavedModel
    result: TrainingResult
    evaluation: Evaluation | None
    each: SequenceScores | None
    on: str
    forecasts: list[Block]

    @property
    def row(self) -> dict[str, float]:
        """The best epoch of the history."""
        return self.result.state.history[self.result.state.best_epoch - 1]

    @property
    def value(self) -> tuple[float, str]:
        """The metric, and the part on which it was measured."""
        metric = self.result.metric
        row = self.row
        if self.evaluation is not None:
            fallback = row.get(f"{self.on}_{metric}", row[f"train_{metric}"])
            return self.evaluation.numbers.get(metric, fallback), self.on
        if "validation_loss" in row:
            return row.get(f"validation_{metric}", row[f"train_{metric}"]), "validation"
        return row[f"train_{metric}"], "training"

    def results(self) -> PrintedTable:
        """Return loss and metrics of each part."""
        metric = self.result.metric
        parts: dict[str, dict[str, float]] = {}
        for label, key in (("training", "train"), ("validation", "validation")):
            if f"{key}_loss" in self.row:
                parts[label] = {
                    "loss": self.row[f"{key}_loss"],
                    metric: self.row[f"{key}_{metric}"],
                }
        if self.evaluation is not None:
            parts[self.on] = parts.get(self.on, {}) | self.evaluation.numbers
        names = dict.fromkeys(name for numbers in parts.values() for name in numbers)
        rows = [
            (metric_words(name), *(label.get(name) for label in parts.values())) for name in names
        ]
        return PrintedTable("The best model; a dash was not measured", ("metric", *parts), rows)

    def mistakes(self) -> list[Block]:
        """Return the confusion matrix, or a picture of predicted against true numbers."""
        if self.evaluation is None:
            return []
        if pairs := self.evaluation.measured.points:
            words = f"Predicted numbers against the true ones, {len(pairs):,} of them."
            return [picture(points(pairs), "p", words, "Exact predictions are on the line.")]
        if self.evaluation.confusion is None or not 0 < len(self.evaluation.labels) <= _WIDEST:
            return []
        caption = "Counts; rows are true classes, columns predicted ones"
        names = [_short(name) for name in self.evaluation.labels]
        return [CountMatrix("Confusion matrix", caption, names, self.evaluation.confusion.tolist())]

    @property
    def rows_title(self) -> str:
        """The title of the table of the task: by class, label, number or step."""
        table = self.evaluation.measured.table if self.evaluation else ()
        return f"By {next(iter(table[0]))}" if table else "By class"

    def classes(self) -> list[Block]:
        """Return the scores of each class, label, number or step."""
        if self.evaluation is None:
            return []
        if self.evaluation.confusion is not None:
            listed = class_rows(self.evaluation.confusion.tolist(), self.evaluation.labels)
        else:
            listed = list(self.evaluation.measured.table)
        short = [{key: _short(value) for key, value in row.items()} for row in listed[:_LISTED]]
        more = f", the first {_LISTED} of {len(listed):,}" if len(listed) > _LISTED else ""
        return [PrintedTable.of(f"On the {self.on} part{more}", short)] if short else []

    def examples(self, device: Any) -> list[Block]:
        """Return inputs, targets and predictions of some transcriptions."""
        if self.each is None or self.saved.task != "transcribe":
            return []
        chosen = self.each.records.subset(self.each.rows[:_EXAMPLES])
        targets = chosen.targets
        split = self.saved.preprocessor
        predicted = predict(self.saved, chosen, device=device)["prediction"]
        rows = []
        for index, (elements, prediction) in enumerate(
            zip(pairwise(chosen.offsets.tolist()), predicted, strict=True)
        ):
            inputs = chosen.values[slice(*elements)]
            entries = () if targets is None else targets.values[index]
            rows.append(
                {
                    "input": _short(join_tokens(inputs.tolist(), split.split))
                    if chosen.is_tokens
                    else len(inputs),
                    "target": _short(join_tokens(entries, split.label_split)),
                    "prediction": _short(
                        prediction if isinstance(prediction, str) else join_tokens(prediction, None)
                    ),
                }
            )
        return [PrintedTable.of(f"The first sequences of the {self.on} part", rows, words=3)]

    def by_length(self) -> list[Block]:
        """Return loss and metric by length, as pictures and a table."""
        if self.each is None or len(self.each.rows) < 2:
            return []
        metric = self.result.metric
        fewer = len(self.each.rows) < len(self.each.records)
        sample = f", a random sample of {len(self.each.rows):,} sequences" if fewer else ""
        caption = f"On the {self.on} part{sample}"
        rows: list[dict[str, Any]] = [
            {
                "lengths": str(group),
                "sequences": group.sequences,
                "loss": group.loss,
                metric: group.metric,
            }
            for group in self.each.ranges()
        ]
        worst = max(rows, key=lambda row: row["loss"])
        names = [row["lengths"] for row in rows]
        drawn: list[Block] = []
        for name, words in (
            (
                "loss",
                f"Loss by length; the largest is {worst['loss']:.3f}, at {worst['lengths']} steps.",
            ),
            (metric, f"{metric_words(metric)} by length."),
        ):
            svg = rows_svg(names, [row[name] for row in rows], metric_words(name))
            drawn.append(
                picture(svg, f"b{len(drawn)}", words, "" if drawn else "By the number of steps.")
            )
        return [*drawn, PrintedTable.of(caption, rows)]

    def hardest(self, device: Any) -> list[Block]:
        """Return a table of the sequences with the largest losses."""
        hardest = [] if self.each is None else self.each.hardest(self.saved, device)
        if self.each is None or len(hardest) < 2:
            return []
        has_classes = any(sequence.predicted for sequence in hardest)
        first = "id" if self.each.records.has_ids else "row"
        rows = [
            {first: _short(sequence.id)}
            | (
                {"true": _short(sequence.true), "predicted": _short(sequence.predicted)}
                if has_classes
                else {}
            )
            | {"steps": sequence.length, "loss": sequence.loss, self.result.metric: sequence.metric}
            for sequence in hardest
        ]
        return [
            PrintedTable.of(
                f"The largest losses of the {self.on} part", rows, words=3 if has_classes else 1
            )
        ]

    def curves(self) -> list[Block]:
        """Return pictures of loss and metric by epoch."""
        state = self.result.state
        metric = metric_words(self.result.metric)
        prefix = "validation" if "validation_loss" in state.history[-1] else "train"
        words = f"Loss over {len(state.history)} epochs; the best is epoch {state.best_epoch}, "
        words += f"with a {prefix} loss of {self.row[f'{prefix}_loss']:.4f}."
        loss, score = (
            curve_svg(state.history, name, state.best_epoch)
            for name in ("loss", self.result.metric)
        )
        file = f"![loss and {escaped(metric)} by epoch](curves.png)"
        return [
            picture(loss, "c0", words, "The model of the best epoch is kept.", file),
            picture(score, "c1", f"{metric} over {len(state.history)} epochs.", ""),
        ]


def make_card(
    folder: Path,
    settings: Settings,
    parts: DataParts,
    measured: _MeasuredPart,
    notes: Sequence[str],
) -> Page:
    """Return the card of a run as a page."""
    state = measured.result.state
    saved = measured.saved
    metric = metric_words(measured.result.metric)
    value, on = measured.value
    seconds = sum(row["seconds"] for row in state.history)
    weights = sum(parameter.numel() for parameter in saved.model.parameters())
    versions = machine.facts(("numpy",))
    purpose = _PURPOSES.get(settings.task, f"to {settings.task}")
    blocks: dict[str, Sequence[Block]] = {
        "Results": [measured.results(), *measured.mistakes()],
        "Errors" if settings.task == "transcribe" else measured.rows_title: measured.classes(),
        "Forecasts": measured.forecasts,
        "Examples": measured.examples(pick_device(settings.device)),
        "By length": measured.by_length(),
        "Hardest sequences": measured.hardest(pick_device(settings.device)),
        "Curves": measured.curves(),
        "How to use it": _use(folder, settings, parts.is_default),
        "Data": [*_lengths(parts), _data(parts, saved), *_labels(parts)],
        "Model": [_model(saved, weights)],
        "Time and versions": [_time(measured.result, seconds, versions)],
        "Settings": _settings(settings),
    }
    return Page(
        kind="raglane train",
        name=folder.name,
        sentence=f"{describe(saved.model)}, trained {purpose} {parts.name}: {metric} {value:.3f} on the {on} part.",
        facts=(
            (f"{metric}, {on}", f"{value:.3f}"),
            ("training sequences", f"{len(parts.training):,}"),
            ("weights", f"{weights:,}"),
            ("best epoch", f"{state.best_epoch} of {state.epoch}"),
            ("training time", seconds_in_words(seconds)),
            ("seed", f"{settings.seed}"),
        ),
        parts=[
            Part(title, inside, title.lower().replace(" ", "-"))
            for title, inside in blocks.items()
            if inside
        ],
        footer=f"Written by raglane {versions['raglane']} at the end of the training. Later results of "
        "raglane evaluate are in evaluation.json.",
        version=versions["raglane"],
        notes=notes,
    )


def _lengths(parts: DataParts) -> list[Block]:
    """Return a histogram of the lengths of each part."""
    lengths = {
        name: np.asarray(dataset.element_counts).tolist()
        for name, dataset in parts.known.items()
        if len(dataset)
    }
    if not lengths:
        return []
    counts = ", ".join(
        f"{name} {len(listed):,} of {min(listed):,} to {max(listed):,} steps"
        for name, listed in lengths.items()
    )
    caption = "The number of sequences by length; the axis is logarithmic above 10."
    return [picture(lengths_svg(lengths), "l", f"Sequences by length: {counts}.", caption)]


def _data(parts: DataParts, saved: SavedModel) -> PrintedTable:
    """Return the source of the data, and statistics of the lengths of each part."""
    rows: list[tuple[Any, ...]] = []
    for name, dataset in parts.known.items():
        lengths = np.asarray(dataset.element_counts)
        if len(lengths) and lengths.sum():
            of = summary(LengthCounts.of(lengths))
            numbers = (of.count, of.elements, of.minimum, of.median, of.p95, of.maximum, of.density)
        else:
            numbers = (len(lengths), 0, 0, 0, 0, 0, float("nan"))
        rows.append((name, *numbers))
    where = "memory" if parts.in_memory else parts.where or f"{DEFAULT_DATA}, the embedded default"
    preprocessor = saved.preprocessor
    what = (
        f"{preprocessor.input_size:,} tokens"
        if preprocessor.is_tokens
        else _channels(preprocessor.channels)
    )
    names = (
        "part",
        "sequences",
        "elements",
        "shortest",
        "median",
        "95 % up to",
        "longest",
        "real if padded",
    )
    columns, *lines = zip(names, *rows, strict=True)
    return PrintedTable(f"From {where}; {what}", columns, lines)


def _channels(names: tuple[str, ...]) -> str:
    listed = ", ".join(map(_short, names[:10]))
    return f"{count_of(len(names), 'channel')}: {listed}" + (", ..." if len(names) > 10 else "")


def _labels(parts: DataParts) -> list[Block]:
    """Return the counts of the labels of the training part."""
    counts = parts.training.label_counts()
    total = counts.total()
    rows = [
        {"label": _short(label), "count": count, "share": f"{count / total:.1%}"}
        for label, count in counts.most_common(_LISTED)
    ]
    more = f", the {_LISTED} most frequent of {len(counts):,}" if len(counts) > _LISTED else ""
    return [PrintedTable.of(f"Labels of the training part{more}", rows)] if rows else []


def _model(saved: SavedModel, weights: int) -> PrintedTable:
    config = saved.model.config
    rows = (
        ("network", describe(saved.model)),
        ("task", config.task),
        ("inputs", f"{config.input_size:,}"),
        ("outputs", f"{config.output_size:,}"),
        ("weights", f"{weights:,}"),
        ("size of the file", f"{4 * weights / 1e6:,.2f} MB"),
    )
    return PrintedTable("The network", ("fact", "value"), rows, words=2)


def _settings(settings: Settings) -> list[Block]:
    """Return the options that differ from their defaults, and the others folded."""
    default = {entry.key: entry.value for entry in entries(Settings(task=settings.task))}
    rows: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for entry in entries(settings):
        value = entry.unset if entry.value is None else str(entry.value)
        rows[entry.value != default[entry.key]].append((entry.key, value))
    columns = ("option", "value")
    chosen = PrintedTable("Options that differ from their defaults", columns, rows[True], words=2)
    others = PrintedTable(
        "All other options have their defaults", columns, rows[False], words=2, is_folded=True
    )
    return [chosen, others] if chosen.rows else [others]


def _time(result: TrainingResult, seconds: float, versions: Mapping[str, str]) -> PrintedTable:
    history = result.state.history
    elements = sum(row["elements_per_second"] * row["seconds"] for row in history)
    rows = (
        ("epochs", f"{len(history):,}"),
        ("training", seconds_in_words(seconds)),
        ("an epoch", seconds_in_words(seconds / len(history))),
        ("elements per second", f"{elements / seconds:,.0f}"),
        *versions.items(),
    )
    return PrintedTable(
        "Time and speed of training, the machine, and versions", ("fact", "value"), rows, words=2
    )


def _use(folder: Path, settings: Settings, is_demo: bool) -> list[Block]:
    """Return commands and Python code that use the model."""
    run = shlex.quote(str(folder))
    is_language = settings.task == "language"
    again = f"raglane train --config {shlex.quote(str(folder / 'run.toml'))} --output FOLDER"
    if is_demo:
        again = shlex.join(["raglane", "demo", *words_of(settings), "--output", "FOLDER"])
    shell = (
        f"raglane sample {run}"
        if is_language
        else f"raglane predict {run} DATA -o predictions.parquet",
        f"raglane evaluate {run} DATA",
        again,
    )
    answer = "bits" if is_language else "prediction"
    python = (
        "import raglane as rl",
        "",
        f"run = rl.load({str(folder)!r})",
        f'run.predict("DATA")["{answer}"]',
        'run.evaluate("DATA")',
    )
    return [CommandLines(shell), CommandLines(python, "python")]


def _short(value: Any) -> Any:
    return shorten(value, _LONGEST) if isinstance(value, str) else value
