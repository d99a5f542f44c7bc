"""Output of the commands: control characters are escaped, so that data cannot affect the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from raglane._utils.messages import printable


def say(*lines: str) -> None:
    """Print lines to standard output, with escapes for unprintable characters."""
    for line in lines:
        print(_encodable(line, sys.stdout.encoding), flush=True)


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
