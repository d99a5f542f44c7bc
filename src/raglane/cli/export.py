"""``raglane export``: a model as a file that runs elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from raglane.cli import console, options
from raglane.errors import count_of
from raglane.training.options import RUN


class _Layout(StrEnum):
    padded = "padded"
    flat = "flat"


_Path = Annotated[Path, typer.Argument(parser=options.path, help="File to write: .onnx.", show_default=False)]
_Chosen = Annotated[
    _Layout,
    typer.Option(help="Values and lengths, or values and offsets.", rich_help_panel=RUN),
]
_Verify = Annotated[
    bool,
    typer.Option("--verify/--no-verify", help="Compare the file with the model first.", rich_help_panel=RUN),
]


@options.command
def export(
    run: options.Run,
    path: _Path,
    *,
    layout: _Chosen = _Layout.padded,
    verify: _Verify = True,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
    debug: options.Debug = False,  # noqa: ARG001
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
