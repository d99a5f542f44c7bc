"""A table as it was read: typed columns by name, with an entry per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raglane._utils.messages import quote
from raglane.data.sources.files import data_error
from raglane.data.typed.arrays import Integers
from raglane.data.typed.column import Column, Typed
from raglane.errors import DataError

Load = Callable[[list[str]], Any]
"""Returns an Arrow table with some of its columns."""


def _without_lists(names: list[str]) -> Any:
    raise TypeError(f"a table of texts without lists: {names}")


@dataclass(frozen=True, eq=False)
class SourceTable:
    """The typed columns of a file, or of an object of a program.

    ``kinds`` are the types of an Arrow table, of which columns may hold lists; {} for a table of
    texts. ``lines`` are the lines of the rows in a text. ``unread`` has the errors of columns whose
    values are of several types. ``declared`` are attributes of Columns that the source tells, and
    ``usual`` those that it has where the user names none.
    """

    path: Path
    columns: Mapping[str, Column]
    notes: tuple[str, ...] = ()
    kinds: Mapping[str, Any] = field(default_factory=dict)
    lines: Integers | None = None
    unread: Mapping[str, DataError] = field(default_factory=dict)
    declared: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    # What is wrong with data that has no labels, the rule, and the fix.
    unlabelled: tuple[str, str, str] | None = None
    # The kinds of labels that a converted folder has stored.
    label_kinds: tuple[str, ...] | None = None

    # The number of rows, and some columns as an Arrow table, of a table of Arrow.
    rows: int | None = None
    load: Load = _without_lists

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ())) if self.rows is None else self.rows


class ArrowColumns(Mapping[str, Column]):
    """The columns of an Arrow table, each read when it is first used."""

    def __init__(self, path: Path, schema: Any, load: Load) -> None:
        # pandas stores the index of a table as a column of this name.
        fields = [field for field in schema if not field.name.startswith("__index_level_")]
        self.kinds = {field.name: field.type for field in fields}
        self._load = load
        self._columns: dict[str, Typed] = {}
        if len(self.kinds) < len(fields):
            counts = Counter(field.name for field in fields)
            twice = next(name for name in self.kinds if counts[name] > 1)
            rule = "a file with columns of different names"
            raise data_error(path, f"two columns {quote(twice)}", rule, "rename one")

    def __getitem__(self, name: str) -> Typed:
        if name not in self._columns:
            if name not in self.kinds:
                raise KeyError(name)
            table = self._load([name])
            # Arrow reads wrong offsets without a test of its buffers.
            table.validate(full=True)
            values = table.column(0)
            # Arrow does not compare UUIDs.
            storage = getattr(values.type, "storage_type", None)
            self._columns[name] = Typed(values if storage is None else values.cast(storage))
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def arrow_table(
    path: Path,
    schema: Any,
    count: int,
    load: Load,
    notes: Sequence[str] = (),
    **details: Any,
) -> SourceTable:
    """Return a table of Arrow; ``load`` reads some of its columns."""
    columns = ArrowColumns(path, schema, load)
    kinds = columns.kinds
    return SourceTable(path, columns, tuple(notes), kinds, rows=count, load=load, **details)


def whole_table(path: Path, table: Any, notes: Sequence[str] = (), **details: Any) -> SourceTable:
    """Return an Arrow table in memory as a table."""
    return arrow_table(path, table.schema, table.num_rows, table.select, notes, **details)
