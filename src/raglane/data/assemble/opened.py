"""Files that are parsed: what decides about them, and makes their records, for any task.

A file is parsed once; its roles can then be decided for several tasks, without reading it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from raglane.data.assemble.elements import records_of_rows
from raglane.data.assemble.errors import accepted
from raglane.data.assemble.grouping import check_rows
from raglane.data.assemble.lists import records_of
from raglane.data.assemble.padding import without_padding
from raglane.data.assemble.tabular import whole_rows, wide_rows
from raglane.data.columns import Columns, option
from raglane.data.records import Records, Targets, as_float32, offsets_of
from raglane.data.roles import Facts, Refusal, Roles, Shape, decide_rows
from raglane.data.roles.decide import with_label
from raglane.data.roles.guess import Guess, first_task, unfit
from raglane.data.roles.rules import with_parts
from raglane.data.roles.words import Words, named_words
from raglane.data.sources.table import SourceTable
from raglane.data.sources.text import Lines
from raglane.data.sources.ts import Series
from raglane.data.splitting import split_texts


class Opened(Protocol):
    """A parsed file."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    def decide(self, columns: Columns, *, is_guess: bool = False) -> Roles | Refusal:
        """Return the roles of the columns for a task; a guess also looks at the labels."""

    def records(self, columns: Columns, roles: Roles) -> Records:
        """Return the records of the decided roles."""


def read_as(opened: Opened, columns: Columns) -> Records:
    """Return the records of a parsed file for a task; raise a DataError if it is refused."""
    return opened.records(columns, accepted(opened.path, opened.decide(columns)))


def guess(opened: Opened, columns: Columns, tasks: Sequence[str]) -> Guess | Refusal:
    """Return the first task that the labels allow, and the roles for it."""
    return first_task(lambda task: opened.decide(replace(columns, task=task), is_guess=True), tasks)


@dataclass(frozen=True, eq=False)
class Tabular:
    """A table, of any format; ``words`` are those of CoNLL."""

    table: SourceTable
    words: Words | None = None

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.table.path

    @cached_property
    def facts(self) -> Facts:
        """The facts of the columns, computed once for all tasks."""
        return Facts(self.table.columns, self.table.kinds, self.table.count)

    def decide(self, columns: Columns, *, is_guess: bool = False) -> Roles | Refusal:
        """Return the roles of the columns for a task."""
        table = self.table
        asked = self.asked(columns)
        if isinstance(asked, Refusal):
            return asked
        self.check_unread(asked)
        if table.count == 0:
            return Refusal("no rows", "a file with at least one sequence", "check the file")
        is_unlabelled = asked.label is None or asked.label not in table.columns
        if table.unlabelled is not None and asked.wants_labels and is_unlabelled:
            return Refusal(*table.unlabelled, is_unfit=True)
        rows = decide_rows(self.facts, asked)
        if isinstance(rows, Refusal):
            return rows
        if rows.shape in (Shape.ELEMENTS, Shape.TEXTS):
            cells = {name: table.columns[name] for name in self.facts.cells(asked)}
            check_rows(table.path, cells, range(table.count))
        roles = with_label(self.facts, asked, rows)
        if not is_guess or isinstance(roles, Refusal):
            return roles
        return unfit(self.facts, asked, roles) or roles

    def records(self, columns: Columns, roles: Roles) -> Records:
        """Return the records of the decided roles."""
        records = self._assembled(self.told(columns), roles)
        notes = self.table.notes
        if self.words is not None:
            notes = (*notes, *self._word_notes(columns))
        if self.table.label_kinds is not None:
            records = replace(records, label_kinds=self.table.label_kinds)
        if roles.shape is Shape.ELEMENTS and "id" in self.table.declared:
            records = replace(records, columns=replace(records.columns, id=columns.id))
        return replace(records, notes=(*notes, *records.notes))

    def _assembled(self, asked: Columns, roles: Roles) -> Records:
        table = self.table
        if roles.shape is Shape.LISTS:
            content = table.load(roles.names)
            return records_of(table.path, content, roles, asked, table.lines)
        if roles.shape is Shape.TEXTS:
            asked = replace(asked, sequence=roles.sequence, label=roles.label or asked.label)
            return whole_rows(table.path, table.columns, asked, roles)
        cells = {name: table.columns[name] for name in self.facts.cells(asked)}
        others = [name for name in table.columns if name not in cells]
        left_out = (f"left out, nested or unnamed: {', '.join(others)}",) if others else ()
        if roles.shape is Shape.STEPS:
            records = wide_rows(table.path, cells, asked, roles)
        else:
            records = records_of_rows(table.path, cells, asked, roles)
            # A guessed time column is not required of other files, nor is an id column.
            used = replace(records.columns, time=asked.time)
            notes = (*filter(None, [roles.id_note]), *records.notes)
            records = replace(records, notes=notes, columns=used)
        return replace(records, notes=(*left_out, *records.notes))

    def told(self, columns: Columns) -> Columns:
        """Return the columns of the user with those that the source tells; raise if refused."""
        return accepted(self.path, self.asked(columns))

    def asked(self, columns: Columns) -> Columns | Refusal:
        """Return the columns of the user with those that the source tells."""
        table = self.table
        if self.words is not None:
            named = named_words(self.words, columns)
            if isinstance(named, Refusal):
                return named
            columns = named.columns
        columns = with_parts(columns, table.columns)
        usual = {name: value for name, value in table.usual.items() if not getattr(columns, name)}
        return replace(columns, **{**usual, **table.declared})

    def _word_notes(self, columns: Columns) -> tuple[str, ...]:
        named = None if self.words is None else named_words(self.words, columns)
        return () if named is None or isinstance(named, Refusal) else named.notes

    def check_unread(self, columns: Columns, required: Sequence[str] = ()) -> None:
        """Raise the error of a column that may be used, and has values of several types."""
        features = (*(columns.features or ()), *(columns.static or ()))
        used = (columns.sequence, columns.label, columns.id, *features, *required)
        is_guessed = columns.sequence is None or (columns.label is None and columns.wants_labels)
        is_guessed &= not required
        for name, error in self.table.unread.items():
            # Unused columns may have any type.
            if is_guessed or name in used:
                raise error


# The labels of the tasks that .ts has none for.
_OTHERS = {
    "tag": "a label per element",
    "multilabel": "sets of labels",
    "transcribe": "sequences of labels",
}


@dataclass(frozen=True, eq=False)
class Declared:
    """Sequences of a file whose header declares a class or a target for each."""

    series: Series

    @property
    def path(self) -> Path:
        """The file."""
        return self.series.header.path

    def decide(self, columns: Columns, *, is_guess: bool = False) -> Roles | Refusal:  # noqa: ARG002
        """Refuse tasks whose labels the header does not declare."""
        header = self.series.header
        if columns.task in _OTHERS:
            fix = f"pass {option('task', 'classify')}, or another format"
            got = f"a .ts file, with one label per sequence, for the task {columns.task}"
            return Refusal(got, f"a file with {_OTHERS[columns.task]}", fix)
        if not columns.wants_labels:
            return Roles(Shape.LISTS)
        fix = "pass a file that has them"
        if columns.task == "regress":
            if header.has_target:
                return Roles(Shape.LISTS, label="target")
            has_class = "@classLabel, a class for each sequence"
            got = has_class if header.has_class else "no '@targetLabel true'"
            return Refusal(got, "a file with a number for each sequence, for regression", fix)
        if header.has_class:
            return Roles(Shape.LISTS, label="class")
        rule = "a file with a class for each sequence, for classification"
        if not header.has_target:
            return Refusal("no '@classLabel true'", rule, fix)
        got = "@targetLabel, a number for each sequence"
        return Refusal(got, rule, f"pass {option('task', 'regress')}")

    def records(self, columns: Columns, roles: Roles) -> Records:
        """Return the sequences with their classes or targets."""
        series = self.series
        notes = series.header.notes
        if series.header.has_target and roles.label != "target":
            notes = [*notes, "the target of each sequence (@targetLabel) is not used"]
        targets = None
        if roles.label == "target":
            targets = Targets(series.targets()[:, None], names=("target",))
        values = as_float32(np.concatenate(series.matrices))
        records = Records(
            values,
            offsets_of([len(matrix) for matrix in series.matrices]),
            labels=series.classes() if roles.label == "class" else None,
            targets=targets,
            channels=tuple(f"x{channel}" for channel in range(values.shape[1])),
            source=self.path,
            notes=tuple(notes),
            columns=columns,
        )
        return without_padding(records)


@dataclass(frozen=True, eq=False)
class Texts:
    """Lines of a text, which are sequences; in a folder, each text is a class."""

    lines: Lines

    @property
    def path(self) -> Path:
        """The text, or the folder."""
        return self.lines.path

    def decide(self, columns: Columns, *, is_guess: bool = False) -> Roles | Refusal:  # noqa: ARG002
        """Refuse tasks whose labels a text lacks."""
        task = columns.task
        if self.lines.classes is None:
            if not columns.wants_labels:
                return Roles(Shape.TEXTS)
            fix = f"pass {option('task', 'language')}, or a folder with a text per class"
            return Refusal("a text file", f"a file with labels, for the task {task}", fix)
        if task in ("classify", "forecast", "language"):
            return Roles(Shape.TEXTS, label="class" if columns.wants_labels else None)
        rule = f"a file, for the task {task}"
        rule = "a file with a label per element" if task == "tag" else rule
        fix = f"pass {option('task', 'classify')}, or another format"
        return Refusal(f"a folder for the task {task}, with one class per sequence", rule, fix)

    def records(self, columns: Columns, roles: Roles) -> Records:
        """Split the lines into tokens."""
        lines = self.lines
        split = columns.split or "characters"
        note = f"a line is a sequence, split into {split}"
        if lines.classes is not None:
            count = "1 class" if lines.texts == 1 else f"{lines.texts} classes"
            note = f"{count}, one per file; a sequence is the {split} of a line"
        tokens, lengths = split_texts(lines.lines, split)
        return Records(
            tokens,
            offsets_of(lengths),
            labels=None if roles.label is None else tuple(lines.classes or ()),
            source=self.path,
            notes=(note, *lines.notes),
            columns=replace(columns, split=split),
        )
