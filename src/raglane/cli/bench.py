"""``raglane bench``: how fast the layers are, against PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message, quote, shorten
from raglane.training.options import RUN

if TYPE_CHECKING:
    from raglane.planner.timing import Size


_MOST = 2**20

Cells = Annotated[str, typer.Option(metavar="NAME,...|all", help="lstm, gru and rnn_tanh.")]
Sizes = Annotated[str, typer.Option(metavar="BxHxD,...", help="Sequences of a batch, units, features.")]
Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        parser=options.path,
        metavar="FILE",
        help="Text file with the length of a sequence per line.",
        show_default="lognormal, 30 on average",
    ),
]
Modes = Annotated[str, typer.Option(metavar="train,infer|all", help="Modes.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        parser=options.path,
        help="File for the table (.md or .csv).",
        show_default="none",
        rich_help_panel=RUN,
    ),
]


@options.command
def bench(
    lengths: Lengths = None,
    sizes: Sizes = "8x64x64,32x128x128,64x256x256",
    cells: Cells = "all",
    modes: Modes = "all",
    output: Output = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Time the recurrent layers against PyTorch's, on packed and on padded batches.

    Each is timed only after its outputs are verified. "times faster" is to the faster of torch's two ways. By default,
    it takes a minute or two.

    For example:

    raglane bench

    raglane bench --lengths my-lengths.txt --sizes 64x256x80 --cells lstm -o times.csv
    """
    import torch

    from raglane._utils.files import check_new_file, write_file
    from raglane.planner.machine import is_busy, load
    from raglane.planner.probe import MODES, lognormal
    from raglane.planner.timing import CELLS, COLUMNS, lengths_of_file, time_layer
    from raglane.report.comparison import Group, as_csv, as_markdown, as_text

    if output is not None:
        if output.suffix.lower() not in (".csv", ".md"):
            rule = "a name that ends in .csv or .md"
            raise ArgumentError(message("output", quote(str(output)), rule, "name the file so"))
        check_new_file("output", output)
    listed = lognormal(1000, 30, 1) if lengths is None else lengths_of_file(lengths)
    wanted = [size_of(text) for text in parts_of("sizes", sizes)]
    chosen, ways = pick("cells", cells, CELLS), pick("modes", modes, MODES)
    rows = [time_layer(cell, size, listed, mode) for cell in chosen for size in wanted for mode in ways]
    name = "lognormal lengths" if lengths is None else f"lengths of {shorten(lengths.name, 40)}"
    groups = [Group(f"{name}, {torch.get_num_threads()} threads", COLUMNS, tuple(rows), COLUMNS[-1])]
    if output is not None:
        write_file(output, as_csv(groups) if output.suffix.lower() == ".csv" else as_markdown(groups).encode())
    if not quiet:
        console.say(*as_text(groups).splitlines())
        if is_busy(load()):
            console.say("the load is above the number of processors: other programs make these times too long")


def parts_of(option: str, text: str) -> list[str]:
    """The parts of a list with commas, none twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentError(message(option, quote(text), "names with a comma between them", "leave none empty"))
    return list(dict.fromkeys(parts))


def pick(option: str, text: str, known: Collection[str]) -> list[str]:
    """Names among those known, or all of them."""
    parts = parts_of(option, text)
    if parts == ["all"]:
        return list(known)
    for part in parts:
        if part not in known:
            raise ArgumentError(message(option, quote(part), f"one of {', '.join(known)}, or all", "pass one of these"))
    return parts


def size_of(text: str) -> Size:
    """The size of a batch and a layer, such as 64x256x80."""
    from raglane.planner.timing import Size

    match = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", text, re.ASCII)
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or not all(1 <= number <= _MOST for number in numbers):
        rule = f"sequences x units x features, each from 1 to {_MOST:,}"
        raise ArgumentError(message("sizes", quote(text), rule, "pass 64x256x256, say"))
    return Size(*numbers)
