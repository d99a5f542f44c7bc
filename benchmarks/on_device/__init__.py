"""The parts of ``benchmarks/device.py``: what only a GPU, or many processors, can show."""

from __future__ import annotations

import sys
from pathlib import Path

# What is measured is this checkout, whether raglane is installed or not, and whichever version.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
