"""``raglane compare``: runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message, quote
from raglane.training.options import RUN

_SUFFIXES = (".md", ".csv", ".png", ".svg")

Runs = Annotated[
    list[Path], typer.Argument(parser=options.path, metavar="RUN...", help="Folders of runs.", show_default=False)
]
Outputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        parser=options.path,
        help="File for the table (.md or .csv) or a picture (.png or .svg); repeat it for several.",
        show_default="none",
        rich_help_panel=RUN,
    ),
]


@options.command
def compare(
    runs: Runs,
    *,
    output: Outputs = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Put runs beside each other: what differs in their settings, what they reached, and what it took.

    Runs on other data, or for another task, stand in a table of their own. The best validation loss comes first.

    For example:

    raglane compare runs/*

    raglane compare runs/gru runs/lstm -o cells.md -o cells.png
    """
    from raglane._utils.files import check_new_file, write_files

    places = output or []
    for place in places:
        if place.suffix.lower() not in _SUFFIXES:
            rule = f"a name that ends in {', '.join(_SUFFIXES)}"
            raise ArgumentError(message("output", quote(str(place)), rule, "name the file so"))
        check_new_file("output", place)
    from raglane.report.comparison import as_csv, as_markdown, as_picture, as_text
    from raglane.runs.comparison import compare as put_together

    groups = put_together(runs)
    content = {}
    for place in places:
        suffix = place.suffix.lower()
        if suffix in (".png", ".svg"):
            content[place] = as_picture(groups, suffix == ".svg")
        else:
            content[place] = as_csv(groups) if suffix == ".csv" else as_markdown(groups).encode()
    write_files(content)
    if not quiet:
        console.say(*as_text(groups).splitlines())
        if places:
            console.say(f"written: {', '.join(map(str, places))}")
