"""``Ragged``: the value that everything in Raglane passes around.

:mod:`~raglane.ragged.batch` holds the class and its conversions, :mod:`~raglane.ragged.operations` what it computes
sequence by sequence, :mod:`~raglane.ragged.functions` which torch functions accept it.
"""

from __future__ import annotations

from raglane.ragged.batch import Ragged

__all__ = ["Ragged"]
