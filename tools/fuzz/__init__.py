"""Fuzzers: random networks, tensors, programs, files, commands and kills, until something breaks
(``make fuzz``).
"""

import sys
from pathlib import Path

# The helpers that the fuzzers share with the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
