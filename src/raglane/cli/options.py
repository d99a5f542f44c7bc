"""The options of the commands, their help and panels.

A parameter ``Annotated[Given, Settings]`` of a command becomes one option per field of the
dataclass, described by :mod:`raglane._utils.options`; ``Annotated[Given, Settings, "task cell"]``
selects some of the fields. ``--config`` reads options from a TOML file.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from raglane._utils.files import read_file
from raglane._utils.json import checked, rule_of
from raglane._utils.messages import flags, nearest, quote
from raglane._utils.options import DATA, MODEL, RUN, TRAINING, flag_of, options
from raglane.data import columns
from raglane.errors import ArgumentError
from raglane.runs.sources import SequenceSource
from raglane.training.own_cell import name_cell, named_choice
from raglane.training.settings import Settings
from raglane.training.stored import new_word

Given = Mapping[str, Any]
"""The options of a dataclass that were passed, by name; without those at their defaults."""

Origins = Mapping[str, str]
"""The origin of each option's value, by name: ``option``, ``file`` or ``default``."""

CONFIG = "config"
"""The option for a TOML file."""

HELP_ALL = "help_all"
"""The option for a help page with all options."""

IGNORE = "ignore"
"""The option for keys of a TOML file to ignore."""

OPTION = "option"
FILE = "file"
DEFAULT = "default"

# The largest TOML file that is read, in bytes.
_LONGEST = 1_000_000


def path(text: str | Path) -> Path:
    """Parse the path of an option; an empty one would mean the current folder."""
    name = str(text)
    if not name:
        raise typer.BadParameter("an empty path; name a file or a folder")
    if "\0" in name:
        raise typer.BadParameter(f"{quote(name)}, which is no valid path; remove the zero byte")
    if "://" in name:
        raise typer.BadParameter(f"{quote(name)}, a URL; name a file or folder of this machine")
    return Path(name)


class _Url(str):
    """A URL in place of a path; the command uses a copy of what is there."""


def path_or_url(text: str | Path) -> Path | _Url:
    """Parse the path of an option, or a URL."""
    return _Url(text) if "://" in str(text) else path(text)


def command(function: Callable[..., None], common: str = "") -> Callable[..., None]:
    """Return a function as a command, with one option per field of its dataclass parameters.

    The help page lists only the options named in ``common``, if there are any, and --help-all the
    others too.
    """
    names_of: dict[str, list[str]] = {}
    key_of: dict[str, Key] = {}
    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    hints = get_type_hints(function, include_extras=True)
    origins: str | None = None
    for name, parameter in inspect.signature(function).parameters.items():
        described, *more = getattr(hints[name], "__metadata__", (None,))
        if is_dataclass(described):
            kind_of = _fields(described, *more)
            names_of[name] = list(kind_of)
            parameters += [_parameter(kind, field) for field, kind in kind_of.items()]
            key_of |= {field: _key(kind, field) for field, kind in kind_of.items()}
        elif hints[name] == Origins:
            origins = name
        else:
            if described is not None and get_args(hints[name])[0] is bool:
                described.metavar = ""  # Typer would show <bool>, as if the flag took a value
            if isinstance(described, typer.models.ArgumentInfo) and described.metavar is None:
                described.metavar = name.upper()
            parameters.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            key_of[name] = Key(name.replace("_", "-"), get_args(hints[name])[0])
    parameters.append(
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Debug)
    )
    if CONFIG in key_of:
        _insert_config(parameters, key_of)
    if common:
        parameters = [_hidden_unless(common.split(), parameter) for parameter in parameters]
        parameters.append(
            inspect.Parameter(
                HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HelpAll
            )
        )

    @functools.wraps(function)
    def run(context: typer.Context, **values: Any) -> None:
        for name in (IGNORE, HELP_ALL, "debug"):
            values.pop(name, None)
        sources = {name: origin_of(context, name) for name in key_of}
        for field, names in names_of.items():
            chosen = {name: values.pop(name) for name in names}
            values[field] = {
                name: value for name, value in chosen.items() if sources[name] != DEFAULT
            }
        if origins is not None:
            values[origins] = sources
        from_file = {
            name: f"{key_of[name].name} in {values[CONFIG]}"
            for name in key_of
            if sources[name] == FILE
        }
        with flags(_flags_of(context) | from_file):
            try:
                for name, value in values.items():
                    if isinstance(value, _Url):
                        from raglane.data.sources.locations import fetched

                        values[name] = fetched(value)
                _name_cells(values, sources)
                function(**values)
            except KeyboardInterrupt as error:
                # Some versions of Typer exit without a message on Ctrl-C.
                raise typer.Abort from error

    # For the help page: one line per paragraph, without markup.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs).replace("[", r"\[")
    run.__signature__ = inspect.Signature(sorted(parameters, key=_panel))  # type: ignore[attr-defined]
    return run


def _fields(*described: Any) -> dict[str, Any]:
    """Return the classes of the options of dataclasses by name; or of one, followed by names."""
    kind, *more = described
    if more and isinstance(more[0], str):
        return dict.fromkeys(more[0].split(), kind)
    return {name: each for each in described for name in options(each)}


def _insert_config(parameters: list[inspect.Parameter], key_of: dict[str, Key]) -> None:
    """Replace the parameter for a TOML file by ``--config`` and ``--ignore``."""
    for name in (CONFIG, "show_config"):
        key_of.pop(name, None)
    config, ignore = _config(key_of, ("search",) if "trials" in key_of else ())
    position = next(position for position, option in enumerate(parameters) if option.name == CONFIG)
    named = parameters[position]
    parameters[position : position + 1] = [
        named.replace(annotation=config),
        named.replace(name=IGNORE, annotation=ignore),
    ]


def _hidden_unless(common: list[str], parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter whose option the help page leaves out, unless its name is in a list."""
    details = getattr(parameter.annotation, "__metadata__", (None,))[0]
    if not isinstance(details, typer.models.OptionInfo) or parameter.name in common:
        return parameter
    # The same option of another command is not hidden.
    hidden = copy.copy(details)
    hidden.hidden = True
    annotated: Any = Annotated
    return parameter.replace(annotation=annotated[get_args(parameter.annotation)[0], hidden])


def _show_all(context: typer.Context, is_given: bool) -> None:
    """Print the help page with all options, and exit."""
    if not is_given:
        return
    whole = copy.copy(context.command)
    whole.params = [copy.copy(parameter) for parameter in whole.params]
    for parameter in whole.params:
        parameter.hidden = False  # type: ignore[attr-defined]
    typer.echo(whole.get_help(context), color=context.color)
    raise typer.Exit


def _name_cells(values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Resolve the cell: the command line may name a file with code, a TOML file may not."""
    choices = next(
        (table for table in values.values() if isinstance(table, dict) and "cell" in table), None
    )
    if choices is not None:
        name = named_choice if sources["cell"] == FILE else name_cell
        choices["cell"] = name(choices["cell"])


def _flags_of(context: typer.Context) -> dict[str, str]:
    """Return the flags of this command and of training by the names of Python's arguments."""
    trained = {
        name: flag_of(kind, name)
        for kind in (Settings, columns.Columns, SequenceSource)
        for name in options(kind)
    }
    special = {
        option.name or "": option.opts[0]
        for option in context.command.params
        if option.opts[0].startswith("-")
    }
    # For commands without the option: the command that resumes their runs.
    elsewhere = {"resume": "raglane train --resume"}
    return {"folder": "--output", "cell": "--cell"} | elsewhere | trained | special


def _config(key_of: Mapping[str, Key], tables: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the options ``--config`` and ``--ignore``, which are parsed before the others."""

    def load(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None and not context.resilient_parsing:
            context.default_map = read_config(file, key_of, tables)
            leave_out(context, context.params.get(IGNORE))
        return file

    def leave_out(context: typer.Context, keys: list[str] | None) -> list[str] | None:
        # Typer calls the callbacks in the order of the command line.
        for name in names_of(keys or [], key_of):
            (context.default_map or {}).pop(name, None)
        return keys

    shared: dict[str, Any] = {"is_eager": True, "show_default": "none", "rich_help_panel": RUN}
    text = "TOML file of options, e.g. the run.toml of a run. Options of the command line take precedence."
    config = typer.Option("--config", parser=path, callback=load, help=text, **shared)
    text = "Ignore an option in the file of --config; several: repeat it, or a,b."
    ignore = typer.Option("--ignore", metavar="NAME", callback=leave_out, help=text, **shared)
    return Annotated[Path | None, config], Annotated[list[str] | None, ignore]


def _panel(parameter: inspect.Parameter) -> int:
    """Return the position of a parameter's panel on the help page, first without one."""
    details = getattr(parameter.annotation, "__metadata__", (None,))[0]
    panels = (MODEL, TRAINING, DATA, RUN)
    panel = getattr(details, "rich_help_panel", None)
    return panels.index(panel) if panel in panels else -1


def _parameter(kind: Any, name: str) -> inspect.Parameter:
    """Return the parameter of a command for a field of a dataclass."""
    default = next(field.default for field in fields(kind) if field.name == name)
    annotated: Any = Annotated
    key = _key(kind, name)
    annotation = annotated[str if key.word else key.hint, _typer_option(kind, name)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


# Evaluating the annotations of all fields takes milliseconds, and each command has dozens of them.
_hints_of = functools.cache(get_type_hints)


def _key(kind: Any, name: str) -> Key:
    """Return the key in a TOML file of a field of a dataclass, with the type of its text."""
    hint = _hints_of(kind)[name]
    return Key(flag_of(kind, name), _WRITTEN.get(hint, hint), options(kind)[name].also)


# The types of options whose type in Python is another one.
_WRITTEN = {tuple[str, ...] | None: list[str] | None, bool | None: str | None}
# What a list has, on the help page.
_OF_LISTS = {list[str] | None: "NAME", list[float] | None: "<float>"}


def _typer_option(kind: Any, name: str) -> Any:
    option = options(kind)[name]
    hint = _key(kind, name).hint
    number = f"<int>|{option.also}" if option.also else _OF_LISTS.get(hint)
    flag = flag_of(kind, name)
    if hint is bool:
        number = ""
        # There is no --no-no-header.
        negated = "" if flag.startswith("--no-") else f"/--no-{flag.removeprefix('--')}"
        flag = f"{flag}{negated}"

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in option.choices if choice.startswith(incomplete)]

    return typer.Option(
        flag,
        parser=functools.partial(_number_or, option.also) if option.also else None,
        metavar=option.metavar or "|".join(option.choices) or number,
        help=option.help,
        show_default=option.unset or number != "",
        rich_help_panel=option.panel,
        autocompletion=complete if option.choices else None,
    )


def _number_or(word: str, text: str | int) -> int | str:
    """Parse a whole number or a given word."""
    if text == word:
        return word
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{quote(text)} is neither a whole number nor {word!r}.") from None


class Key(NamedTuple):
    """An option in a TOML file: its flag, its type, and a word that is also valid."""

    flag: str
    hint: Any
    word: str | None = None

    @property
    def name(self) -> str:
        """The key in the file."""
        return self.flag.removeprefix("--")

    def read(self, value: Any, file: Path) -> Any:
        """Return the value of this option in a file, or raise."""
        if self.word is not None and value == self.word:
            return value
        try:
            result = checked(str if self.hint in (Path, Path | None) else self.hint, value, "")
        except ValueError as error:
            fix = "correct it, or leave it out"
            raise ArgumentError(
                f"{self.name} in {file}", quote(value), rule_of(error), fix
            ) from error
        return str(result) if self.word is not None else result


def read_config(file: Path, keys: Mapping[str, Key], tables: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options in a TOML file, by their names in Python."""
    return {
        name: keys[name].read(value, file)
        # A run.toml may be older than this version.
        for key, value in starmap(_new_word, read_toml(file).items())
        if key not in tables
        for name in names_of([key], keys, str(file))
    }


def _new_word(key: str, value: Any) -> tuple[str, Any]:
    name, value = new_word(key.replace("-", "_"), value)
    return (key if name == key.replace("-", "_") else name), value


def names_of(keys: Iterable[str], valid: Mapping[str, Key], where: str = "--ignore") -> list[str]:
    """Return the names in Python of options with the given keys."""
    names = []
    for key in keys:
        name = next(
            (name for name, option in valid.items() if option.name == key.replace("_", "-")), None
        )
        if name is None:
            # The key may be the name in Python, which can differ from the flag.
            listed = [option.name for option in valid.values()]
            near = valid[key].name if key in valid else nearest(key, listed)
            rule = "a file of options of this command, named as flags without dashes"
            fix = "see --help for all options"
            raise ArgumentError(
                where, f"the option {quote(key)}", rule, f"write {near}" if near else fix
            )
        names.append(name)
    return names


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file."""
    rule = "a TOML file, such as the run.toml of a run"
    fix = "correct it, or name another file"
    try:
        content = read_file(file)
        if len(content) > _LONGEST:
            raise ArgumentError("--config", f"{file}, of {len(content):,} bytes", rule, fix)
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ArgumentError("--config", f"{file}: {error.strerror or error}", rule, fix) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(str(file), f"{error}", rule, fix) from error


def origin_of(context: typer.Context, name: str) -> str:
    """Return the origin of an option's value."""
    source = context.get_parameter_source(name)
    names = {"COMMANDLINE": OPTION, "ENVIRONMENT": OPTION, "DEFAULT_MAP": FILE}
    return DEFAULT if source is None else names.get(source.name, DEFAULT)


def option(help: str, panel: str = RUN, *flags: str, **details: Any) -> Any:
    """Return an option of Typer for a parameter that is in no dataclass."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **details)


def output(help: str, *flags: str, **details: Any) -> Any:
    """Return the option for an output file or folder, by default ``--output``, or ``-o``."""
    return option(help, RUN, *(flags or ("--output", "-o")), parser=path, **details)


def argument(help: str, **details: Any) -> Any:
    """Return an argument of Typer that is a path or a URL."""
    return typer.Argument(help=help, show_default=False, **{"parser": path_or_url, **details})


Choices = Annotated[Given, Settings]
Columns = Annotated[Given, columns.Columns, SequenceSource]
Device = Annotated[str, _typer_option(Settings, "device")]

_DATA = (
    "A .csv, .tsv, .jsonl, .json, .parquet, .arrow, .npz, .ts, .conll, .arff, .xlsx or .txt file, a folder of "
    "recordings or texts, a folder written by raglane convert, or a URL of these."
)
Data = Annotated[Path | None, argument(_DATA)]
DataOrRun = Annotated[Path | None, argument(f"{_DATA} With --resume, by default the run's.")]
Run = Annotated[Path, argument("Folder of a run, or of a saved model, or its URL.")]
Cell = Annotated[
    str | None,
    option(
        "User-defined cell of the model; its file must be unchanged since training.",
        metavar="FILE.py:CLASS",
    ),
]
Format = Annotated[
    str | None,
    option(
        "Format of the data.",
        DATA,
        metavar="ts|parquet|arrow|jsonl|npz|csv|arff|xlsx|conll|text|folder",
        show_default="by suffix",
    ),
]
Test = Annotated[
    Path | None,
    option(
        "Data on which to evaluate the best model at the end.",
        DATA,
        parser=path_or_url,
        show_default="none",
    ),
]
Validation = Annotated[
    Path | None,
    option(
        "Data whose loss selects the best epoch.", DATA, parser=path_or_url, show_default="held out"
    ),
]
Out = Annotated[
    Path | None,
    output("Folder of the run.", show_default="runs/<data>-<task>-<cell>"),
]
Resume = Annotated[
    bool, option("Resume the run in --output, with its data and settings.", RUN, "--resume")
]
Overwrite = Annotated[bool, option("Replace the run in --output.", RUN, "--overwrite")]
Horizon = Annotated[int, option("Number of elements to forecast (forecast, language).")]
Beam = Annotated[
    int | None,
    option("Hypotheses of a beam search (transcribe).", show_default="1, greedy; 16 with --n-best"),
]
NBest = Annotated[int, option("Also report the N best hypotheses (transcribe).")]
Top = Annotated[int, option("Also report the N most likely classes.")]
PredictionBatchSize = Annotated[int, option("Sequences per batch.", RUN, "--batch-size")]
Config = Annotated[Path | None, "replaced by the options of _config"]
ShowConfig = Annotated[
    bool,
    option(
        "Print all options as TOML with their origins (option, file or default), and exit.",
        RUN,
        "--show-config",
    ),
]
Json = Annotated[
    Path | None,
    output("File for the results as JSON; - for standard output.", "--json", show_default="none"),
]
Quiet = Annotated[bool, option("Print only errors.", RUN, "--quiet", "-q")]
_HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        metavar="",
        is_eager=True,
        callback=_show_all,
        help="Show this message with all options, and exit.",
    ),
]
_Debug = Annotated[bool, option("Show warnings and tracebacks.", RUN, "--debug")]
