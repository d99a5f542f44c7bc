"""The command ``raglane``. This module imports only the standard library, so that it can report
missing packages.

app.py registers the commands and reports errors; options.py turns functions into commands, and
console.py prints. The commands: train.py, data.py, models.py (of trained runs), compare.py,
bench.py and serve.py. imports.py imports modules faster.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    # They are None if they are closed, as under cron.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if any(importlib.util.find_spec(module) is None for module in ("typer", "rich")):
        print(
            "raglane: error: the command line requires typer and rich. Run pip install 'raglane[cli]'.",
            file=sys.stderr,
        )
        return 2
    try:
        from raglane.cli.imports import importing

        with importing():
            from raglane.cli.app import run
    except KeyboardInterrupt:
        print("raglane: error: stopped", file=sys.stderr)
        return 130
    return run(sys.argv[1:] if arguments is None else list(arguments))
