"""CoNLL: a line per word, with its columns between tabs or spaces, and a blank line after each
sentence.

Columns are numbered from 1, or named as in CoNLL-U: ``ID``, ``FORM``, ``LEMMA``, ``UPOS``, ``XPOS``,
``FEATS``, ``HEAD``, ``DEPREL``, ``DEPS`` and ``MISC``, or by a comment ``# global.columns = ...``.
The words are the first column that is neither a count of words nor the label. The label is ``UPOS``,
or the last column of labels of entities, or the last column.

``-DOCSTART-`` ends a sentence. Comments precede the first word of a sentence; a word may begin with
``#`` too, so a line with as many columns as the others, and a label as theirs, is a word. Lines of
several words, such as ``1-2``, and empty nodes, such as ``1.1``, are left out with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, count_of, quote, quote_all, require
from raglane.data.assemble.lists import choose, records_of
from raglane.data.assemble.pieces import Piece, Start
from raglane.data.records import LISTS, Columns, Records, offsets_of
from raglane.data.sources.files import columns_argument, data_error, decode, read_bytes
from raglane.data.sources.ipc import slices, table_piece
from raglane.errors import UnfitColumnError

SUFFIXES = (".conll", ".conllu", ".conllx", ".conllup", ".iob", ".iob2", ".bio", ".bioes")
ROLES = ("sequence", "label", "id", *LISTS)

_UD = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_NAMES = re.compile(r"#\s*global\.columns\s*=\s*(.+)")
_SPACES = re.compile(r"[ \t]+")
_ID = re.compile(r"#\s*sent_id\s*=\s*(\S.*?)\s*")
_is_number = re.compile(r"\d+").fullmatch
_is_joint = re.compile(r"\d+[-.]\d+").fullmatch
_is_entity = re.compile(r"[BIESLUM]-\S+").fullmatch
_DOCUMENT = "-DOCSTART-"
_DOCUMENTS = re.compile(rf"^[ \t\ufeff]*{_DOCUMENT}", re.MULTILINE)
# Lines of a text that decide whether it is CoNLL.
_LOOK = 200


@dataclass(frozen=True)
class _Line:
    """A line that is not blank: its number from 1, its columns, and the number of its sentence."""

    number: int
    text: str
    fields: list[str]
    sentence: int
    is_comment: bool


@dataclass(frozen=True)
class _Words:
    """The words of a file, in the lines ``numbers`` from 1, and their sentences."""

    rows: list[list[str]]
    numbers: list[int]
    offsets: npt.NDArray[np.int64]
    names: tuple[str, ...]
    mark: str
    ids: list[str]
    has_more: bool  # whether some sentences have further columns
    notes: tuple[str, ...]

    def column(self, name: str) -> list[str]:
        at = self.names.index(name)
        return [row[at] for row in self.rows]


def read(path: Path, columns: Columns) -> Records:
    """Read a file of words."""
    table, columns, notes = _table(path, columns)
    chosen = choose(path, table.schema, columns)
    records = records_of(path, table.select(chosen.names), chosen, columns)
    return replace(records, notes=(*notes, *records.notes))


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces; a position is a sentence."""
    table, columns, _ = _table(path, columns)
    chosen = choose(path, table.schema, columns)
    for row, rows in slices(table):
        if not start or row >= start[0]:
            yield table_piece(path, rows, chosen, columns, row, row + rows.num_rows)


def is_conll(text: str) -> bool:
    """Return True if the first lines of a text have words with labels of entities, or are
    CoNLL-U.
    """
    lines = [line for line in _lines_of(text)[:_LOOK] if not line.is_comment][:-1]
    widths = {len(line.fields) for line in lines}
    if len(lines) < 2 or len(widths) > 1 or widths <= {1}:
        return False
    if widths == {len(_UD)} and _are_numbered(lines):
        return True
    columns = list(zip(*(line.fields for line in lines), strict=True))
    return any(map(_are_entities, (columns[0], columns[-1])))


def filled(path: Path, columns: Columns, answers: Sequence[Sequence[str]]) -> bytes:
    """Return the lines of a file with other labels in the label column, which is added if the file
    has none.
    """
    text = decode(path, read_bytes(path))
    words = _words_of(path, text)
    name = _resolved(columns.label, words.names) or ""
    at = words.names.index(name) if name in words.names else len(words.names)
    labels = [str(label) for row in answers for label in row]
    if len(labels) != len(words.rows):
        got = f"{len(labels):,} labels for {len(words.rows):,} words"
        raise data_error(path, got, "a file whose words all have a label", "write .jsonl")
    lines = text.split("\n")
    for row, number, label in zip(words.rows, words.numbers, labels, strict=True):
        end = "\r" if lines[number - 1].endswith("\r") else ""
        lines[number - 1] = words.mark.join([*row[:at], label, *row[at + 1 :]]) + end
    return "\n".join(lines).encode()


def _table(path: Path, columns: Columns) -> tuple[Any, Columns, tuple[str, ...]]:
    """Return a table with a list of each column per sentence, the columns to read, and notes."""
    words = _words_of(path, decode(path, read_bytes(path)))
    if columns.task == "classify" and columns.wants_labels:
        fix = f"pass {argument('task', 'tag')} for a label per word"
        rule = "data with a label per sequence, for the task classify"
        raise UnfitColumnError(f"{path}", "words with their labels", rule, fix)
    columns, notes = _chosen(path, words, columns)
    arrow = require("pyarrow", "data")
    table = {
        name: arrow.LargeListArray.from_arrays(arrow.array(words.offsets), words.column(name))
        for name in words.names
    }
    if words.ids and columns.id is None:
        table["sent_id"] = arrow.array(words.ids)
        columns = replace(columns, id="sent_id")
    return arrow.table(table), columns, (*words.notes, *notes)


def _chosen(path: Path, words: _Words, columns: Columns) -> tuple[Columns, list[str]]:
    """Return the columns to read by their names, and notes about guesses."""
    named: dict[str, Any] = {
        role: tuple(_resolved(name, words.names) or name for name in getattr(columns, role))
        for role in LISTS
        if getattr(columns, role) is not None
    }
    notes: list[str] = []
    label = _resolved(columns.label, words.names)
    if label is None and columns.wants_labels:
        label, note = _label_of(path, words)
        notes.append(note)
    sequence = _resolved(columns.sequence, words.names)
    if sequence is None and not columns.features:
        others = {label, *_counts(words), *_constants(words)}
        free = [name for name in words.names if name not in others]
        sequence = (free or list(words.names))[0]
        notes.append(f"the words are column {sequence} of {len(words.names)}")
    return replace(columns, sequence=sequence, label=label, **named), notes


def _resolved(name: str | None, names: Sequence[str]) -> str | None:
    """Return the column of a name in any case of letters, or of a number from 1, or from the end if
    it is negative.
    """
    if name is None or name in names:
        return name
    if re.fullmatch(r"-?\d{1,3}", name) and 0 < abs(int(name)) <= len(names):
        return names[int(name) - (int(name) > 0)]
    return next((other for other in names if other.lower() == name.lower()), name)


def _label_of(path: Path, words: _Words) -> tuple[str, str]:
    """Return the column of labels, and a note about it."""
    counts = _counts(words)
    free = [name for name in words.names if name not in counts]
    entities = [name for name in free if _are_entities(words.column(name))]
    usual = "UPOS" if "UPOS" in free else ""
    label = usual or (entities or free or [""])[-1]
    fix = f"add labels, or name another column with {columns_argument('label')}"
    if words.has_more and not usual:
        got = "sentences with different numbers of columns"
        raise data_error(path, got, "a file whose labels are the last column", fix)
    if len(free) < 2:
        got = f"{count_of(len(free), 'column')} of words"
        raise data_error(path, got, "a file with a column of labels", fix)
    if set(words.column(label)) == {"_"}:
        got = f"the column {label}, which is empty in all lines"
        raise data_error(path, got, "a file with a label per word", fix)
    last = f", the last of {', '.join(entities)}" if len(entities) > 1 and not usual else ""
    return label, f"the labels are column {label}{last} ({columns_argument('label')} names another)"


def _are_entities(labels: Sequence[str]) -> bool:
    """Return True if all labels are parts of entities, and one has a type."""
    different = set(labels) - {"O"}
    return bool(different) and all(map(_is_entity, different))


def _counts(words: _Words) -> list[str]:
    """Return the columns that count the words of each sentence from 1, or of a document from 0."""
    expected = np.arange(len(words.rows)) - np.repeat(words.offsets[:-1], np.diff(words.offsets))
    counts = [list(map(str, (expected + first).tolist())) for first in (1, 0)]
    return [name for name in words.names if words.column(name) in counts]


def _constants(words: _Words) -> list[str]:
    """Return the columns that have one entry in all words of a sentence, such as a document."""
    starts = np.repeat(words.offsets[:-1], np.diff(words.offsets)).tolist()
    if starts == list(range(len(starts))):
        return []
    columns = {name: words.column(name) for name in words.names}
    return [
        name
        for name, column in columns.items()
        if all(entry == column[start] for entry, start in zip(column, starts, strict=True))
    ]


def _lines_of(text: str) -> list[_Line]:
    """Return the lines that are not blank, without those that begin a document."""
    lines: list[_Line] = []
    mark = ""
    sentence = 0
    is_first = True
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip(" \t\r\ufeff")
        if not stripped or stripped.startswith(_DOCUMENT):
            sentence += 1
            is_first = True
            continue
        is_first = is_first and stripped.startswith("#")
        if not mark and not is_first:
            mark = "\t" if "\t" in stripped else " "
        fields = stripped.split("\t") if mark == "\t" else _SPACES.split(stripped)
        lines.append(_Line(number, stripped, fields, sentence, is_comment=is_first))
    words = [line for line in lines if not line.is_comment]
    widths = {len(line.fields) for line in words}
    labels = {line.fields[-1] for line in words}
    return [replace(line, is_comment=_is_comment(line, widths, labels)) for line in lines]


def _is_comment(line: _Line, widths: set[int], labels: set[str]) -> bool:
    """Return False for a line that begins with # and has a label, as others do."""
    if not line.is_comment or len(line.fields) < 2 or len(line.fields) not in widths:
        return line.is_comment
    label = line.fields[-1]
    return label not in labels and not _is_entity(label)


def _are_numbered(lines: list[_Line]) -> bool:
    """Return True if the words of each sentence are numbered from 1, or from 0."""
    first = {line.sentence: line.fields[0] for line in reversed(lines)}
    is_begin = all(name in ("0", "1") or _is_joint(name) for name in first.values())
    numbers = [bool(_is_number(line.fields[0])) for line in lines]
    joint = [bool(_is_joint(line.fields[0])) for line in lines]
    return is_begin and sum(numbers) + sum(joint) == len(lines) and sum(numbers) > sum(joint)


def _words_of(path: Path, text: str) -> _Words:
    """Parse a file."""
    lines = _lines_of(text)
    comments = [line for line in lines if line.is_comment]
    every = [line for line in lines if not line.is_comment]
    if not every:
        raise data_error(path, "no word", "a file with a word in each line", "check the file")
    is_numbered = _are_numbered(every)
    words = [line for line in every if not (is_numbered and _is_joint(line.fields[0]))]
    least = _width(path, words)
    names = _names_of(path, comments, words[0], least, is_numbered=is_numbered)
    starts = _starts(words)
    if is_numbered:
        _check_numbers(path, words, starts)
    ids = _ids_of(comments, [words[start].sentence for start in starts[:-1]])
    notes = _left_out(len(_DOCUMENTS.findall(text)), len(comments), len(every) - len(words))
    most = max(len(line.fields) for line in words)
    if most > least:
        notes.append(f"left out: columns {least + 1} to {most}, which not all sentences have")
    return _Words(
        [line.fields for line in words],
        [line.number for line in words],
        offsets_of(np.diff(starts)),
        names,
        "\t" if "\t" in words[0].text else " ",
        ids,
        most > least,
        tuple(notes),
    )


def _starts(words: list[_Line]) -> list[int]:
    """Return the places where sentences begin, and the end of the last."""
    pairs = enumerate(pairwise(words), 1)
    return [0, *(at for at, (a, b) in pairs if a.sentence != b.sentence), len(words)]


def _ids_of(comments: list[_Line], sentences: list[int]) -> list[str]:
    """Return the different names of all sentences; [] if one has none."""
    named = {line.sentence: match[1] for line in comments if (match := _ID.fullmatch(line.text))}
    ids = [named.get(sentence, "") for sentence in sentences]
    return ids if all(ids) and len(set(ids)) == len(ids) else []


def _left_out(documents: int, comments: int, joint: int) -> list[str]:
    counts = {
        f"of {_DOCUMENT}": documents,
        "of comments": comments,
        "of several words or empty nodes": joint,
    }
    names = [f"{count_of(count, 'line')} {name}" for name, count in counts.items() if count]
    return [f"left out: {', '.join(names)}"] if names else []


def _names_of(
    path: Path, comments: list[_Line], first: _Line, count: int, *, is_numbered: bool
) -> tuple[str, ...]:
    """Return the names of the columns: those of a comment, of CoNLL-U, or numbers from 1."""
    named = [match[1].split() for line in comments if (match := _NAMES.fullmatch(line.text))]
    if named and len(named[0]) != count:
        got = f"{count_of(count, 'column')} in line {first.number}"
        rule = f"a file with the columns {quote_all(named[0])}"
        raise data_error(path, got, rule, "correct the comment global.columns")
    if named:
        return tuple(named[0])
    if is_numbered and count == len(_UD):
        return _UD
    return tuple(str(number) for number in range(1, count + 1))


def _width(path: Path, words: list[_Line]) -> int:
    """Return the number of columns that all words have; raise if words of a sentence have
    others.
    """
    for before, line in pairwise(words):
        if line.sentence == before.sentence and len(line.fields) != len(before.fields):
            got = f"{count_of(len(line.fields), 'column')}, after {len(before.fields)}"
            rule = "a sentence whose words have equally many columns"
            fix = "correct the line, or add a blank line after the sentence"
            raise data_error(path, got, rule, fix, line.number)
    blank = next((line for line in words if "" in line.fields), None)
    if blank is not None:
        got = f"an empty column in {quote(blank.text)}"
        fix = "write _ there"
        raise data_error(path, got, "a file without empty columns", fix, blank.number)
    return min(len(line.fields) for line in words)


def _check_numbers(path: Path, words: list[_Line], starts: list[int]) -> None:
    """Raise a DataError if a sentence begins without a blank line."""
    for start, end in pairwise(starts):
        for line in words[start + 1 : end]:
            if line.fields[0] in ("0", "1") and words[start].fields[0] == line.fields[0]:
                got = f"the word {line.fields[0]} again"
                fix = "add a blank line before it"
                raise data_error(path, got, "a blank line after each sentence", fix, line.number)
