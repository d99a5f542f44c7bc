"""``raglane bench``: how fast the layers are, against PyTorch's and other engines'."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message, quote, require

if TYPE_CHECKING:
    from raglane.bench.cases import Case, Size
    from raglane.bench.lengths import Lengths
    from raglane.bench.run import Report

__all__ = ["bench"]

# What a folder of results holds, and nothing else: only such a folder is replaced.
_FILES = ("results.csv", "results.md", "results.png")
_CASES, _RUN = "Cases", "Run and output"
_MOST = 2**20

_Value = TypeVar("_Value")

Suites = Annotated[
    str,
    typer.Option(
        metavar="NAME,...|all",
        help="Suites of cases: grid, and elementwise, loop, own-cell, fill, one-long, tiny, drop-in, export and "
        "memory, which ask one question each.",
        rich_help_panel=_CASES,
    ),
]
Cells = Annotated[
    str,
    typer.Option(
        metavar="NAME,...|all",
        help="lstm, gru and rnn_tanh; in the suite elementwise indrnn_tanh, mingru, minlstm, sru and qrnn.",
        rich_help_panel=_CASES,
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="BxHxD,...",
        help="Sequences of a batch, units, features.",
        show_default="8x64x64 to 256x128x64, or the suite's own",
        rich_help_panel=_CASES,
    ),
]
LengthsOption = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="NAME,...|all|FILE",
        help="Lengths of the sequences: equal, uniform, lognormal, like real data (librispeech, ljspeech, names, ewt, "
        "trec, vowels), or a text file with one per line. For the suites grid and drop-in.",
        rich_help_panel=_CASES,
    ),
]
Modes = Annotated[str, typer.Option(metavar="train,infer|all", help="Modes.", rich_help_panel=_CASES)]
Dtypes = Annotated[str, typer.Option(metavar="float32,bfloat16|all", help="Dtypes.", rich_help_panel=_CASES)]
Threads = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Threads of the CPU; several show how it scales.",
        show_default="PyTorch's choice",
        rich_help_panel=_CASES,
    ),
]
Competitors = Annotated[
    str,
    typer.Option(
        metavar="NAME,...|all",
        help="Beside ours: torch-packed, torch-padded, torch-sorted, torch-steps, torch-hoisted, onnxruntime, "
        "openvino, jax. all: those installed.",
        rich_help_panel=_CASES,
    ),
]
Rounds = Annotated[
    int, typer.Option(help="Rounds in which all are timed; slow cases have at least 3.", rich_help_panel=_RUN)
]
Out = Annotated[Path, typer.Option(parser=options.path, help="Folder of the results.", rich_help_panel=_RUN)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.", rich_help_panel=_RUN)]


@options.command
def bench(
    suites: Suites = "grid,elementwise",
    cells: Cells = "all",
    sizes: Sizes = None,
    lengths: LengthsOption = "lognormal,ewt",
    modes: Modes = "all",
    dtypes: Dtypes = "float32",
    threads: Threads = None,
    competitors: Competitors = "all",
    rounds: Rounds = 7,
    out: Out = Path("runs/bench"),
    overwrite: Overwrite = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001
) -> None:
    """Time the recurrent layers, against PyTorch's and, where they are installed, other engines'.

    A competitor is timed only after its answer is verified. The folder gets a table (results.md, results.csv) and a
    picture (results.png). By default, it takes about ten minutes on two processors.

    For example:

    raglane bench

    raglane bench --lengths my-lengths.txt --sizes 64x256x80 --cells lstm

    raglane bench --suites all --lengths all --dtypes all --out runs/everything

    raglane bench --threads 1,2,4,8 --sizes 256x128x64
    """
    # Before the first case, rather than after the last.
    for module in ("matplotlib", "matplotlib.figure"):
        require(module, "bench")
    _check_rounds(rounds)
    from raglane.lock import locked

    _check_out(out, overwrite)
    chosen = _cases(suites, cells, sizes, lengths, modes, dtypes, threads)
    rivals = _rivals(competitors)

    def say(line: str) -> None:
        if not quiet:
            console.say(line)

    with locked(out, "out"):
        _run(chosen, rivals, rounds, out, say)


def _run(cases: Sequence[Case], rivals: Sequence[str], rounds: int, out: Path, say: Callable[[str], None]) -> None:
    """Measure, write the files, and say what came of it."""
    from raglane.bench import machine, tables
    from raglane.bench.run import installed, measure
    from raglane.files import settle, write_folder

    _, missing = installed(rivals)
    for line in missing:
        say(line)
    say(f"cases: {len(cases)}, rounds: {rounds}, load: {machine.load():.2f} on {os.cpu_count()} processors")
    say(tables.heading_line())
    report = measure(cases, rivals, rounds=rounds, watch=lambda result: say(tables.case_line(result)))
    files = _files(report)
    write_folder(out, files)
    settle(out)
    for line in [*report.notes[len(missing) :], *tables.summary_lines(report)]:
        say(line)
    say(f"written: {', '.join(str(out / name) for name in files)}")
    if report.faults:
        for fault in report.faults:
            say(f"wrong: {fault}")
        raise typer.Exit(1)


def _files(report: Report) -> dict[str, bytes]:
    from raglane.bench import chart, tables

    title = f"Raglane {report.facts['raglane']} against torch {report.facts['torch']}\n{report.facts['processor']}"
    contents = (
        tables.csv_text(report).encode(),
        tables.markdown(report).encode(),
        chart.ratios_png(report.results, title),
    )
    return dict(zip(_FILES, contents, strict=True))


def _cases(
    suites: str, cells: str, sizes: str | None, lengths: str, modes: str, dtypes: str, threads: str | None
) -> list[Case]:
    """The cases that the options ask for."""
    import torch

    from raglane.bench import cases as registry
    from raglane.bench.lengths import LENGTHS

    wanted = _pick("suites", suites, dict.fromkeys(registry.SUITES))
    takes_lengths = any(not registry.SUITES[name].lengths for name in wanted)
    free = {name: rule for name, rule in LENGTHS.items() if not _is_of_a_suite(name)}
    return registry.select(
        wanted,
        cells=_pick("cells", cells, dict.fromkeys(registry.CELLS)),
        sizes=None if sizes is None else [_size(text) for text in _split("sizes", sizes)],
        lengths=_lengths(lengths, free) if takes_lengths else [],
        modes=_pick("modes", modes, dict.fromkeys(registry.MODES)),
        dtypes=_pick("dtypes", dtypes, dict.fromkeys(registry.DTYPES)),
        threads=[torch.get_num_threads()] if threads is None else _threads(threads),
    )


def _is_of_a_suite(name: str) -> bool:
    """Whether lengths are made for one suite: they are not part of ``all``."""
    from raglane.bench.cases import SUITES

    return any(name in suite.lengths for suite in SUITES.values()) and name != "lognormal"


def _split(option: str, text: str) -> list[str]:
    """The parts of a list with commas, none twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentError(message(option, quote(text), "names with a comma between them", "leave none empty"))
    return list(dict.fromkeys(parts))


def _pick(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    """Names of a registry, or all of it."""
    parts = _split(option, text)
    if parts == ["all"]:
        return list(known)
    for part in parts:
        if part not in known:
            raise ArgumentError(message(option, quote(part), f"one of {', '.join(known)}, or all", "pass one of these"))
    return parts


def _size(text: str) -> Size:
    from raglane.bench.cases import Size

    match = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", text, re.ASCII)
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or not all(1 <= number <= _MOST for number in numbers):
        rule = f"sequences x units x features, each from 1 to {_MOST:,}"
        raise ArgumentError(message("sizes", quote(text), rule, "pass 64x256x256, say"))
    return Size(*numbers)


def _lengths(text: str, known: Mapping[str, Lengths]) -> list[Lengths]:
    """Rules by their names; whatever looks like a path, or is one, is a file."""
    from raglane.bench.lengths import lengths_of_file

    if text == "all":
        return list(known.values())
    found = []
    for part in _split("lengths", text):
        if part in known:
            found.append(known[part])
        elif Path(part).exists() or Path(part).suffix or Path(part).name != part:
            found.append(lengths_of_file(Path(part)))
        else:
            rule = f"one of {', '.join(known)}, all, or a file"
            raise ArgumentError(message("lengths", quote(part), rule, "pass one of these, or the path of a text file"))
    return found


def _threads(text: str) -> list[int]:
    most = max(64, 4 * (os.cpu_count() or 1))
    counts = []
    for part in _split("threads", text):
        if not (part.isascii() and part.isdigit() and len(part) < 10 and 1 <= int(part) <= most):
            rule = f"whole numbers from 1 to {most} on this machine, with commas between them"
            raise ArgumentError(message("threads", quote(part), rule, "pass 1,2, say"))
        counts.append(int(part))
    return counts


def _rivals(text: str) -> list[str]:
    """Who takes part besides ours; who is asked for by name must be installed."""
    from raglane.bench.competitors import COMPETITORS, RIVALS

    names = _pick("competitors", text, dict.fromkeys(RIVALS))
    if text != "all":
        for module in (module for name in names for module in COMPETITORS[name].modules):
            require(module, "bench")
    return names


def _check_rounds(rounds: int) -> None:
    if not 1 <= rounds <= 10_000:
        raise ArgumentError(message("rounds", str(rounds), "from 1 to 10,000", "pass 7, say"))


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that results must not be written to, before any work is done."""
    from raglane.files import check_place
    from raglane.lock import LOCK

    if not out.exists() and not out.is_symlink():
        check_place("out", out)
        return
    names = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else None
    if names is None or not names <= set(_FILES):
        raise ArgumentError(message("out", repr(str(out)), "a new folder, or one of results", "give another --out"))
    here = Path.cwd()
    if out.resolve() in (here, *here.parents):
        rule = "results are a folder beside others, which is replaced as a whole"
        raise ArgumentError(message("out", f"{str(out)!r}, the current folder or one above it", rule, "name a new one"))
    check_place("out", out.absolute().parent)
    if names and not overwrite:
        rule = "results are not replaced unasked"
        raise ArgumentError(
            message("out", f"{str(out)!r}, where results are already", rule, "give another --out, or --overwrite")
        )
