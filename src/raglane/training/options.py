"""Fields of dataclasses that say everything about a choice once: its default, its rules and what a help page shows.

The command line makes its options of such fields, and :func:`check` refuses a value that breaks a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError

# The parts of a help page, in their order.
MODEL, TRAINING, DATA, RUN = "Task and model", "Training", "Data", "Run and output"

_KEY = "option"


@dataclass(frozen=True)
class Rule:
    """A condition on a value, in words, with the fix."""

    # Not called with None.
    holds: Callable[[Any], bool]
    rule: str
    fix: str


@dataclass(frozen=True)
class Option:
    """The properties of an option beside its name, type and default."""

    help: str
    panel: str
    rules: tuple[Rule, ...] = ()
    choices: tuple[str, ...] = ()
    flag: str | None = None
    metavar: str | None = None
    # The help for None.
    unset: str | None = None
    # A word that the command line takes in place of a number, and acts upon before it makes an object.
    also: str | None = None
    # A value besides the choices.
    or_else: Rule | None = None


def option(default: Any, help: str, panel: str, *rules: Rule, **details: Any) -> Any:
    """A field of a dataclass that is an option."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, panel, rules, **details)})


def options(kind: Any) -> dict[str, Option]:
    """The options among the fields of a dataclass, by their names."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind) if _KEY in field.metadata}


def flag_of(kind: Any, name: str) -> str:
    """The flag of an option on the command line."""
    return options(kind)[name].flag or "--" + name.replace("_", "-")


def check(chosen: Any) -> None:
    """Refuse a value that is none of its choices, or breaks a rule."""
    for name, described in options(chosen).items():
        check_value(name, getattr(chosen, name), described)


def check_value(name: str, value: Any, described: Option) -> None:
    """Refuse a value that an option cannot have; None can always be left out."""
    if value is None:
        return
    other = described.or_else
    if described.choices and value not in described.choices and not (other is not None and other.holds(value)):
        listed = "one of " + ", ".join(described.choices) + ("" if other is None else f", or {other.rule}")
        raise ArgumentError(message(name, quote(value), listed, f"pass {described.choices[0]}"))
    for rule in described.rules:
        if not rule.holds(value):
            raise ArgumentError(message(name, quote(value), rule.rule, rule.fix))
