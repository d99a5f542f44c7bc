"""The columns that the user asked for, with their help texts and rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raglane._utils import options
from raglane._utils.messages import argument, quote
from raglane._utils.options import DATA
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.tasks import DUPLICATES, TASKS

# The attributes of Columns that name one column, and those that name several.
_ROLES = ("sequence", "label", "id", "time")
LISTS = ("features", "static", "categorical")
_TIMES = ("time_format", "duplicate_times")
# The roles of the columns of a table with names, of a table of texts, and of a folder of files.
NAMED = (*_ROLES, *LISTS, "time_gaps", "wide", *_TIMES)
WRITTEN = (*NAMED, "header", "no_header")
ROLES = (*WRITTEN, "label_from_name")
# The attributes that tell how other data of a kind is read.
READING = ("keep_trailing", *(role for role in ROLES if role not in (*_ROLES, *LISTS)))

_FLAGS = ("need_labels", "time_gaps", "wide", "keep_trailing", "no_header")
_FIX = "pass its name, or None"
# The rules and fixes of the attributes that are texts.
_TEXTS = {
    **dict.fromkeys(_ROLES, ("the name of a column, or None", _FIX)),
    "header": ("names with commas, or None", _FIX),
    "time_format": ("a format of strptime, or None", _FIX),
    "label_from_name": ("a regular expression", r"pass e.g. '^[^_]+'"),
    "split": ("a text, or None", "pass e.g. characters"),
    "label_split": ("a text, or None", "pass e.g. characters"),
}
_SPLITS = "words|characters|bytes|FILE"


def _column(role: str, help: str, unset: str) -> Any:
    """Return a field of :class:`Columns` for the columns of a role."""
    return options.option(None, help, DATA, flag=f"--{role}-column", unset=unset)


@dataclass(frozen=True)
class Columns:
    """The roles of the columns of a file; a name that is None is guessed if there is one candidate.

    Attributes:
        task: ``"classify"`` (a class per sequence), ``"tag"`` (a class per element), ``"regress"``
            (numbers for either), ``"multilabel"`` (any number of labels for either), ``"forecast"``
            or ``"language"`` (no label), or ``"transcribe"`` (a sequence of labels per sequence).
        need_labels: False for prediction: labels are not read, and their column is optional. If it
            is named, it is not used as a feature.
        sequence: the list or text column (Parquet, JSON lines).
        label: the column of labels.
        id: the column of sequence names; in a CSV file, rows with equal entries are one sequence.
            Several columns with commas between them, ``"store,product"``, are the ids together.
        time: the column that orders the rows of a sequence (CSV); ``"Date,Time"`` for a date and a
            time of day in two columns, and ``"none"`` for rows that are in order.
        time_format: the form of the times, as for ``datetime.strptime``; None reads ISO 8601, and
            forms such as 31/01/2024 if the whole column tells the day from the month.
        duplicate_times: rows of a sequence with one time: ``"keep"`` them in the order of the file,
            merge them to their ``"mean"``, or keep the ``"first"``; None keeps up to 5 % of the
            rows, with a note, and refuses more.
        features: the columns of features per element. None selects, in a CSV file, every other
            column, and in other formats only the sequence column; there a feature is a list as long
            as the sequence.
        static: the columns of features per sequence; in a CSV file their entries are equal in all
            rows of a sequence.
        categorical: the features whose numbers are categories; words always are.
        split: the tokenization of texts: ``"words"``, ``"characters"``, ``"bytes"``, or the path of
            a tokenizer file; None splits columns of texts into words, and text files into
            characters.
        label_split: the tokenization of target texts of ``"transcribe"``, as for ``split``; None is
            ``"characters"``.
        tokens: whether whole numbers are tokens; None means for a language model, and in a column
            named ``input_ids``, ``token_ids`` or ``tokens``.
        wide: whether each row of a CSV file is a sequence, and its feature columns are the steps;
            one numbered name in ``features``, such as t0, means all from there on. A file with one
            row per id and three or more numbered columns, such as t0, t1, t2, is read in this way
            too.
        time_gaps: whether to add the time since the previous element as a feature (CSV): 0 for the
            first element, in the units of the time column, or in seconds if it holds dates.
        keep_trailing: whether elements at the end of a sequence that are missing in all channels
            are elements; else a sequence ends before them, as in padded data.
        header: the names of the columns of a CSV file without a header, with commas between them.
        no_header: whether a CSV file has no header; without names, its columns are ``c1`` and so
            on.
        label_from_name: in a folder, the regular expression that finds the label of a file in its
            path: the first group, or all that it finds.

    Raises:
        ArgumentError: ``task``, ``split`` or ``duplicate_times`` is unknown.
        ArgumentTypeError: a name is not a str, or several names are not in a tuple.

    Example:
        >>> Columns(label="language").task
        'classify'
    """

    task: str = "classify"
    need_labels: bool = True
    sequence: str | None = _column(
        "sequence",
        "Column of sequences (Parquet, JSON lines), or of texts (CSV).",
        "the only candidate",
    )
    label: str | None = _column("label", "Column of labels.", "the only candidate")
    id: str | None = _column(
        "id",
        "Column of IDs of sequences; in a CSV file, rows with the same ID are one sequence; store,product joins two.",
        "by its name, or by times that repeat",
    )
    time: str | None = _column(
        "time",
        "Column that orders the rows of a sequence (CSV); Date,Time for two columns, none if the rows are in order.",
        "by its name, else the order of the file",
    )
    time_format: str | None = options.option(
        None,
        "Form of the times, as for strptime, e.g. %d/%m/%Y.",
        DATA,
        metavar="FORMAT",
        unset="ISO 8601, or by the whole column",
    )
    duplicate_times: str | None = options.option(
        None,
        "Rows of a sequence with one time: keep them, merge them to their mean, or keep the first.",
        DATA,
        choices=DUPLICATES,
        unset="keep up to 5 % of the rows",
    )
    features: tuple[str, ...] | None = _column(
        "feature",
        "Column of a feature per element; several: repeat it, or a,b.",
        "CSV: all others; else only the sequences",
    )
    static: tuple[str, ...] | None = _column(
        "static", "Column of a feature per sequence; several: repeat it, or a,b.", "none"
    )
    categorical: tuple[str, ...] | None = _column(
        "categorical",
        "Column of a feature whose numbers are categories; several: repeat it, or a,b.",
        "columns of words",
    )
    split: str | None = options.option(
        None,
        "Split of texts into tokens: words, characters, bytes, or a Hugging Face tokenizer file.",
        DATA,
        metavar=_SPLITS,
        unset="columns: words, or characters if nearly all texts are one word; files: characters",
    )
    label_split: str | None = options.option(
        None,
        "Split of target texts into tokens, as for --split (transcribe).",
        DATA,
        metavar=_SPLITS,
        unset="characters",
    )
    tokens: bool | None = options.option(
        None,
        "Read whole numbers as tokens.",
        DATA,
        choices=tuple(options.TRUTH),
        unset="for language models, and columns named input_ids, token_ids or tokens",
    )
    wide: bool = options.option(
        False,
        "Each row is a sequence, and the columns of features are its steps (CSV); also if they are numbered.",
        DATA,
    )
    time_gaps: bool = options.option(
        False, "Add the time since the previous element as a feature (CSV).", DATA
    )
    keep_trailing: bool = options.option(
        False,
        "Keep elements at the end of a sequence that are missing in all channels, as in padded data.",
        DATA,
    )
    header: str | None = options.option(
        None,
        "Names of the columns of a CSV file without a header, with commas between them.",
        DATA,
        metavar="NAMES",
    )
    no_header: bool = options.option(
        False, "A CSV file has no header: its columns are --header, or c1, c2 and so on.", DATA
    )
    label_from_name: str | None = options.option(
        None,
        "In a folder, the label of a file is what this pattern finds in its path: its group, or all.",
        DATA,
        metavar="REGEX",
    )

    def __post_init__(self) -> None:
        # Imported here, because help texts read Columns without torch.
        from raglane._utils.checks import check_choice, check_flag, check_kind
        from raglane.data.splitting import check_split

        check_task(self.task)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        for name, (rule, fix) in _TEXTS.items():
            check_kind(name, getattr(self, name), (str, type(None)), rule, fix)
        rule = "a tuple of names, or None"
        fix = 'pass ("a", "b")'
        for name in LISTS:
            names = getattr(self, name)
            check_kind(name, names, (tuple, type(None)), rule, fix)
            for entry in names or ():
                check_kind(name, entry, str, rule, fix)
        check_kind(
            "tokens", self.tokens, (bool, type(None)), "a bool, or None", "pass True or False"
        )
        if self.duplicate_times is not None:
            check_choice("duplicate_times", self.duplicate_times, DUPLICATES)
        _check_pattern(self.label_from_name)
        for name in ("split", "label_split"):
            split = getattr(self, name)
            if split is not None:
                check_split(split, name)

    @property
    def wants_labels(self) -> bool:
        """True if a file without labels is an error."""
        return self.need_labels and TASKS[self.task].label is not None


def check_task(task: str) -> None:
    """Raise :class:`~raglane.errors.ArgumentError` unless ``task`` is one of ``TASKS``."""
    from raglane._utils.checks import check_choice

    check_choice("task", task, tuple(TASKS))


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        rule, fix = _TEXTS["label_from_name"]
        got = f"{quote(pattern)} ({error})"
        raise ArgumentError("label_from_name", got, rule, fix) from error


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of Columns for options of the command line, keywords or entries of JSON:
    names become tuples, and yes and no bools.
    """
    valid = options.options(Columns)
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if name not in valid:
            rule = f"one of {', '.join(valid)}"
            raise ArgumentTypeError("options", quote(name), rule, "check the name")
        if name in LISTS and isinstance(value, str):
            value = (value,)
        if isinstance(value, list | tuple):
            value = tuple(value) or None
        if name == "tokens" and isinstance(value, str):
            options.check_value(name, value, valid[name])
            value = options.TRUTH[value]
        chosen[name] = value
    return chosen


def is_named(name: str, columns: Columns) -> bool:
    """Return False for the name that pandas gives to a column without one, unless a role was given
    to it.
    """
    if not re.fullmatch(r"Unnamed: \d+(\.\d+)*", name):
        return True
    names = [getattr(columns, role) or "" for role in _ROLES]
    parts = [part.strip() for each in names for part in each.split(",")]
    return name in (*parts, *(entry for role in LISTS for entry in getattr(columns, role) or ()))


def option(name: str, value: str | bool | None = None) -> str:
    """Write an argument of Columns, or its option, for a message."""
    return argument(name, value=value, of="Columns")
