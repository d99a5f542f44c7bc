"""Sources of data: a file with its columns, data in memory, or the embedded default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raglane._utils.files import as_path
from raglane._utils.messages import argument, quote
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.tasks import DUPLICATES, TASKS
from raglane.training.options import DATA, check, option, options
from raglane.training.settings import ModelSettings

if TYPE_CHECKING:
    from raglane.data.dataset import Dataset
    from raglane.data.formats import File
    from raglane.data.records import Columns


DEFAULT_DATA = "Japanese vowels"


def _column(role: str, help: str, unset: str) -> Any:
    """Return a field of :class:`ColumnNames` for the columns of a role."""
    return option(None, help, DATA, flag=f"--{role}-column", unset=unset)


@dataclass(frozen=True)
class ColumnNames:
    """The names of columns, as in :class:`~raglane.data.Columns`, and the reading of files; stored
    in config.json.
    """

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
    time_format: str | None = option(
        None,
        "Form of the times, as for strptime, e.g. %d/%m/%Y.",
        DATA,
        metavar="FORMAT",
        unset="ISO 8601, or by the whole column",
    )
    duplicate_times: str | None = option(
        None,
        "Rows of a sequence with one time: keep them, merge them to their mean, or keep the first.",
        DATA,
        choices=DUPLICATES,
        unset="keep up to 5 % of the rows",
    )
    features: list[str] | None = _column(
        "feature",
        "Column of a feature per element; several: repeat it, or a,b.",
        "CSV: all others; else only the sequences",
    )
    static: list[str] | None = _column(
        "static", "Column of a feature per sequence; several: repeat it, or a,b.", "none"
    )
    categorical: list[str] | None = _column(
        "categorical",
        "Column of a feature whose numbers are categories; several: repeat it, or a,b.",
        "columns of words",
    )
    split: str | None = option(
        None,
        "Split of texts into tokens: words, characters, bytes, or a Hugging Face tokenizer file.",
        DATA,
        metavar="words|characters|bytes|FILE",
        unset="columns: words, or characters if nearly all texts are one word; files: characters",
    )
    label_split: str | None = option(
        None,
        "Split of target texts into tokens, as for --split (transcribe).",
        DATA,
        metavar="words|characters|bytes|FILE",
        unset="characters",
    )
    tokens: str | None = option(
        None,
        "Read whole numbers as tokens.",
        DATA,
        choices=("yes", "no"),
        unset="for language models, and columns named input_ids, token_ids or tokens",
    )
    wide: bool = option(
        False,
        "Each row is a sequence, and the columns of features are its steps (CSV); also if they are numbered.",
        DATA,
    )
    time_gaps: bool = option(
        False, "Add the time since the previous element as a feature (CSV).", DATA
    )
    keep_trailing: bool = option(
        False,
        "Keep elements at the end of a sequence that are missing in all channels, as in padded data.",
        DATA,
    )
    header: str | None = option(
        None,
        "Names of the columns of a CSV file without a header, with commas between them.",
        DATA,
        metavar="NAMES",
    )
    no_header: bool = option(
        False, "A CSV file has no header: its columns are --header, or c1, c2 and so on.", DATA
    )
    label_from_name: str | None = option(
        None,
        "In a folder, the label of a file is what this pattern finds in its path: its group, or all.",
        DATA,
        metavar="REGEX",
    )
    on_bad_row: str = option(
        "raise",
        "raise: stop at an invalid row; skip: leave it out and list it in skipped.jsonl.",
        DATA,
        choices=("raise", "skip"),
    )

    def __post_init__(self) -> None:
        check(self)


def chosen_columns(names_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`ColumnNames` for columns named in Python."""
    # Imported here, because help texts read ColumnNames without torch.
    from raglane._utils.checks import check_flag, check_kind
    from raglane.data.records import LISTS

    valid = tuple(options(ColumnNames))
    chosen: dict[str, Any] = {}
    for name, value in names_of.items():
        if name not in valid:
            raise ArgumentTypeError(
                "options", quote(name), f"one of {', '.join(valid)}", "check the name"
            )
        if name in LISTS and value is not None:
            value = [value] if isinstance(value, str) else value
            check_kind(name, value, (list, tuple), "a list of column names", 'pass ["a", "b"]')
        if name == "tokens" and isinstance(value, bool):
            value = "yes" if value else "no"
        flags = ("wide", "time_gaps", "keep_trailing", "no_header")
        if name in flags and value is not None:
            chosen[name] = check_flag(name, value)
            continue
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            check_kind(
                name, entry, (str, type(None)), "a string, or None", "pass the name of a column"
            )
        chosen[name] = list(value) if isinstance(value, tuple) else value
    return chosen


def renamed(trained: ColumnNames, names_of: Mapping[str, Any]) -> ColumnNames:
    """Return the columns of new data: those of training, replaced by the given ones of
    :func:`chosen_columns`.
    """
    if names_of.get("sequence") is not None and trained.sequence is None:
        # The sequences were the feature columns in training, and are another column now.
        gone = {*(trained.features or ())} - {*(names_of.get("features") or ())}
        categorical = [name for name in trained.categorical or () if name not in gone]
        trained = replace(trained, features=None, categorical=categorical or None)
    for role in ("features", "static"):
        before = getattr(trained, role) or ()
        now = names_of.get(role) or ()
        if len(before) == len(now) > 0:
            names = dict(zip(before, now, strict=True))
            categorical = [names.get(name, name) for name in trained.categorical or ()]
            trained = replace(trained, categorical=categorical or None)
    return replace(trained, **names_of)


@dataclass(frozen=True)
class Source:
    """A source of sequences: a file or folder with its columns, data in memory, or the embedded
    default.
    """

    path: Path | None
    format: str | None
    columns: ColumnNames = ColumnNames()
    # Data and labels in memory, instead of a file.
    held: tuple[Any, Any] | None = None
    # The parsed file, until the training begins.
    parsed: dict[Path, File] | None = field(default=None, compare=False, repr=False)

    def of(self, data: Any, labels: Any = None, name: str = "data") -> Source:
        """Return another source with the same columns: a path, or data in memory."""
        if not isinstance(data, (str, os.PathLike)):
            from raglane.data.memory import listed

            return replace(self, path=None, held=(listed(data), listed(labels)))
        if labels is not None:
            rule = "None for a file, whose labels are in a column"
            fix = "name the column, as label='kind'"
            raise ArgumentTypeError("labels", f"labels with a file as {name}", rule, fix)
        return replace(self, path=as_path(data), held=None)

    @property
    def is_default(self) -> bool:
        """True for the data that is included in the package."""
        return self.path is None and self.held is None

    @property
    def where(self) -> str:
        """The source, for messages."""
        if self.held is not None:
            return "memory"
        return DEFAULT_DATA if self.path is None else str(self.path)

    @property
    def name(self) -> str:
        """A short name, for a folder."""
        if self.path is None:
            return DEFAULT_DATA.lower().replace(" ", "-")
        return Path(self.path.stem).stem if self.path.suffix.lower() == ".gz" else self.path.stem

    @property
    def _converted(self) -> Path | None:
        """The path, if it is a folder that ``raglane convert`` wrote; else None."""
        from raglane.data.sources.ipc import is_converted

        return (
            self.path
            if self.path is not None and self.format is None and is_converted(self.path)
            else None
        )

    def read(self, task: str, *, need_labels: bool = True, role: str = "train") -> Dataset:
        """Read the sequences into memory."""
        from raglane.data.reading import japanese_vowels, read

        if self.is_default:
            return japanese_vowels()[0 if role == "train" else 1]
        asked = self.asked(task, need_labels=need_labels)
        if self.held is not None:
            on_bad_row: Any = self.columns.on_bad_row  # one of its choices
            return read(self.held[0], asked, labels=self.held[1], on_bad_row=on_bad_row)
        if self.columns.on_bad_row == "raise":
            from raglane.data.dataset import Dataset

            return Dataset(self._file(asked).records(asked))
        return read(self.path, asked, self.format, on_bad_row="skip")

    def _file(self, asked: Columns) -> File:
        """Parse the file, or return it if it has been parsed."""
        from raglane.data.formats import open_file

        path = self.path or Path()
        if self.parsed is None:
            return open_file(path, asked, self.format)
        if path not in self.parsed:
            self.parsed[path] = open_file(path, asked, self.format)
        return self.parsed[path]

    def open(self, task: str) -> Dataset:
        """Open a folder that ``raglane convert`` wrote, or read other data."""
        if self._converted is None:
            return self.read(task)
        from raglane.data.dataset import Dataset

        return Dataset(self._converted, self.asked(task))

    def guess(self, loss: str | None = None) -> tuple[Dataset, str]:
        """Open the data for the task of its labels, see :func:`~raglane.data.roles.guess_task`, or of a converted
        folder.
        """
        if self._converted is not None:
            from raglane.data.sources.ipc import described

            task = str(described(self._converted).get("task", "classify"))
            return self.open(task), task
        if self.held is not None:
            return self._guess_in_memory(loss)
        from raglane.data.formats import pick

        path = self.path or Path()
        tasks = tasks_of(loss) or list(pick(path, self.format).tasks)
        if self.columns.label is not None and len(tasks) > 1:
            # A forecast has no label.
            tasks = [task for task in tasks if task != "forecast"]
        return self._guess_file(path, tasks)

    def _guess_file(self, path: Path, tasks: Sequence[str]) -> tuple[Dataset, str]:
        """Return a file with the first task that its labels allow."""
        from raglane.data.assemble.errors import refused
        from raglane.data.assemble.pieces import attempt
        from raglane.data.dataset import Dataset
        from raglane.data.roles import Refusal

        asked = self.asked(tasks[0])
        is_strict = self.columns.on_bad_row == "raise"
        file = self._file(asked) if is_strict else attempt(lambda: self._file(asked))
        if isinstance(file, DataError):
            return self._guess_skipping(tasks, file)
        guess = file.guess(asked, tasks)
        if isinstance(guess, Refusal):
            error = refused(path, guess)
            if is_strict or guess.candidates:
                raise error
            return self._guess_skipping(tasks, error)
        if not is_strict:
            return self.read(guess.task), guess.task
        return Dataset(file.records(replace(asked, task=guess.task), guess.roles)), guess.task

    def _guess_skipping(self, tasks: Sequence[str], error: DataError) -> tuple[Dataset, str]:
        """Return a file that cannot be read whole with the task for which the fewest rows must be
        skipped.
        """
        from raglane.data.assemble.pieces import attempt

        read: list[tuple[Dataset, str]] = []
        for task in tasks:
            dataset = attempt(partial(self.read, task))
            if not isinstance(dataset, DataError):
                read.append((dataset, task))
        if not read:
            raise error
        return min(read, key=lambda pair: len(pair[0].skipped))

    def _guess_in_memory(self, loss: str | None) -> tuple[Dataset, str]:
        """Return data in memory with its task, which a Dataset determines."""
        from raglane.data.assemble.errors import refused
        from raglane.data.assemble.opened import guess
        from raglane.data.dataset import Dataset
        from raglane.data.formats import GUESSED
        from raglane.data.memory import InMemory
        from raglane.data.reading import check_in_memory
        from raglane.data.roles import Refusal

        data, labels = self.held or (None, None)
        if not isinstance(data, Dataset):
            check_in_memory(None, self.columns.on_bad_row)
            memory = InMemory(data, labels)
            tasks = tasks_of(loss) or list(GUESSED)
            found = guess(memory, self.asked(tasks[0]), tasks)
            if isinstance(found, Refusal):
                raise refused(memory.path, found)
            return Dataset(memory.records(self.asked(found.task), found.roles)), found.task
        data = data if labels is None else self.read("classify")
        if not data.is_in_memory:
            return data, data.columns.task
        if data.targets is not None:
            kind = data.targets.kind
            return data, next(task for task, facts in TASKS.items() if facts.label == kind)
        return data, "tag" if data.labels is None and data.tags is not None else "classify"

    def asked(self, task: str, *, need_labels: bool = True) -> Columns:
        """Return the columns that a reader is to read."""
        from raglane.data.records import LISTS, Columns

        if self.columns.label_split is not None and TASKS[task].label != "sequence":
            rule = "left out for all tasks except transcribe, whose labels are sequences"
            raise ArgumentError(
                "label_split", quote(self.columns.label_split), rule, "leave it out"
            )
        named = asdict(self.columns)
        del named["on_bad_row"]
        # ColumnNames has lists, because it is stored as JSON.
        named["tokens"] = None if self.columns.tokens is None else self.columns.tokens == "yes"
        named |= {name: tuple(named[name]) if named[name] else None for name in LISTS}
        return Columns(task=task, need_labels=need_labels, **named)

    def found_in(self, records: Dataset) -> dict[str, Any]:
        """Return the columns for other files of this kind: the named and the detected ones.

        Detected ID and time columns are not included, because other files may have none.
        """
        from raglane.data.records import LISTS

        used = records.columns
        guessed: dict[str, Any] = {"sequence": used.sequence, "label": used.label}
        guessed |= {"split": used.split, "label_split": used.label_split}
        guessed |= {"keep_trailing": used.keep_trailing}
        for name in LISTS:
            names = getattr(used, name)
            guessed[name] = None if names is None else list(names)
        if not records.is_in_memory:
            # Other data is read as the converted data was.
            words = {None: None, True: "yes", False: "no"}
            guessed["tokens"] = words[used.tokens]
            guessed |= {"time_gaps": used.time_gaps, "time": used.time, "wide": used.wide}
            guessed |= {"time_format": used.time_format, "duplicate_times": used.duplicate_times}
            guessed |= {"header": used.header, "no_header": used.no_header}
            guessed["label_from_name"] = used.label_from_name
            if used.sequence == "sequence":
                # The default name in a converted folder; columns with this name are detected.
                guessed["sequence"] = None
        asked = asdict(self.columns)
        columns = {
            name: guessed.get(name) if named in (None, [], False) else named
            for name, named in asked.items()
        }
        flags = ("time_gaps", "keep_trailing", "no_header")
        columns |= {name: bool(columns[name]) for name in flags}
        columns["wide"] = self.columns.wide or used.wide
        # Each prediction chooses the treatment of invalid rows.
        columns["on_bad_row"] = "raise"
        return columns | {"categorical": guessed["categorical"] or columns["categorical"]}


class Sources(NamedTuple):
    """The sources of the parts; without a validation source, a part of the training data is held
    out.
    """

    training: Source
    validation: Source | None = None
    test: Source | None = None

    def with_parsed(self, parsed: dict[Path, File] | None) -> Sources:
        """Return sources of which the training data is parsed once, and then taken from there."""
        return self._replace(training=replace(self.training, parsed=parsed))

    def by_characters(self, records: Dataset, task: str) -> tuple[Sources, Dataset, str | None]:
        """Split texts into characters if nearly all are one word and no split was chosen; return a
        line about it.
        """
        from raglane.data.dataset import Dataset
        from raglane.data.records import is_one_word

        source = self.training
        data = (self.training.held or (None,))[0]
        is_chosen = (
            source.columns.split is not None
            or not records.is_in_memory
            or isinstance(data, Dataset)
        )
        if is_chosen or not is_one_word(records.records):
            return self, records, None
        columns = replace(source.columns, split="characters")
        source = replace(source, columns=columns)
        others = [other and replace(other, columns=columns) for other in self[1:]]
        line = f"texts of one word are split into characters; {argument('split', 'words')} keeps them whole"
        return Sources(source, *others), source.read(task), line


def check_default(source: Source, settings: ModelSettings) -> None:
    """Raise if the default data is used for another task than classify."""
    if source.is_default and settings.task != "classify":
        rule = f"'classify' for the default data, {DEFAULT_DATA}"
        raise ArgumentError("task", repr(settings.task), rule, "pass DATA")


@dataclass(frozen=True)
class SavedSource:
    """The sources of a run in run.json. Paths are absolute; None is the embedded default."""

    path: str | None
    format: str | None
    columns: ColumnNames
    validation: str | None
    test: str | None

    @classmethod
    def of(cls, source: Source, validation: Source | None, test: Source | None) -> SavedSource:
        """Return the stored form of sources, without data in memory."""

        def text(other: Source | None) -> str | None:
            return None if other is None or other.path is None else str(other.path.absolute())

        return cls(text(source), source.format, source.columns, text(validation), text(test))

    @classmethod
    def load(cls, run: Path, data: Mapping[str, Any]) -> SavedSource:
        """Validate the sources in run.json."""
        from raglane.training.folder import DESCRIPTION
        from raglane.training.stored import build, reading

        with reading(run / DESCRIPTION):
            return build(cls, data, "data")

    def source(self, path: str | None) -> Source:
        """Return the source of a file with the run's format and columns."""
        return Source(None if path is None else Path(path), self.format, self.columns)


def tasks_of(loss: str | None) -> list[str]:
    """Return the tasks of a loss, unless it is one of the losses of classify."""
    if loss is None or loss in TASKS["classify"].losses:
        return []
    return [task for task, facts in TASKS.items() if loss in facts.losses]
