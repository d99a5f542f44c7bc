"""Every exception that Raglane raises.

The tree::

    RaglaneError
    ├── ArgumentError (also ValueError)          an argument's value breaks a rule
    │   ├── ShapeError (also RuntimeError)       shapes, lengths or dtypes do not fit together
    │   │   └── DimensionError (also IndexError) too few dimensions, or one of the wrong size
    │   ├── DispatchError                        no such (schedule, backend) pair, or it cannot run this
    │   └── DataError                            a file, column or record that cannot be used
    │       └── CheckpointError                  a saved model that cannot be read
    ├── ArgumentTypeError (also TypeError)       an argument of the wrong kind
    │   ├── RaggedFunctionError                  a torch function that makes no sense on a ragged batch
    │   └── KindError (also AttributeError,      an argument of the wrong kind in :mod:`raglane.packing`
    │       RuntimeError)
    ├── DivergedError                            a training whose loss ran away
    └── MissingExtraError (also ImportError)     an optional dependency that is not installed

PyTorch raises ``RuntimeError`` where shapes disagree and ``ValueError`` elsewhere; :class:`ShapeError` is
both, so that code written against either keeps working. The two classes with more bases stand where torch's functions
raise whichever error their code runs into.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "DataError",
    "DimensionError",
    "DispatchError",
    "DivergedError",
    "KindError",
    "MissingExtraError",
    "RaggedFunctionError",
    "RaglaneError",
    "ShapeError",
    "explain",
    "require",
]


class RaglaneError(Exception):
    """The root of every exception that Raglane raises on purpose."""


class ArgumentError(RaglaneError, ValueError):
    """An argument's value breaks a rule."""


class ShapeError(ArgumentError, RuntimeError):
    """Shapes, lengths or dtypes do not fit together."""


class DimensionError(ShapeError, IndexError):
    """Too few dimensions, or one of the wrong size."""


class DispatchError(ArgumentError):
    """No such pair of schedule and backend, or the pair cannot run this layer."""


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
        what: was seen, alone.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


class MissingExtraError(RaglaneError, ImportError):
    """An optional dependency that is not installed."""


def explain(argument: str, got: str, rule: str, fix: str) -> str:
    """Build the message of an error that teaches: the argument, its value, the rule, the fix.

    Args:
        argument: the name of the argument, as the caller wrote it.
        got: what it was, in a few words or numbers.
        rule: what must hold.
        fix: what to pass or call instead.

    Example:
        >>> explain("lengths", "3 lengths", "one length a sequence, and input holds 1", "pass [9]")
        'lengths: got 3 lengths; the rule: one length a sequence, and input holds 1. Fix: pass [9].'
    """
    return f"{argument}: got {got}; the rule: {rule}. Fix: {fix}."


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: the dotted name to import.
        extra: the extra of the ``raglane`` distribution that installs it.

    Raises:
        MissingExtraError: it is not installed.

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
