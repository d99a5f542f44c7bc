"""The parts of ``benchmarks/device.py``, for a GPU or many processors."""

from __future__ import annotations

import sys
from pathlib import Path

# This checkout is measured, even if another version of raglane is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
