"""``--config``: the options of a command from a TOML file, and where each of them comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import typer

from raglane._utils.files import read_file
from raglane.errors import ArgumentError, message, nearest, quote
from raglane.training.stored import checked, rule_of

CONFIG, IGNORE = "config", "ignore"
"""The options that name a file, and what is not to be taken from it."""

OPTION, FILE, DEFAULT = "option", "file", "default"

# More than this is no file of options.
_LONGEST = 1_000_000
_RULE = "an option of this command, by its flag without dashes"


@dataclass(frozen=True)
class Key:
    """What an option is called in a file, and what it may be there."""

    name: str
    hint: Any
    word: str | None = None

    @classmethod
    def of(cls, annotation: Any, name: str, word: str | None) -> Key:
        """The key of a parameter of a command."""
        hint, details = get_args(annotation)[:2]
        # Within Annotated, Typer keeps the first flag where a default would be.
        said = (getattr(details, "default", None), *(getattr(details, "param_decls", None) or ()))
        flag = next((flag for flag in said if str(flag).startswith("--")), name.replace("_", "-"))
        # A path is a text in a file, and a number where the command line has a text for the sake of a word.
        kind: Any = int if word is not None else str if hint in (Path, Path | None) else hint
        return cls(flag.partition("/")[0].removeprefix("--"), kind, word)

    def read(self, value: Any, file: Path) -> Any:
        """The value of this option in a file."""
        if self.word is not None and value == self.word:
            return value
        try:
            found = checked(self.hint, value, "")
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
            fix = f"write {meant}, perhaps" if meant else "--help lists them"
            raise ArgumentError(message(where, f"the unknown option {quote(key)}", _RULE, fix))
        found.append(name)
    return found


def read_toml(file: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    rule, fix = "a file of TOML, such as the run.toml of a run", "correct it, or name another file"
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
