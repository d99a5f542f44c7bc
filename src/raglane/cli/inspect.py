"""``raglane inspect``: what data looks like, and how to train on it."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message, quote, require
from raglane.runs.progress import shown
from raglane.runs.sources import ColumnNames, Source, check_default
from raglane.training.options import RUN
from raglane.training.settings import Settings

if TYPE_CHECKING:
    from raglane.runs.inspection.inspect import Inspection


def as_trained(name: str) -> Any:
    """The field of this name of the settings of training: its default, its rules and its help."""
    field = Settings.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


@dataclass(frozen=True)
class _Model:
    """The choices of training that matter to a plan."""

    task: str = as_trained("task")
    layer: str = as_trained("layer")
    hidden: int = as_trained("hidden")
    layers: int = as_trained("layers")
    bidirectional: bool = as_trained("bidirectional")
    layer_norm: bool = as_trained("layer_norm")
    embedding: int = as_trained("embedding")


Data = Annotated[
    Path | None,
    typer.Argument(
        parser=options.path,
        help="What raglane train reads, or a .txt file with one length per line. Without it: Japanese vowels.",
        show_default=False,
    ),
]
Ranks = Annotated[int, typer.Option(help="Processes that train together.", rich_help_panel=RUN)]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure the layer again, when this machine is idle, say.", rich_help_panel=RUN)
]
Html = Annotated[
    Path | None,
    typer.Option("--html", parser=options.path, help="File for a page.", show_default="none", rich_help_panel=RUN),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        parser=options.path,
        help="File for everything as JSON; - for the standard output.",
        show_default="none",
        rich_help_panel=RUN,
    ),
]


@options.command
def inspect(
    data: Data = None,
    *,
    choices: Annotated[options.Given, _Model],
    columns: options.Columns,
    format: options.Format = None,
    ranks: Ranks = 1,
    fresh: Fresh = False,
    html: Html = None,
    json: Json = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Look at data before a training: its lengths, what padding wastes, what each way to train costs, and the best.

    The layer is measured on this machine for about a minute, once; the next inspection of such a layer is quick.

    For example:

    raglane inspect names.csv --cell lstm --hidden 256

    raglane inspect lengths.txt --ranks 8

    raglane inspect meters.parquet --task forecast --html report.html --json report.json
    """
    from raglane._utils.checks import check_whole

    # What this cell wants of the data; the others take it as it is.
    filled: dict[str, Any] = {"missing": "elapsed"} if choices.get("layer") == "grud" else {}
    settings = Settings(**choices, **filled)
    check_whole("ranks", ranks, 1, "pass the number of processes")
    place = None if json is None or str(json) == "-" else json
    names = ColumnNames(**columns)
    source = Source(data, format, names)
    check_default(source, settings)
    _check_outputs(data, html=html, json=place)
    from raglane._utils.files import write_files
    from raglane.runs.inspection import reading
    from raglane.runs.inspection.document import as_json
    from raglane.runs.inspection.inspect import inspect as find_out

    with shown(quiet) as progress:
        progress.stage("reading")
        contents = reading.read(data, source.asked(settings.task), format, progress, names.on_bad_row)
        found = find_out(contents, settings, columns=names, format=format, ranks=ranks, fresh=fresh, progress=progress)
        files = {} if place is None else {place: as_json(found)}
        if html is not None:
            from raglane.runs.inspection.page import as_page

            progress.stage("drawing")
            files[html] = as_page(found)
    write_files(files)
    if json is not None and place is None:
        sys.stdout.write(as_json(found).decode("utf-8", errors="backslashreplace"))
        sys.stdout.flush()
    elif not quiet:
        _tell(found, list(files))


def _tell(found: Inspection, written: list[Path]) -> None:
    from raglane.runs.inspection.text import lines

    bar = "█"
    try:
        bar.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        bar = "#"
    if written:
        console.say(*lines(found, bar), f"written: {', '.join(map(str, written))}")
    else:
        console.say(*lines(found, bar))
    console.say("train with:", found.command)


def _check_outputs(data: Path | None, **places: Path | None) -> None:
    """Refuse files that could not be written, or would replace the data, before anything is read."""
    from raglane._utils.files import check_new_file

    given = {name: path for name, path in places.items() if path is not None}
    for name, path in given.items():
        check_new_file(name, path)
        if data is not None and _is_same(path, data):
            got = f"{quote(str(path))}, the data, which it would replace"
            raise ArgumentError(message(name, got, "a file of its own", "name another file"))
    if len(given) == 2 and _is_same(*given.values()):
        got = f"{quote(str(given['json']))}, which is also the page"
        raise ArgumentError(message("json", got, "a file of its own", "name another file"))
    if "html" in given:
        for module in ("altair", "vl_convert", "matplotlib"):
            require(module, "report")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()
