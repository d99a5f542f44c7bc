"""``python -m raglane``: the command line."""

from __future__ import annotations

import sys

from raglane.cli import main

if __name__ == "__main__":
    sys.exit(main())
