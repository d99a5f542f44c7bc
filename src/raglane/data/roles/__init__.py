"""Which column of a table is what: the only room that guesses.

Rules get the facts of typed columns, and the columns that the user named. No file is read here, and
no path is known, so a decision can be tested without a file: :func:`decide` returns the
:class:`Roles`, with a note for each guess, or the :class:`Refusal` with its fix. roles.py has the
decision; decide.py and row_shape.py tell what a row is, rules.py, steps.py, lists.py and labels.py what
its columns are, label_types.py which types a task's labels have, and guess.py the task.
"""

from __future__ import annotations

from raglane.data.roles.decide import decide, decide_rows
from raglane.data.roles.facts import Facts
from raglane.data.roles.guess import guess_task
from raglane.data.roles.roles import Roles, Shape
from raglane.data.roles.rules import Refusal

__all__ = ["Facts", "Refusal", "Roles", "Shape", "decide", "decide_rows", "guess_task"]
