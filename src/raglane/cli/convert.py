"""``raglane convert``: data of any format as a folder that opens at once, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from raglane.cli import console, options
from raglane.cli.evaluate import tell_skipped
from raglane.cli.inspect import as_trained
from raglane.errors import ArgumentError, message
from raglane.runs.progress import shown
from raglane.runs.sources import ColumnNames, Source
from raglane.training.options import RUN

if TYPE_CHECKING:
    from raglane.data import Conversion


@dataclass(frozen=True)
class _Choices:
    """What a reader is asked for besides the columns."""

    task: str = as_trained("task")


Places = Annotated[
    list[str],
    typer.Argument(
        metavar="IN... OUT",
        help="What raglane train reads: files, folders, quoted patterns, URLs; and last the folder to write.",
        show_default=False,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace what was converted to OUT from other data, or is half done there.",
        rich_help_panel=RUN,
    ),
]


@options.command
def convert(
    places: Places,
    *,
    choices: Annotated[options.Given, _Choices],
    columns: options.Columns,
    format: options.Format = None,
    overwrite: Overwrite = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Convert data to a folder of Arrow files, with what is counted of it beside them.

    Memory does not grow with the data. A conversion that was stopped goes on with the same command.

    For example:

    raglane convert names.csv names

    raglane convert "logs/*.parquet" s3://bucket/more.parquet logs --task forecast

    raglane convert tagged.jsonl tagged --task tag --on-bad-row skip
    """
    from raglane.data.conversion import convert as convert_all
    from raglane.data.formats.pieces import SKIPPED

    for place in places[:-1]:
        if "://" not in place:
            options.path(place)
    options.path(places[-1])
    # Not as paths, which would make one slash of the two in a URL.
    *inputs, output = places
    if not inputs:
        rule = "files to read, and a folder to write"
        raise ArgumentError(message("IN... OUT", f"{output} alone", rule, f"give both: raglane convert {output} OUT"))
    names = ColumnNames(**columns)
    asked = Source(None, format, names).asked(choices.get("task", "classify"))
    with shown(quiet) as progress:
        done = convert_all(
            inputs, output, asked, format=format, on_bad_row=names.on_bad_row, overwrite=overwrite, progress=progress
        )
    if quiet:
        return
    _tell(done)
    if names.on_bad_row == "skip":
        tell_skipped(done.skipped, done.folder / SKIPPED, console.say)
    console.say(f"next: raglane train {output}, or raglane inspect {output}")


def _tell(done: Conversion) -> None:
    """What was written."""
    from raglane.errors import count_of

    found = done.statistics
    if done.was_there:
        console.say(f"{done.folder} holds this already: nothing to do")
    elif done.resumed:
        console.say(f"{count_of(done.resumed, 'sequence')} of an earlier conversion, which was stopped, were kept")
    what = f"{len(found.tokens):,} different tokens" if found.tokens else count_of(len(found.channels), "channel")
    console.say(
        f"{done.folder}: {count_of(found.sequences, 'sequence')} of up to {count_of(found.longest, 'element')}, "
        f"{found.elements:,} in all; {what}" + (f"; {count_of(len(found.labels), 'label')}" if found.labels else "")
    )
