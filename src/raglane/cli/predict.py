"""``raglane predict``, ``sample`` and ``export``: answers of a model, texts from it, and a file for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from raglane.cli import console, options
from raglane.cli.evaluate import tell_empty, tell_skipped
from raglane.cli.options import argument, option
from raglane.errors import ArgumentError, count_of, message, quote
from raglane.training.settings import ENGINES

_Output = Annotated[
    Path, option("File to write: .parquet, .csv or .jsonl.", options.RUN, "--output", "-o", parser=options.path)
]
_Data = Annotated[
    Path | None,
    argument("Data of the kind that the model was trained on. Without it: what the run was to be tested on."),
]
_Probabilities = Annotated[bool, option("Add one column p_<label> per class.", options.RUN, "--probabilities")]
_Engine = Annotated[
    str, option("ray: on a Ray cluster, for Parquet files, to a folder of such.", metavar="processes|ray")
]
_EscapeFormulas = Annotated[
    bool,
    option(
        "Put an apostrophe before texts of a .csv that a spreadsheet would execute: =, +, -, @.",
        options.RUN,
        "--escape-formulas",
    ),
]


@options.command
def predict(
    run: options.Run,
    output: _Output,
    data: _Data = None,
    *,
    probabilities: _Probabilities = False,
    top: options.Top = 1,
    horizon: options.Horizon = 1,
    columns: options.Columns,
    format: options.Format = None,
    batch_size: options.PredictionBatchSize = 256,
    device: options.Device = "auto",
    engine: _Engine = "processes",
    escape_formulas: _EscapeFormulas = False,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
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


_Prompt = Annotated[str, option("How each text begins.", show_default=False)]
_Count = Annotated[int, option("How many texts.")]
_Length = Annotated[int, option("The most tokens that are drawn for a text.")]
_Temperature = Annotated[float, option("Below 1 the likely becomes likelier; 0 takes the likeliest.")]
_Seed = Annotated[int, option("Of the draw.")]


@options.command
def sample(
    run: options.Run,
    *,
    prompt: _Prompt = "",
    count: _Count = 5,
    length: _Length = 200,
    temperature: _Temperature = 1.0,
    seed: _Seed = 0,
    device: options.Device = "auto",
    cell: options.Cell = None,
) -> None:
    """Draw text from the best model of a run of the task language: one text per line.

    For example:

    raglane sample runs/names --count 10 --temperature 0.8

    raglane sample runs/novel --prompt "It was" --length 500
    """
    from raglane.training import sampling
    from raglane.training.checkpoint import load_model
    from raglane.training.folder import tidy
    from raglane.training.inference import pick_device

    where = pick_device(device)
    tidy(run)
    texts = sampling.sample(
        load_model(run, cell),
        prompt=prompt,
        count=count,
        length=length,
        temperature=temperature,
        seed=seed,
        device=where,
    )
    for text in texts:
        console.say(text)


class _Layout(StrEnum):
    padded = "padded"
    flat = "flat"


_File = Annotated[Path, argument("File to write: .onnx.")]
_LayoutOption = Annotated[_Layout, option("Values and lengths, or values and offsets.")]
_Verify = Annotated[bool, option("Compare the file with the model first.", options.RUN, "--verify/--no-verify")]


@options.command
def export(
    run: options.Run,
    path: _File,
    *,
    layout: _LayoutOption = _Layout.padded,
    verify: _Verify = True,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Write the best model of a run as an ONNX file, and what a program must know of it as a JSON beside it.

    Scaling is part of the file: it takes the channels as they are in the data. Of tokens it takes their places in the
    vocabulary, which is in the JSON with the labels.

    For example:

    raglane export runs/vowels vowels.onnx
    """
    from raglane.runs.exported import description_path
    from raglane.runs.run import load
    from raglane.training.predictions import check_apart

    for file in (path, description_path(path)):
        check_apart(file, run, run)
    exported = load(run, cell=cell).export(path, layout=layout.value, verify=verify)
    if quiet:
        return
    console.say(f"model: {path}, {path.stat().st_size:,} bytes; what it takes and gives: {description_path(path)}")
    if exported.verified is not None:
        found = exported.verified
        console.say(
            f"checked in ONNX Runtime: {count_of(found.sequences, 'sequence')} of fresh random lengths, "
            f"at most {found.largest_difference:.1e} of the largest number away"
        )
