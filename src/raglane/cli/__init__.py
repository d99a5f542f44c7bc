"""The command ``raglane``. This file needs nothing beyond Python, so that it can say what is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    if any(importlib.util.find_spec(module) is None for module in ("typer", "rich")):
        print(
            "raglane: error: the command line needs packages that are not installed. Run pip install 'raglane[cli]'.",
            file=sys.stderr,
        )
        return 2
    from raglane.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
