"""Every exception that Raglane raises.

The tree::

    RaglaneError
    ├── ArgumentError (also ValueError)          an argument's value breaks a rule
    │   ├── ShapeError (also RuntimeError)       shapes, lengths or dtypes do not fit together
    │   │   └── DimensionError (also IndexError) too few dimensions, or one of the wrong size
    │   ├── DispatchError                        no such (schedule, backend) pair, or it cannot run this
    │   ├── ExportError                          a model that cannot be exported
    │   └── DataError                            a file, column or record that cannot be used
    │       └── CheckpointError                  a saved model that cannot be read
    ├── ArgumentTypeError (also TypeError)       an argument of the wrong kind
    │   ├── RaggedFunctionError                  a torch function that makes no sense on a ragged batch
    │   └── KindError (also AttributeError,      an argument of the wrong kind in :mod:`raglane.packing`
    │       RuntimeError)
    ├── DivergedError                            a training whose loss ran away
    ├── LostRankError                            a training of which a process died
    └── MissingExtraError (also ImportError)     an optional dependency that is not installed

PyTorch raises ``RuntimeError`` where shapes disagree and ``ValueError`` elsewhere; :class:`ShapeError` is
both, so that code written against either keeps working. The two classes with more bases stand where torch's functions
raise whatever error their code runs into.

A message is one line of printable characters, whatever a file or a caller put into it: it can neither break a log into
lines nor control the terminal that shows it. :class:`RaglaneError` sees to that; :func:`quote` and :func:`message` keep
it short.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "DataError",
    "DimensionError",
    "DispatchError",
    "DivergedError",
    "ExportError",
    "KindError",
    "LostRankError",
    "MissingExtraError",
    "RaggedFunctionError",
    "RaglaneError",
    "ShapeError",
    "argument",
    "count_of",
    "current_flags",
    "flags",
    "message",
    "nearest",
    "printable",
    "quote",
    "quote_all",
    "require",
    "shorten",
]

# Characters of a quoted value, and of each part of a message; how many values of a list are named.
_QUOTED, _PART, _NAMED = 80, 400, 20

# The flags of the command that runs, by the names that Python's callers have for the same arguments; {} in Python.
# Not a ContextVar, which torch.compile cannot read where it traces a message.
_flags: Mapping[str, str] = {}

_TRACE = "Original Traceback (most recent call last):"


def printable(text: str) -> str:
    r"""A text with an escape for every character that is not printable.

    Control characters, line breaks, half surrogate pairs and the marks that turn the direction of writing become what
    Python's ``repr`` writes for them, so that a terminal shows them and does nothing else.

    Example:
        >>> printable("red:\x1b[31m\n\u202e")
        'red:\\x1b[31m\\n\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shorten(text: str, most: int) -> str:
    """A text without its middle, where it is longer than ``most`` characters.

    Example:
        >>> shorten("abcdefghijklmnopqrstuvwxyz", 12)
        'abcdef...xyz'
    """
    if len(text) <= most:
        return text
    end = (most - 3) // 3
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"


def count_of(count: int, noun: str) -> str:
    """A number of things, in words.

    Example:
        >>> count_of(1, "channel"), count_of(3, "channel"), count_of(1234, "row")
        ('1 channel', '3 channels', '1,234 rows')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def quote(value: Any) -> str:
    """A value as messages quote it: its ``repr``, without its middle where that is long.

    Example:
        >>> quote("abc"), quote(10**5000), len(quote("a" * 1000))
        ("'abc'", 'a number of 16610 bits', 80)
    """
    if isinstance(value, (str, bytes)) and len(value) > 2 * _QUOTED:
        # The middle of a long text would be escaped for nothing.
        return shorten(repr(value[:_QUOTED])[:-1] + repr(value[-_QUOTED:])[1:], _QUOTED)
    try:
        text = repr(value)
    except Exception:
        # Python refuses to write a number of thousands of digits, and a caller's class may refuse anything.
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return shorten(printable(text), _QUOTED)


def quote_all(values: Iterable[Any]) -> str:
    """Values as messages list them: the first few, and how many more there are.

    Example:
        >>> quote_all("ab"), quote_all(range(1000))[-19:]
        ("'a', 'b'", '18, 19 and 980 more')
    """
    listed = list(values)
    more = f" and {len(listed) - _NAMED:,} more" if len(listed) > _NAMED else ""
    return ", ".join(map(quote, listed[:_NAMED])) + more


class RaglaneError(Exception):
    """The root of every exception that Raglane raises on purpose; its message is one line of printable characters."""

    def __init__(self, message: object = "") -> None:
        # A DataLoader makes the error of a worker anew, with the worker's trace in its message.
        lines = str(message).split("\n") if _TRACE in str(message) else [str(message)]
        super().__init__("\n".join(map(printable, lines)))


class ArgumentError(RaglaneError, ValueError):
    """An argument's value breaks a rule."""


class ShapeError(ArgumentError, RuntimeError):
    """Shapes, lengths or dtypes do not fit together."""


class DimensionError(ShapeError, IndexError):
    """Too few dimensions, or one of the wrong size."""


class DispatchError(ArgumentError):
    """No such pair of schedule and backend, or the pair cannot run this layer."""


class ExportError(ArgumentError):
    """A model that cannot be exported: the layer, and the reason."""


class DataError(ArgumentError):
    """A file, column or record that cannot be used."""


class CheckpointError(DataError):
    """A saved model that cannot be read."""


class ArgumentTypeError(RaglaneError, TypeError):
    """An argument of the wrong kind."""


class KindError(ArgumentTypeError, AttributeError, RuntimeError):
    """An argument of the wrong kind in :mod:`raglane.packing`."""


class RaggedFunctionError(ArgumentTypeError):
    """A torch function that makes no sense on a ragged batch."""


class DivergedError(RaglaneError):
    """A training whose loss ran away.

    Args:
        message: what was seen and what to try.
        what: what was seen, without the advice.
    """

    def __init__(self, message: object = "", what: str = "") -> None:
        super().__init__(message)
        self.what = what


class LostRankError(RaglaneError):
    """A training in several processes of which one died; it can go on from its last checkpoint."""


class MissingExtraError(RaglaneError, ImportError):
    """An optional dependency that is not installed."""


@contextmanager
def flags(names: Mapping[str, str]) -> Iterator[None]:
    """Let messages speak to somebody at the command line: they name flags in place of Python's arguments.

    Args:
        names: the flags by the arguments' names; {} speaks of Python again.

    Example:
        >>> with flags({"batch_size": "--batch-size"}):
        ...     print(message("batch_size", "0", "at least 1", "pass 1, say"))
        --batch-size: got 0; the rule: at least 1. Fix: pass 1, say.
    """
    global _flags
    before, _flags = _flags, names
    try:
        yield
    finally:
        _flags = before


def current_flags() -> dict[str, str]:
    """The flags that messages name now, for another process that is to speak alike.

    Example:
        >>> with flags({"clip": "--clip"}):
        ...     current_flags()
        {'clip': '--clip'}
    """
    return dict(_flags)


def argument(name: str, value: Any = None, of: str | None = None) -> str:
    """How a message tells its reader to give an argument: in Python's words, or by the flag of the command that runs.

    Args:
        name: of the argument.
        value: to give; None where the message does not say.
        of: the class or function whose argument it is.

    Example:
        >>> argument("clip"), argument("clip", 1), argument("missing", "zero"), argument("label", of="Columns")
        ('clip', 'clip=1', "missing='zero'", 'Columns(label=...)')
        >>> with flags({"clip": "--clip", "missing": "--missing", "label": "--label-column", "bucket": "--bucket"}):
        ...     argument("clip"), argument("clip", 1), argument("missing", "zero"), argument("label", of="Columns")
        ...     argument("bucket", True)
        ('--clip', '--clip 1', '--missing zero', '--label-column')
        '--bucket'
    """
    if name in _flags:
        return _flags[name] if value is None or value is True else f"{_flags[name]} {value}"
    if of is not None:
        return f"{of}({name}={'...' if value is None else repr(value)})"
    return name if value is None else f"{name}={value!r}"


def message(argument: str, got: str, rule: str, fix: str) -> str:
    """Build the message of an error that teaches: the argument, its value, the rule, the fix.

    Args:
        argument: the name of the argument; from the command line the message has its flag.
        got: what it was, in a few words or numbers; :func:`quote` shortens a value that may be long.
        rule: what must hold.
        fix: what to pass or call instead.

    Example:
        >>> message("lengths", "3 lengths", "one length per sequence, and input holds 1", "pass [9]")
        'lengths: got 3 lengths; the rule: one length per sequence, and input holds 1. Fix: pass [9].'
    """
    argument = _flags.get(argument, argument)
    argument, got, rule, fix = (shorten(printable(part), _PART) for part in (argument, got, rule, fix))
    return f"{argument}: got {got}; the rule: {rule}. Fix: {fix}."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The closest valid name to a misspelled one.

    Args:
        name: as it was written.
        known: the names that there are.

    Example:
        >>> nearest("hiden", ["hidden", "layers"]), nearest("xyz", ["hidden", "layers"])
        ('hidden', None)
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: the dotted name to import.
        extra: the extra of the ``raglane`` distribution that installs it.

    Raises:
        MissingExtraError: ``module`` is not installed.

    Example:
        >>> require("math", "data").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but broken inside must show its own error, not ours.
        if error.name is not None and module != error.name and not module.startswith(error.name + "."):
            raise
        raise MissingExtraError(
            f"{module.split('.')[0]} is not installed. Fix: pip install 'raglane[{extra}]'."
        ) from error
