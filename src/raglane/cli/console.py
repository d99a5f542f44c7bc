"""Where the commands print: what a file or a user wrote is shown, and does nothing else to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from raglane._utils.messages import printable


def say(*lines: str) -> None:
    """Print lines to the standard output, each as one line of printable characters."""
    for line in lines:
        print(_shown(line, sys.stdout.encoding), flush=True)


def speaker(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line, or nothing where a command is to be quiet."""
    return (lambda _: None) if quiet else say


def complain(*lines: str) -> None:
    """Print lines to the standard error, each as one line of printable characters."""
    for line in lines:
        print(_shown(line, sys.stderr.encoding), file=sys.stderr)


def _shown(line: str, encoding: str | None) -> str:
    # A stream that has not all of Unicode shows escapes, too, rather than fail.
    encoding = encoding or "utf-8"
    return printable(line).encode(encoding, errors="backslashreplace").decode(encoding)
