"""The decision about a table: a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raglane._utils.messages import quote
from raglane.data.records import RoleNotes
from raglane.data.roles.steps import NO_STEPS, StepColumns


class Shape(StrEnum):
    """The kinds of rows."""

    ELEMENTS = "an element"
    STEPS = "a sequence, with a column per step"
    TEXTS = "a text"
    LISTS = "a sequence"


@dataclass(frozen=True)
class Roles:
    """The roles of the columns of a table.

    ``id`` and ``time`` are () for rows without ids, or in order; several columns are joined.
    ``notes`` tell the user which rule chose each.
    """

    shape: Shape
    id: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    sequence: str | None = None
    label: str | None = None
    features: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    steps: StepColumns = NO_STEPS
    id_note: str = ""
    time_note: str = ""
    note: str = ""
    # The notes about sequence, label and id of rows that are sequences.
    about: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes about the rows, each one line."""
        if self.shape is Shape.LISTS:
            return ("each row is a sequence",)
        ids = self.id_note
        if self.id and not ids and self.shape is not Shape.TEXTS:
            ids = f"id column: {', '.join(map(quote, self.id))} (named)"
        return tuple(filter(None, (ids, self.note, self.time_note)))

    @property
    def names(self) -> list[str]:
        """The columns of rows that are sequences, each once."""
        every = (self.sequence, self.label, *self.id, *self.features, *self.static)
        return list({name: None for name in every if name is not None})

    @property
    def described(self) -> RoleNotes:
        """Which column of rows that are sequences is what, in words."""
        columns = {"sequence": self.sequence, "label": self.label, "id": ",".join(self.id) or None}
        named = [
            f"{role} column: {quote(name)} (named)"
            for role, name in columns.items()
            if name is not None
            and not any(note.startswith(f"{role} column") for note in (self.note, *self.about))
        ]
        return RoleNotes(self.notes, (*named, *self.about))
