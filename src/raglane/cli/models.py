"""Commands that use the model of a run: ``raglane evaluate``, ``predict``, ``sample`` and
``export``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from raglane._utils.messages import count_of, metric_words, quote
from raglane.cli import console, options
from raglane.cli.imports import importing
from raglane.cli.options import argument, option
from raglane.errors import ArgumentError
from raglane.training.settings import ENGINES

if TYPE_CHECKING:
    import torch

    from raglane.data.dataset import Dataset
    from raglane.runs.run import Run
    from raglane.training.checkpoint import SavedModel
    from raglane.training.results import Evaluation


# Sequences whose predictions are printed before those of the next are computed.
_PART = 2_048
# The most classes of a confusion matrix that are printed; files have them all.
_WIDEST_TABLE = 20
# The most rows of a table that are printed.
_LONGEST_TABLE = 30


# The options that the help pages list; --help-all lists all. Columns are those of the training.
_COMMON = (
    "label id time on_bad_row format output probabilities top horizon backtests beam_size n_best batch_size device "
    "json quiet cell"
)


@partial(options.command, common=_COMMON)
def evaluate(
    run: options.Run,
    data: Annotated[
        Path | None, argument("Data with labels. Default: the test data of the run.")
    ] = None,
    *,
    output: Annotated[
        Path | None,
        options.output(
            "Folder for the results.",
            show_default="the folder of the run; of a URL, the current folder",
        ),
    ] = None,
    columns: options.Columns,
    format: options.Format = None,
    batch_size: options.PredictionBatchSize = 256,
    top: options.Top = 1,
    horizon: options.Horizon = 1,
    backtests: Annotated[
        int,
        option(
            "Number of forecasts of each sequence to measure; each begins --horizon elements before the next."
        ),
    ] = 1,
    beam_size: options.Beam = None,
    device: options.Device = "auto",
    json: options.Json = None,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Evaluate the best model of a run: its loss, the metrics of its task, and simple baselines.

    The folder of the run, or that of --output, receives evaluation.json, the confusion matrix as
    confusion.png and confusion.txt, a row per label or number in table.txt, and predictions against
    the truth in points.png. The model card and the report keep the results of the end of the
    training.

    For example:

    raglane evaluate runs/vowels

    raglane evaluate runs/names more-names.csv --label-column language

    raglane evaluate runs/meters later.csv --horizon 24 --backtests 7 -o results
    """
    with importing():
        from raglane._utils.files import check_writable
        from raglane.data.sources.locations import copies
        from raglane.runs.run import load
        from raglane.training.checkpoint import model_folder
        from raglane.training.folder import EVALUATION, IS_BACK, at_work
        from raglane.training.inference import pick_device

    log = console.logger(quiet or console.is_stdout(json))
    # A wrong device is reported before data is read.
    where = pick_device(device)
    model_folder(run)
    output = output or (Path() if run.is_relative_to(copies()) else run)
    check_writable("output", output)
    with at_work(run, "run") as is_back:
        if is_back:
            log(IS_BACK)
        model = load(run, cell=cell)
        records = model.test_part() if data is None else model.read(data, format=format, **columns)
        _log_notes(records, model, log)
        more = {
            "batch_size": batch_size,
            "top": top,
            "horizon": horizon,
            "backtests": backtests,
            "beam_size": beam_size,
        }
        content = report(
            output, model.saved, records, device=where, log=log, more=more, title=run.name
        )
        console.write_json(json, content)
        if columns.get("on_bad_row") == "skip":
            log_skipped(len(records.skipped), output / EVALUATION, log)


def log_skipped(count: int, where: Path | None, log: Callable[[str], None]) -> None:
    """Print the number of skipped rows."""
    log(
        f"rows left out: {count:,}"
        + (f", listed with reasons in {where}" if count and where else "")
    )


def _log_notes(records: Dataset, model: Run, log: Callable[[str], None]) -> None:
    """Print whether rows have no time, and counts of empty sequences, which get a class too, and of
    unknown words.
    """
    from raglane.data.prepare.encoders import unknown_words
    from raglane.data.records import note_empty

    # The training data may have had a time column.
    notes = [note for note in records.notes if note.startswith("no time column")]
    if model.task == "classify" and (empty := note_empty(records.records)):
        notes.append(empty)
    tokens = model.preprocessor.vocabulary or ()
    encoders = model.preprocessor.features
    if tokens or any(
        encoder.vocabulary for encoder in encoders
    ):  # otherwise the data is not read for statistics
        notes += unknown_words(tokens, encoders, records.statistics)
    for note in notes:
        log(note)


def report(
    folder: Path,
    saved: SavedModel,
    records: Dataset,
    *,
    device: torch.device,
    log: Callable[[str], None],
    more: Mapping[str, Any] | None = None,
    is_short: bool = False,
    title: str = "",
) -> dict[str, Any]:
    """Evaluate the best model of a run, print its metrics, and write files to a folder, by default
    that of the run; return the content of evaluation.json.
    """
    from raglane._utils.files import write_files
    from raglane._utils.json import to_json
    from raglane.training import inference
    from raglane.training.folder import EVALUATION

    evaluation = inference.evaluate(saved, records, device=device, **(more or {}))
    name = "test" if is_short else "evaluation"
    log(
        f"{name}: {_numbers(evaluation)} ({count_of(evaluation.sequences, 'sequence')} of {records.source.name})"
    )
    details = _details(title or folder.name, evaluation, log=None if is_short else log)
    content = {"data": str(records.source), **evaluation.to_config()}
    if records.skipped:
        content["skipped"] = [asdict(row) for row in records.skipped]
    folder.mkdir(parents=True, exist_ok=True)
    write_files(
        {folder / EVALUATION: to_json(content)}
        | {folder / name: content for name, content in details.items()}
    )
    if not is_short:
        if (rule := evaluation.better_rule()) is not None:
            log(f"note: the model is not better than a simple rule ({rule})")
        log(f"written: {', '.join([str(folder / EVALUATION), *details])}")
        if ahead := evaluation.ahead():
            errors = ", ".join(f"{metric_words(name)} {ahead[name]:.3f}" for name in ahead)
            log(f"all {len(evaluation.measured.table)} steps: {errors}")
    return content


def _details(
    called: str, evaluation: Evaluation, log: Callable[..., None] | None
) -> dict[str, bytes]:
    """Return confusion matrix, table and pictures as files by name, and print small tables."""
    from raglane._utils.table import PrintedTable
    from raglane.report.figures import confusion_png, confusion_table, points

    details: dict[str, bytes] = {}
    tables: dict[str, tuple[PrintedTable, bool]] = {}
    measured = evaluation.measured
    numbers = evaluation.numbers
    labels = evaluation.labels
    if evaluation.confusion is not None:
        matrix = evaluation.confusion.tolist()
        title = f"{called}\naccuracy {numbers['accuracy']:.3f}, macro-F1 {numbers['macro_f1']:.3f}"
        details["confusion.png"] = confusion_png(matrix, labels, title)
        tables["confusion.txt"] = confusion_table(matrix, labels), len(labels) <= _WIDEST_TABLE
    if measured.table:
        tables["table.txt"] = (
            PrintedTable.of("Numbers", measured.table),
            len(measured.table) <= _LONGEST_TABLE,
        )
    for name, (table, is_small) in tables.items():
        text = table.text()
        details[name] = f"{text}\n".encode()
        if log is not None and is_small:
            log(*text.splitlines())
    if measured.points:
        details["points.png"] = points(measured.points, f"{called}\n{_numbers(evaluation)}")
    return details


def _numbers(evaluation: Evaluation) -> str:
    """Return loss and metrics as a line."""
    numbers = evaluation.numbers
    metrics = [f"{metric_words(key)} {numbers[key]:.3f}" for key in numbers if key != "loss"]
    return ", ".join([*metrics, f"loss {numbers['loss']:.4f}"])


@partial(options.command, common=_COMMON)
def predict(
    run: options.Run,
    data: Annotated[
        Path | None,
        argument(
            "Data like the training data, labels optional. Default: the test data of the run."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        options.output(
            "File to write: .parquet, .csv or .jsonl; or .conll, if DATA is CoNLL.",
            show_default="CSV on standard output",
        ),
    ] = None,
    probabilities: Annotated[
        bool, option("Add one column p_<label> per class.", options.RUN, "--probabilities")
    ] = False,
    top: options.Top = 1,
    horizon: options.Horizon = 1,
    beam_size: options.Beam = None,
    n_best: options.NBest = 1,
    columns: options.Columns,
    format: options.Format = None,
    batch_size: options.PredictionBatchSize = 256,
    device: options.Device = "auto",
    engine: Annotated[
        str,
        option(
            "ray: predict Parquet files on a Ray cluster, to a folder of them.",
            metavar="processes|ray",
        ),
    ] = "processes",
    escape_formulas: Annotated[
        bool,
        option(
            "Prefix texts of a .csv that a spreadsheet would execute (=, +, -, @) with an apostrophe.",
            options.RUN,
            "--escape-formulas",
        ),
    ] = False,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Predict with the best model of a run: one row per sequence, in the order of the data.

    The columns are id (of the data, or the row number from 0), prediction and its probability. A
    forecast has a row per sequence and step, with its time if the data has times. With a
    prediction per element, as for the task tag, CSV has a row per element, and other formats one
    list per sequence, with the words. For transcribe they are the text, its log-probability and the
    first and last step of each label.

    With --on-bad-row skip, predictions.skipped.jsonl lists the rows that are missing from
    predictions.csv. A .csv keeps texts unchanged, also those that a spreadsheet executes, such as
    =1+1; to prevent this, pass --escape-formulas, or write .parquet.

    For example:

    raglane predict runs/vowels

    raglane predict runs/vowels recordings.ts -o predictions.parquet

    raglane predict runs/names names.csv -o predictions.csv --probabilities

    raglane predict runs/meters today.csv -o tomorrow.jsonl --horizon 24

    raglane predict runs/names 'names/*.parquet' -o predictions --engine ray
    """
    more: dict[str, Any] = {
        "probabilities": probabilities,
        "top": top,
        "horizon": horizon,
        "beam_size": beam_size,
        "n_best": n_best,
        "batch_size": batch_size,
    }
    if engine != "processes":
        if escape_formulas:
            got = f"True, with the engine {engine}"
            rule = "False, because a cluster writes Parquet"
            raise ArgumentError("escape_formulas", got, rule, "leave it out")
        named = {**columns, **({} if format is None else {"format": format})}
        _on_ray(run, cell, output, data, named, engine, more | {"device": device}, quiet)
        return
    with importing():
        from raglane.data.assemble.pieces import skipped_lines
        from raglane.runs.run import load
        from raglane.training import inference
        from raglane.training.predictions import (
            check_apart,
            check_output,
            csv_in_parts,
            write_predictions,
        )

    output = None if output == Path("-") else output
    if output is not None:
        check_output(output, escape_formulas=escape_formulas)
    # A wrong device is reported before data is read.
    more["device"] = inference.pick_device(device)
    model = load(run, cell=cell)
    records = (
        model.test_part()
        if data is None
        else model.read(data, need_labels=False, format=format, **columns)
    )
    skips = columns.get("on_bad_row") == "skip"
    if output is None:
        # Standard output has only the predictions.
        log = console.logger(quiet) if quiet else console.log_error
        _log_notes(records, model, log)
        parts = inference.predict_in_parts(model.saved, records, part_size=_PART, **more)
        for content in csv_in_parts(parts, escape_formulas=escape_formulas):
            if not console.write(content):
                break
        if skips:
            log_skipped(len(records.skipped), None, log)
        return
    check_apart(output, records.source, run)
    others = {}
    list_of_skipped = output.with_suffix(".skipped.jsonl")
    if skips:
        check_apart(list_of_skipped, records.source, run)
        others[list_of_skipped] = skipped_lines(records.skipped)
    log = console.logger(quiet)
    _log_notes(records, model, log)
    predictions = inference.predict(model.saved, records, **more)
    write_predictions(output, predictions, others, escape_formulas=escape_formulas, data=records)
    if skips:
        log_skipped(len(records.skipped), list_of_skipped, log)
    steps = f" of {count_of(horizon, 'step')}" if predictions.channels else ""
    log(f"predictions: {len(predictions):,} sequences{steps}, {output}")


def _on_ray(
    run: Path,
    cell: str | None,
    output: Path | None,
    data: Path | None,
    named: options.Given,
    engine: str,
    more: dict[str, Any],
    quiet: bool,
) -> None:
    """Predict Parquet files on a Ray cluster."""
    from raglane._utils.checks import check_choice

    check_choice("engine", engine, ENGINES, "leave it out")
    if data is None:
        raise ArgumentError("data", "nothing", "Parquet files for the engine ray", "pass DATA")
    if output is None:
        raise ArgumentError(
            "output", "nothing", "a folder for the engine ray", "pass --output FOLDER"
        )
    if named:
        name = next(iter(named))
        rule = "unset for the engine ray, which reads the columns of the training data"
        raise ArgumentError(name, quote(named[name]), rule, "leave it out")
    from raglane.runs.ray_predictions import predict_on_ray
    from raglane.runs.run import load

    count = predict_on_ray(load(run, cell=cell), str(data), output, **more)
    if not quiet:
        console.log(f"predictions: {count:,} sequences, {output}")


@options.command
def sample(
    run: options.Run,
    *,
    prompt: Annotated[str, option("Beginning of each text.", show_default=False)] = "",
    count: Annotated[int, option("Number of texts.")] = 5,
    max_length: Annotated[int, option("Largest number of tokens per text.")] = 200,
    temperature: Annotated[
        float,
        option("Divisor of the logits: below 1 favours likely tokens; 0 takes the likeliest."),
    ] = 1.0,
    seed: Annotated[int, option("Seed of the random numbers.")] = 0,
    beam_size: Annotated[
        int | None,
        option(
            "Hypotheses of a beam search for the likeliest texts.",
            show_default="none: texts are drawn",
        ),
    ] = None,
    device: options.Device = "auto",
    cell: options.Cell = None,
) -> None:
    """Sample texts from the best model of a run of the task language, one per line.

    For example:

    raglane sample runs/names --count 10 --temperature 0.8

    raglane sample runs/novel --prompt "It was" --max-length 500

    raglane sample runs/novel --prompt "It was" --beam-size 8 --count 3
    """
    from raglane.training import inference
    from raglane.training.checkpoint import load_model
    from raglane.training.folder import tidy

    where = inference.pick_device(device)
    tidy(run)
    for text in inference.sample(
        load_model(run, cell),
        prompt=prompt,
        count=count,
        max_length=max_length,
        temperature=temperature,
        seed=seed,
        beam_size=beam_size,
        device=where,
    ):
        console.log(text)


@options.command
def export(
    run: options.Run,
    output: Annotated[Path, options.output("File to write: .onnx.")],
    *,
    layout: Annotated[
        Literal["padded", "flat"],
        option("Inputs: padded values and lengths, or flat values and offsets."),
    ] = "padded",
    verify: Annotated[
        bool,
        option(
            "Compare the outputs of the file with the model's.", options.RUN, "--verify/--no-verify"
        ),
    ] = True,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Write the best model of a run as an ONNX file, with its metadata in a JSON file.

    The ONNX file includes scaling: its inputs are the channels in the units of the data, or indices
    of tokens in the vocabulary. The JSON file contains vocabulary and labels.

    For example:

    raglane export runs/vowels -o vowels.onnx
    """
    with importing():
        from raglane.runs.exported import description_path
        from raglane.runs.run import load
        from raglane.training.predictions import check_apart

    for file in (output, description_path(output)):
        check_apart(file, run, run)
    exported = load(run, cell=cell).export(output, layout=layout, verify=verify)
    if quiet:
        return
    console.log(
        f"model: {output}, {output.stat().st_size:,} bytes; metadata: {description_path(output)}"
    )
    if (verified := exported.verified) is not None:
        console.log(
            f"verified in ONNX Runtime: {count_of(verified.sequences, 'sequence')} of random lengths, "
            f"largest relative difference {verified.largest_difference:.1e}"
        )
