"""``raglane convert`` and ``raglane inspect``: data as a folder that opens at once, and what it looks like."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raglane._utils.messages import count_of, message, quote, require
from raglane.cli import console, options
from raglane.cli.models import tell_skipped
from raglane.cli.options import argument, option
from raglane.errors import ArgumentError
from raglane.runs.progress import shown
from raglane.runs.sources import ColumnNames, Source, check_default
from raglane.training.settings import Settings

if TYPE_CHECKING:
    from raglane.data import Conversion
    from raglane.runs.inspection.inspect import Inspection


_Places = Annotated[
    list[str],
    typer.Argument(
        metavar="IN... OUT",
        help="What raglane train reads: files, folders, quoted patterns, URLs; and last the folder to write.",
        show_default=False,
    ),
]
_Overwrite = Annotated[
    bool,
    option("Replace what was converted to OUT from other data, or is half done there.", options.RUN, "--overwrite"),
]


@options.command
def convert(
    places: _Places,
    *,
    choices: Annotated[options.Given, Settings, "task"],
    columns: options.Columns,
    format: options.Format = None,
    overwrite: _Overwrite = False,
    quiet: options.Quiet = False,
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
        rule = "data to read, and a folder to write"
        raise ArgumentError(message("IN... OUT", f"only {output}", rule, f"pass both: raglane convert {output} OUT"))
    names = ColumnNames(**columns)
    asked = Source(None, format, names).asked(choices.get("task", "classify"))
    with shown(quiet) as progress:
        done = convert_all(
            inputs, output, asked, format=format, on_bad_row=names.on_bad_row, overwrite=overwrite, progress=progress
        )
    if quiet:
        return
    _tell_converted(done)
    if names.on_bad_row == "skip":
        tell_skipped(done.skipped, done.folder / SKIPPED, console.say)
    console.say(f"next: raglane train {output}, or raglane inspect {output}")


def _tell_converted(done: Conversion) -> None:
    """What was written."""
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


# The settings of a training that matter to a plan.
_PLANNED = "task cell hidden_size num_layers bidirectional layer_norm embedding"

_Data = Annotated[
    Path | None,
    argument("What raglane train reads, or a .txt file with one length per line. Without it: Japanese vowels."),
]
_Ranks = Annotated[int, option("Processes that train together.")]
_Fresh = Annotated[bool, option("Measure the layer again, when this machine is idle, say.", options.RUN, "--fresh")]
_Html = Annotated[
    Path | None, option("File for a page.", options.RUN, "--html", parser=options.path, show_default="none")
]
_Json = Annotated[
    Path | None,
    option(
        "File for everything as JSON; - for the standard output.",
        options.RUN,
        "--json",
        parser=options.path,
        show_default="none",
    ),
]


@options.command
def inspect(
    data: _Data = None,
    *,
    choices: Annotated[options.Given, Settings, _PLANNED],
    columns: options.Columns,
    format: options.Format = None,
    ranks: _Ranks = 1,
    fresh: _Fresh = False,
    html: _Html = None,
    json: _Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Look at data before a training: its lengths, what padding wastes, what each way to train costs, and the best.

    The layer is measured on this machine for about a minute, once; the next inspection of such a layer is quick.

    For example:

    raglane inspect names.csv --cell lstm --hidden-size 256

    raglane inspect lengths.txt --ranks 8

    raglane inspect meters.parquet --task forecast --html report.html --json report.json
    """
    from raglane._utils.checks import check_whole

    # What this cell wants of the data; the others take it as it is.
    filled: dict[str, Any] = {"missing": "elapsed"} if choices.get("cell") == "grud" else {}
    settings = Settings(**choices, **filled)
    check_whole("ranks", ranks, 1, "pass the number of processes")
    place = None if json is None or str(json) == "-" else json
    names = ColumnNames(**columns)
    source = Source(data, format, names)
    check_default(source, settings)
    _check_outputs(data, html=html, json=place)
    from raglane._utils.files import write_files
    from raglane.runs.inspection import reading
    from raglane.runs.inspection.inspect import as_json
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
        _tell_found(found, list(files))


def _tell_found(found: Inspection, written: list[Path]) -> None:
    from raglane.runs.inspection.inspect import lines

    bar = "█"
    try:
        bar.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        bar = "#"
    told = [f"written: {', '.join(map(str, written))}"] if written else []
    console.say(*lines(found, bar), *told, "train with:", found.command)


def _check_outputs(data: Path | None, **places: Path | None) -> None:
    """Refuse files that could not be written, or would replace the data, before anything is read."""
    from raglane._utils.files import check_new_file

    given = {name: path for name, path in places.items() if path is not None}
    for name, path in given.items():
        check_new_file(name, path)
        if data is not None and _is_same(path, data):
            got = f"{quote(str(path))}, the data"
            raise ArgumentError(message(name, got, "another file", "name another file"))
    if len(given) == 2 and _is_same(*given.values()):
        got = f"{quote(str(given['json']))}, which is the page"
        raise ArgumentError(message("json", got, "another file", "name another file"))
    if "html" in given:
        for module in ("altair", "vl_convert", "matplotlib"):
            require(module, "report")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()
