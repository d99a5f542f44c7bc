"""Dataclass fields that are options: with a default, rules and a help text.

The command line makes its options of them, and :func:`check` validates their values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from raglane._utils.messages import nearest, quote
from raglane.errors import ArgumentError

# The sections of a help page, in their order.
MODEL = "Task and model"
TRAINING = "Training"
DATA = "Data"
RUN = "Run and output"

TRUTH = {"yes": True, "no": False}
"""The choices of an option that is True, False or None."""

_KEY = "option"


class Rule(NamedTuple):
    """A condition on a value, with its words and fix for messages."""

    # Not called with None.
    holds: Callable[[Any], bool]
    rule: str
    fix: str


@dataclass(frozen=True)
class Option:
    """The metadata of an option; its name, type and default are those of the field."""

    help: str
    panel: str
    rules: tuple[Rule, ...] = ()
    choices: tuple[str, ...] = ()
    flag: str | None = None
    metavar: str | None = None
    # The help for None.
    unset: str | None = None
    # A word that the command line accepts in place of a number, and replaces before it builds the
    # settings.
    also: str | None = None
    # A rule for values that are not among the choices.
    or_else: Rule | None = None


def option(default: Any, help: str, panel: str, *rules: Rule, **details: Any) -> Any:
    """Return a dataclass field that is an option."""
    return dataclasses.field(
        default=default, metadata={_KEY: Option(help, panel, rules, **details)}
    )


def options(kind: Any) -> dict[str, Option]:
    """Return the options of a dataclass by name."""
    return {
        field.name: field.metadata[_KEY]
        for field in dataclasses.fields(kind)
        if _KEY in field.metadata
    }


def flag_of(kind: Any, name: str) -> str:
    """Return the command-line flag of an option."""
    return options(kind)[name].flag or "--" + name.replace("_", "-")


def in_words(value: Any, described: Option) -> Any:
    """Return the value of an option as it is written: the names of True and False, if it has
    some.
    """
    if isinstance(value, bool) and described.choices:
        return next(word for word, truth in TRUTH.items() if truth == value)
    return value


def check(chosen: Any) -> None:
    """Raise if a field of an object with options is invalid."""
    for name, described in options(chosen).items():
        check_value(name, getattr(chosen, name), described)


def check_value(name: str, value: Any, described: Option) -> None:
    """Raise if an option must not have a value; None is always valid."""
    if value is None:
        return
    other = described.or_else
    if (
        described.choices
        and value not in described.choices
        and not (other is not None and other.holds(value))
    ):
        listed = (
            "one of "
            + ", ".join(described.choices)
            + ("" if other is None else f"; or {other.rule}")
        )
        near = nearest(value, described.choices) if isinstance(value, str) else None
        raise ArgumentError(name, quote(value), listed, f"pass {near or described.choices[0]}")
    for rule in described.rules:
        if not rule.holds(value):
            raise ArgumentError(name, quote(value), rule.rule, rule.fix)
