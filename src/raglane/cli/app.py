"""The application ``raglane``: its commands, and their errors as one line and an exit code."""

from __future__ import annotations

import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raglane._utils.messages import message, nearest, quote, shorten
from raglane.cli.console import log, log_error
from raglane.cli.once import OnceCommand
from raglane.errors import DivergedError, RaglaneError
from raglane.training.own_cell import place_of_error

_EXIT_CODES = (
    "Exit codes: 1 internal error; 2 invalid input or out of disk or memory; 3 training diverged; "
    "130 stopped by Ctrl-C; 143 stopped by SIGTERM."
)
# The modules of the commands, in the order of the help page. Only that of a named command is
# imported.
_HOMES = {
    "demo": "train",
    "convert": "data",
    "inspect": "data",
    "train": "train",
    "show": "show",
    "evaluate": "models",
    "predict": "models",
    "sample": "models",
    "compare": "compare",
    "tune": "train",
    "export": "models",
    "serve": "serve",
    "bench": "bench",
}
# The longest message of another package, in characters: it may quote any input.
_LONGEST = 500

# Typer's message, in the words of Pydantic, for an invalid number.
_INVALID_NUMBER = re.compile(r"Input should be a valid (integer|number)")


def _without_values(parameters: list[Any]) -> list[Any]:
    """Return parameters whose flags are listed without <bool>, as if they took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Group(TyperGroup):
    """The command raglane."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_values(super().get_params(ctx))


def _show_version(is_given: bool) -> None:
    if is_given:
        try:
            log(f"raglane {version('raglane')}")
        except PackageNotFoundError:
            log("raglane (not installed as a package)")
        raise typer.Exit


def _raglane(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            metavar="",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


class _Command(OnceCommand):
    """A command whose usage line has arguments as RUN [DATA], without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the name."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"\{(.*?)\}(\.{3})?", r"\1", piece) for piece in pieces]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_values(super().get_params(ctx))


def application(names: Iterable[str] = tuple(_HOMES)) -> typer.Typer:
    """Return the application with some of its commands."""
    app = typer.Typer(
        name="raglane",
        cls=_Group,
        epilog=_EXIT_CODES,
        help="Recurrent networks on sequences of different lengths. Begin with raglane demo.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_raglane)
    for name in names:
        command = getattr(import_module(f"raglane.cli.{_HOMES[name]}"), name)
        app.command(cls=_Command, epilog=_EXIT_CODES)(command)
    return app


def run(arguments: list[str]) -> int:
    """Run a command, print an error as one line, and return the exit code."""
    debug = "--debug" in arguments
    named = [name for name in arguments[:1] if name in _HOMES]
    try:
        app = application(named or _HOMES)
        with warnings.catch_warnings():
            if not debug:
                # Warnings and logs of libraries address programmers.
                warnings.simplefilter("ignore")
                logging.getLogger().addHandler(logging.NullHandler())
            return app(arguments, prog_name="raglane", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        text = "stopped"
        code = 130
    except Exception as error:
        if debug:
            log_error(*traceback.format_exc().splitlines())
        text, code = _explain(error, arguments)
    # Messages of libraries may have several lines.
    log_error(f"raglane: error: {' '.join(text.splitlines())}")
    return code


def _explain(error: Exception, arguments: list[str]) -> tuple[str, int]:
    """Return the message and the exit code of an error."""
    if isinstance(error, typer.TyperException):
        text = _unknown_option(error) or _invalid_number(error, arguments) or error.format_message()
        return shorten(text, _LONGEST), 2
    if isinstance(error, DivergedError):
        return str(error), 3
    if isinstance(error, RaglaneError):
        return str(error), 2
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        file = f"{shorten(str(error.filename), _LONGEST)}: " if error.filename else ""
        return f"{file}{reason}; no partial file is left", 2
    if _is_out_of_memory(error):
        size = re.search(r"allocate ([\d.]+ \w+)", str(error))
        need = f"{size[1]} more are needed for" if size else "it cannot hold"
        option_of = {"bench": "--sizes", "sample": "--count, --max-length or --beam-size"}
        fix = option_of.get(
            "".join(arguments[:1]), "--hidden-size, --num-layers, --embedding or --batch-size"
        )
        return f"Memory is exhausted: {need} model and batch. Reduce {fix}.", 2
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        fix = "Pass fewer --workers; --resume continues the run from its last checkpoint."
        return f"A worker of the DataLoader died, e.g. because memory was full. {fix}", 2
    code_line = place_of_error(error)
    if code_line is not None:
        return (
            f"--cell failed in {shorten(code_line, _LONGEST)}. Correct it; --debug shows the traceback.",
            2,
        )
    text = shorten(f"{type(error).__name__}: {error}".splitlines()[0], _LONGEST)
    return f"{text} (internal error; --debug shows the traceback)", 1


def _unknown_option(error: Any) -> str | None:
    """Return a message with the closest option of the command, or None for another error."""
    if type(error).__name__ != "NoSuchOption" or error.ctx is None:
        return None
    near = nearest(
        error.option_name,
        [
            flag
            for parameter in error.ctx.command.params
            for flag in parameter.opts
            if flag[0] == "-"
        ],
    )
    fix = f"pass {near}" if near else "see --help for all options"
    return message(
        "option", quote(error.option_name), f"an option of {error.ctx.command_path}", fix
    )


def _invalid_number(error: Any, arguments: list[str]) -> str | None:
    """Return a message that quotes the invalid number of an option, which Typer's message does not;
    else None.
    """
    match = _INVALID_NUMBER.search(error.format_message())
    flags: list[str] = getattr(getattr(error, "param", None), "opts", [])
    pairs = [
        f"{before}={after}" for before, after in pairwise(arguments) if before in flags
    ] + arguments
    values = [
        text.split("=", 1)[1] for text in pairs if text.split("=", 1)[0] in flags and "=" in text
    ]
    if match is None or not values:
        return None
    kind, example = ("a whole number", "8") if match[1] == "integer" else ("a number", "0.5")
    return message(flags[0], quote(values[-1]), kind, f"write it in digits, such as {example}")


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if memory ran out; on a CPU, PyTorch raises a RuntimeError then."""
    words = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "bad_alloc",
        "size calculation overflowed",
    )
    # By name, because torch may not be imported.
    is_on_device = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    is_on_cpu = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or is_on_device or is_on_cpu
