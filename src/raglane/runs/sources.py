"""Sources of data: a file with its columns, data in memory, or the embedded default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raglane._utils.files import as_path
from raglane._utils.messages import argument, quote
from raglane._utils.options import DATA, check, option, options
from raglane.data.columns import LISTS, READING, Columns, arguments_of
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from raglane.tasks import TASKS, guessed_in
from raglane.training.settings import ModelSettings

if TYPE_CHECKING:
    from raglane.data.dataset import Dataset
    from raglane.data.formats import ParsedFile


DEFAULT_DATA = "Japanese vowels"


def _renamed(trained: Columns, given: Mapping[str, Any]) -> Columns:
    """Return the columns of new data: those of training, replaced by the given ones."""
    named = Columns(**given)
    if named.sequence is not None and trained.sequence is None:
        # The sequences were the feature columns in training, and are another column now.
        gone = {*(trained.features or ())} - {*(named.features or ())}
        categorical = tuple(name for name in trained.categorical or () if name not in gone)
        trained = replace(trained, features=None, categorical=categorical or None)
    for role in ("features", "static"):
        before = getattr(trained, role) or ()
        now = getattr(named, role) or ()
        if len(before) == len(now) > 0:
            names = dict(zip(before, now, strict=True))
            categorical = tuple(names.get(name, name) for name in trained.categorical or ())
            trained = replace(trained, categorical=categorical or None)
    return replace(trained, **given)


@dataclass(frozen=True)
class SequenceSource:
    """A source of sequences: a file or folder with its columns, data in memory, or the embedded
    default.
    """

    path: Path | None
    format: str | None
    columns: Columns = field(default_factory=Columns)
    on_bad_row: str = option(
        "raise",
        "raise: stop at an invalid row; skip: leave it out and list it in skipped.jsonl.",
        DATA,
        choices=("raise", "skip"),
    )
    # Data and labels in memory, instead of a file.
    held: tuple[Any, Any] | None = None
    # The parsed file, until the training begins.
    parsed: dict[Path, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check(self)

    def chosen(self, values: Mapping[str, Any]) -> SequenceSource:
        """Return the source with some options replaced, which :attr:`stored` lists."""
        columns = {
            name: value for name, value in values.items() if name not in options(SequenceSource)
        }
        rows = {name: value for name, value in values.items() if name in options(SequenceSource)}
        return replace(self, columns=_renamed(self.columns, arguments_of(columns)), **rows)

    @property
    def stored(self) -> dict[str, Any]:
        """The columns and the treatment of bad rows by name, as files of a run have them."""
        return {
            name: getattr(of, name) for of in (self.columns, self) for name in options(type(of))
        }

    def of(self, data: Any, labels: Any = None, name: str = "data") -> SequenceSource:
        """Return another source with the same columns: a path, or data in memory."""
        if not isinstance(data, (str, os.PathLike)):
            from raglane.data.assemble.in_memory import listed

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
            on_bad_row: Any = self.on_bad_row  # one of its choices
            return read(self.held[0], asked, labels=self.held[1], on_bad_row=on_bad_row)
        if self.on_bad_row == "raise":
            from raglane.data.dataset import Dataset

            return Dataset(self._file(asked).records(asked))
        return read(self.path, asked, self.format, on_bad_row="skip")

    def _file(self, asked: Columns) -> ParsedFile:
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
        tasks = tasks_of(loss) or list(guessed_in(pick(path, self.format).row))
        if self.columns.label is not None and len(tasks) > 1:
            # A forecast has no label.
            tasks = [task for task in tasks if task != "forecast"]
        return self._guess_file(path, tasks)

    def _guess_file(self, path: Path, tasks: Sequence[str]) -> tuple[Dataset, str]:
        """Return a file with the first task that its labels allow."""
        from raglane.data.assemble.errors import attempt, refused
        from raglane.data.dataset import Dataset
        from raglane.data.roles import Refusal

        asked = self.asked(tasks[0])
        is_strict = self.on_bad_row == "raise"
        file = self._file(asked) if is_strict else attempt(self._file, asked)
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
        from raglane.data.assemble.errors import attempt

        read: list[tuple[Dataset, str]] = []
        for task in tasks:
            dataset = attempt(self.read, task)
            if not isinstance(dataset, DataError):
                read.append((dataset, task))
        if not read:
            raise error
        return min(read, key=lambda pair: len(pair[0].skipped))

    def _guess_in_memory(self, loss: str | None) -> tuple[Dataset, str]:
        """Return data in memory with its task, which a Dataset determines."""
        from raglane.data.assemble.errors import accepted
        from raglane.data.assemble.in_memory import InMemory
        from raglane.data.assemble.opened import guess
        from raglane.data.dataset import Dataset
        from raglane.data.reading import check_in_memory

        data, labels = self.held or (None, None)
        if not isinstance(data, Dataset):
            check_in_memory(None, self.on_bad_row)
            memory = InMemory(data, labels)
            tasks = tasks_of(loss) or list(guessed_in("sequence"))
            first = accepted(memory.path, guess(memory, self.asked(tasks[0]), tasks))
            return Dataset(memory.records(self.asked(first.task), first.roles)), first.task
        data = data if labels is None else self.read("classify")
        if not data.is_in_memory:
            return data, data.columns.task
        if data.targets is not None:
            kind = data.targets.kind
            return data, next(task for task, facts in TASKS.items() if facts.label == kind)
        return data, "tag" if data.labels is None and data.tags is not None else "classify"

    def asked(self, task: str, *, need_labels: bool = True) -> Columns:
        """Return the columns that a reader is to read."""
        if self.columns.label_split is not None and TASKS[task].label != "sequence":
            rule = "left out for all tasks except transcribe, whose labels are sequences"
            raise ArgumentError(
                "label_split", quote(self.columns.label_split), rule, "leave it out"
            )
        return replace(self.columns, task=task, need_labels=need_labels)

    def found_in(self, records: Dataset) -> dict[str, Any]:
        """Return the columns for other files of this kind: the named and the detected ones.

        Detected ID and time columns are not included, because other files may have none; nor are
        bad rows left out, which each prediction chooses.
        """
        from raglane.data.sources.ipc import with_names

        used = records.columns
        detected = {"sequence", "label", "split", "label_split", "keep_trailing", "wide", *LISTS}
        if not records.is_in_memory:
            # Other data is read as the converted data was.
            detected |= {"tokens", "time", *READING}
        names = {name: getattr(used, name) for name in detected}
        if not records.is_in_memory and used.sequence == "sequence":
            # The default name in a converted folder; columns with this name are detected.
            names["sequence"] = None
        columns = with_names(self.columns, names)
        columns = replace(columns, categorical=used.categorical or columns.categorical)
        return replace(self, columns=columns, on_bad_row="raise").stored


class Sources(NamedTuple):
    """The sources of the parts; without a validation source, a part of the training data is held
    out.
    """

    training: SequenceSource
    validation: SequenceSource | None = None
    test: SequenceSource | None = None

    def with_parsed(self, parsed: dict[Path, Any] | None) -> Sources:
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


def check_default(source: SequenceSource, settings: ModelSettings) -> None:
    """Raise if the default data is used for another task than classify."""
    if source.is_default and settings.task != "classify":
        rule = f"'classify' for the default data, {DEFAULT_DATA}"
        raise ArgumentError("task", repr(settings.task), rule, "pass DATA")


@dataclass(frozen=True)
class SavedSource:
    """The sources of a run in run.json. Paths are absolute; None is the embedded default."""

    path: str | None
    format: str | None
    columns: Mapping[str, Any]
    validation: str | None
    test: str | None

    @classmethod
    def of(
        cls, source: SequenceSource, validation: SequenceSource | None, test: SequenceSource | None
    ) -> SavedSource:
        """Return the stored form of sources, without data in memory."""

        def text(other: SequenceSource | None) -> str | None:
            return None if other is None or other.path is None else str(other.path.absolute())

        return cls(text(source), source.format, source.stored, text(validation), text(test))

    @classmethod
    def load(cls, run: Path, data: Mapping[str, Any]) -> SavedSource:
        """Validate the sources in run.json."""
        from raglane._utils.json import build, reading
        from raglane.training.folder import DESCRIPTION

        with reading(run / DESCRIPTION):
            saved = build(cls, data, "data")
            saved.source(None)
        return saved

    def source(self, path: str | None) -> SequenceSource:
        """Return the source of a file with the run's format and columns."""
        source = SequenceSource(None if path is None else Path(path), self.format)
        return source.chosen(self.columns)


def tasks_of(loss: str | None) -> list[str]:
    """Return the tasks of a loss, unless it is one of the losses of classify."""
    if loss is None or loss in TASKS["classify"].losses:
        return []
    return [task for task, facts in TASKS.items() if loss in facts.losses]
