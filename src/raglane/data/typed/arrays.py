"""The types of NumPy arrays by what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""An array of any type."""

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

Values = npt.NDArray[np.float32]
"""Numbers as a model reads them."""

Entries = npt.NDArray[np.object_]
"""Texts of the entries of a column."""
