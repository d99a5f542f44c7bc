"""``raglane bench``: the speed of Raglane's layers and PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raglane.cli import console, options
from raglane.cli.compare import as_json, to_bytes


@options.command
def bench(
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths",
            parser=options.path,
            metavar="FILE",
            help="Text file with one sequence length per line.",
            show_default="lognormal, 30 on average",
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="BxHxD,...", help="Sizes: sequences per batch x hidden units x features."
        ),
    ] = "8x64x64,32x128x128,64x256x256",
    cells: Annotated[
        str, typer.Option(metavar="NAME,...|all", help="Cells: lstm, gru, rnn.")
    ] = "all",
    modes: Annotated[
        str, typer.Option(metavar="train,infer|all", help="Training steps or inference.")
    ] = "all",
    output: Annotated[
        Path | None, options.output("File for the table (.md or .csv).", show_default="none")
    ] = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare the speed of Raglane's recurrent layers with PyTorch's, on packed and padded batches.

    A layer is timed only if its outputs are correct. "times faster" is relative to the faster of
    PyTorch's two results. With default options the command takes a minute or two.

    For example:

    raglane bench

    raglane bench --lengths my-lengths.txt --sizes 64x256x80 --cells lstm -o times.csv
    """
    from raglane._utils.files import check_new_file, write_file
    from raglane._utils.table import as_text
    from raglane.native.machine import is_busy, load
    from raglane.planner import bench as planner

    if output is not None:
        check_new_file("output", output, (".csv", ".md"))
    table = planner.bench(lengths, sizes, cells, modes)
    if output is not None:
        write_file(output, to_bytes(output, [table]))
    console.write_json(json, as_json([table]))
    if not quiet and not console.is_stdout(json):
        columns = [name.replace("_", " ") for name in table.columns]
        console.log(*as_text([replace(table, columns=columns)]).splitlines())
        if is_busy(load()):
            console.log(
                "the load exceeds the number of processors: other programs slow these measurements down"
            )
