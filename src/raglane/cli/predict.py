"""``raglane predict``: what a model makes of data."""

from __future__ import annotations

from raglane.cli import console, options
from raglane.cli.evaluate import tell_empty

__all__ = ["predict"]


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
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Predict with the best model of a run: one row per sequence, in the order of the data.

    The columns are id (the data's, else the row number from 0), prediction and its probability. For the task tag,
    they hold one list per sequence; a forecast is a list of steps, each a list of channels.

    For example:

    raglane predict runs/vowels -o predictions.csv

    raglane predict runs/vowels recordings.ts -o predictions.parquet

    raglane predict runs/names names.csv -o predictions.csv --probabilities

    raglane predict runs/meters today.csv -o tomorrow.jsonl --horizon 24
    """
    from raglane.models.run import load
    from raglane.training.inference import pick_device
    from raglane.training.predictions import check_apart, check_output, write_predictions

    check_output(output)
    # Before anything is read, which can take a while.
    pick_device(device)
    model = load(run)
    records = model.test_part() if data is None else model.read(data, need_labels=False, format=format, **columns)
    check_apart(output, records.source, run)
    if not quiet:
        tell_empty(records, model.task, console.say)
    predictions = model.predict(
        records,
        batch_size=batch_size,
        probabilities=probabilities,
        top=top,
        horizon=horizon,
        device=device,
    )
    write_predictions(output, predictions)
    if not quiet:
        console.say(f"predictions: {len(predictions):,} sequences, {output}")
