"""The rows of a table with types: elements, or sequences with a column per step, or neither."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raglane.data.columns import Columns
from raglane.data.roles.facts import Facts
from raglane.data.roles.lists import decide_lists
from raglane.data.roles.roles import Roles, Shape
from raglane.data.roles.rules import Refusal, parts_of, usual_id
from raglane.data.roles.steps import NUMBERED, steps_of
from raglane.data.typed.arrow import is_list, is_text
from raglane.data.typed.names import (
    PERIOD_NAMES,
    ROLE_NAMES,
    ROW_ID_NAMES,
    TEXT_NAMES,
    TIME_NAMES,
)


def rows_are_elements(
    facts: Facts, columns: Columns, decide: Callable[[Facts, Columns], Roles | Refusal]
) -> bool:
    """Return True for rows that are elements, or have a column per step; ``decide`` returns the
    roles of columns without lists.
    """
    names = facts.cells(columns)
    if columns.sequence is not None or any(map(is_list, facts.kinds.values())) or not names:
        return False
    texts = {name for name in names if is_text(facts.kinds[name])}
    if _are_named(facts, columns, texts):
        return True
    ids = _ids_of(columns, names, texts)
    if ids and not facts.is_unique(*ids) and not _are_documents(facts, texts):
        return True
    if columns.task == "forecast" and not ids and texts < set(names):
        # Texts with numbers and times may be the ids of series.
        decision = decide(facts.only(names), columns)
        if _are_series(decision):
            return True
    return _have_steps(facts, columns, names, ids)


def _ids_of(columns: Columns, names: list[str], texts: set[str]) -> tuple[str, ...]:
    if columns.id is not None:
        return (columns.id,) if columns.id in names else ()
    # Texts called "sequence" are sequences, such as those of genes.
    eligible = [name for name in names if name not in texts or name.lower() != "sequence"]
    usual = usual_id(columns, eligible, ROW_ID_NAMES)
    return () if usual is None else usual.names


def _are_series(decision: Roles | Refusal) -> bool:
    if isinstance(decision, Refusal):
        return "id" in decision.fixes
    return decision.shape is Shape.ELEMENTS


def _are_named(facts: Facts, columns: Columns, texts: set[str]) -> bool:
    """Return True if options, or the lack of texts, tell that rows are no whole sequences."""
    kinds = facts.kinds
    # A forecast needs no id, and times of JSON are texts.
    usual = (*TIME_NAMES, *PERIOD_NAMES) if columns.task == "forecast" else ()
    times = {name for name in texts if name.lower() in usual}
    ids = parts_of(columns.id, kinds) if columns.id is not None else ()
    has_time = columns.time is not None and set(parts_of(columns.time, kinds)) <= set(kinds)
    has_features = bool(set(columns.features or ()) & set(kinds) - texts)
    return columns.wide or has_time or has_features or texts == times or len(ids) > 1


def _are_documents(facts: Facts, texts: set[str]) -> bool:
    """Return True if a column of texts has sentences: several may have one id, e.g. those of a
    user.
    """
    usual = (*ROLE_NAMES["sequence"], *TEXT_NAMES)
    return any(name.lower() in usual and _are_sentences(facts, name) for name in sorted(texts))


def _are_sentences(facts: Facts, name: str) -> bool:
    """Return True if most texts of a column have several words."""
    words = facts.columns[name].words()
    texts = words[words != ""]
    several = np.array([" " in text.strip() for text in texts.tolist()], dtype=np.bool_)
    return 2 * several.sum() > len(texts)


def _have_steps(facts: Facts, columns: Columns, names: list[str], ids: tuple[str, ...]) -> bool:
    # Without three numbered columns, the table need not be read, and may have bytes.
    if sum(map(bool, map(NUMBERED.fullmatch, names))) <= 2:
        return False
    roles = decide_lists(facts, columns)
    if isinstance(roles, Refusal) and not roles.is_unfit:
        return False
    if isinstance(roles, Roles):
        # A step of whole numbers looks like a label.
        is_guessed = roles.label not in (None, columns.label)
        if not is_guessed or NUMBERED.fullmatch(str(roles.label)) is None:
            return False
    return bool(steps_of(facts.only(names), columns, ids).columns)
