"""``raglane convert`` and ``raglane inspect``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from raglane._utils.messages import count_of, quote, require
from raglane.cli import console, options
from raglane.cli.models import log_skipped
from raglane.cli.options import argument, option
from raglane.errors import ArgumentError
from raglane.runs.sources import SequenceSource, check_default
from raglane.training.settings import Settings, task_defaults

# The options that the help pages list; --help-all lists all.
_COMMON = (
    "task cell hidden_size num_layers bidirectional sequence label id time features on_bad_row format overwrite "
    "processes fresh html json quiet"
)


@partial(options.command, common=_COMMON)
def convert(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Data to read (files, folders, quoted patterns, URLs), and the folder to write.",
            show_default=False,
        ),
    ],
    *,
    choices: Annotated[options.Given, Settings, "task"],
    columns: options.Columns,
    format: options.Format = None,
    overwrite: Annotated[
        bool,
        option(
            "Replace a conversion of other data in OUT, or an incomplete one.",
            options.RUN,
            "--overwrite",
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert data to a folder of Arrow files with statistics.

    Memory use does not grow with the data. The same command resumes an interrupted conversion.

    For example:

    raglane convert names.csv names

    raglane convert "logs/*.parquet" s3://bucket/more.parquet logs --task forecast

    raglane convert tagged.jsonl tagged --task tag --on-bad-row skip
    """
    from raglane.data.assemble.pieces import SKIPPED
    from raglane.data.store.conversion import convert as convert_all
    from raglane.runs.progress import progress_bar

    for path in paths[:-1]:
        if "://" not in path:
            options.path(path)
    options.path(paths[-1])
    # As strings, because a Path would merge the two slashes of a URL.
    *inputs, output = paths
    if not inputs:
        rule = "data to read, and a folder to write"
        fix = f"pass both: raglane convert {output} OUT"
        raise ArgumentError("IN... OUT", f"only {output}", rule, fix)
    source = SequenceSource(None, format).chosen(columns)
    request = source.asked(choices.get("task", "classify"))
    on_bad_row: Any = source.on_bad_row  # one of its choices
    with progress_bar(quiet) as progress:
        done = convert_all(
            inputs,
            output,
            request,
            format=format,
            on_bad_row=on_bad_row,
            overwrite=overwrite,
            progress=progress,
        )
    if quiet:
        return
    counts = done.statistics
    if done.was_there:
        console.log(f"{done.folder} is already complete: nothing to do")
    elif done.resumed:
        console.log(f"{count_of(done.resumed, 'sequence')} of an interrupted conversion were kept")
    content = (
        f"{len(counts.tokens):,} different tokens"
        if counts.tokens
        else count_of(len(counts.channels), "channel")
    )
    console.log(
        f"{done.folder}: {count_of(counts.sequences, 'sequence')} of up to {count_of(counts.longest, 'element')}, "
        f"{counts.elements:,} in total; {content}"
        + (f"; {count_of(len(counts.labels), 'label')}" if counts.labels else "")
    )
    if on_bad_row == "skip":
        log_skipped(done.skipped, done.folder / SKIPPED, console.log)
    console.log(f"next: raglane train {output}, or raglane inspect {output}")


_MEASURED_ONCE = (
    "measuring this layer on this machine, for a minute or two; later inspections reuse it"
)
# The settings of a training that affect a plan.
_PLANNED = "task cell hidden_size num_layers bidirectional layer_norm embedding"


@partial(options.command, common=_COMMON)
def inspect(
    data: Annotated[
        Path | None,
        argument(
            "Data of raglane train, or a .txt file with one length per line. Default: Japanese vowels."
        ),
    ] = None,
    *,
    choices: Annotated[options.Given, Settings, _PLANNED],
    columns: options.Columns,
    format: options.Format = None,
    processes: Annotated[int, option("Number of training processes.")] = 1,
    fresh: Annotated[
        bool,
        option(
            "Measure the layer again, e.g. because the machine was busy.", options.RUN, "--fresh"
        ),
    ] = False,
    html: Annotated[
        Path | None, options.output("File for an HTML page.", "--html", show_default="none")
    ] = None,
    json: Annotated[
        Path | None,
        options.output(
            "File for the results as JSON; - for standard output.", "--json", show_default="none"
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Describe data before training: lengths, padding, the time of each backend and schedule, and
    the fastest.

    The first inspection of a layer measures it on this machine for a minute or two; later ones
    reuse the measurement.

    For example:

    raglane inspect names.csv --cell lstm --hidden-size 256

    raglane inspect lengths.txt --processes 8

    raglane inspect meters.parquet --task forecast --html report.html --json report.json
    """
    from raglane._utils.checks import check_whole

    # The cell grud requires this setting.
    filled: dict[str, Any] = {"missing": "elapsed"} if choices.get("cell") == "grud" else {}
    settings = Settings(**task_defaults(choices), **filled)
    check_whole("processes", processes, 1, "pass the number of processes")
    json_path = None if console.is_stdout(json) else json
    source = SequenceSource(data, format).chosen(columns)
    check_default(source, settings)
    _check_outputs(data, html=html, json=json_path)
    from raglane._utils.files import write_files
    from raglane.runs.inspection import reading
    from raglane.runs.inspection.inspect import MEASURING, as_json, lines
    from raglane.runs.inspection.inspect import inspect as inspect_contents
    from raglane.runs.progress import AnnouncedProgress, progress_bar

    def announce() -> None:
        if not quiet and not console.is_stdout(json):
            console.log_error(_MEASURED_ONCE)

    with progress_bar(quiet) as shown:
        progress = AnnouncedProgress(shown, MEASURING, announce)
        progress.stage("reading")
        contents = reading.read(
            data, source.asked(settings.task), format, progress, source.on_bad_row
        )
        inspection = inspect_contents(
            contents,
            settings,
            source=source,
            ranks=processes,
            fresh=fresh,
            progress=progress,
        )
        files = {} if json_path is None else {json_path: as_json(inspection)}
        if html is not None:
            from raglane.runs.inspection.page import as_page

            progress.stage("drawing")
            files[html] = as_page(inspection)
    write_files(files)
    if json is not None and json_path is None:
        console.write(as_json(inspection))
    elif not quiet:
        bar = "█"
        try:
            bar.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            bar = "#"
        written = [f"written: {', '.join(map(str, files))}"] if files else []
        console.log(*lines(inspection, bar), *written, "train with:", inspection.command)


def _check_outputs(data: Path | None, **files: Path | None) -> None:
    """Raise if an output file cannot be written, or would replace the data or another output."""
    from raglane._utils.files import check_new_file

    outputs = {name: path for name, path in files.items() if path is not None}
    for name, path in outputs.items():
        check_new_file(name, path)
        if data is not None and _is_same(path, data):
            got = f"{quote(str(path))}, the file of the data"
            raise ArgumentError(name, got, "another file than the data", "name another file")
    if len(outputs) == 2 and _is_same(*outputs.values()):
        got = f"{quote(str(outputs['json']))}, which is the page"
        raise ArgumentError("json", got, "another file than the page", "name another file")
    if "html" in outputs:
        for module in ("altair", "vl_convert", "matplotlib"):
            require(module, "report")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()
