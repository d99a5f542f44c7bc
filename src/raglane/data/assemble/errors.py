"""Refusals and errors about a file as values, and notes about options that do nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from raglane.data.columns import LISTS, NAMED, ROLES, Columns, option
from raglane.data.records import Records
from raglane.data.roles import Refusal
from raglane.data.sources.files import data_error
from raglane.errors import DataError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def attempt(
    read: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result | DataError:
    """Return what is read, or the error of data that breaks a rule, in order to decide by it.

    Only here an error becomes a value: readers raise the error of a row where they find it, and
    rows that are left out, tables without labels and the like are chosen by the value.
    """
    try:
        return read(*args, **options)
    except DataError as error:
        return error


def refused(path: Path, refusal: Refusal) -> DataError:
    """Return the error for a file whose columns have no role, or several."""
    error = data_error(path, refusal.got, refusal.rule, refusal.fix)
    error.fixes = dict(refusal.fixes)
    return error


def accepted(path: Path, decision: Result | Refusal) -> Result:
    """Return what was decided about a file; raise the error of a refusal."""
    if isinstance(decision, Refusal):
        raise refused(path, decision)
    return decision


def _idle(columns: Columns, records: Records) -> list[str]:
    """Return the options for texts and whole numbers that do nothing for these records."""
    is_sequence = records.targets is not None and records.targets.ordered
    texts = {
        "split": records.is_tokens and records.columns.split is not None,
        # Data to predict has no labels.
        "label_split": not columns.need_labels or is_sequence,
        "tokens": records.is_tokens or not columns.tokens,
    }
    return [name for name, acts in texts.items() if getattr(columns, name) and not acts]


def unused_notes(
    columns: Columns, roles: Iterable[str], source: str, records: Records
) -> list[str]:
    """Return the notes about options that do nothing for these records, whose source has columns of
    some roles.
    """
    if roles and records.columns.sequence is not None:
        of_files = {role for role in roles if role not in NAMED}
        roles = ("sequence", "label", "id", *LISTS, *of_files)
        source = "a table of this kind"
    unused = [
        role for role in ROLES if getattr(columns, role) not in (None, False) and role not in roles
    ]
    idle = _idle(columns, records)
    reasons = {f"{source} has no such column": unused, "no texts or whole numbers fit": idle}
    return [
        f"not used, since {reason}: {', '.join(map(option, names))}"
        for reason, names in reasons.items()
        if names
    ]
