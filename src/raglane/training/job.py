"""A run as its folder describes it, the job that its processes share, and its result."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.files import as_path, write_file
from raglane._utils.messages import argument, message
from raglane.data.dataset import Dataset
from raglane.data.records import Feature, Records
from raglane.errors import DivergedError
from raglane.training.checkpoint import check_format
from raglane.training.folder import DESCRIPTION, find
from raglane.training.own_cell import named_code, take_code
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.stored import read_json, reading, to_json

FORMAT = "raglane-run"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class RunDescription:
    """The settings and the data of a run, kept in ``run.json`` so that it can go on.

    Args:
        settings: of the training.
        data: where the data came from; JSON values, as the caller likes.
        fingerprint: of the training and validation part.
        identity: of the data as a whole, whatever was held out; "" of runs before there was one.
        diverged: what was seen of a run that ran away; None of others.

    Example:
        >>> RunDescription(Settings()).settings.cell
        'gru'
    """

    settings: Settings
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    diverged: str | None = None
    identity: str = ""

    def write(self, folder: Path) -> None:
        """Write ``run.json`` in the folder of a run."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_config(),
            "data": dict(self.data),
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "diverged": self.diverged,
        }
        write_file(folder / DESCRIPTION, to_json(content))


@dataclass(frozen=True, kw_only=True)
class Job(RunDescription):
    """A training that is checked and settled, as one process hands it to others: with its sequences and its folder."""

    training: Dataset
    validation: Dataset | None = None
    # Only checked against the model.
    test: Dataset | None = None
    # Of a file, by what they hold; kept with the model.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # Locked by the process that made the job; None keeps the best model in memory.
    folder: Path | None = None
    resume: bool = False
    # Further files of the folder by name, written before the first step.
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # The code of the user's own cell goes along: another process takes none that it was not handed.
        return {**vars(self), "code": named_code(self.settings.cell)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_code(state.pop("code"))
        vars(self).update(state)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Args:
        folder: of the run; None where it was trained in memory.
        metric: the name of the metric in the history.
        state: history, best epoch and its loss.
        stopped_by: the number of the signal that ended it, of Ctrl-C or SIGTERM; it is saved and can go on. None if
            it ran to its end.
        was_complete: whether it was resumed with no epoch left to run.
        best: of a run without a folder, the files of its best model, for
            ``raglane.training.checkpoint.read_model``; {} before its first epoch is done.
    """

    folder: Path | None
    metric: str
    state: TrainingState
    stopped_by: int | None = None
    was_complete: bool = False
    best: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def interrupted(self) -> bool:
        """True if a signal ended it."""
        return self.stopped_by is not None


def load_description(folder: str | os.PathLike[str]) -> RunDescription:
    """Read what a run was started with.

    Args:
        folder: of the run.

    Raises:
        CheckpointError: ``run.json`` is missing, damaged or of a newer format.
    """
    path = find(as_path(folder), DESCRIPTION)
    config = read_json(path)
    check_format(path, config, FORMAT, FORMAT_VERSION)
    with reading(path):
        chosen = config["settings"]
        if config["format_version"] == 1 and isinstance(chosen, dict):
            # What the first version did, where its settings do not say.
            chosen = {"unk_dropout": 0.0, **chosen}
        settings, data, marks = Settings.from_config(chosen), config["data"], config["fingerprint"]
        diverged, identity = config.get("diverged"), config.get("identity", "")
        texts = isinstance(marks, str) and isinstance(diverged, str | None) and isinstance(identity, str)
        if not isinstance(data, dict) or not texts:
            raise ValueError("data that is not an object, or a fingerprint, identity or diverged that is not a text")
    return RunDescription(settings, data, marks, diverged, identity)


def refuse_diverged(description: RunDescription, folder: Path) -> None:
    """Refuse to go on with a run that ran away."""
    if description.diverged is not None:
        got = f"{str(folder)!r}, which diverged: {description.diverged}"
        tamer = f"a smaller {argument('lr')} or with {argument('grad_clip', 1)}"
        fix = f"train again with {tamer}, and {argument('overwrite', True)}; the best model until then can be used"
        raise DivergedError(message("resume", got, "a run that did not diverge", fix), description.diverged)


_Hashes = npt.NDArray[np.uint64]


def fingerprint(*parts: Dataset | None) -> str:
    """A short text that differs for different sequences, labels or order."""
    digest = hashlib.sha256()
    for part in parts:
        for content in () if part is None else part.contents():
            digest.update(content)
    return digest.hexdigest()[:16]


def identity(*parts: Dataset | None) -> str:
    """A short text that differs for different sequences or labels, in whatever order and parts."""
    total, count = 0, 0
    for part in parts:
        if part is None:
            continue
        if not part.is_in_memory:
            # Its parts are rows of one folder, whose counts they share.
            return f"folder-{zlib.crc32(repr(part.statistics.to_config()).encode()):08x}"
        total += int(_sequences(part.records).sum(dtype=np.uint64))
        count += len(part)
    return f"{count}-{total % 2**64:016x}"


def _sequences(records: Records) -> _Hashes:
    """A number for each sequence: its elements in their order, and what it is to be taken for."""
    elements = _words(records.values) if records.is_tokens else _rows(records.values)
    for feature in records.features:
        if not feature.per_sequence:
            elements = _mixed(elements) + _column(feature)
    if records.tags is not None:
        elements = _mixed(elements + _mixed(_words(records.tags)))
    targets = records.targets
    if targets is not None and targets.per_element:
        elements = _mixed(elements + _mixed(_words(targets.values.tolist())))
    lengths = records.lengths
    steps = np.arange(len(elements)) - np.repeat(records.offsets[:-1], lengths)
    elements = _mixed(elements + _mixed(steps.astype(np.uint64)))
    # Differences of running sums are right although the sums overflow.
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    found = running[records.offsets[1:]] - running[records.offsets[:-1]] + lengths.astype(np.uint64)
    for words in (records.labels, None if targets is None or targets.per_element else targets.values.tolist()):
        if words is not None:
            found = _mixed(found + _mixed(_words(words)))
    for feature in records.features:
        if feature.per_sequence:
            found = _mixed(found) + _column(feature)
    return _mixed(found)


def _column(feature: Feature) -> _Hashes:
    """A number for each entry of a column beside the main one, another in each column."""
    entries = _rows(feature.values[:, None]) if feature.is_numbers else _words(feature.values.tolist())
    return _mixed(entries + np.uint64(zlib.crc32(feature.name.encode(errors="surrogatepass"))))


def _rows(values: npt.NDArray[Any]) -> _Hashes:
    """A number for each row of float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    places = _mixed(np.arange(1, values.shape[1] + 1, dtype=np.uint64))
    found: _Hashes = _mixed(bits + places).sum(axis=1, dtype=np.uint64)
    return found


def _words(words: Iterable[Any]) -> _Hashes:
    """A number for each text, number or list of them; equal ones are looked at once."""
    texts = [word if isinstance(word, str) else repr(word) for word in words]
    known = {text: zlib.crc32(text.encode(errors="surrogatepass")) for text in set(texts)}
    return np.array([known[text] for text in texts], dtype=np.uint64)


def _mixed(numbers: _Hashes) -> _Hashes:
    """The last steps of splitmix64 (Steele, Lea and Flood, 2014), which spread every bit over all."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
