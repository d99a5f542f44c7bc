"""The ``.ts`` format of time series archives, as sktime and aeon write it.

A header of lines that begin with ``@``, then ``@data``, then one sequence a line: channels separated by ``:``, the
values of a channel by ``,``, and after a last ``:`` the label. ``?`` and ``NaN`` are missing values. Lines that begin
with ``#`` or ``%`` are comments. Values with timestamps are not supported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import count_of, data_error, has_utf8, read_bytes
from raglane.data.records import Columns, Records, offsets_of
from raglane.errors import DataError, MissingExtraError

__all__ = ["japanese_vowels", "read"]

# Directives that say nothing about how the lines are to be read.
_DESCRIPTIVE = ("problemname", "missing", "type", "path")


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

    @property
    def has_label(self) -> bool:
        """Whether a line ends in a label or a target."""
        return self.has_class or self.has_target


def read(path: Path, columns: Columns) -> Records:
    """Read a ``.ts`` file.

    Args:
        path: the file.
        columns: of these only the task matters; the format has no columns.

    Returns:
        Features ``(N, C)``, channels ``x0`` to ``x<C-1>``.

    Raises:
        DataError: a line breaks a rule; the message has the file, the line, the rule and the fix.
    """
    text = read_bytes(path).decode("utf-8-sig", errors="surrogateescape")
    lines = _content_lines(text)
    header = _read_header(path, lines)
    if columns.task == "tag":
        rule = "the .ts format has one label a sequence, to tag needs one an element"
        raise data_error(path, "a .ts file for the task tag", rule, "pass --task classify, or another format")
    notes = header.notes
    if columns.wants_labels and not header.has_class:
        got = "@targetLabel, a number to predict" if header.has_target else "no '@classLabel true'"
        raise data_error(path, got, "to classify needs class labels", "pass a file that has them")
    if header.has_target:
        notes.append("the target of each sequence (@targetLabel) is not used")
    matrices: list[npt.NDArray[np.float64]] = []
    labels: list[str] = []
    for number, line in lines:
        fields = _fields(path, header, line, number)
        if header.has_label:
            label = fields.pop().strip()
            if columns.wants_labels:
                labels.append(_label(path, header, label, number))
        matrices.append(_matrix(path, header, fields, number))
    if not matrices:
        raise data_error(path, "no line after @data", "it must hold at least one sequence", "check the file")
    # A value that float32 cannot hold becomes infinite, and is then reported or filled as missing.
    with np.errstate(over="ignore"):
        values = np.concatenate(matrices).astype(np.float32)
    return Records(
        values,
        offsets_of([len(matrix) for matrix in matrices]),
        labels=tuple(labels) if columns.wants_labels else None,
        channels=tuple(f"x{channel}" for channel in range(values.shape[1])),
        source=path,
        notes=tuple(notes),
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
            got = f"{line[:40]!a} before @data"
            rule = "a .ts file begins with lines that start with '@', the last of them @data"
            raise data_error(path, got, rule, "check that it is a .ts file", number)
        name, *words = line[1:].split()
        directive = name.lower()
        if directive == "data":
            return header
        _read_directive(path, header, directive, words, number)
    rule = "a line @data stands before the sequences"
    raise data_error(path, "no line @data", rule, "check that it is a whole .ts file")


def _read_directive(path: Path, header: _Header, name: str, words: list[str], number: int) -> None:
    """Note what one line of the header says."""
    if name == "timestamps":
        if _flag(path, name, words, number):
            rule = "values with timestamps are not supported"
            raise data_error(path, "@timeStamps true", rule, "save the series without timestamps", number)
    elif name == "univariate":
        if _flag(path, name, words, number):
            header.dimensions = 1
    elif name in ("dimensions", "dimension"):
        header.dimensions = _count(path, name, words, number)
    elif name == "equallength":
        header.equal_length = _flag(path, name, words, number)
    elif name == "serieslength":
        header.length = _count(path, name, words, number)
    elif name == "targetlabel":
        header.has_target = _flag(path, name, words, number)
    elif name == "classlabel":
        header.has_class = _flag(path, name, words, number)
        classes = words[1:]
        odd = next((word for word in classes if not has_utf8(word)), None)
        if odd is not None:
            raise data_error(path, f"the class {odd!a}", "a class is text in UTF-8", "convert the file", number)
        if header.has_class and not classes:
            rule = "the classes are listed after '@classLabel true'"
            raise data_error(path, "no class", rule, "list the classes there", number)
        header.classes = {word.lower(): word for word in classes} | {word: word for word in classes}
    elif name not in _DESCRIPTIVE:
        header.notes.append(f"line {number}: @{ascii(name)[1:-1]} is not known and not used")


def _flag(path: Path, name: str, words: list[str], number: int) -> bool:
    """The true or false of a directive."""
    word = words[0].lower() if words else ""
    if word not in ("true", "false"):
        raise data_error(path, f"@{name} {word!a}", "true or false", f"write @{name} false", number)
    return word == "true"


def _count(path: Path, name: str, words: list[str], number: int) -> int:
    """The whole number, above 0, of a directive."""
    word = words[0] if words else ""
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        raise data_error(path, f"@{name} {word!a}", "a whole number above 0", f"write @{name} 1", number)
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
        rule = f"{channels}{label}, as the header says"
        fix = "restore the line, or correct the header"
        raise data_error(path, f"{len(fields)} fields separated by ':'", rule, fix, number)
    return fields


def _label(path: Path, header: _Header, label: str, number: int) -> str:
    """The label of a line, in the header's spelling."""
    if label not in header.classes and label.lower() not in header.classes:
        known = ", ".join(dict.fromkeys(header.classes.values()))
        fix = "add it to @classLabel, or restore the line"
        raise data_error(path, f"the label {label!a}", f"@classLabel lists {known}", fix, number)
    return header.classes.get(label) or header.classes[label.lower()]


def _matrix(path: Path, header: _Header, fields: list[str], number: int) -> npt.NDArray[np.float64]:
    """The features of a line, ``(L, C)`` float64, NaN where missing."""
    lengths = {channel.count(",") for channel in fields}
    if len(lengths) > 1:
        counts = ", ".join(str(channel.count(",") + 1) for channel in fields)
        rule = "the channels of a sequence are equally long"
        raise data_error(path, f"channels of {counts} values", rule, "restore or remove the line", number)
    if not any(map(str.strip, fields)):
        matrix = np.empty((0, len(fields)))
    else:
        entries = ",".join(fields).replace("?", "nan").split(",")
        try:
            matrix = np.array(entries, dtype=np.float64).reshape(len(fields), -1).T
        except ValueError as error:
            raise _bad_value(path, fields, number) from error
    if header.equal_length and header.length is not None and len(matrix) != header.length:
        rule = f"@equalLength true and @seriesLength {header.length}"
        fix = "restore the line, or write @equalLength false"
        raise data_error(path, f"a sequence of {len(matrix)} steps", rule, fix, number)
    return matrix


def _bad_value(path: Path, fields: list[str], number: int) -> DataError:
    """The error for the first entry of a line that is no number."""
    for channel, entries in enumerate(fields):
        for step, entry in enumerate(entries.replace("?", "nan").split(",")):
            try:
                float(entry)
            except ValueError:
                got = f"{entry[:40]!a} as channel {channel}, step {step}"
                fix = "correct it, or write ? where a value is missing"
                return data_error(path, got, "a value is a number, NaN or ?", fix, number)
    return data_error(path, "a value that is no number", "a value is a number, NaN or ?", "correct it", number)


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
        raise MissingExtraError("sktime is not installed. Fix: pip install 'raglane[demo]'.")
    folder = Path(found.submodule_search_locations[0], "datasets", "data", "JapaneseVowels")
    train, test = (read(folder / f"JapaneseVowels_{part}.ts", Columns()) for part in ("TRAIN", "TEST"))
    return train, test
