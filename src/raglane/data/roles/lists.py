"""Tables whose rows are sequences: lists of numbers or words, or texts, with their labels.

If no column is named, the sequence column is the only list column, or else the only text column;
the label column is the only other column of labels. A column called ``id`` (or ``sequence_id``,
...) contains the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raglane._utils.messages import quote
from raglane.data.columns import Columns, is_named, option
from raglane.data.roles.facts import Facts
from raglane.data.roles.label_types import fits, label_test
from raglane.data.roles.roles import Roles, Shape
from raglane.data.roles.rules import (
    Features,
    Refusal,
    RoleColumns,
    absent,
    empty_label,
    named_features,
    only,
    takes_tokens,
    usual_id,
)
from raglane.data.typed.arrow import arrow_types, is_id, is_list, is_sequence, is_text
from raglane.data.typed.names import (
    ID_NAMES,
    ROLE_NAMES,
    TIME_NAMES,
)
from raglane.tasks import TASKS

_Kinds = Mapping[str, Any]


def decide_lists(facts: Facts, columns: Columns) -> Roles | Refusal:
    """Return the roles of a table whose rows are sequences."""
    kinds = {name: kind for name, kind in facts.kinds.items() if is_named(name, columns)}
    if columns.time in kinds:
        rule = "a file without a time column, because a row is a whole sequence with its elements in order"
        fix = f"sort the lists, and leave {option('time')} out"
        return Refusal(f"the time column {quote(columns.time)}", rule, fix)
    ids = _id_of(kinds, columns)
    features = named_features(columns, list(kinds))
    if isinstance(ids, Refusal):
        return ids
    if isinstance(features, Refusal):
        return features
    sequence = _sequence_of(kinds, columns, ids.names, features)
    if isinstance(sequence, Refusal):
        return sequence
    name = sequence.names[0]
    features = Features(tuple(each for each in features[0] if each != name), features[1])
    others = (name, *ids.names, *features[0], *features[1])
    label = _label_of(kinds, columns, others)
    if isinstance(label, Refusal):
        return label
    notes = [*filter(None, [sequence.note]), *_reading_notes(kinds[name], name, columns)]
    notes += [*filter(None, [label.note])]
    if not ids.names:
        used = {name, *label.names, *features[0], *features[1]}
        notes += [
            f"not used, since ids are texts or whole numbers: the column {quote(each)}"
            for each in kinds
            if each not in used and each.lower() in ID_NAMES
        ]
    return Roles(
        Shape.LISTS,
        id=ids.names,
        sequence=name,
        label=next(iter(label.names), None),
        features=features[0],
        static=features[1],
        about=(*notes, *filter(None, [ids.note])),
    )


def _reading_notes(kind: Any, name: str, columns: Columns) -> list[str]:
    if is_text(kind):
        is_words = columns.split in (None, "words")
        how = "on white space into tokens" if is_words else f"into {columns.split}"
        return [f"the texts of {quote(name)} are split {how}"]
    if is_list(kind) and arrow_types().is_integer(kind.value_type):
        return [takes_tokens(columns, name)[1]]
    return []


def _id_of(kinds: _Kinds, columns: Columns) -> RoleColumns | Refusal:
    if columns.id is not None:
        return (
            RoleColumns((columns.id,)) if columns.id in kinds else absent("id", columns.id, kinds)
        )
    return usual_id(
        columns, (name for name in kinds if is_id(kinds[name])), ID_NAMES
    ) or RoleColumns(())


def _sequence_of(
    kinds: _Kinds, columns: Columns, ids: Sequence[str], features: Features
) -> RoleColumns | Refusal:
    if columns.sequence is not None:
        is_there = columns.sequence in kinds
        return (
            RoleColumns((columns.sequence,))
            if is_there
            else absent("sequence", columns.sequence, kinds)
        )
    if features.of_elements:
        return RoleColumns(features.of_elements[:1])
    roles = (*ids, columns.label, *features.of_sequences)
    free = [name for name in kinds if name not in roles]
    kind = (
        "column of lists of numbers, of lists of lists of numbers, of lists of strings, or of texts"
    )
    return only("sequence", _sequence_candidates(kinds, columns, free), kind, kinds)


def _sequence_candidates(kinds: _Kinds, columns: Columns, free: Sequence[str]) -> list[str]:
    lists = [name for name in free if is_sequence(kinds[name])]
    label = TASKS[columns.task].label
    labels = ROLE_NAMES["label"] if columns.label is None and label is not None else ()
    texts = _texts(kinds, free, labels)
    if not columns.wants_labels or columns.task == "classify":
        return lists or texts
    # A list may be the label here, but a text with the name of a sequence is not.
    usual = _called(texts, "sequence")
    if label != "sequence":
        return usual or lists or texts
    # Both columns may be lists or texts, but only sequences are numbers.
    lists = _numeric(kinds, lists) or lists
    return _not_targets(kinds, lists, columns.task) or usual or lists or texts


def _texts(kinds: _Kinds, free: Sequence[str], labels: Sequence[str]) -> list[str]:
    return [name for name in free if is_text(kinds[name]) and name.lower() not in labels]


def _numeric(kinds: _Kinds, lists: list[str]) -> list[str]:
    return [name for name in lists if not is_text(kinds[name].value_type)]


def _not_targets(kinds: _Kinds, names: list[str], task: str) -> list[str]:
    is_target = label_test(task)[0]
    return [name for name in names if not is_target(kinds[name])]


def _called(names: Iterable[str], role: str) -> list[str]:
    return [name for name in names if name.lower() in ROLE_NAMES[role]]


def _is_time(name: str, kind: Any) -> bool:
    """Return True for a column of times: a table with a time in each row has a row per element."""
    return name.lower() in TIME_NAMES and not is_list(kind)


def _label_of(kinds: _Kinds, columns: Columns, others: Sequence[str]) -> RoleColumns | Refusal:
    if not columns.wants_labels:
        return RoleColumns(())
    is_label, kind = label_test(columns.task)
    if columns.label is None:
        usual = _called(kinds, "label")
        if usual and all(arrow_types().is_null(kinds[name]) for name in usual):
            return empty_label(usual[0])
        free = [name for name in kinds if name not in others and not _is_time(name, kinds[name])]
        return only("label", [name for name in free if is_label(kinds[name])], kind, kinds)
    if columns.label not in kinds:
        return absent("label", columns.label, kinds)
    if not fits(kinds[columns.label], columns.task):
        got = f"{kinds[columns.label]} in column {quote(columns.label)}"
        fix = f"name another with {option('label')}"
        return Refusal(got, f"data with a {kind}", fix, is_unfit=True)
    return RoleColumns((columns.label,))
