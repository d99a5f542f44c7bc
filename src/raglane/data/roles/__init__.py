"""Which column of a table is what: the only room that guesses.

Rules get the facts of typed columns, and the columns that the user named. No file is read here, and
no path is known, so a decision can be tested without a file: :func:`decide` returns the
:class:`Roles`, with a note for each guess, or the :class:`Refusal` with its fix.
"""

from __future__ import annotations

from raglane.data.roles.decide import Roles, Shape, decide
from raglane.data.roles.facts import Facts
from raglane.data.roles.rules import Refusal

__all__ = ["Facts", "Refusal", "Roles", "Shape", "decide"]
