"""Time the recurrent layers against PyTorch's and those of other installed engines.

    python benchmarks/layers.py
    python benchmarks/layers.py --lengths my-lengths.txt --sizes 64x256x80 --cells lstm
    python benchmarks/layers.py --suites all --lengths all --dtypes all --out runs/everything
    python benchmarks/layers.py --threads 1,2,4,8 --sizes 256x128x64

A competitor is timed only after its answer is verified. The folder gets a table (results.md,
results.csv) and a picture (results.png). By default, it takes about ten minutes on two processors.
The other engines: pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from harness import chart, tables
from harness.cases import CELLS, DTYPES, MODES, SUITES, Case, select
from harness.competitors import COMPETITORS, RIVALS
from harness.lengths import LENGTHS, Lengths, of_file
from harness.run import Report, installed, measure

from raglane._utils.files import check_writable, settle, write_folder
from raglane._utils.lock import LOCK, locked
from raglane._utils.messages import quote, require
from raglane.cli.console import log, log_error
from raglane.errors import ArgumentError, RaglaneError
from raglane.native import machine
from raglane.planner.bench import parts_of, pick, size_of

# The files of a folder of results; only a folder with no other files is replaced.
_FILES = ("results.csv", "results.md", "results.png")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _bench(_parser().parse_args(arguments))
    except KeyboardInterrupt:
        return 130
    except (argparse.ArgumentError, RaglaneError, OSError) as error:
        log_error(f"layers.py: error: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    every = "a list with commas, or all"
    parser.add_argument(
        "--suites", default="grid,elementwise", help=f"{', '.join(SUITES)}: {every}"
    )
    parser.add_argument("--cells", default="all", help=f"{', '.join(CELLS)}: {every}")
    parser.add_argument(
        "--sizes", help="sequences x units x features, with commas; the suite's own if left out"
    )
    parser.add_argument(
        "--lengths",
        default="lognormal,ewt",
        help=f"{', '.join(_free())}, or text files with a length per line: {every}; for the suites grid and drop-in",
    )
    parser.add_argument("--modes", default="all", help="train,infer or one of them")
    parser.add_argument("--dtypes", default="float32", help="float32,bfloat16 or one of them")
    parser.add_argument(
        "--threads", help="numbers of threads with commas; PyTorch's choice if left out"
    )
    parser.add_argument(
        "--competitors",
        default="all",
        help=f"compared with ours: {', '.join(RIVALS)}; {every} of the installed ones",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="in which all are timed; slow cases have at least 3"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="folder of the results"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return parser


def _bench(given: argparse.Namespace) -> int:
    # Checked before the first case.
    for module in ("matplotlib", "matplotlib.figure"):
        require(module, "bench")
    if not 1 <= given.rounds <= 10_000:
        raise ArgumentError("rounds", str(given.rounds), "from 1 to 10,000", "pass e.g. 7")
    _check_out(given.out, given.overwrite)
    cases, rivals = _cases(given), _rivals(given.competitors)
    with locked(given.out, "out"):
        return _run(cases, rivals, given.rounds, given.out, _nothing if given.quiet else log)


def _nothing(*_: str) -> None:
    pass


def _run(
    cases: Sequence[Case], rivals: Sequence[str], rounds: int, out: Path, log: Callable[..., None]
) -> int:
    """Measure, write the files, and print a summary."""
    _, missing = installed(rivals)
    for line in missing:
        log(line)
    log(
        f"cases: {len(cases)}, rounds: {rounds}, load: {machine.load():.2f} on {os.cpu_count()} processors"
    )
    log(tables.heading_line())
    report = measure(
        cases, rivals, rounds=rounds, watch=lambda result: log(tables.case_line(result))
    )
    files = _files(report)
    write_folder(out, files)
    settle(out)
    for line in [*report.notes[len(missing) :], *tables.summary_lines(report)]:
        log(line)
    log(f"written: {', '.join(str(out / name) for name in files)}")
    for fault in report.faults:
        log(f"wrong: {fault}")
    return 1 if report.faults else 0


def _files(report: Report) -> dict[str, bytes]:
    title = f"Raglane {report.facts['raglane']} against torch {report.facts['torch']}\n{report.facts['processor']}"
    contents = (
        tables.csv_text(report).encode(),
        tables.markdown(report).encode(),
        chart.ratios_png(report.results, title),
    )
    return dict(zip(_FILES, contents, strict=True))


def _cases(given: argparse.Namespace) -> list[Case]:
    """Return the cases of the options."""
    wanted = pick("suites", given.suites, SUITES)
    takes_lengths = any(not SUITES[name].lengths for name in wanted)
    return select(
        wanted,
        cells=pick("cells", given.cells, CELLS),
        sizes=None
        if given.sizes is None
        else [size_of(text) for text in parts_of("sizes", given.sizes)],
        lengths=_lengths(given.lengths, _free()) if takes_lengths else [],
        modes=pick("modes", given.modes, MODES),
        dtypes=pick("dtypes", given.dtypes, DTYPES),
        threads=[torch.get_num_threads()] if given.threads is None else _threads(given.threads),
    )


def _free() -> dict[str, Lengths]:
    """Return the lengths that are not reserved for a suite."""
    own = {name for suite in SUITES.values() for name in suite.lengths} - {"lognormal"}
    return {name: rule for name, rule in LENGTHS.items() if name not in own}


def _lengths(text: str, known: Mapping[str, Lengths]) -> list[Lengths]:
    """Return the rules of some names; a name that is a path, or looks like one, is a file."""
    if text == "all":
        return list(known.values())
    found = []
    for part in parts_of("lengths", text):
        if part in known:
            found.append(known[part])
        elif Path(part).exists() or Path(part).suffix or Path(part).name != part:
            found.append(of_file(Path(part)))
        else:
            rule = f"one of {', '.join(known)}, all, or a file"
            raise ArgumentError(
                "lengths", quote(part), rule, "pass one of these, or the path of a text file"
            )
    return found


def _threads(text: str) -> list[int]:
    most = max(64, 4 * (os.cpu_count() or 1))
    counts = []
    for part in parts_of("threads", text):
        if not (part.isascii() and part.isdigit() and len(part) < 10 and 1 <= int(part) <= most):
            rule = f"whole numbers from 1 to {most} on this machine, with commas between them"
            raise ArgumentError("threads", quote(part), rule, "pass e.g. 1,2")
        counts.append(int(part))
    return counts


def _rivals(text: str) -> list[str]:
    """Return the competitors; those that are named must be installed."""
    names = pick("competitors", text, RIVALS)
    if text != "all":
        for module in (module for name in names for module in COMPETITORS[name].modules):
            require(module, "bench")
    return names


def _check_out(out: Path, overwrite: bool) -> None:
    """Raise if results must not be written to a folder."""
    if not out.exists() and not out.is_symlink():
        check_writable("out", out)
        return
    names = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else None
    if names is None or not names <= set(_FILES):
        raise ArgumentError(
            "out", repr(str(out)), "a new folder, or one of results", "give another --out"
        )
    here = Path.cwd()
    if out.resolve() in (here, *here.parents):
        rule = "another folder than the current one and those above it"
        raise ArgumentError("out", repr(str(out)), rule, "name a new folder")
    check_writable("out", out.absolute().parent)
    if names and not overwrite:
        got = f"{str(out)!r}, where results are already"
        raise ArgumentError(
            "out", got, "a folder without results", "give another --out, or --overwrite"
        )


if __name__ == "__main__":
    sys.exit(main())
