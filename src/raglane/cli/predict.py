"""``raglane predict``: what a model makes of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raglane.cli import console, options
from raglane.cli.evaluate import tell_empty, tell_skipped
from raglane.errors import ArgumentError, message, quote
from raglane.training.options import RUN
from raglane.training.settings import ENGINES

_EscapeFormulas = Annotated[
    bool,
    typer.Option(
        "--escape-formulas",
        help="Put an apostrophe before texts of a .csv that a spreadsheet would execute: =, +, -, @.",
        rich_help_panel=RUN,
    ),
]


@options.command
def predict(
    run: options.Run,
    output: options.Output,
    data: options.DataToPredict = None,
    *,
    probabilities: options.Probabilities = False,
    top: options.Top = 1,
    horizon: options.Horizon = 1,
    columns: options.Columns,
    format: options.Format = None,
    batch_size: options.PredictionBatchSize = 256,
    device: options.Device = "auto",
    engine: options.Engine = "processes",
    escape_formulas: _EscapeFormulas = False,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Predict with the best model of a run: one row per sequence, in the order of the data.

    The columns are id (the data's, else the row number from 0), prediction and its probability. For the task tag,
    they hold one list per sequence; a forecast is a list of steps, each a list of channels. With --on-bad-row skip,
    predictions.skipped.jsonl lists the rows that were left out of predictions.csv. A .csv keeps texts unchanged,
    also those that a spreadsheet executes, such as =1+1: for one, pass --escape-formulas, or write .parquet.

    For example:

    raglane predict runs/vowels -o predictions.csv

    raglane predict runs/vowels recordings.ts -o predictions.parquet

    raglane predict runs/names names.csv -o predictions.csv --probabilities

    raglane predict runs/meters today.csv -o tomorrow.jsonl --horizon 24

    raglane predict runs/names 'names/*.parquet' -o predictions --engine ray
    """
    asked: dict[str, Any] = {
        "probabilities": probabilities,
        "top": top,
        "horizon": horizon,
        "batch_size": batch_size,
        "device": device,
    }
    if engine != "processes":
        if escape_formulas:
            rule = "a cluster writes Parquet, which has no formulas"
            raise ArgumentError(message("escape_formulas", f"it with the engine {engine}", rule, "leave it out"))
        _on_ray(
            run, cell, output, data, {**columns, **({} if format is None else {"format": format})}, engine, asked, quiet
        )
        return
    from raglane.data.formats.pieces import skipped_lines
    from raglane.runs.run import load
    from raglane.training.inference import pick_device
    from raglane.training.predictions import check_apart, check_output, write_predictions

    check_output(output, escape_formulas=escape_formulas)
    # Before anything is read, which can take a while.
    pick_device(device)
    model = load(run, cell=cell)
    records = model.test_part() if data is None else model.read(data, need_labels=False, format=format, **columns)
    check_apart(output, records.source, run)
    skips, listed = columns.get("on_bad_row") == "skip", output.with_suffix(".skipped.jsonl")
    if skips:
        check_apart(listed, records.source, run)
    if not quiet:
        tell_empty(records, model.task, console.say)
    predictions = model.predict(records, **asked)
    beside = {listed: skipped_lines(records.skipped)} if skips else {}
    write_predictions(output, predictions, beside, escape_formulas=escape_formulas)
    if not quiet:
        if skips:
            tell_skipped(len(records.skipped), listed, console.say)
        console.say(f"predictions: {len(predictions):,} sequences, {output}")


def _on_ray(
    run: Path,
    cell: str | None,
    output: Path,
    data: Path | None,
    named: options.Given,
    engine: str,
    asked: dict[str, Any],
    quiet: bool,
) -> None:
    """Predict on a cluster, for Parquet files."""
    if engine not in ENGINES:
        raise ArgumentError(message("engine", quote(engine), f"one of {', '.join(ENGINES)}", "leave it out"))
    if data is None:
        raise ArgumentError(message("data", "nothing", "a cluster predicts for Parquet files", "give DATA"))
    if named:
        name = next(iter(named))
        raise ArgumentError(
            message(name, quote(named[name]), "a cluster takes the columns of the training data", "leave it out")
        )
    from raglane.runs.on_ray import predict_on_ray
    from raglane.runs.run import load

    count = predict_on_ray(load(run, cell=cell), str(data), output, **asked)
    if not quiet:
        console.say(f"predictions: {count:,} sequences, {output}")
