"""The class ``Ragged``.

:mod:`~raglane.ragged.batch` contains the class, :mod:`~raglane.ragged.operations` its operations
per sequence, and :mod:`~raglane.ragged.face` the torch functions that accept it.
"""

from __future__ import annotations

from raglane.ragged.batch import Ragged

__all__ = ["Ragged"]
