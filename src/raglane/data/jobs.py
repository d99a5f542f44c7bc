"""What a conversion is to do, and how far it has come: kept beside what it writes, so that another call goes on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raglane._utils.files import remove, write_file
from raglane._utils.lock import LOCK
from raglane.data import shards
from raglane.data.formats.ipc import FORMAT_VERSION
from raglane.data.formats.pieces import Alike
from raglane.data.fragments import Layout
from raglane.data.records import Columns
from raglane.data.statistics import Statistics
from raglane.errors import ArgumentError, argument, message, quote


@dataclass(frozen=True)
class Job:
    """What makes two conversions the same."""

    locations: tuple[str, ...]
    fingerprints: tuple[str, ...]
    columns: Columns
    format: str | None
    on_bad_row: str

    def sources(self) -> list[dict[str, str]]:
        """Where the data came from."""
        pairs = zip(self.locations, self.fingerprints, strict=True)
        return [{"location": location, "fingerprint": mark} for location, mark in pairs]

    def key(self) -> str:
        """A short text that differs for other data, or another way to read it."""
        facts = [self.sources(), asdict(self.columns), self.format, self.on_bad_row, shards.SHARD, FORMAT_VERSION]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@dataclass
class State(Alike):
    """How far a conversion is, and what its rows have in common."""

    shards: list[dict[str, Any]] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    skipped: list[dict[str, str]] = field(default_factory=list)
    source: int = 0
    start: tuple[int, ...] = ()

    @classmethod
    def stored(cls, work: Path, job: Job, overwrite: bool) -> State:
        """What an earlier conversion has come to; at the beginning where there was none."""
        path = work / "job.json"
        try:
            key = json.loads(path.read_bytes())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            key = None
        if key not in (None, job.key()) and not overwrite:
            got = f"{quote(str(work))}, an unfinished conversion of other data, or in another way"
            fix = f"finish that first, or drop it with {argument('overwrite', True)}"
            raise ArgumentError(message("output", got, "what is half done is not replaced unasked", fix))
        if key != job.key():
            clear(work)
            write_file(path, json.dumps({"key": job.key()}).encode())
            return cls(first=job.locations[0])
        state, sound = cls(first=job.locations[0]), cls(first=job.locations[0])
        while (entry := _read_progress(work, len(state.shards))) is not None:
            state.add(entry)
            if entry["position"] is not None:
                sound = replace(state, shards=list(state.shards), skipped=list(state.skipped))
        return sound

    @property
    def names(self) -> dict[str, str]:
        """The columns of the shards by their roles."""
        return {} if self.layout is None or self.columns is None else self.layout.names(self.columns)

    def add(self, entry: dict[str, Any]) -> None:
        """Take in what is kept of a shard."""
        self.shards.append(entry["shard"])
        self.statistics = self.statistics + Statistics.from_config(entry["statistics"])
        self.skipped += entry["skipped"]
        self.layout = Layout.from_config(entry["layout"])
        # What Python calls a tuple is a list in JSON.
        named: dict[str, Any] = entry["columns"]
        lists = {role: tuple(name) for role, name in named.items() if isinstance(name, list)}
        self.columns = Columns(**{**named, **lists})
        if entry["position"] is not None:
            self.source, *start = entry["position"]
            self.start = tuple(start)


def progress_file(work: Path, number: int) -> Path:
    """What is kept of a shard while others are still to come."""
    return work / "progress" / f"{number:05d}.json"


def _read_progress(work: Path, number: int) -> dict[str, Any] | None:
    """What is kept of a shard; None where it was not written."""
    try:
        entry: dict[str, Any] = json.loads(progress_file(work, number).read_bytes())
    except (OSError, ValueError):
        return None
    return entry if (work / "data" / entry["shard"]["file"]).is_file() else None


def clear(work: Path) -> None:
    """Empty the folder in which a conversion is made, but for its lock."""
    for path in work.iterdir():
        if path.name != LOCK:
            remove(path)


class Progress:
    """What is told how far the work has come; this one keeps it to itself."""

    def stage(self, name: str) -> None:
        """The next part of the work begins."""

    def done(self, share: float) -> None:
        """So much of the part is done, from 0 to 1."""
