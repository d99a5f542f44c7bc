"""The decision about a table: which column is what, by which rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from raglane._utils.messages import argument, quote, quote_all
from raglane.data.records import Columns
from raglane.data.roles.facts import Facts
from raglane.data.roles.rules import (
    ID,
    ROLE_NAMES,
    Choice,
    Refusal,
    first,
    option,
    time_rules,
)
from raglane.data.roles.steps import NO_STEPS, Steps, described, row_id, steps_of, unused_steps
from raglane.tasks import TASKS

# Names of a column of texts in a file without ids.
TEXT_NAMES = ("text", "sentence", "document", "question", "review")
# Names of the texts, and of their transcriptions, of a table of two columns.
_SOURCE_NAMES = (*ROLE_NAMES["sequence"], *TEXT_NAMES, "word", "source", "grapheme", "graphemes")
_TARGET_NAMES = (
    *ROLE_NAMES["label"],
    *("phones", "phonemes", "phoneme", "pronunciation", "ipa", "translation", "transcription"),
)


class Shape(StrEnum):
    """The kinds of rows."""

    ELEMENTS = "an element"
    STEPS = "a sequence, with a column per step"
    TEXTS = "a text"


@dataclass(frozen=True)
class Roles:
    """The roles of the columns of a table whose cells are numbers and words.

    ``id`` and ``time`` are () for rows without ids, or in order; several columns are joined.
    ``notes`` tell the user which rule chose each.
    """

    shape: Shape
    id: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    sequence: str | None = None
    label: str | None = None
    steps: Steps = NO_STEPS
    id_note: str = ""
    time_note: str = ""
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes about the rows, each one line."""
        ids = self.id_note
        if self.id and not ids:
            ids = f"id column: {', '.join(map(quote, self.id))} (named)"
        return tuple(filter(None, (ids, self.note, self.time_note)))


def decide(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Return the roles of the columns of a table, or why they cannot be told.

    ``columns`` names the columns of the user, and the task. The features and the label of rows that
    are elements are chosen when the rows are sorted.

    Example:
        >>> from raglane.data.typed.column import written
        >>> facts = Facts({"id": written(["a", "a", "b"]), "x": written(["1", "2", "3"])})
        >>> roles = decide(facts, Columns(task="forecast"))
        >>> roles.shape.value, roles.id, roles.id_note
        ('an element', ('id',), "id column: 'id' (by its name)")
    """
    texts = _texts(facts, columns)
    if isinstance(texts, Refusal):
        return texts
    if texts is not None:
        return texts
    ids = first(ID[:2], facts, columns)
    if isinstance(ids, Refusal):
        return ids
    names = () if ids is None else ids.names
    steps = steps_of(facts, columns, names)
    if steps.columns or columns.wide:
        return _rows_of_steps(facts, columns, ids, steps)
    return _elements(facts, columns)


def _elements(facts: Facts, columns: Columns) -> Roles | Refusal:
    ids = first(ID, facts, columns)
    if isinstance(ids, Refusal):
        return ids
    names = () if ids is None else ids.names
    times = first(time_rules(names), facts, columns)
    if isinstance(times, Refusal):
        return times
    id_note = "" if ids is None else ids.note
    unused = NO_STEPS if names else unused_steps(facts, columns)
    if unused.columns:
        wide = argument("wide", value=True, of="Columns")
        id_note = f"{id_note}, with the channels {unused.span}; {wide} makes each row a sequence"
    return Roles(
        Shape.ELEMENTS,
        id=names,
        time=() if times is None else times.names,
        id_note=id_note,
        time_note="" if times is None else times.note,
    )


def _rows_of_steps(
    facts: Facts, columns: Columns, ids: Choice | None, steps: Steps
) -> Roles | Refusal:
    leave = option("wide")
    if not steps.columns:
        rule = "a file whose columns of numbers are steps"
        return Refusal("no column of numbers", rule, f"check the file, or leave {leave} out")
    present = set(facts)
    lacking = next((name for name in steps.names if name not in present), None)
    if lacking is not None:
        rule = f"a file with this column, but its columns are {quote_all(facts)}"
        fix = f"pass one of them as {option('features')}"
        return Refusal(f"no column {quote(lacking)}", rule, fix)
    name = None if ids is not None or columns.wants_labels else row_id(facts, columns, steps)
    if name is not None:
        note = f"id column: {quote(name)} (the only one of words before the steps)"
        ids = Choice((name,), note)
    return Roles(
        Shape.STEPS,
        id=() if ids is None else ids.names,
        steps=steps,
        id_note="" if ids is None else ids.note,
        note=described(steps),
    )


def _texts(facts: Facts, columns: Columns) -> Roles | Refusal | None:
    """Return the column of texts, if each row is a whole sequence."""
    if columns.sequence is not None:
        return _text_roles(columns.sequence)
    ids = first(ID[:2], facts, columns)
    names = ids.names if isinstance(ids, Choice) else ()
    is_pair = TASKS[columns.task].label == "sequence" and columns.features is None
    if names and not (is_pair and facts.is_unique(*names)):
        return None
    present = [name for name in facts if name not in names]
    texts = [name for name in present if name.lower() in TEXT_NAMES]
    if is_pair:
        return _pair(present, texts, columns)
    return _text_roles(texts[0]) if len(texts) == 1 else None


def _pair(present: Sequence[str], texts: Sequence[str], columns: Columns) -> Roles | Refusal:
    """Return the columns of texts and of their transcriptions."""
    labels = (columns.label,) if columns.label is not None else ROLE_NAMES["label"]
    free = [name for name in present if name not in (*labels, *(columns.static or ()))]
    if len(texts) == 1:
        return _text_roles(texts[0], _target_of(free, texts[0], columns))
    if len(free) == 1:
        return _text_roles(free[0], None, "the only candidate")
    sources = [name for name in free if name.lower() in _SOURCE_NAMES]
    if len(sources) == 1:
        return _text_roles(sources[0], _target_of(free, sources[0], columns), "by its name")
    return _no_pair(free)


def _target_of(free: Sequence[str], source: str, columns: Columns) -> str | None:
    """Return the column of the transcriptions of a source, by its name."""
    if columns.label is not None:
        return None
    targets = [name for name in free if name != source and name.lower() in _TARGET_NAMES]
    return targets[0] if len(targets) == 1 else None


def _text_roles(name: str, label: str | None = None, how: str = "") -> Roles:
    note = f"sequence column: {quote(name)} ({how})" if how else ""
    return Roles(Shape.TEXTS, sequence=name, label=label, note=note)


def _no_pair(free: Sequence[str]) -> Refusal:
    got = f"{len(free)} candidates for the sequence column: {quote_all(free)}"
    rule = "a file with one candidate for the sequence column"
    if len(free) < 2:
        return Refusal(got, rule, f"name one with {option('sequence')}")
    pair = f"{option('sequence', free[0])} {option('label', free[1])}"
    fix = f"name the texts and their transcriptions, as {pair}"
    fixes = {"sequence": free[0], "label": free[1]}
    return Refusal(got, rule, fix, fixes, tuple(free))
