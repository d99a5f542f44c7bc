"""The decision about a table: which column is what, by which rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raglane._utils.messages import quote, quote_all, require
from raglane.data.columns import Columns, option
from raglane.data.roles.facts import Facts
from raglane.data.roles.labels import label_of
from raglane.data.roles.lists import decide_lists
from raglane.data.roles.roles import Roles, Shape
from raglane.data.roles.row_shape import rows_are_elements
from raglane.data.roles.rules import ID, Refusal, RoleColumns, first, row_numbers, time_rules
from raglane.data.roles.steps import (
    NO_STEPS,
    StepColumns,
    described,
    row_id,
    steps_of,
    unused_steps,
)
from raglane.data.typed.arrow import is_bytes
from raglane.data.typed.names import (
    ROLE_NAMES,
    TEXT_NAMES,
)
from raglane.tasks import TASKS

# Names of the texts, and of their transcriptions, of a table of two columns.
_SOURCE_NAMES = (*ROLE_NAMES["sequence"], *TEXT_NAMES, "word", "source", "grapheme", "graphemes")
_TARGET_NAMES = (
    *ROLE_NAMES["label"],
    *("phones", "phonemes", "phoneme", "pronunciation", "ipa", "translation", "transcription"),
)


def decide(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Return the roles of the columns of a table, or why they cannot be told.

    ``columns`` names the columns of the user, and the task. The features of rows that are elements
    are chosen when the rows are sorted.

    Example:
        >>> from raglane.data.typed.column import written
        >>> facts = Facts({"id": written(["a", "a", "b"]), "x": written(["1", "2", "3"])})
        >>> roles = decide(facts, Columns(task="forecast"))
        >>> roles.shape.value, roles.id, roles.id_note
        ('an element', ('id',), "id column: 'id' (by its name)")
    """
    roles = decide_rows(facts, columns)
    return roles if isinstance(roles, Refusal) else with_label(facts, columns, roles)


def with_label(facts: Facts, columns: Columns, roles: Roles) -> Roles | Refusal:
    """Return the roles of rows with the label of rows that are elements or have steps."""
    if roles.shape in (Shape.LISTS, Shape.TEXTS):
        return roles
    others = (*roles.id, *roles.time, *roles.steps.names, *(columns.static or ()))
    cells = facts.only(facts.cells(columns)) if facts.kinds else facts
    ids = None if roles.shape is Shape.STEPS else roles.id
    label = label_of(cells, columns, ids, others)
    if isinstance(label, Refusal):
        return label
    name = ",".join(label.names) or None
    return replace(roles, label=name, about=tuple(filter(None, [label.note])))


def decide_rows(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Return the roles of a table without the label of rows that are elements or have steps."""
    if facts.kinds:
        return _decide_typed(facts, columns)
    return _decide_cells(facts, columns)


def _decide_typed(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Decide about columns of types, of which some may hold lists."""
    if not rows_are_elements(facts, columns, _decide_cells):
        return decide_lists(facts, columns)
    names = facts.cells(columns)
    odd = next((name for name in names if is_bytes(facts.kinds[name])), None)
    if odd is not None:
        rule = "a table of texts, numbers and booleans"
        fix = "decode them, e.g. with .str.decode()"
        return Refusal(f"bytes in the column {quote(odd)}", rule, fix)
    return _decide_cells(facts.only(names), columns)


def _decide_cells(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Decide about columns of numbers and words."""
    written = next((name for name in _used(facts, columns) if facts.are_written_lists(name)), None)
    if written is not None:
        rule = "a table whose entries are numbers or words"
        fix = "write it with to_parquet, or to_json(path, orient='records', lines=True), which keep lists"
        return Refusal(f"lists written as texts in column {quote(written)}", rule, fix)
    texts = _texts(facts, columns)
    if isinstance(texts, Refusal):
        return texts
    if texts is not None:
        return _text_rows(facts, columns, texts)
    ids = first(ID[:2], facts, columns)
    if isinstance(ids, Refusal):
        return ids
    names = () if ids is None else ids.names
    steps = steps_of(facts, columns, names)
    if steps.columns or columns.wide:
        return _rows_of_steps(facts, columns, ids, steps)
    return _elements(facts, columns)


def _used(facts: Facts, columns: Columns) -> list[str]:
    """Return the columns that may be features or sequences."""
    named = (*(columns.features or ()), *filter(None, [columns.sequence]))
    return [name for name in facts if not named or name in named]


def _text_rows(facts: Facts, columns: Columns, texts: Roles) -> Roles | Refusal:
    """Return the roles of rows that are a text each, as in a table with types."""
    label = columns.label or texts.label
    asked = replace(columns, sequence=texts.sequence, label=label)
    arrow = require("pyarrow", "data")
    numbers = {label} if TASKS[columns.task].label == "numbers" else set()
    numbers |= {name for name in columns.static or () if not is_word(facts, name, columns)}
    kinds = {name: arrow.float64() if name in numbers else arrow.string() for name in facts}
    roles = decide_lists(Facts(facts.columns, kinds), asked)
    if isinstance(roles, Refusal):
        return roles
    return replace(roles, shape=Shape.TEXTS, note=texts.note)


def is_word(facts: Facts, name: str, columns: Columns) -> bool:
    """Return True for a feature of texts that is a category."""
    if name in (columns.categorical or ()):
        return True
    return name in facts.columns and facts.share_of_words(name) > 0.5


def _elements(facts: Facts, columns: Columns) -> Roles | Refusal:
    ids = first(ID, facts, columns)
    if isinstance(ids, Refusal):
        return ids
    names = () if ids is None else ids.names
    numbered = row_numbers(facts, columns, names)
    if numbered is not None:
        return numbered
    times = first(time_rules(names), facts, columns)
    if isinstance(times, Refusal):
        return times
    id_note = "" if ids is None else ids.note
    unused = NO_STEPS if names else unused_steps(facts, columns)
    if unused.columns:
        wide = option("wide", value=True)
        id_note = f"{id_note}, with the channels {unused.span}; {wide} makes each row a sequence"
    return Roles(
        Shape.ELEMENTS,
        id=names,
        time=() if times is None else times.names,
        id_note=id_note,
        time_note="" if times is None else times.note,
    )


def _rows_of_steps(
    facts: Facts, columns: Columns, ids: RoleColumns | None, steps: StepColumns
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
        ids = RoleColumns((name,), note)
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
    names = ids.names if isinstance(ids, RoleColumns) else ()
    is_pair = TASKS[columns.task].label == "sequence" and columns.features is None
    present = [name for name in facts if name not in names]
    texts = [name for name in present if name.lower() in TEXT_NAMES]
    if names:
        if columns.wide or columns.features is not None or not facts.is_unique(*names):
            return None
        if not is_pair:
            return _texts_of_ids(facts, columns, names, present)
    if is_pair:
        return _pair(present, texts, columns)
    return _text_roles(texts[0]) if len(texts) == 1 else None


def _texts_of_ids(
    facts: Facts, columns: Columns, names: Sequence[str], present: Sequence[str]
) -> Roles | None:
    """Return the column of texts if each row has an id of its own, or of a column called sequence
    that is no id.
    """
    usual = (*TEXT_NAMES, *ROLE_NAMES["sequence"])
    texts = [name for name in present if name.lower() in usual and name != columns.label]
    if not texts and columns.id is None and len(present) <= 1:
        texts = [name for name in names if name.lower() in usual]
    if len(texts) != 1 or facts.share_of_words(texts[0]) <= 0.5:
        return None
    return _text_roles(texts[0], None, "by its name")


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
