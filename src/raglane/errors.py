"""Every exception that Raglane raises.

The tree::

    RaglaneError
    ├── ArgumentError (also ValueError)          an argument's value breaks a rule
    │   ├── ShapeError (also RuntimeError)       shapes, lengths or dtypes do not fit together
    │   ├── DispatchError                        a schedule or backend that does not exist or cannot run the call
    │   ├── ExportError                          a model that cannot be exported
    │   └── DataError                            a file, column or record that cannot be used
    │       └── CheckpointError                  a saved model that cannot be read
    ├── ArgumentTypeError (also TypeError)       an argument of the wrong type, or a torch function without Ragged
    ├── BusyError                                an engine with as many streams as it can have, or with a full queue
    ├── ClosedError                              a stream or an engine that is closed
    ├── DivergedError                            a training whose loss diverged
    ├── LostRankError                            a distributed training in which a process died
    └── MissingExtraError (also ImportError)     an optional dependency that is not installed

PyTorch raises ``RuntimeError`` if shapes disagree and ``ValueError`` otherwise. :class:`ShapeError`
is both, so code written for PyTorch's errors keeps working. For the same reason a
:class:`ShapeError` about an index or a dimension is also an ``IndexError``, and an
:class:`ArgumentTypeError` of :mod:`raglane.packing` is also an ``AttributeError`` and a
``RuntimeError``, and an :class:`ArgumentError` about a size of the wrong type, such as
``LSTM(3.0, 4)``, is also an :class:`ArgumentTypeError`.

Every message is one line of printable characters: file contents and arguments in it can neither add
lines to a log nor control a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BusyError",
    "CheckpointError",
    "ClosedError",
    "DataError",
    "DispatchError",
    "DivergedError",
    "ExportError",
    "LostRankError",
    "MissingExtraError",
    "RaglaneError",
    "ShapeError",
]

_TRACE = "Original Traceback (most recent call last):"
_PART = 400  # the longest part of a message in characters

# Command-line flags by the names of the same arguments in Python; {} outside of commands.
# Not a ContextVar, which torch.compile cannot read while it traces a message.
flags: Mapping[str, str] = {}


def printable(text: str) -> str:
    """Escape every character that is not printable, as ``repr`` does: control characters,
    surrogates, bidi marks.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def shorten(text: str, most: int) -> str:
    """Replace the middle of a text that is longer than ``most`` characters by "..."."""
    if len(text) <= most:
        return text
    end = (most - 3) // 3
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"


def message(argument: str, got: str, rule: str, fix: str) -> str:
    """Join the parts of a message: the argument, the rule, which completes "must be", the value,
    the fix.
    """
    argument = flags.get(argument, argument)
    argument, got, rule, fix = (
        shorten(printable(part), _PART) for part in (argument, got, rule, fix)
    )
    return f"{argument} must be {rule}, got {got}. {fix[:1].upper()}{fix[1:]}."


class RaglaneError(Exception):
    """The base class of all exceptions that Raglane raises. Its message is one line of printable
    characters.

    Args:
        text: the message; or the argument, followed by its value, the rule and the fix, which
            ``message`` joins.
    """

    def __init__(self, text: object = "", got: str = "", rule: str = "", fix: str = "") -> None:
        text = message(str(text), got, rule, fix) if rule else str(text)
        # A DataLoader raises the error of a worker again, with the worker's traceback in its
        # message.
        lines = text.split("\n") if _TRACE in text else [text]
        super().__init__("\n".join(map(printable, lines)))


class ArgumentError(RaglaneError, ValueError):
    """An argument's value breaks a rule."""


class ShapeError(ArgumentError, RuntimeError):
    """Shapes, lengths or dtypes do not fit together."""


class DimensionError(ShapeError, IndexError):
    """An index is out of range, or a tensor has a wrong number of dimensions (internal)."""


class DispatchError(ArgumentError):
    """The schedule or backend does not exist, or cannot run this call."""


class ExportError(ArgumentError):
    """The model cannot be exported. The message names the layer and the reason."""


class DataError(ArgumentError):
    """A file, column or record cannot be used.

    Attributes:
        fixes: values of arguments, by name, with which the data may be read; {} if the fix is not
            an argument.
    """

    fixes: Mapping[str, str] = {}


class CheckpointError(DataError):
    """A saved model cannot be read."""


class BusyError(RaglaneError):
    """An engine has no room for another stream, or for more frames in a queue. The call changed
    nothing, and can be repeated later.
    """


class ClosedError(RaglaneError):
    """A stream or an engine is closed."""


class ArgumentTypeError(RaglaneError, TypeError):
    """An argument has the wrong type, or a torch function is not defined on a ragged batch."""


class KindError(ArgumentTypeError, AttributeError, RuntimeError):
    """An argument of a function in :mod:`raglane.packing` has the wrong type (internal)."""


class MistypedError(ArgumentError, ArgumentTypeError):
    """A size or dtype of a layer has the wrong type, for which torch raises TypeError (internal)."""


class DivergedError(RaglaneError):
    """The loss of a training diverged.

    Args:
        message: the whole message.
        symptom: the part of the message without the advice.
    """

    def __init__(self, message: object = "", symptom: str = "") -> None:
        super().__init__(message)
        self.symptom = symptom


class LostRankError(RaglaneError):
    """A process of a distributed training died. The training can be resumed from its last
    checkpoint.
    """


class MissingExtraError(RaglaneError, ImportError):
    """An optional dependency is not installed."""
