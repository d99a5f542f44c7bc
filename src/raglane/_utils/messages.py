"""Build parts of the messages of errors."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from raglane import errors
from raglane.errors import MissingExtraError
from raglane.errors import message as message
from raglane.errors import printable as printable
from raglane.errors import shorten as shorten

# The most characters of a quoted value.
_QUOTED = 80
# Parts of names of metrics that are written in capitals.
_ABBREVIATED = frozenset("cer f1 mae r2 rmse wer".split())
# The most values of a list.
_LISTED = 20

# Names of other libraries for options and choices, and those of Raglane.
_OTHER_NAMES = dict(
    pair.split("=")
    for pair in (
        "learning-rate=lr bs=batch-size steps=epochs early-stopping=patience decay=weight-decay gpu=device "
        "model=cell layer=cell units=hidden-size average=mean avg=mean label=label-column target=label-column"
    ).split()
)

# Packages between a user's line and a warning.
_BETWEEN = ("raglane", "torch")


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called the package, also through torch's modules."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, *line, registry)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def metric_words(name: str) -> str:
    """Return the name of a metric, such as ``macro_f1``, in words."""
    words = (word.upper() if word in _ABBREVIATED else word for word in name.split("_"))
    return " ".join(words).replace(" F1", "-F1")


def count_of(count: int, noun: str) -> str:
    """Return a number and its noun, e.g. "1 row" or "1,234 rows"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def quote(value: Any) -> str:
    """Return the ``repr`` of a value: printable, and at most 80 characters."""
    if isinstance(value, (str, bytes)) and len(value) > 2 * _QUOTED:
        # Avoids escaping the middle of a long text.
        return shorten(repr(value[:_QUOTED])[:-1] + repr(value[-_QUOTED:])[1:], _QUOTED)
    try:
        text = repr(value)
    except Exception:
        # Python does not write integers of thousands of digits, and a user's class may raise
        # anything.
        text = (
            f"a number of {value.bit_length()} bits"
            if isinstance(value, int)
            else f"a {type(value).__name__}"
        )
    return shorten(printable(text), _QUOTED)


def quote_all(values: Iterable[Any]) -> str:
    """Return the first values, quoted, and the number of the others: "'a', 'b' and 98 more"."""
    listed = list(values)
    more = f" and {len(listed) - _LISTED:,} more" if len(listed) > _LISTED else ""
    return ", ".join(map(quote, listed[:_LISTED])) + more


def first_of(texts: Sequence[str], most: int) -> str:
    """Return the first texts, and the number of the others."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


@contextmanager
def flags(names: Mapping[str, str]) -> Iterator[None]:
    """Replace names of arguments in messages by command-line flags."""
    before = errors.flags
    errors.flags = names
    try:
        yield
    finally:
        errors.flags = before


def current_flags() -> dict[str, str]:
    """Return the flags that messages use now, for use in another process."""
    return dict(errors.flags)


def argument(name: str, value: Any = None, of: str | None = None) -> str:
    """Write an argument with its value for a message: "clip=1" or "--clip 1".

    ``of`` is the class or function that takes the argument in Python: "Columns(label=...)".
    """
    if name in errors.flags:
        flag = errors.flags[name]
        if value is False:
            return f"--no-{flag.removeprefix('--')}"
        return flag if value is None or value is True else f"{flag} {value}"
    if of is not None:
        return f"{of}({name}={'...' if value is None else repr(value)})"
    return name if value is None else f"{name}={value!r}"


def same_word(word: str, choices: Iterable[str]) -> str:
    """Return the choice that equals a word except for case and underscores, or the word itself."""
    plain = word.lower().replace("_", "")
    return next((choice for choice in choices if choice.replace("_", "") == plain), word)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to a misspelled or abbreviated one, in any case of letters, or
    None.
    """
    name_of = {_plain(choice): choice for choice in valid}
    plain_name = _plain(name)
    begins = [
        choice
        for choice in name_of
        if len(plain_name) > 2
        and (choice.startswith(plain_name) or plain_name.startswith(f"{choice}-"))
    ]
    candidates = (
        plain_name,
        _OTHER_NAMES.get(plain_name),
        *begins,
        *difflib.get_close_matches(plain_name, name_of, 1),
    )
    return next((name_of[choice] for choice in candidates if choice in name_of), None)


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; raise MissingExtraError with the extra of raglane that
    installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A broken package that is installed shows its own error.
        if (
            error.name is not None
            and module != error.name
            and not module.startswith(error.name + ".")
        ):
            raise
        raise MissingExtraError(
            f"{module.split('.')[0]} is not installed. Run pip install 'raglane[{extra}]'."
        ) from error
