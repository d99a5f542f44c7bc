"""Commands whose lists are written as repeated options, or with commas; and whose other options of
columns are given once, because of several the last would replace the others silently.

Other options may be given again, to change those of a script. A name may be shortened while no
other option begins with the same letters: ``--out`` is ``--output``.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from raglane._utils.messages import quote
from raglane._utils.options import flag_of, options
from raglane.data.columns import Columns
from raglane.runs.sources import SequenceSource

# Options whose values are names with commas between them, so that several are joined.
_JOINED = ("--id-column", "--time-column", "--label-column", "--sizes", "--cells", "--modes")
# Repeated options whose values have no commas, so that a value with commas is several. Those of
# columns are divided where the columns of the data are read.
_DIVIDED = ("--quantile", "--ignore", "--allow-host", "--allow-origin")


class OnceCommand(TyperCommand):
    """A command that joins the columns of an option given twice, or refuses it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command line."""
        columns = {
            flag_of(kind, name) for kind in (Columns, SequenceSource) for name in options(kind)
        }
        single = {
            parameter.opts[0]
            for parameter in self.params
            if parameter.opts[0] in (*columns, *_JOINED)
            and not getattr(parameter, "multiple", False)
            and not getattr(parameter, "is_flag", False)
        }
        flags = [
            flag
            for parameter in self.get_params(ctx)  # --help too
            for flag in (*parameter.opts, *parameter.secondary_opts)
            if flag.startswith("--")
        ]
        listed = given_once(whole_names(args, flags), single)
        return super().parse_args(ctx, divided(listed))


def whole_names(arguments: list[str], flags: list[str]) -> list[str]:
    """Return arguments in which each shortened name of an option is whole, if one option alone
    begins with it.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*(_whole_name(word, flags) for word in arguments[:end]), *arguments[end:]]


def _whole_name(word: str, flags: list[str]) -> str:
    name, mark, value = word.partition("=")
    if len(name) < len("--x") or not name.startswith("--") or name in flags:
        return word
    matching = [flag for flag in flags if flag.startswith(name)]
    return matching[0] + mark + value if len(matching) == 1 else word


def divided(arguments: list[str]) -> list[str]:
    """Return arguments in which lists with commas are repeated options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words: list[str] = []
    position = 0
    while position < end:
        flag, mark, value = arguments[position].partition("=")
        position += 1
        if flag not in _DIVIDED or not (mark or position < end):
            words.append(arguments[position - 1])
            continue
        if not mark:
            value = arguments[position]
            position += 1
        words += [word for part in value.split(",") for word in (flag, part.strip())]
    return [*words, *arguments[end:]]


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
