"""Reads files, and objects of a program, into a dataset in memory.

Numbers become channels ``x0`` to ``x<C-1>``; texts and lists of texts become tokens. A table with a
column of lists or texts follows the rules of Parquet, where a row is a sequence; other tables
follow those of CSV, where a row is an element.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

from raglane._utils.checks import check_kind
from raglane._utils.files import as_path
from raglane._utils.messages import quote
from raglane.data import formats
from raglane.data.assemble.in_memory import InMemory, listed, noted
from raglane.data.columns import Columns
from raglane.data.dataset import Dataset
from raglane.errors import ArgumentError, ArgumentTypeError, MissingExtraError


def read(
    source: Any,
    columns: Columns | None = None,
    format: str | None = None,
    *,
    labels: Any = None,
    on_bad_row: Literal["raise", "skip"] = "raise",
) -> Dataset:
    r"""Read sequences into memory: those of a file or folder, or of objects of a program.

    ==============================================  ============================================================
    source                                          its sequences
    ==============================================  ============================================================
    path                                            those of a file in one of the ``FORMATS``, of a converted folder,
                                                    or of a folder of recordings or texts
    list of arrays or tensors, or lists of numbers  each ``(L,)``, one channel, or ``(L, C)``
    list of texts, or of lists of texts             tokens; a text is split at white space
    array or tensor ``(B, L)``, ``(B, L, C)``       ``B`` sequences of one length
    :class:`~raglane.Ragged`                        its own, of ``(L,)`` or ``(L, C)``
    table: pandas, polars, Arrow, datasets          as in a file: with a column of lists or texts, a row is a
                                                    sequence; else a row is an element, and a column names its
                                                    sequence
    pandas, with an index of (sequence, step)       a row is an element, a column a channel
    pandas, each entry a Series                     a row is a sequence, a column a channel
    list of pandas tables                           a table is a sequence, its rows elements, its columns channels
    :class:`~raglane.data.Dataset`                  its own
    ==============================================  ============================================================

    Args:
        source: as above; NaN is a missing number.
        columns: which columns hold what, and the task; None guesses, for the task ``"classify"``.
        format: of a path, a key of ``FORMATS``; None uses the suffix, and whether the path is a
            folder.
        labels: of objects, the targets of the task, one entry per sequence: a label, a list with a
            label per element, or numbers; None uses those of ``source``, if it has any.
        on_bad_row: of a path, ``"raise"``, or ``"skip"`` to leave out rows that break a rule;
            ``skipped`` lists them.

    Returns:
        The sequences, unchanged. ``notes`` lists what was guessed and left out, named columns that
        the format lacks, and the number of empty sequences with a label.

    Raises:
        ArgumentTypeError: ``source`` or ``columns`` of another kind, or labels with a path.
        ArgumentError: ``format`` is not a key of ``FORMATS``, or ``on_bad_row`` neither ``"raise"``
            nor ``"skip"``, or ``format`` or ``"skip"`` without a path.
        DataError: no sequence; a path that is missing, unreadable, of an unknown suffix, or no file
            or folder; or content that breaks a rule.
        ShapeError: sequences with different channels, or not one label per sequence.
        MissingExtraError: the ``data`` extra is required and not installed.

    Example:
        >>> data = read([[0.1, 0.5], [[0.9], [0.2], [0.3]]], labels=["up", "down"])
        >>> data.lengths.tolist(), data.channels, data.labels
        ([2, 3], ('x0',), ('up', 'down'))
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "cat.txt").write_text("tom\ntiger\n")
        ...     _ = Path(folder, "dog.txt").write_text("rex\n")
        ...     data = read(folder)
        >>> data.labels, data.lengths.tolist()
        (('cat', 'cat', 'dog'), [3, 5, 3])
    """
    fix = "pass e.g. rl.data.Columns(label=...); labels are passed by name, as labels=[...]"
    check_kind("columns", columns, (Columns, type(None)), "an object of Columns, or None", fix)
    if isinstance(source, (str, os.PathLike)):
        if labels is not None:
            rule = "None, because a file has its labels in a column"
            fix = "name the column with Columns(label=...)"
            raise ArgumentTypeError("labels", quote(labels), rule, fix)
        return Dataset(formats.read(as_path(source), columns, format, on_bad_row=on_bad_row))
    check_in_memory(format, on_bad_row)
    if isinstance(source, Dataset) and labels is None:
        return source if columns is None else noted(source, columns)
    asked = Columns() if columns is None else columns
    memory = InMemory(listed(source), listed(labels))
    return Dataset(memory.records(asked, memory.roles(asked)))


def check_in_memory(format: str | None, on_bad_row: str) -> None:
    """Raise an ArgumentError for an option of files, with data in memory."""
    for name, value, default in (("format", format, None), ("on_bad_row", on_bad_row, "raise")):
        if value != default:
            rule = f"{default!r} for data in memory, because it is about the reading of files"
            raise ArgumentError(name, quote(value), rule, "leave it out, or write a file")


def japanese_vowels() -> tuple[Dataset, Dataset]:
    """Return the Japanese vowels data, from the files of sktime: 270 training and 370 test
    recordings.

    Nine speakers pronounce two vowels. A recording has 7 to 29 steps of 12 channels, and the
    speaker is the label. The split is the official one. sktime itself is not imported.

    Returns:
        The training part and the test part.

    Raises:
        MissingExtraError: sktime is not installed.

    Example:
        >>> train, test = japanese_vowels()
        >>> len(train), len(test)
        (270, 370)
    """
    spec = importlib.util.find_spec("sktime")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("sktime is not installed. Run pip install 'raglane[demo]'.")
    folder = Path(spec.submodule_search_locations[0], "datasets", "data", "JapaneseVowels")
    train, test = (
        Dataset(formats.read(folder / f"JapaneseVowels_{part}.ts")) for part in ("TRAIN", "TEST")
    )
    return train, test
