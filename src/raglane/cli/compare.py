"""``raglane compare`` and ``raglane bench``: tables that compare runs, and Raglane's layers with
PyTorch's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raglane._utils.messages import quote, shorten
from raglane.cli import console, options
from raglane.errors import ArgumentError

if TYPE_CHECKING:
    from raglane._utils.table import Table
    from raglane.planner.probe import Size

_MOST = 2**20


@options.command
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            parser=options.path, metavar="RUN...", help="Folders of runs.", show_default=False
        ),
    ],
    *,
    output: Annotated[
        list[Path] | None,
        options.output(
            "File for the table (.md or .csv), a picture (.png or .svg) or a page (.html); several: repeat it.",
            show_default="none",
        ),
    ] = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare runs: their differing settings, results and training times.

    Runs are grouped by data, task and loss, and sorted by validation loss, the lowest first.
    Folders without a saved model are left out.

    For example:

    raglane compare runs/*

    raglane compare runs/gru runs/lstm -o cells.md -o cells.html
    """
    from raglane._utils.files import check_new_file, write_files
    from raglane._utils.table import as_text
    from raglane.report.figures import compared_picture
    from raglane.runs.comparison import compare as compare_runs
    from raglane.runs.comparison import has_model
    from raglane.runs.comparison_page import comparison_page

    outputs = output or []
    for path in outputs:
        check_new_file("output", path, (".md", ".csv", ".png", ".svg", ".html"))
    # As in runs/*, which may also match runs of which none is saved yet, and files.
    with_model = list(filter(has_model, runs))
    groups = compare_runs(with_model or runs)
    content = {}
    for path in outputs:
        suffix = path.suffix.lower()
        if suffix in (".png", ".svg"):
            content[path] = compared_picture(groups, suffix == ".svg")
        elif suffix == ".html":
            content[path] = comparison_page(groups, "raglane compare", path.stem)
        else:
            content[path] = _to_bytes(path, groups)
    write_files(content)
    console.write_json(json, _as_json(groups))
    if not quiet and not console.is_stdout(json):
        console.log(*as_text(groups).splitlines())
        for folder in runs:
            if folder not in with_model:
                console.log(f"left out: {folder}, which has no saved model")
        if outputs:
            console.log(f"written: {', '.join(map(str, outputs))}")


def _as_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return tables as JSON: the caption and the rows of each."""
    return [
        {
            "caption": table.caption,
            "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
        }
        for table in tables
    ]


def _to_bytes(path: Path, tables: Sequence[Table]) -> bytes:
    """Return tables in the format of a file's suffix."""
    from raglane._utils.table import as_csv, as_markdown

    return as_csv(tables) if path.suffix.lower() == ".csv" else as_markdown(tables).encode()


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
    import torch

    from raglane._utils.files import check_new_file, write_file
    from raglane._utils.table import Table, as_text
    from raglane.planner.machine import is_busy, load
    from raglane.planner.probe import CELLS, COLUMNS, MODES, lengths_of_file, lognormal, time_layer

    if output is not None:
        check_new_file("output", output, (".csv", ".md"))
    listed = lognormal(1000, 30, 1) if lengths is None else lengths_of_file(lengths)
    shapes = [size_of(text) for text in parts_of("sizes", sizes)]
    chosen = pick("cells", cells, CELLS)
    ways = pick("modes", modes, MODES)
    rows = [
        time_layer(cell, size, listed, mode) for cell in chosen for size in shapes for mode in ways
    ]
    name = "lognormal lengths" if lengths is None else f"lengths of {shorten(lengths.name, 40)}"
    table = Table(f"{name}, {torch.get_num_threads()} threads", COLUMNS, rows)
    if output is not None:
        write_file(output, _to_bytes(output, [table]))
    console.write_json(json, _as_json([table]))
    if not quiet and not console.is_stdout(json):
        console.log(
            *as_text(
                [replace(table, columns=[name.replace("_", " ") for name in COLUMNS])]
            ).splitlines()
        )
        if is_busy(load()):
            console.log(
                "the load exceeds the number of processors: other programs slow these measurements down"
            )


def parts_of(option: str, text: str) -> list[str]:
    """Split a comma-separated list, and remove duplicates."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ArgumentError(option, quote(text), "a comma-separated list", "leave no entry empty")
    return list(dict.fromkeys(words))


def pick(option: str, text: str, valid: Collection[str]) -> list[str]:
    """Return the selected names, all of them for 'all'."""
    words = parts_of(option, text)
    if words == ["all"]:
        return list(valid)
    for word in words:
        if word not in valid:
            raise ArgumentError(
                option, quote(word), f"one of {', '.join(valid)}, or all", "pass one of these"
            )
    return words


def size_of(text: str) -> Size:
    """Parse the size of a batch and a layer, such as 64x256x80."""
    from raglane.planner.probe import Size

    match = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", text, re.ASCII)
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or not all(1 <= number <= _MOST for number in numbers):
        rule = f"sequences x units x features, with each number from 1 to {_MOST:,}"
        raise ArgumentError("sizes", quote(text), rule, "pass e.g. 64x256x256")
    return Size(*numbers)
