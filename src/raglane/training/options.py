"""Fields of dataclasses that say everything about a choice once: its default, its rules and what a help page shows.

The command line makes its options of such fields, and :func:`check` refuses a value that breaks a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raglane.errors import ArgumentError, message, quote

__all__ = ["DATA", "MODEL", "RUN", "TRAINING", "Option", "Rule", "check", "flag_of", "option", "options"]

# The parts of a help page, in their order.
MODEL, TRAINING, DATA, RUN = "Task and model", "Training", "Data", "Run and output"

_KEY = "option"


@dataclass(frozen=True)
class Rule:
    """What must hold of a value.

    Args:
        holds: whether it does; not asked of None.
        rule: in words.
        fix: what to pass instead.
    """

    holds: Callable[[Any], bool]
    rule: str
    fix: str


@dataclass(frozen=True)
class Option:
    """What a field says beside its name, type and default.

    Args:
        help: a line for the help page.
        panel: the part of the help page.
        rules: what must hold of the value.
        choices: the values that there are; () where they cannot be listed.
        flag: on the command line; None for the name with two dashes.
        metavar: what stands for the value on the help page; None for the choices, or for the type.
        unset: what None means, for the help page.
        or_else: what a value may be besides the choices.
        also: a word that the command line takes in place of a number, and acts upon before it makes an object.
    """

    help: str
    panel: str
    rules: tuple[Rule, ...] = ()
    choices: tuple[str, ...] = ()
    flag: str | None = None
    metavar: str | None = None
    unset: str | None = None
    also: str | None = None
    or_else: Rule | None = None


def option(default: Any, help: str, panel: str, *rules: Rule, **details: Any) -> Any:
    """A field of a dataclass that is an option.

    Example:
        >>> @dataclass
        ... class Walk:
        ...     steps: int = option(3, "How far.", RUN, Rule(lambda steps: steps > 0, "above 0", "pass 3, say"))
        >>> Walk().steps, options(Walk)["steps"].help
        (3, 'How far.')
        >>> check(Walk(0))
        Traceback (most recent call last):
        ...
        raglane.errors.ArgumentError: steps: got 0; the rule: above 0. Fix: pass 3, say.
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(help, panel, rules, **details)})


def options(kind: Any) -> dict[str, Option]:
    """The options among the fields of a dataclass, by their names."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind) if _KEY in field.metadata}


def flag_of(kind: Any, name: str) -> str:
    """The flag of an option on the command line.

    Example:
        >>> from raglane.training.settings import Settings
        >>> flag_of(Settings, "layer"), flag_of(Settings, "batch_size")
        ('--cell', '--batch-size')
    """
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
        listed = "one of " + ", ".join(described.choices) + ("" if other is None else f"; or {other.rule}")
        raise ArgumentError(message(name, quote(value), listed, f"pass {described.choices[0]}"))
    for rule in described.rules:
        if not rule.holds(value):
            raise ArgumentError(message(name, quote(value), rule.rule, rule.fix))
