"""The ``.ts`` format of time series archives, as sktime and aeon write it.

A header of lines that begin with ``@``, then ``@data``, then one sequence per line: channels separated by ``:``, the
values of a channel by ``,``, and after a last ``:`` the label. ``?`` and ``NaN`` are missing values. Lines that begin
with ``#`` or ``%`` are comments. Values with timestamps are not supported. Directives that contradict each other are
refused: one of them would be passed over.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import count_of, quote, quote_all
from raglane.data.formats.base import check_text, columns_argument, data_error, has_utf8, read_bytes
from raglane.data.formats.pieces import Line, Piece, Start, line_pieces, lines_of
from raglane.data.records import Columns, Records, Targets, as_float32, offsets_of
from raglane.errors import DataError, MissingExtraError

# Directives that say nothing about how the lines are to be read.
_DESCRIPTIVE = ("problemname", "missing", "type", "path")

# Those that say how they are to be read, and those that take one word; the others list something behind it.
_ALIASES = {"dimension": "dimensions"}
_ONE_WORD = ("timestamps", "univariate", "dimensions", "equallength", "serieslength")

# Digits of the largest number of channels or steps that is believed.
_DIGITS = 9


@dataclass
class _Header:
    """What the lines before ``@data`` say; ``dimensions`` and ``length`` are None where they say nothing."""

    dimensions: int | None = None
    equal_length: bool = False
    length: int | None = None
    has_class: bool = False
    has_target: bool = False
    # From a label as a line may write it to the label: some writers put lines, but not the header, in lower case.
    classes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # What each directive said, and in which line.
    seen: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    @property
    def has_label(self) -> bool:
        """Whether a line ends in a label or a target."""
        return self.has_class or self.has_target


def read(path: Path, columns: Columns) -> Records:
    """Read a ``.ts`` file."""
    content = read_bytes(path)
    check_text(path, content)
    # Comments and names of problems are of no use, and in some archives not UTF-8.
    lines = _content_lines(content.decode("utf-8-sig", errors="surrogateescape"))
    header = _read_header(path, lines)
    _check_asked(path, header, columns)
    return _records(path, header, list(lines), columns)


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins at a byte, in a line. The header is read first, each time."""
    ends = [0, 1]

    def contents() -> Iterator[tuple[int, str]]:
        for line in lines_of(path):
            ends[:] = line.end, line.number + 1
            for _, text in _content_lines(_text(path, line)):
                yield line.number, text

    lines = contents()
    header = _read_header(path, lines)
    _check_asked(path, header, columns)
    begin = tuple(ends)
    # Where the header does not say how many channels and steps there are, the first sequence does.
    if (first := next(lines, None)) is not None:
        with suppress(DataError):
            _records(path, header, [first], columns)

    def records(found: Sequence[Line]) -> Records:
        texts = [(line.number, text) for line in found for _, text in _content_lines(_text(path, line))]
        return _records(path, header, texts, columns)

    kept = (line for line in lines_of(path, start or begin) if line.content.lstrip()[:1] not in (b"#", b"%"))
    yield from line_pieces(kept, records, lambda line: (line.end, line.number + 1))


def _text(path: Path, line: Line) -> str:
    check_text(path, line.content, line.number)
    return line.content.decode(errors="surrogateescape")


def _wants_target(columns: Columns) -> bool:
    return columns.wants_labels and columns.task == "regress"


def _check_asked(path: Path, header: _Header, columns: Columns) -> None:
    """Refuse a file that does not have what is asked for, and note what of it is not used."""
    if columns.task in ("tag", "multilabel"):
        rule = "a file of another format for tagging, since .ts has one label per sequence"
        if columns.task == "multilabel":
            rule = "a file of another format, since .ts has one label per sequence"
        raise data_error(
            path,
            f"a .ts file for the task {columns.task}",
            rule,
            f"pass {columns_argument('task', 'classify')}, or another format",
        )
    wants_target = _wants_target(columns)
    if wants_target and not header.has_target:
        got = "@classLabel, classes" if header.has_class else "no '@targetLabel true'"
        raise data_error(
            path, got, "a file with a number for each sequence, for regression", "pass a file that has them"
        )
    if columns.wants_labels and not wants_target and not header.has_class:
        got = "@targetLabel, numbers" if header.has_target else "no '@classLabel true'"
        fix = f"pass {columns_argument('task', 'regress')}" if header.has_target else "pass a file that has them"
        raise data_error(path, got, "a file with class labels, for classification", fix)
    if header.has_target and not wants_target:
        header.notes.append("the target of each sequence (@targetLabel) is not used")


def _records(path: Path, header: _Header, lines: Sequence[tuple[int, str]], columns: Columns) -> Records:
    """Lines behind ``@data``, with their numbers, as records."""
    wants_target = _wants_target(columns)
    matrices: list[npt.NDArray[np.float64]] = []
    labels: list[str] = []
    numbers: list[float] = []
    for number, line in lines:
        fields = _fields(path, header, line, number)
        if header.has_label:
            label = fields.pop().strip()
            if wants_target:
                numbers.append(_target(path, label, number))
            elif columns.wants_labels:
                labels.append(_label(path, header, label, number))
        matrices.append(_matrix(path, header, fields, number))
    if not matrices:
        raise data_error(path, "no line after @data", "a file with at least one sequence", "check the file")
    values = as_float32(np.concatenate(matrices))
    return Records(
        values,
        offsets_of([len(matrix) for matrix in matrices]),
        labels=tuple(labels) if columns.wants_labels and not wants_target else None,
        targets=Targets(np.array(numbers)[:, None], names=("target",)) if wants_target else None,
        channels=tuple(f"x{channel}" for channel in range(values.shape[1])),
        source=path,
        notes=tuple(header.notes),
        columns=columns,
    )


def _content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of the lines that are neither blank nor comments."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and stripped[0] not in "#%":
            yield number, stripped


def _read_header(path: Path, lines: Iterator[tuple[int, str]]) -> _Header:
    """Read up to and including ``@data``."""
    header = _Header()
    for number, line in lines:
        if not line.startswith("@"):
            got = f"{quote(line)} before @data"
            rule = "one of the first lines of a .ts file, which start with '@' and end with @data"
            raise data_error(path, got, rule, "check that it is a .ts file", number)
        name, *words = line[1:].split() or [""]
        directive = _ALIASES.get(name.lower(), name.lower())
        if directive == "data" and not words:
            return header
        if directive in ("", "data"):
            fix = "put the rest on another line" if words else "name the directive, or remove the line"
            rule = "a directive after '@', and nothing after @data"
            raise data_error(path, quote(line), rule, fix, number)
        _read_directive(path, header, directive, words, number)
    rule = "a file with a line @data before the sequences"
    raise data_error(path, "no line @data", rule, "check that it is a whole .ts file")


def _read_directive(path: Path, header: _Header, name: str, words: list[str], number: int) -> None:
    """Note what one line of the header says."""
    if name not in _DESCRIPTIVE:
        _refuse_again(path, header, name, words, number)
    if name in _ONE_WORD and len(words) > 1:
        got = f"@{name} {quote(' '.join(words))}"
        raise data_error(path, got, "a directive with one word", "remove the others", number)
    if name == "timestamps":
        if _flag(path, name, words, number):
            rule = "@timeStamps false, since timestamps are not supported"
            raise data_error(path, "@timeStamps true", rule, "save the series without timestamps", number)
    elif name == "univariate":
        if _flag(path, name, words, number):
            _set_dimensions(path, header, 1, number)
    elif name == "dimensions":
        _set_dimensions(path, header, _count(path, name, words, number), number)
    elif name == "equallength":
        header.equal_length = _flag(path, name, words, number)
    elif name == "serieslength":
        header.length = _count(path, name, words, number)
    elif name == "targetlabel":
        header.has_target = _flag(path, name, words, number)
    elif name == "classlabel":
        _read_classes(path, header, words, number)
    elif name not in _DESCRIPTIVE:
        header.notes.append(f"line {number}: @{ascii(name)[1:-1]} is not known and not used")
    if header.has_class and header.has_target:
        rule = "a header with either a class or a target"
        raise data_error(path, "@classLabel true and @targetLabel true", rule, "write one of them false", number)


def _read_classes(path: Path, header: _Header, words: list[str], number: int) -> None:
    header.has_class = _flag(path, "classlabel", words, number)
    classes = words[1:]
    odd = next((word for word in classes if not has_utf8(word)), None)
    if odd is not None:
        raise data_error(path, f"the class {quote(odd)}", "a class in UTF-8", "convert the file", number)
    if header.has_class and not classes:
        rule = "'@classLabel true' and a list of the classes"
        raise data_error(path, "no class", rule, "list the classes there", number)
    header.classes = {word.lower(): word for word in classes} | {word: word for word in classes}


def _refuse_again(path: Path, header: _Header, name: str, words: list[str], number: int) -> None:
    """Raise if a directive stood there before and said something else."""
    before, line = header.seen.setdefault(name, (words, number))
    if [word.lower() for word in before] != [word.lower() for word in words]:
        got = f"@{name} {quote(' '.join(words))}, after {quote(' '.join(before))} in line {line}"
        raise data_error(path, got, "the only line with this directive", "remove one of the lines", number)


def _set_dimensions(path: Path, header: _Header, count: int, number: int) -> None:
    """Note the number of channels, which two directives can say."""
    if header.dimensions not in (None, count):
        got = f"{count_of(count, 'channel')}, after {header.dimensions}"
        fix = "remove @univariate or @dimensions, or make them agree"
        raise data_error(path, got, "a header whose @univariate and @dimensions agree", fix, number)
    header.dimensions = count


def _flag(path: Path, name: str, words: list[str], number: int) -> bool:
    word = words[0].lower() if words else ""
    if word not in ("true", "false"):
        raise data_error(path, f"@{name} {quote(word)}", "true or false", f"write @{name} false", number)
    return word == "true"


def _count(path: Path, name: str, words: list[str], number: int) -> int:
    """The whole number, above 0, of a directive."""
    word = words[0] if words else ""
    if not (word.isascii() and word.isdigit() and len(word) <= _DIGITS and int(word) > 0):
        rule = f"a whole number above 0, of at most {_DIGITS} digits"
        raise data_error(path, f"@{name} {quote(word)}", rule, f"write @{name} 1", number)
    return int(word)


def _fields(path: Path, header: _Header, line: str, number: int) -> list[str]:
    """The channels of a line, and the label if it has one."""
    fields = line.split(":")
    count = len(fields) - header.has_label
    if header.dimensions is None and count > 0:
        header.dimensions = count
        header.notes.append(f"no @dimensions: {count}, as in line {number}")
    if count != header.dimensions:
        label = " and a label" if header.has_label else ""
        channels = "some channels" if header.dimensions is None else count_of(header.dimensions, "channel")
        rule = f"a line of {channels}{label}, as in the header"
        fix = "restore the line, or correct the header"
        raise data_error(path, f"{len(fields)} fields separated by ':'", rule, fix, number)
    return fields


def _label(path: Path, header: _Header, label: str, number: int) -> str:
    if label not in header.classes and label.lower() not in header.classes:
        known = quote_all(dict.fromkeys(header.classes.values()))
        fix = "add it to @classLabel, or restore the line"
        raise data_error(path, f"the label {quote(label)}", f"a label of @classLabel, {known}", fix, number)
    return header.classes.get(label) or header.classes[label.lower()]


def _target(path: Path, text: str, number: int) -> float:
    if _is_value(text) and text != "?" and math.isfinite(float(text)):
        return float(text)
    fix = "correct it, or remove the line"
    raise data_error(path, f"the target {quote(text)}", "a finite target", fix, number)


def _matrix(path: Path, header: _Header, fields: list[str], number: int) -> npt.NDArray[np.float64]:
    """The features of a line, ``(L, C)`` float64, NaN where missing."""
    lengths = {channel.count(",") for channel in fields}
    if len(lengths) > 1:
        counts = quote_all(channel.count(",") + 1 for channel in fields)
        rule = "a sequence whose channels have the same length"
        raise data_error(path, f"channels of {counts} values", rule, "restore or remove the line", number)
    if not any(map(str.strip, fields)):
        matrix = np.empty((0, len(fields)))
    else:
        text = ",".join(fields)
        entries = text.split(",")
        if "?" in text:
            entries = ["nan" if entry.strip() == "?" else entry for entry in entries]
        try:
            matrix = np.array(entries, dtype=np.float64).reshape(len(fields), -1).T
        except ValueError as error:
            raise _bad_value(path, fields, number) from error
        # Python reads 1_5 as 15, and other scripts' digits as ours; in a file they are damage.
        if "_" in text or not text.isascii():
            raise _bad_value(path, fields, number)
    if header.equal_length:
        if header.length is None:
            header.length = len(matrix)
        if len(matrix) != header.length:
            stated = f"@seriesLength {header.length}" if "serieslength" in header.seen else f"{header.length} before"
            fix = "restore the line, or write @equalLength false"
            got = f"a sequence of {count_of(len(matrix), 'step')}"
            raise data_error(
                path, got, f"a sequence of the stated length (@equalLength true and {stated})", fix, number
            )
    return matrix


def _bad_value(path: Path, fields: list[str], number: int) -> DataError:
    """The error for the first entry of a line that is not a number."""
    for channel, entries in enumerate(fields):
        for step, entry in enumerate(entries.split(",")):
            if not _is_value(entry):
                got = f"{quote(entry)} as channel {channel}, step {step}"
                fix = "correct it, or write ? for a missing value"
                return data_error(path, got, "a list of numbers, NaN or ?", fix, number)
    return data_error(path, "a value that is not a number", "a list of numbers, NaN or ?", "correct it", number)


def _is_value(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return entry.strip() == "?"
    return entry.isascii() and "_" not in entry


def japanese_vowels() -> tuple[Records, Records]:
    """The Japanese vowels data, from the files that sktime brings: 270 training and 370 test recordings.

    Nine speakers say two vowels; a recording has 7 to 29 steps of 12 channels, and the speaker is the label. The
    split is the official one. sktime itself is not imported.

    Returns:
        The training records and the test records.

    Raises:
        MissingExtraError: sktime is not installed.
    """
    found = importlib.util.find_spec("sktime")
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("sktime is not installed. Run pip install 'raglane[demo]'.")
    folder = Path(found.submodule_search_locations[0], "datasets", "data", "JapaneseVowels")
    train, test = (read(folder / f"JapaneseVowels_{part}.ts", Columns()) for part in ("TRAIN", "TEST"))
    return train, test
