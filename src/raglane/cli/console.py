"""Output of the commands: control characters are escaped, so that data cannot affect the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from raglane._utils.messages import printable


def say(*lines: str) -> None:
    """Print lines to standard output, with escapes for unprintable characters."""
    for line in lines:
        print(_encodable(line, sys.stdout.encoding), flush=True)


def write(content: bytes) -> None:
    """Print the content of a file: unchanged, or with escapes on a terminal; a reader may end early, as head does."""
    text = content.decode(errors="backslashreplace")
    if sys.stdout.isatty():
        say(*text.splitlines())
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python reports the pipe again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def speaker(quiet: bool) -> Callable[[str], None]:
    """Return :func:`say`, or a function that prints nothing."""
    return (lambda *_: None) if quiet else say


def complain(*lines: str) -> None:
    """Print lines to standard error, with escapes for unprintable characters."""
    for line in lines:
        print(_encodable(line, sys.stderr.encoding), file=sys.stderr)


def _encodable(line: str, encoding: str | None) -> str:
    encoding = encoding or "utf-8"
    return printable(line).encode(encoding, errors="backslashreplace").decode(encoding)
