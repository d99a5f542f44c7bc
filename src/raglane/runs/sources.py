"""Sources of data: a file with its columns, what a program holds, or the embedded default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raglane._utils.files import as_path
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.training.options import DATA, check, option, options
from raglane.training.settings import LOSSES, ModelSettings

if TYPE_CHECKING:
    from raglane.data.dataset import Dataset
    from raglane.data.records import Columns


DEFAULT_DATA = "Japanese vowels"
# The tasks that labels may be for where they are no classes of sequences, in the order in which they are tried.
LABELLED = ("tag", "regress", "multilabel")


@dataclass(frozen=True)
class ColumnNames:
    """The columns that were named, called as :class:`~raglane.data.Columns` calls them, and how files are read.

    config.json keeps them too.
    """

    sequence: str | None = option(
        None,
        "Column of sequences (Parquet, JSON lines), or of texts (CSV).",
        DATA,
        flag="--sequence-column",
        unset="the only candidate",
    )
    label: str | None = option(None, "Column of labels.", DATA, flag="--label-column", unset="the only candidate")
    id: str | None = option(
        None,
        "Column that names a sequence; in a CSV file it says which rows belong together.",
        DATA,
        flag="--id-column",
        unset="by its name",
    )
    time: str | None = option(
        None,
        "Column that orders the rows of a sequence (CSV).",
        DATA,
        flag="--time-column",
        unset="by its name, else the order of the file",
    )
    features: list[str] | None = option(
        None,
        "Feature of elements; repeat it for several.",
        DATA,
        flag="--feature-column",
        unset="CSV: all others; else the sequences alone",
    )
    static: list[str] | None = option(
        None,
        "Feature of a sequence as a whole; repeat it for several.",
        DATA,
        flag="--static-column",
        unset="none",
    )
    categorical: list[str] | None = option(
        None,
        "Feature whose numbers are categories; repeat it for several.",
        DATA,
        flag="--categorical-column",
        unset="those of words",
    )
    split: str | None = option(
        None,
        "How texts become tokens: words, characters, bytes, or a Hugging Face tokenizer file.",
        DATA,
        metavar="words|characters|bytes|FILE",
        unset="columns: words; files: characters",
    )
    tokens: str | None = option(
        None,
        "Whether whole numbers are tokens.",
        DATA,
        choices=("yes", "no"),
        unset="for a language model, and in a column called input_ids, token_ids or tokens",
    )
    time_gaps: bool = option(False, "Take the time since the element before as a feature too (CSV).", DATA)
    on_bad_row: str = option(
        "fail",
        "Stop at a row that breaks a rule, or leave it out and list it in skipped.jsonl.",
        DATA,
        choices=("fail", "skip"),
    )

    def __post_init__(self) -> None:
        check(self)


def chosen_columns(given: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that a program names, as :class:`ColumnNames` has them."""
    # Not above: it imports PyTorch, and a help text shows the names of columns.
    from raglane._utils.checks import check_kind
    from raglane.data.records import LISTS

    known = tuple(options(ColumnNames))
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            rule = f"one of {', '.join(known)}"
            raise ArgumentTypeError(message("options", quote(name), rule, "check the name"))
        if name in LISTS and value is not None:
            value = [value] if isinstance(value, str) else value
            check_kind(name, value, (list, tuple), "a list of names of columns", 'pass ["a", "b"]')
        if name == "tokens" and isinstance(value, bool):
            value = "yes" if value else "no"
        for part in value if isinstance(value, (list, tuple)) else [value]:
            check_kind(name, part, (str, type(None)), "a text, or None", "pass the name of a column")
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def renamed(trained: ColumnNames, given: Mapping[str, Any]) -> ColumnNames:
    """The columns of other data: those of training, but for what was named, see :func:`chosen_columns`."""
    if given.get("sequence") is not None and trained.sequence is None:
        # The columns of features were the sequences; now another column is, and these stand beside none.
        gone = {*(trained.features or ())} - {*(given.get("features") or ())}
        categorical = [name for name in trained.categorical or () if name not in gone]
        trained = replace(trained, features=None, categorical=categorical or None)
    return replace(trained, **given)


@dataclass(frozen=True)
class Source:
    """Sequences and how to read them: a file or folder, what a program holds, or the embedded default."""

    path: Path | None
    format: str | None
    columns: ColumnNames = ColumnNames()
    # Data and labels of a program, in place of a file.
    held: tuple[Any, Any] | None = None

    def of(self, data: Any, labels: Any = None, name: str = "data") -> Source:
        """Other sequences that are read alike: a path, or what a program holds."""
        if not isinstance(data, (str, os.PathLike)):
            return replace(self, path=None, held=(data, labels))
        if labels is not None:
            rule, fix = "left out for a file, whose labels are in a column", "name the column, e.g. label='kind'"
            raise ArgumentTypeError(message("labels", f"labels with a file as {name}", rule, fix))
        return replace(self, path=as_path(data), held=None)

    @property
    def is_default(self) -> bool:
        """True for the sequences that come with the package."""
        return self.path is None and self.held is None

    @property
    def where(self) -> str:
        """The sequences in a line that tells of them."""
        return "memory" if self.held is not None else DEFAULT_DATA if self.path is None else str(self.path)

    @property
    def name(self) -> str:
        """A short name for a folder."""
        return DEFAULT_DATA.lower().replace(" ", "-") if self.path is None else self.path.stem

    @property
    def _converted(self) -> Path | None:
        """The folder, if ``raglane convert`` wrote it, whose sequences are not read into memory."""
        from raglane.data.formats.ipc import is_converted

        return self.path if self.path is not None and self.format is None and is_converted(self.path) else None

    def read(self, task: str, *, need_labels: bool = True, part: str = "train") -> Dataset:
        """Read it."""
        from raglane.data.reading import japanese_vowels, read

        if self.held is not None:
            return self.take(*self.held, task, need_labels=need_labels)
        if self.path is None:
            return japanese_vowels()[0 if part == "train" else 1]
        asked = self.asked(task, need_labels=need_labels)
        return read(self.path, asked, self.format, on_bad_row=self.columns.on_bad_row)

    def take(self, data: Any, labels: Any, task: str, *, need_labels: bool = True) -> Dataset:
        """Read objects of a program."""
        from raglane.data.reading import read

        if self.columns.on_bad_row != "fail":
            rule = "left out for data in memory"
            raise ArgumentError(message("on_bad_row", quote(self.columns.on_bad_row), rule, "pass a file"))
        return read(data, self.asked(task, need_labels=need_labels), labels=labels)

    def open(self, task: str) -> Dataset:
        """Read the data, or open it if it is a folder that ``raglane convert`` wrote."""
        if self._converted is None:
            return self.read(task)
        from raglane.data.dataset import Dataset

        return Dataset(self._converted, self.asked(task))

    def guess(self, loss: str | None = None) -> tuple[Dataset, str]:
        """Open the data for the task that its labels suit, or that a folder was converted for."""
        if self._converted is not None:
            from raglane.data.formats.ipc import described

            task = str(described(self._converted).get("task", "classify"))
            return self.open(task), task
        if self.held is not None:
            return self._guess_of_held(loss)
        suffix = "" if self.path is None else self.path.suffix.lower()
        tables = (".jsonl", ".ndjson", ".parquet", ".pq")
        others = LABELLED if suffix in tables else ("regress",)
        others = ("language",) if suffix == ".txt" else others
        if self.columns.on_bad_row == "fail":
            return guess_task(self.read, others, loss)
        return self._guess_of_most(others, loss)

    def _guess_of_held(self, loss: str | None) -> tuple[Dataset, str]:
        """Read objects of a program for the task that their labels suit; a Dataset has labels of one kind."""
        from raglane.data.dataset import Dataset

        data, labels = self.held or (None, None)
        if not isinstance(data, Dataset):
            return guess_task(self.read, LABELLED, loss)
        data = data if labels is None else self.read("classify")
        if not data.is_in_memory:
            return data, data.columns.task
        if data.targets is not None:
            return data, "regress" if data.targets.is_numbers else "multilabel"
        return data, "tag" if data.labels is None and data.tags is not None else "classify"

    def _guess_of_most(self, others: tuple[str, ...], loss: str | None) -> tuple[Dataset, str]:
        """The same where rows may be left out: the task that all rows are for, or else most of them."""
        strict = replace(self, columns=replace(self.columns, on_bad_row="fail"))
        try:
            return guess_task(strict.read, others, loss)
        except DataError as error:
            found: list[tuple[Dataset, str]] = []
            for task in tasks_of(loss) or ("classify", *others):
                with suppress(DataError):
                    found.append((self.read(task), task))
            if not found:
                raise error
        return min(found, key=lambda pair: len(pair[0].skipped))

    def asked(self, task: str, *, need_labels: bool = True) -> Columns:
        """The request to a reader."""
        from raglane.data.records import LISTS, Columns

        named = asdict(self.columns)
        del named["on_bad_row"]
        # What Python calls a tuple is a list in JSON.
        named["tokens"] = None if self.columns.tokens is None else self.columns.tokens == "yes"
        named |= {name: tuple(named[name]) if named[name] else None for name in LISTS}
        return Columns(task=task, need_labels=need_labels, **named)

    def found_in(self, records: Dataset) -> dict[str, Any]:
        """The columns for another file of this kind: those that the reader found, and those that were named.

        A guessed id or time column is left to be guessed again: another file may do without.
        """
        from raglane.data.records import LISTS

        found = records.columns
        guessed: dict[str, Any] = {"sequence": found.sequence, "label": found.label, "split": found.split}
        for name in LISTS:
            names = getattr(found, name)
            guessed[name] = None if names is None else list(names)
        if not records.is_in_memory:
            # What a folder was converted with is what other data is to be read with.
            guessed["tokens"] = None if found.tokens is None else "yes" if found.tokens else "no"
            guessed |= {"time_gaps": found.time_gaps, "time": found.time}
            if found.sequence == "sequence":
                # So a folder calls what had no column of its own; and a column of this name is found without it.
                guessed["sequence"] = None
        given = asdict(self.columns)
        kept = {name: guessed.get(name) if named in (None, [], False) else named for name, named in given.items()}
        kept["time_gaps"] = bool(kept["time_gaps"])
        # What becomes of bad rows of other data is for whoever predicts to say.
        kept["on_bad_row"] = "fail"
        # Of the named ones and those that were found.
        return kept | {"categorical": guessed["categorical"] or kept["categorical"]}


class Sources(NamedTuple):
    """The sources of the parts of the data; without a validation part one is held out."""

    training: Source
    validation: Source | None = None
    test: Source | None = None


def check_default(source: Source, settings: ModelSettings) -> None:
    """Refuse a task that the default data is not for."""
    if source.is_default and settings.task != "classify":
        rule = f"classify for the default data, {DEFAULT_DATA}"
        raise ArgumentError(message("task", repr(settings.task), rule, "pass DATA"))


@dataclass(frozen=True)
class SavedSource:
    """The sources of a run, as run.json has them; paths are absolute, None is the embedded default."""

    path: str | None
    format: str | None
    columns: ColumnNames
    validation: str | None
    test: str | None

    @classmethod
    def of(cls, source: Source, validation: Source | None, test: Source | None) -> SavedSource:
        """The sources as a run keeps them; nothing is kept of what a program holds."""

        def text(part: Source | None) -> str | None:
            return None if part is None or part.path is None else str(part.path.absolute())

        return cls(text(source), source.format, source.columns, text(validation), text(test))

    @classmethod
    def load(cls, run: Path, data: Mapping[str, Any]) -> SavedSource:
        """Read what a run keeps of its data."""
        from raglane.training.folder import DESCRIPTION
        from raglane.training.stored import build, reading

        with reading(run / DESCRIPTION):
            return build(cls, data, "data")

    def source(self, path: str | None) -> Source:
        """A file with the run's format and columns."""
        return Source(None if path is None else Path(path), self.format, self.columns)


def guess_task(read: Callable[[str], Dataset], others: tuple[str, ...], loss: str | None = None) -> tuple[Dataset, str]:
    """Read data for the task that its labels are for: to classify, unless that cannot be."""
    first, *rest = tasks_of(loss) or ("classify", *others)
    try:
        return read(first), first
    except DataError as error:
        for task in rest:
            try:
                return read(task), task
            except DataError:
                continue
        raise error


def tasks_of(loss: str | None) -> list[str]:
    """The tasks that a loss is for, where it says more than that classes are told."""
    if loss is None or loss in LOSSES["classify"]:
        return []
    return [task for task, losses in LOSSES.items() if loss in losses]
