"""``raglane compare``: tables that compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raglane.cli import console, options

if TYPE_CHECKING:
    from raglane._utils.table import PrintedTable


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
            content[path] = to_bytes(path, groups)
    write_files(content)
    console.write_json(json, as_json(groups))
    if not quiet and not console.is_stdout(json):
        console.log(*as_text(groups).splitlines())
        for folder in runs:
            if folder not in with_model:
                console.log(f"left out: {folder}, which has no saved model")
        if outputs:
            console.log(f"written: {', '.join(map(str, outputs))}")


def as_json(tables: Sequence[PrintedTable]) -> list[dict[str, Any]]:
    """Return tables as JSON: the caption and the rows of each."""
    return [
        {
            "caption": table.caption,
            "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
        }
        for table in tables
    ]


def to_bytes(path: Path, tables: Sequence[PrintedTable]) -> bytes:
    """Return tables in the format of a file's suffix."""
    from raglane._utils.table import as_csv, as_markdown

    return as_csv(tables) if path.suffix.lower() == ".csv" else as_markdown(tables).encode()
