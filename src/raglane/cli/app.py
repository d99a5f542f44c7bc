"""The commands of ``raglane`` joined, and what becomes of their errors: one line, and an exit code."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated, Any

import typer

from raglane._utils.messages import message, quote, shorten
from raglane.cli.compare import bench, compare
from raglane.cli.console import complain, say
from raglane.cli.data import convert, inspect
from raglane.cli.models import evaluate, export, predict, sample
from raglane.cli.train import train, tune
from raglane.errors import DivergedError, RaglaneError
from raglane.training.own_cell import place_of_error

_EXIT_CODES = (
    "Exit codes: 0 done; 1 a fault of Raglane; 2 bad input, or a machine that is full; 3 a training that ran away; "
    "130 stopped by Ctrl-C; 143 stopped by SIGTERM."
)
# Characters of a message that is not our own: it quotes what was typed, however long.
_LONGEST = 500

# What Typer says, in words of Pydantic, of an entry that is no number.
_NO_NUMBER = re.compile(r"Input should be a valid (integer|number)")

app = typer.Typer(
    name="raglane",
    epilog=_EXIT_CODES,
    help="Recurrent networks on sequences of different lengths: convert, inspect, train, evaluate, predict.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            say(f"raglane {version('raglane')}")
        except PackageNotFoundError:
            say("raglane (not installed as a package)")
        raise typer.Exit


@app.callback()
def _raglane(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Recurrent networks on sequences of different lengths: convert, inspect, train, evaluate, predict."""


for command in (convert, inspect, train, evaluate, predict, sample, compare, tune, export, bench):
    app.command(epilog=_EXIT_CODES)(command)

# The root of the errors that Typer raises for wrong usage. Typer does not export it, and brings its own copy of
# click or imports it, depending on its version; an ancestor of a class that it does export is right in both.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(arguments: list[str]) -> int:
    """Run a command and turn its errors into one line each."""
    debug = "--debug" in arguments
    try:
        with warnings.catch_warnings():
            if not debug:
                # Warnings of libraries are for those who write the program, not for those who run it.
                warnings.simplefilter("ignore")
            return app(arguments, prog_name="raglane", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        message, code = "stopped", 130
    except Exception as error:
        if debug:
            complain(*traceback.format_exc().splitlines())
        message, code = _explain(error, arguments)
    # Our own messages are one line; those of libraries may be several.
    complain(f"raglane: error: {' '.join(message.splitlines())}")
    return code


def _explain(error: Exception, arguments: list[str]) -> tuple[str, int]:
    """What an error means to the user, and the exit code."""
    if isinstance(error, _UsageError):
        return shorten(_no_number(error, arguments) or error.format_message(), _LONGEST), 2  # type: ignore[attr-defined]
    if isinstance(error, DivergedError):
        return str(error), 3
    if isinstance(error, RaglaneError):
        return str(error), 2
    if isinstance(error, OSError):
        return _describe(error), 2
    if _is_out_of_memory(error):
        asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
        got = f"too little for {asked[1]} more" if asked else "too little"
        fix = "reduce hidden_size, num_layers, embedding or batch_size (--hidden-size, --batch-size, ...)"
        return message("memory", got, "large enough for the model and a batch", fix), 2
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        got = "a worker that died, possibly for lack of memory"
        fix = "pass fewer; resume the run from its last checkpoint with --resume"
        return message("--workers", got, "processes that run until the end", fix), 2
    place = place_of_error(error)
    if place is not None:
        return message(
            "--cell", shorten(place, _LONGEST), "a cell whose step runs", "correct it; use --debug for the traceback"
        ), 2
    text = shorten(f"{type(error).__name__}: {error}".splitlines()[0], _LONGEST)
    return f"{text} (a fault of Raglane; --debug shows the trace)", 1


def _no_number(error: Any, arguments: list[str]) -> str | None:
    """The line of what is no number where one belongs: Typer's does not say what was given. None of other errors."""
    found = _NO_NUMBER.search(error.format_message())
    flags: list[str] = getattr(getattr(error, "param", None), "opts", [])
    given = [f"{before}={after}" for before, after in pairwise(arguments) if before in flags] + arguments
    values = [text.split("=", 1)[1] for text in given if text.split("=", 1)[0] in flags and "=" in text]
    if found is None or not values:
        return None
    kind, example = ("a whole number", "8") if found[1] == "integer" else ("a number", "0.5")
    return message(flags[0], quote(values[-1]), kind, f"write it in digits, such as {example}")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, which PyTorch says of a CPU in the words of a RuntimeError only."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "size calculation overflowed")
    # By its name, so that a command that needs no PyTorch does not wait for it.
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or named or told


def _describe(error: OSError) -> str:
    """An error of the system in a line, with the file where it happened."""
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    place = f"{shorten(str(error.filename), _LONGEST)}: " if error.filename else ""
    return f"{place}{reason}; nothing half-written is left"
