"""Commands whose options of columns are given once: of several, the last would replace the others
silently.

Other options may be given again, to change those of a script.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from raglane._utils.messages import quote
from raglane.runs.sources import ColumnNames
from raglane.training.options import flag_of, options

# Options whose values are names with commas between them, so that several are joined.
_JOINED = ("--id-column", "--time-column", "--label-column")


class OnceCommand(TyperCommand):
    """A command that joins the columns of an option given twice, or refuses it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command line."""
        columns = {flag_of(ColumnNames, name) for name in options(ColumnNames)}
        single = {
            parameter.opts[0]
            for parameter in self.params
            if parameter.opts[0] in columns
            and not getattr(parameter, "multiple", False)
            and not getattr(parameter, "is_flag", False)
        }
        return super().parse_args(ctx, given_once(args, single))


def given_once(arguments: list[str], single: set[str]) -> list[str]:
    """Return arguments in which each of some options with a value occurs once, or raise a usage
    error.
    """
    values_of: dict[str, list[str]] = {}
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            rest += arguments[position:]
            break
        name, mark, value = word.partition("=")
        has_next = position + 1 < len(arguments)
        if name not in single or not (mark or has_next):
            rest.append(word)
            position += 1
            continue
        if not mark:
            position += 1
            value = arguments[position]
        position += 1
        values_of.setdefault(name, []).append(value)
    options = [word for flag, values in values_of.items() for word in (flag, _single(flag, values))]
    return [*options, *rest]


def _single(flag: str, values: list[str]) -> str:
    different = list(dict.fromkeys(values))
    if len(different) == 1:
        return different[0]
    if flag in _JOINED:
        return ",".join(different)
    got: Any = " and ".join(map(quote, different))
    raise typer.BadParameter(f"{flag} must be given once, got {got}. Leave one out.")
