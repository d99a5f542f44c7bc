"""The ``.ts`` format of time series archives, as written by sktime and aeon.

A header of lines that begin with ``@``, then ``@data``, then one sequence per line: channels
separated by ``:``, the values of a channel by ``,``, and the label after a last ``:``. ``?`` and
``NaN`` are missing values. Lines that begin with ``#`` or ``%`` are comments. Values with
timestamps and contradictory directives are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raglane._utils.messages import count_of, quote, quote_all
from raglane.data.sources.files import check_text, data_error, has_utf8, read_bytes
from raglane.data.sources.lines import Line, Start, lines_of
from raglane.data.typed.arrays import Floats
from raglane.errors import DataError

# Directives that do not affect how lines are read.
_DESCRIPTIVE = ("problemname", "missing", "type", "path")

_ALIASES = {"dimension": "dimensions"}
# Directives with one word; others may list more.
_ONE_WORD = ("timestamps", "univariate", "dimensions", "equallength", "serieslength")

# The maximum number of digits of a number of channels or steps.
_DIGITS = 9


@dataclass
class Header:
    """The header of a file; ``dimensions`` and ``length`` are None until a directive or a sequence
    sets them.
    """

    path: Path
    dimensions: int | None = None
    equal_length: bool = False
    length: int | None = None
    has_class: bool = False
    has_target: bool = False
    # The labels by their spelling in lines: some writers change lines, but not the header, to lower
    # case.
    classes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # The words and the line of each directive.
    seen: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def error(self, got: str, rule: str, fix: str, number: int) -> DataError:
        """Return the error for a line."""
        return data_error(self.path, got, rule, fix, number)


@dataclass(frozen=True, eq=False)
class Series:
    """The sequences after a header, with the class or the target that it declares.

    ``matrices`` are ``(L, C)`` float64, NaN where missing.
    """

    header: Header
    matrices: list[Floats]
    # The last field of each line, and the number of the line; [] without one.
    labels: list[tuple[str, int]]

    def classes(self) -> tuple[str, ...]:
        """Return the class of each sequence; raise for one that the header lacks."""
        return tuple(_label(self.header, label, number) for label, number in self.labels)

    def targets(self) -> Floats:
        """Return the target of each sequence; raise for one that is no number."""
        return np.array([_target(self.header, label, number) for label, number in self.labels])


def series_of(path: Path) -> Series:
    """Return the sequences of a file."""
    content = read_bytes(path)
    check_text(path, content)
    # Comments and problem names are ignored, and are not UTF-8 in some archives.
    lines = _content_lines(content.decode("utf-8-sig", errors="surrogateescape"))
    header = _read_header(path, lines)
    return parsed(header, list(lines))


def parsed(header: Header, lines: Sequence[tuple[int, str]]) -> Series:
    """Parse numbered lines after ``@data``."""
    matrices: list[Floats] = []
    labels: list[tuple[str, int]] = []
    for number, line in lines:
        fields = _fields(header, line, number)
        if header.has_class or header.has_target:
            labels.append((fields.pop().strip(), number))
        matrices.append(_matrix(header, fields, number))
    if not matrices:
        rule = "a file with at least one sequence"
        raise data_error(header.path, "no line after @data", rule, "check the file")
    return Series(header, matrices, labels)


def begin_of(path: Path) -> tuple[Header, Start, tuple[int, str] | None]:
    """Return the header of a file, the position after it, and the first line of data."""
    begin: Start = ()

    def contents() -> Iterator[tuple[int, str]]:
        nonlocal begin
        for line in lines_of(path):
            begin = line.end, line.number + 1
            yield from texts_of(path, [line])

    lines = contents()
    header = _read_header(path, lines)
    start = begin
    return header, start, next(lines, None)


def texts_of(path: Path, lines: Sequence[Line]) -> list[tuple[int, str]]:
    """Return the texts of lines that are no comments, with their numbers."""
    texts = []
    for line in lines:
        check_text(path, line.content, line.number)
        text = line.content.decode(errors="surrogateescape")
        texts += [(line.number, stripped) for _, stripped in _content_lines(text)]
    return texts


def _content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number, from 1, and text of the lines that are neither blank nor comments."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and stripped[0] not in "#%":
            yield number, stripped


def _read_header(path: Path, lines: Iterator[tuple[int, str]]) -> Header:
    """Read the lines up to ``@data``."""
    header = Header(path)
    for number, line in lines:
        if not line.startswith("@"):
            rule = "a header of lines that start with '@', the last of them @data"
            raise header.error(
                f"{quote(line)} before @data", rule, "check that it is a .ts file", number
            )
        name, *words = line[1:].split() or [""]
        directive = _ALIASES.get(name.lower(), name.lower())
        if directive == "data" and not words:
            return header
        if directive in ("", "data"):
            fix = (
                "put the rest on a line of its own"
                if words
                else "name the directive, or remove the line"
            )
            raise header.error(
                quote(line), "a directive after '@', and nothing after @data", fix, number
            )
        _read_directive(header, directive, words, number)
    raise data_error(
        path, "no line @data", "a file with a line @data", "check that the .ts file is complete"
    )


def _read_directive(header: Header, name: str, words: list[str], number: int) -> None:
    """Read one directive into the header."""
    if name in _DESCRIPTIVE:
        return
    _check_words(header, name, words, number)
    if name == "timestamps":
        _refuse_times(header, name, words, number)
    elif name == "univariate":
        if _flag(header, name, words, number):
            _set_dimensions(header, 1, number)
    elif name == "dimensions":
        _set_dimensions(header, _count(header, name, words, number), number)
    elif name == "equallength":
        header.equal_length = _flag(header, name, words, number)
    elif name == "serieslength":
        header.length = _count(header, name, words, number)
    elif name == "targetlabel":
        header.has_target = _flag(header, name, words, number)
    elif name == "classlabel":
        _read_classes(header, words, number)
    else:
        header.notes.append(f"line {number}: @{ascii(name)[1:-1]} is not known and not used")
    if header.has_class and header.has_target:
        got = "@classLabel true and @targetLabel true"
        raise header.error(got, "a class or a target, not both", "write one of them false", number)


def _check_words(header: Header, name: str, words: list[str], number: int) -> None:
    """Raise a DataError for a directive that contradicts another one, or has too many words."""
    before, line = header.seen.setdefault(name, (words, number))
    text = quote(" ".join(words))
    if [word.lower() for word in before] != [word.lower() for word in words]:
        got = f"@{name} {text}, after {quote(' '.join(before))} in line {line}"
        rule = "the same in each line of a directive"
        raise header.error(got, rule, "remove one of the lines", number)
    if name in _ONE_WORD and len(words) > 1:
        raise header.error(f"@{name} {text}", "one word", "remove the others", number)


def _refuse_times(header: Header, name: str, words: list[str], number: int) -> None:
    if _flag(header, name, words, number):
        rule = "false, since values with timestamps are not supported"
        fix = "save the series without timestamps"
        raise header.error("@timeStamps true", rule, fix, number)


def _read_classes(header: Header, words: list[str], number: int) -> None:
    header.has_class = _flag(header, "classlabel", words, number)
    classes = words[1:]
    odd = next((word for word in classes if not has_utf8(word)), None)
    if odd is not None:
        raise header.error(f"the class {quote(odd)}", "a text in UTF-8", "convert the file", number)
    if header.has_class and not classes:
        raise header.error(
            "no class",
            "at least one class after '@classLabel true'",
            "list the classes there",
            number,
        )
    header.classes = {word.lower(): word for word in classes} | {word: word for word in classes}


def _set_dimensions(header: Header, count: int, number: int) -> None:
    """Set the number of channels, or raise a DataError if @univariate and @dimensions contradict
    each other.
    """
    if header.dimensions not in (None, count):
        got = f"{count_of(count, 'channel')}, after {header.dimensions}"
        fix = "remove @univariate or @dimensions, or make them agree"
        raise header.error(
            got, "1 with @univariate true, else the number of @dimensions", fix, number
        )
    header.dimensions = count


def _flag(header: Header, name: str, words: list[str], number: int) -> bool:
    word = words[0].lower() if words else ""
    if word not in ("true", "false"):
        raise header.error(
            f"@{name} {quote(word)}", "true or false", f"write @{name} false", number
        )
    return word == "true"


def _count(header: Header, name: str, words: list[str], number: int) -> int:
    """Return the positive integer of a directive."""
    word = words[0] if words else ""
    if not (word.isascii() and word.isdigit() and len(word) <= _DIGITS and int(word) > 0):
        rule = f"a whole number above 0, of at most {_DIGITS} digits"
        raise header.error(f"@{name} {quote(word)}", rule, f"write @{name} 1", number)
    return int(word)


def _fields(header: Header, line: str, number: int) -> list[str]:
    """Split a line into its channels and, if it has one, the label."""
    fields = line.split(":")
    has_label = header.has_class or header.has_target
    count = len(fields) - has_label
    if header.dimensions is None and count > 0:
        header.dimensions = count
        header.notes.append(f"no @dimensions: {count}, as in line {number}")
    if count != header.dimensions:
        label = " and a label" if has_label else ""
        channels = (
            "some channels" if header.dimensions is None else count_of(header.dimensions, "channel")
        )
        got = f"{len(fields)} fields separated by ':'"
        fix = "restore the line, or correct the header"
        raise header.error(got, f"{channels}{label}, according to the header", fix, number)
    return fields


def _label(header: Header, label: str, number: int) -> str:
    if label not in header.classes and label.lower() not in header.classes:
        rule = f"one of the classes of @classLabel, {quote_all(dict.fromkeys(header.classes.values()))}"
        raise header.error(
            f"the label {quote(label)}", rule, "add it to @classLabel, or restore the line", number
        )
    return header.classes.get(label) or header.classes[label.lower()]


def _target(header: Header, text: str, number: int) -> float:
    if _is_value(text) and text != "?" and math.isfinite(float(text)):
        return float(text)
    raise header.error(
        f"the target {quote(text)}", "a finite number", "correct it, or remove the line", number
    )


def _matrix(header: Header, fields: list[str], number: int) -> Floats:
    """Parse the features of a line, ``(L, C)`` float64, NaN where missing."""
    if len({channel.count(",") for channel in fields}) > 1:
        counts = quote_all(channel.count(",") + 1 for channel in fields)
        rule = "a line of equally long channels"
        fix = "restore or remove the line"
        raise header.error(f"channels of {counts} values", rule, fix, number)
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
            raise _bad_value(header, fields, number) from error
        # Python accepts 1_5 and digits of other scripts; in a file they are damage.
        if "_" in text or not text.isascii():
            raise _bad_value(header, fields, number)
    if header.equal_length:
        if header.length is None:
            header.length = len(matrix)
        if len(matrix) != header.length:
            source = "@seriesLength" if "serieslength" in header.seen else "earlier sequences"
            rule = f"{count_of(header.length, 'step')}, because of @equalLength true and {source}"
            fix = "restore the line, or write @equalLength false"
            raise header.error(f"a sequence of {count_of(len(matrix), 'step')}", rule, fix, number)
    return matrix


def _bad_value(header: Header, fields: list[str], number: int) -> DataError:
    """Return the error for the first entry of a line that is not a number."""
    for channel, entries in enumerate(fields):
        for step, entry in enumerate(entries.split(",")):
            if not _is_value(entry):
                got = f"{quote(entry)} as channel {channel}, step {step}"
                return header.error(
                    got, "a number, NaN or ?", "correct it, or write ? for a missing value", number
                )
    return header.error("a value that is not a number", "a number, NaN or ?", "correct it", number)


def _is_value(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return entry.strip() == "?"
    return entry.isascii() and "_" not in entry
