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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from raglane._utils.messages import count_of, quote, quote_all, require
from raglane.data.columns import LISTS
from raglane.data.records import offsets_of
from raglane.data.sources.files import data_error
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.typed.arrays import Integers
from raglane.data.typed.tags import are_entities, is_entity

SUFFIXES = (".conll", ".conllu", ".conllx", ".conllup", ".iob", ".iob2", ".bio", ".bioes")
ROLES = ("sequence", "label", "id", *LISTS)

_UD = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_NAMES = re.compile(r"#\s*global\.columns\s*=\s*(.+)")
_SPACES = re.compile(r"[ \t]+")
_ID = re.compile(r"#\s*sent_id\s*=\s*(\S.*?)\s*")
_is_number = re.compile(r"\d+").fullmatch
_is_joint = re.compile(r"\d+[-.]\d+").fullmatch
# The column of the names of sentences.
_SENTENCE = "sent_id"
_DOCUMENT = "-DOCSTART-"
_DOCUMENTS = re.compile(rf"^[ \t\ufeff]*{_DOCUMENT}", re.MULTILINE)
# Lines of a text that decide whether it is CoNLL.
_LOOK = 200


@dataclass(frozen=True)
class _WordLine:
    """A line that is not blank: its number from 1, its columns, and the number of its sentence."""

    number: int
    text: str
    fields: list[str]
    sentence: int
    is_comment: bool


@dataclass(frozen=True)
class ConllWords:
    """The words of a file, in the lines ``numbers`` from 1, and their sentences."""

    path: Path
    rows: list[list[str]]
    numbers: list[int]
    offsets: Integers
    names: tuple[str, ...]
    mark: str
    ids: list[str]
    has_more: bool  # whether some sentences have further columns
    notes: tuple[str, ...]

    def column(self, name: str) -> list[str]:
        """Return the entries of a column."""
        at = self.names.index(name)
        return [row[at] for row in self.rows]


def table(words: ConllWords) -> SourceTable:
    """Return a list of the entries of each column per sentence."""
    arrow = require("pyarrow", "data")
    offsets = arrow.array(words.offsets)
    columns = {
        name: arrow.LargeListArray.from_arrays(offsets, words.column(name)) for name in words.names
    }
    usual = {}
    if words.ids:
        columns[_SENTENCE] = arrow.array(words.ids)
        usual["id"] = _SENTENCE
    return whole_table(words.path, arrow.table(columns), words.notes, usual=usual)


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
    return any(map(are_entities, (columns[0], columns[-1])))


def _lines_of(text: str) -> list[_WordLine]:
    """Return the lines that are not blank, without those that begin a document."""
    lines: list[_WordLine] = []
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
        lines.append(_WordLine(number, stripped, fields, sentence, is_comment=is_first))
    words = [line for line in lines if not line.is_comment]
    widths = {len(line.fields) for line in words}
    labels = {line.fields[-1] for line in words}
    return [replace(line, is_comment=_is_comment(line, widths, labels)) for line in lines]


def _is_comment(line: _WordLine, widths: set[int], labels: set[str]) -> bool:
    """Return False for a line that begins with # and has a label, as others do."""
    if not line.is_comment or len(line.fields) < 2 or len(line.fields) not in widths:
        return line.is_comment
    label = line.fields[-1]
    return label not in labels and not is_entity(label)


def _are_numbered(lines: list[_WordLine]) -> bool:
    """Return True if the words of each sentence are numbered from 1, or from 0."""
    first = {line.sentence: line.fields[0] for line in reversed(lines)}
    is_begin = all(name in ("0", "1") or _is_joint(name) for name in first.values())
    numbers = [bool(_is_number(line.fields[0])) for line in lines]
    joint = [bool(_is_joint(line.fields[0])) for line in lines]
    return is_begin and sum(numbers) + sum(joint) == len(lines) and sum(numbers) > sum(joint)


def words_of(path: Path, text: str) -> ConllWords:
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
    return ConllWords(
        path,
        [line.fields for line in words],
        [line.number for line in words],
        offsets_of(np.diff(starts)),
        names,
        "\t" if "\t" in words[0].text else " ",
        ids,
        most > least,
        tuple(notes),
    )


def _starts(words: list[_WordLine]) -> list[int]:
    """Return the places where sentences begin, and the end of the last."""
    pairs = enumerate(pairwise(words), 1)
    return [0, *(at for at, (a, b) in pairs if a.sentence != b.sentence), len(words)]


def _ids_of(comments: list[_WordLine], sentences: list[int]) -> list[str]:
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
    path: Path, comments: list[_WordLine], first: _WordLine, count: int, *, is_numbered: bool
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


def _width(path: Path, words: list[_WordLine]) -> int:
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


def _check_numbers(path: Path, words: list[_WordLine], starts: list[int]) -> None:
    """Raise a DataError if a sentence begins without a blank line."""
    for start, end in pairwise(starts):
        for line in words[start + 1 : end]:
            if line.fields[0] in ("0", "1") and words[start].fields[0] == line.fields[0]:
                got = f"the word {line.fields[0]} again"
                fix = "add a blank line before it"
                raise data_error(path, got, "a blank line after each sentence", fix, line.number)
