"""Output of the commands: control characters are escaped, so that data cannot affect the
terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raglane._utils.messages import printable
from raglane.errors import ArgumentError


def log(*lines: str) -> None:
    """Print lines to standard output, with escapes for unprintable characters."""
    for line in lines:
        print(_encodable(line, sys.stdout.encoding), flush=True)


def write(content: bytes) -> bool:
    """Print the content of a file: unchanged, or with escapes on a terminal.

    Return False if the reader has ended early, as head does.
    """
    if (
        getattr(sys.stdout, "name", "") == os.devnull
    ):  # opened by main, while that of a shell has another name
        raise ArgumentError(
            "standard output", "a closed one", "open to print data", "write to a file instead"
        )
    if sys.stdout.isatty():
        log(*content.decode(errors="backslashreplace").splitlines())
        return True
    try:
        # Data is UTF-8, whatever encoding the environment names for texts; a stream of texts has no
        # encoding.
        binary = getattr(sys.stdout, "buffer", None)
        sys.stdout.write(content.decode()) if binary is None else binary.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python reports the pipe again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def is_stdout(path: Path | None) -> bool:
    """Return True for ``-``, standard output, as the file of an option."""
    return str(path) == "-"


def write_json(path: Path | None, content: Any) -> None:
    """Write JSON to the file of an option, or to standard output for ``-``; nothing for None."""
    from raglane._utils.files import check_writable, write_file
    from raglane._utils.json import finite, to_json

    if path is None:
        return
    if is_stdout(path):
        write(to_json(finite(content)))
        return
    check_writable("json", path)
    write_file(path, to_json(finite(content)))


def logger(quiet: bool) -> Callable[[str], None]:
    """Return :func:`log`, or a function that prints nothing."""
    return (lambda *_: None) if quiet else log


def log_error(*lines: str) -> None:
    """Print lines to standard error, with escapes for unprintable characters."""
    for line in lines:
        print(_encodable(line, sys.stderr.encoding), file=sys.stderr)


def _encodable(line: str, encoding: str | None) -> str:
    encoding = encoding or "utf-8"
    return printable(line).encode(encoding, errors="backslashreplace").decode(encoding)
