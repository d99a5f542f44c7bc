"""The options of the commands: names, help and panels, in one place so that the commands agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raglane.errors import quote


def path(text: str | Path) -> Path:
    """The path that an option gives. An empty one would be the current folder, which nobody has meant."""
    name = str(text)
    if not name:
        raise typer.BadParameter("an empty path; name a file or a folder")
    if "\0" in name:
        raise typer.BadParameter(f"{quote(name)}, which no file can be called; leave the zero byte out")
    return Path(name)


# What a command says of a run that it has found half replaced.
IS_BACK = "the run that --overwrite was to replace is back, since the new one had no checkpoint"

_MODEL, _TRAINING, _DATA, _RUN = "Task and model", "Training", "Data", "Run and output"

Data = Annotated[
    Path | None,
    typer.Argument(
        parser=path,
        help="A .ts, .parquet, .jsonl or .csv file, or a folder of text files, one a class. "
        "Without it: Japanese vowels, the embedded default.",
        show_default=False,
    ),
]
Task = Annotated[
    str,
    typer.Option(
        metavar="classify|tag|forecast",
        help="One label a sequence, one an element, or the next element.",
        rich_help_panel=_MODEL,
    ),
]
Cell = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The recurrent cell: lstm, gru, rnn, indrnn, sru, qrnn, mingru, minlstm, peephole_lstm or coupled_lstm.",
        rich_help_panel=_MODEL,
    ),
]
Hidden = Annotated[int, typer.Option(help="Units of a layer and direction.", rich_help_panel=_MODEL)]
Layers = Annotated[int, typer.Option(help="Layers on top of each other.", rich_help_panel=_MODEL)]
Bidirectional = Annotated[
    bool, typer.Option("--bidirectional", help="Also run from end to start.", rich_help_panel=_MODEL)
]
LayerNorm = Annotated[
    bool,
    typer.Option("--layer-norm", help="Normalise inside the recurrence (lstm and gru).", rich_help_panel=_MODEL),
]
InitialState = Annotated[
    str,
    typer.Option(
        metavar="zeros|learned|lengths",
        help="What a sequence begins with; lengths: a learned function of its length.",
        rich_help_panel=_MODEL,
    ),
]
Pooling = Annotated[
    str,
    typer.Option(
        metavar="last|first|mean|max|logsumexp|attention",
        help="How the elements of a sequence become one vector (classify).",
        rich_help_panel=_MODEL,
    ),
]
Dropout = Annotated[
    float, typer.Option(help="Share of units dropped between layers and before the head.", rich_help_panel=_MODEL)
]
InputDropout = Annotated[
    float,
    typer.Option(help="Share of a layer's inputs dropped for a whole sequence.", rich_help_panel=_MODEL),
]
StateDropout = Annotated[
    float,
    typer.Option(
        help="Share of the state dropped for a whole sequence, where weights read it.", rich_help_panel=_MODEL
    ),
]
WeightDropout = Annotated[
    float, typer.Option(help="Share of the recurrent weights dropped for a batch.", rich_help_panel=_MODEL)
]
Zoneout = Annotated[
    float, typer.Option(help="Share of units that keep their value for a step.", rich_help_panel=_MODEL)
]
Embedding = Annotated[
    int, typer.Option(help="Size of a token's embedding (token sequences only).", rich_help_panel=_MODEL)
]

Epochs = Annotated[int, typer.Option(help="Passes over the training part.", rich_help_panel=_TRAINING)]
BatchSize = Annotated[int, typer.Option(help="Sequences of a batch.", rich_help_panel=_TRAINING)]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate.", rich_help_panel=_TRAINING)]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="adam|adamw|sgd|rmsprop", help="The optimizer; sgd with momentum 0.9.", rich_help_panel=_TRAINING
    ),
]
WeightDecay = Annotated[float, typer.Option(help="Weight decay.", rich_help_panel=_TRAINING)]
Clip = Annotated[
    float | None,
    typer.Option(help="Largest norm of the gradient.", show_default="no limit", rich_help_panel=_TRAINING),
]
Patience = Annotated[
    int | None,
    typer.Option(
        help="Stop after so many epochs without a lower validation loss.",
        show_default="run all epochs",
        rich_help_panel=_TRAINING,
    ),
]
Bucket = Annotated[bool, typer.Option("--bucket", help="Make batches of similar lengths.", rich_help_panel=_TRAINING)]
Seed = Annotated[int, typer.Option(help="Of weights, order, dropout and the held-out part.", rich_help_panel=_TRAINING)]
Device = Annotated[
    str,
    typer.Option(metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU.", rich_help_panel=_RUN),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of the CPU.", show_default="PyTorch's choice", rich_help_panel=_RUN),
]
Workers = Annotated[
    int, typer.Option(help="Processes that prepare batches; 0: the training one.", rich_help_panel=_RUN)
]

SequenceColumn = Annotated[
    str | None,
    typer.Option(
        help="Column of sequences (Parquet, JSON lines).", show_default="the only candidate", rich_help_panel=_DATA
    ),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(help="Column of labels.", show_default="the only candidate", rich_help_panel=_DATA),
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        help="Column that names a sequence; in a CSV file it says which rows belong together.",
        show_default="by its name",
        rich_help_panel=_DATA,
    ),
]
TimeColumn = Annotated[
    str | None,
    typer.Option(
        help="Column that orders the rows of a sequence (CSV).",
        show_default="by its name, else the order of the file",
        rich_help_panel=_DATA,
    ),
]
FeatureColumn = Annotated[
    list[str] | None,
    typer.Option(help="Feature column (CSV); repeat it for several.", show_default="all others", rich_help_panel=_DATA),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="ts|parquet|jsonl|csv|folder",
        help="Format of the data.",
        show_default="by suffix",
        rich_help_panel=_DATA,
    ),
]
Validation = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        help="Data that decides which epoch is best.",
        show_default="held out",
        rich_help_panel=_DATA,
    ),
]
ValidationFraction = Annotated[
    float,
    typer.Option(help="Share held out for validation when none is given; 0 holds out none.", rich_help_panel=_DATA),
]
Test = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        help="Data to evaluate the best model on at the end.",
        show_default="none; the official test part of the default data",
        rich_help_panel=_DATA,
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        metavar="error|zero|forward",
        help="NaN or infinite features: refuse them, or fill them and add a was-missing channel each.",
        rich_help_panel=_DATA,
    ),
]

Out = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        help="Folder of the run.",
        show_default="runs/<data>-<task>-<cell>",
        rich_help_panel=_RUN,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out, with its data and settings.", rich_help_panel=_RUN),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.", rich_help_panel=_RUN)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=_RUN)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error, and warnings.", rich_help_panel=_RUN)]

Run = Annotated[Path, typer.Argument(parser=path, help="Folder of a run, or of a saved model.", show_default=False)]
DataToPredict = Annotated[
    Path | None,
    typer.Argument(
        parser=path,
        help="Data of the kind that the model was trained on. Without it: what the run was to be tested on.",
        show_default=False,
    ),
]
DataToEvaluate = Annotated[
    Path | None,
    typer.Argument(
        parser=path, help="Data with labels. Without it: what the run was to be tested on.", show_default=False
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        parser=path,
        help="File to write: .parquet, .csv or .jsonl.",
        show_default=False,
        rich_help_panel=_RUN,
    ),
]
Probabilities = Annotated[
    bool,
    typer.Option("--probabilities", help="Add one column p_<label> a class.", rich_help_panel=_RUN),
]
Horizon = Annotated[int, typer.Option(help="Elements to forecast (task forecast only).", rich_help_panel=_RUN)]
PredictionBatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences of a batch.", rich_help_panel=_RUN)]
