"""The class ``Ragged``.

:mod:`~raglane.ragged.batch` contains the class, :mod:`~raglane.ragged.operations` its operations
per sequence, :mod:`~raglane.ragged.face` the torch functions that accept it, and
:mod:`~raglane.ragged.nested` batches of batches.
"""

from __future__ import annotations

from raglane.ragged.batch import Ragged
from raglane.ragged.nested import Nested

__all__ = ["Nested", "Ragged"]
