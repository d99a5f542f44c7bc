"""The options of the commands, with their help and panels, in one place so that the commands agree.

What a dataclass of :mod:`raglane.training.options` says of its fields stands there alone: a parameter of the kind
``Annotated[Given, Settings]`` is one option for each of them, and ``Annotated[Given, Settings, "task cell"]`` for
these. ``--config`` reads options from a TOML file.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from raglane._utils.files import read_file
from raglane._utils.messages import flags, message, nearest, quote
from raglane.errors import ArgumentError
from raglane.runs.sources import ColumnNames
from raglane.training.options import DATA, MODEL, RUN, TRAINING, flag_of, options
from raglane.training.own_cell import name_cell, named_choice
from raglane.training.settings import Settings
from raglane.training.stored import checked, rule_of

Given = Mapping[str, Any]
"""What was given of the options of a dataclass, by their names; what was left at its default is not in it."""

Origins = Mapping[str, str]
"""Where the value of each option of the command comes from, by names: ``option``, ``file`` or ``default``."""


CONFIG, IGNORE = "config", "ignore"
"""The options that name a file, and what is not to be taken from it."""

OPTION, FILE, DEFAULT = "option", "file", "default"

# More than this is no file of options.
_LONGEST = 1_000_000
_RULE = "a file of options of this command, named as flags without dashes"


def path(text: str | Path) -> Path:
    """The path that an option gives. An empty one would be the current folder, which nobody means."""
    name = str(text)
    if not name:
        raise typer.BadParameter("an empty path; name a file or a folder")
    if "\0" in name:
        raise typer.BadParameter(f"{quote(name)}, which no file can be called; leave the zero byte out")
    if "://" in name:
        rule = "a URL, where a file or a folder belongs; to read it, copy it: raglane convert URL FOLDER"
        raise typer.BadParameter(f"{quote(name)}, {rule}")
    return Path(name)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A function as a command: its parameters of dataclasses are options, sorted by the panels of the help."""
    parts: dict[str, list[str]] = {}
    known: dict[str, Key] = {}
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    hints = get_type_hints(function, include_extras=True)
    origins: str | None = None
    for name, parameter in inspect.signature(function).parameters.items():
        described, *some = getattr(hints[name], "__metadata__", (None,))
        if is_dataclass(described):
            parts[name] = some[0].split() if some else list(options(described))
            parameters += [_parameter(described, part) for part in parts[name]]
            types = get_type_hints(described)
            for part in parts[name]:
                known[part] = Key(flag_of(described, part), types[part], options(described)[part].also)
        elif hints[name] == Origins:
            origins = name
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            known[name] = Key(name.replace("_", "-"), get_args(hints[name])[0])
    # The trace of an error is shown by the application, whatever the command.
    parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Debug))
    if CONFIG in known:
        for name in (CONFIG, "show_config"):
            known.pop(name, None)
        config, ignore = _config(known, ("search",) if "trials" in known else ())
        place = next(place for place, option in enumerate(parameters) if option.name == CONFIG)
        named = parameters[place]
        parameters[place : place + 1] = [
            named.replace(annotation=config),
            named.replace(name=IGNORE, annotation=ignore),
        ]

    @functools.wraps(function)
    def run(context: typer.Context, **values: Any) -> None:
        for name in (IGNORE, "debug"):
            values.pop(name, None)
        sources = {name: origin_of(context, name) for name in known}
        for part, names in parts.items():
            chosen = {name: values.pop(name) for name in names}
            values[part] = {name: value for name, value in chosen.items() if sources[name] != DEFAULT}
        if origins is not None:
            values[origins] = sources
        from_file = {name: f"{known[name].name} in {values[CONFIG]}" for name in known if sources[name] == FILE}
        with flags(_flags_of(context) | from_file):
            _name_cells(values, sources)
            function(**values)

    run.__doc__ = _prose(inspect.getdoc(function) or "")
    run.__signature__ = inspect.Signature(sorted(parameters, key=_panel))  # type: ignore[attr-defined]
    return run


def _name_cells(values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Name the user's own cell: the command line may bring code, a file of options may not."""
    choices = next((part for part in values.values() if isinstance(part, dict) and "cell" in part), None)
    if choices is not None:
        name = named_choice if sources["cell"] == FILE else name_cell
        choices["cell"] = name(choices["cell"])


def _prose(text: str) -> str:
    """A docstring for the help page: a paragraph is a line, for the terminal to wrap, and brackets are no markup."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).replace("[", r"\[")


def _flags_of(context: typer.Context) -> dict[str, str]:
    """The flags by the names of Python's arguments: of this command, and of training, which messages may refer to."""
    trained = {name: flag_of(kind, name) for kind in (Settings, ColumnNames) for name in options(kind)}
    own = {option.name or "": option.opts[0] for option in context.command.params if option.opts[0].startswith("-")}
    # What the command line calls --out is an argument called folder.
    return {"folder": "--out", "cell": "--cell"} | trained | own


def _config(known: Mapping[str, Key], tables: tuple[str, ...]) -> tuple[Any, Any]:
    """``--config`` and ``--ignore`` of a command with these options, which are read before the others."""

    def load(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None and not context.resilient_parsing:
            context.default_map = read_config(file, known, tables)
            leave_out(context, context.params.get(IGNORE))
        return file

    def leave_out(context: typer.Context, keys: list[str] | None) -> list[str] | None:
        # Typer calls the one of the two first that comes first on the command line.
        for name in names_of(keys or [], known):
            (context.default_map or {}).pop(name, None)
        return keys

    shared: dict[str, Any] = {"is_eager": True, "show_default": "none", "rich_help_panel": RUN}
    text = "TOML file of options, which those of the command line go before; a run holds its own, run.toml."
    config = typer.Option("--config", parser=path, callback=load, help=text, **shared)
    text = "An option that --config is not to set; repeat it for several."
    ignore = typer.Option("--ignore", metavar="NAME", callback=leave_out, help=text, **shared)
    return Annotated[Path | None, config], Annotated[list[str] | None, ignore]


def _panel(parameter: inspect.Parameter) -> int:
    """The place of a parameter's panel on the help page; what has none comes first."""
    details = getattr(parameter.annotation, "__metadata__", (None,))[0]
    panels = (MODEL, TRAINING, DATA, RUN)
    panel = getattr(details, "rich_help_panel", None)
    return panels.index(panel) if panel in panels else -1


def _parameter(kind: Any, name: str) -> inspect.Parameter:
    """The parameter of a command that is an option of a dataclass."""
    default = next(field.default for field in fields(kind) if field.name == name)
    annotated: Any = Annotated
    hint = str if options(kind)[name].also else get_type_hints(kind)[name]
    annotation = annotated[hint, _shown(kind, name)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown(kind: Any, name: str) -> Any:
    """What Typer is to know of an option of a dataclass."""
    option = options(kind)[name]
    number = f"INTEGER|{option.also}" if option.also else None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in option.choices if choice.startswith(incomplete)]

    return typer.Option(
        flag_of(kind, name),
        parser=functools.partial(_number_or, option.also) if option.also else None,
        metavar=option.metavar or "|".join(option.choices) or number,
        help=option.help,
        show_default=True if option.unset is None else option.unset,
        rich_help_panel=option.panel,
        autocompletion=complete if option.choices else None,
    )


def _number_or(word: str, text: str | int) -> int | str:
    """The whole number of an option, or the word that it takes besides."""
    if text == word:
        return word
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{quote(text)} is not a whole number, and not {word!r}.") from None


@dataclass(frozen=True)
class Key:
    """An option in a file: the type of its value there, and a word that it takes besides."""

    flag: str
    hint: Any
    word: str | None = None

    @property
    def name(self) -> str:
        """The key in the file."""
        return self.flag.removeprefix("--")

    def read(self, value: Any, file: Path) -> Any:
        """The value of this option in a file."""
        if self.word is not None and value == self.word:
            return value
        try:
            # A path is a text in a file.
            found = checked(str if self.hint in (Path, Path | None) else self.hint, value, "")
        except ValueError as error:
            fix = "correct it, or leave it out"
            raise ArgumentError(message(f"{self.name} in {file}", quote(value), rule_of(error), fix)) from error
        return str(found) if self.word is not None else found


def read_config(file: Path, known: Mapping[str, Key], tables: Iterable[str] = ()) -> dict[str, Any]:
    """The options that a file gives."""
    found: dict[str, Any] = {}
    for key, value in read_toml(file).items():
        if key in tables:
            continue
        (name,) = names_of([key], known, str(file))
        found[name] = known[name].read(value, file)
    return found


def names_of(keys: Iterable[str], known: Mapping[str, Key], where: str = "--ignore") -> list[str]:
    """The names in Python of options that are named as in a file."""
    found = []
    for key in keys:
        name = next((name for name, option in known.items() if option.name == key.replace("_", "-")), None)
        if name is None:
            # Whoever knows Python's name of an option is told the other.
            meant = known[key].name if key in known else nearest(key, [option.name for option in known.values()])
            fix = f"write {meant}" if meant else "see --help"
            raise ArgumentError(message(where, f"the option {quote(key)}", _RULE, fix))
        found.append(name)
    return found


def read_toml(file: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    rule, fix = "a TOML file, such as the run.toml of a run", "correct it, or name another file"
    try:
        content = read_file(file)
        if len(content) > _LONGEST:
            raise ArgumentError(message("--config", f"{file}, of {len(content):,} bytes", rule, fix))
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ArgumentError(message("--config", f"{file}: {error.strerror or error}", rule, fix)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(message(str(file), f"{error}", rule, fix)) from error


def origin_of(context: typer.Context, name: str) -> str:
    """Where the value of an option comes from."""
    source = context.get_parameter_source(name)
    names = {"COMMANDLINE": OPTION, "ENVIRONMENT": OPTION, "DEFAULT_MAP": FILE}
    return DEFAULT if source is None else names.get(source.name, DEFAULT)


def option(help: str, panel: str = RUN, *flags: str, **details: Any) -> Any:
    """What Typer takes of an option that is in no dataclass."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **details)


def argument(help: str, **details: Any) -> Any:
    """What Typer takes of an argument that is a path."""
    return typer.Argument(parser=path, help=help, show_default=False, **details)


Choices = Annotated[Given, Settings]
Columns = Annotated[Given, ColumnNames]
Device = Annotated[str, _shown(Settings, "device")]

Data = Annotated[
    Path | None,
    argument(
        "A .ts, .parquet, .arrow, .jsonl, .csv or .txt file, a folder that raglane convert wrote, or a folder of "
        "text files, one per class. Without it: Japanese vowels, the embedded default."
    ),
]
Run = Annotated[Path, argument("Folder of a run, or of a saved model.")]
Cell = Annotated[
    str | None,
    option(
        "The cell of one's own that the model was trained with; its file must be as it was.", metavar="FILE.py:CLASS"
    ),
]
Format = Annotated[
    str | None,
    option("Format of the data.", DATA, metavar="ts|parquet|arrow|jsonl|csv|text|folder", show_default="by suffix"),
]
Test = Annotated[
    Path | None,
    option(
        "Data to evaluate the best model on at the end.",
        DATA,
        parser=path,
        show_default="none; the official test part of the default data",
    ),
]
Validation = Annotated[
    Path | None, option("Data that decides which epoch is best.", DATA, parser=path, show_default="held out")
]
Out = Annotated[Path | None, option("Folder of the run.", parser=path, show_default="runs/<data>-<task>-<cell>")]
Resume = Annotated[bool, option("Go on with the run in --out, with its data and settings.", RUN, "--resume")]
Overwrite = Annotated[bool, option("Replace the run in --out.", RUN, "--overwrite")]
Horizon = Annotated[int, option("Elements to forecast (forecast, language).")]
Top = Annotated[int, option("Also tell this many of the likeliest classes.")]
PredictionBatchSize = Annotated[int, option("Sequences of a batch.", RUN, "--batch-size")]
Config = Annotated[Path | None, "made by the command that has it: see _config"]
ShowConfig = Annotated[
    bool,
    option(
        "Print all options as TOML, with where each comes from: option, file or default; and train nothing.",
        RUN,
        "--show-config",
    ),
]
Quiet = Annotated[bool, option("Print errors only.", RUN, "--quiet", "-q")]
_Debug = Annotated[bool, option("Show the trace of an error, and warnings.", RUN, "--debug")]
