"""Converts data to a folder of Arrow files that opens at once: ``rl.data.convert``.

The files are written to a work folder next to the output, which replaces the output at the end.
After each shard, its statistics and the position in the input are written, so a killed conversion
resumes after its last shard. A shard is a function of its start, so the result has the bytes of an
uninterrupted conversion.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from raglane._utils.checks import check_choice, check_flag
from raglane._utils.files import (
    as_path,
    check_writable,
    put_folder,
    remove,
    settle,
    whole_file,
    write_file,
)
from raglane._utils.lock import LOCK, locked
from raglane._utils.messages import argument, quote, require
from raglane.data.assemble.pieces import (
    ON_BAD_ROW,
    SKIPPED,
    Alike,
    sift,
    skipped_lines,
    without_bad_elements,
)
from raglane.data.columns import LISTS, READING, Columns
from raglane.data.formats import pick
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import Records, Skipped
from raglane.data.sources.ipc import (
    DESCRIPTION,
    FORMAT_VERSION,
    LENGTHS,
    STATISTICS,
    checksums,
    is_converted,
    seal,
)
from raglane.data.sources.locations import fingerprint, local, size_of
from raglane.data.store import shards
from raglane.data.store.folders import expand
from raglane.data.store.fragments import StoreLayout, check_labels
from raglane.data.store.shards import bounded, bytes_of, offsets_in, span_in, write_shard
from raglane.errors import ArgumentError, DataError

FORMAT = "raglane-dataset"


class Progress:
    """Callbacks for the progress of a conversion; these do nothing."""

    def stage(self, name: str) -> None:
        """Called when a stage of the work begins."""

    def done(self, share: float) -> None:
        """Called with the finished share of the stage, from 0 to 1."""


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion, see :func:`convert`."""

    folder: Path
    statistics: Statistics
    skipped: int = 0
    resumed: int = 0
    was_there: bool = False


def convert(
    inputs: Any,
    output: str | os.PathLike[str],
    columns: Columns | None = None,
    *,
    format: str | None = None,
    on_bad_row: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    r"""Convert data to a folder that :class:`~raglane.data.Dataset` opens at once, whatever its
    size.

    The data is read in pieces, so that the memory does not depend on its size. A conversion that
    was stopped resumes when it is called again, and ends with the same bytes. The folder contains
    Arrow files, which pandas, Polars and others also read; ``lengths.npy``; ``statistics.json``,
    from which vocabularies and scales are computed; ``dataset.json``, a description; and, with
    ``on_bad_row="skip"``, ``skipped.jsonl``.

    Args:
        inputs: a path, a pattern, a folder, a URL, or a list of these, of any format of
            :func:`~raglane.data.read`.
        output: the folder to write.
        columns: the roles of the columns; others are guessed from the first rows.
        format: a key of ``FORMATS``; None uses the suffix.
        on_bad_row: ``"raise"``, or ``"skip"`` to leave out and list rows that break a rule.
        overwrite: whether to replace an existing folder with other content.
        progress: an object whose methods are called with the progress of the conversion.

    Returns:
        An object with ``folder``; ``statistics`` of all sequences; ``skipped``, the number of rows
        that were left out; ``resumed``, the number of sequences that an earlier, stopped conversion
        had written; and ``was_there``, True if the folder already was the result of the same
        conversion.

    Raises:
        ArgumentError: ``output`` has other content, another process is writing it, or an input is
            named twice.
        DataError: the data is invalid. Finished shards are kept for the next call.
        OSError: a file cannot be written, e.g. on a full disk. Finished shards are kept for the
            next call.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "names.jsonl").write_text('{"x": ["a", "b"], "y": 1}\n{"x": [], "y": 0}\n')
        ...     done = convert(Path(folder, "names.jsonl"), Path(folder, "names"), Columns(label="y"))
        ...     sorted(path.name for path in done.folder.iterdir()), done.statistics.sequences
        (['dataset.json', 'lengths.npy', 'part-00000.arrow', 'statistics.json'], 2)
    """
    require("pyarrow", "data")
    folder = as_path(output)
    columns = columns or Columns()
    progress = progress or Progress()
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    check_flag("overwrite", overwrite)
    locations = expand(inputs)
    _check_paths(folder, locations)
    progress.stage("looking at the data")
    job = ConversionRequest(
        tuple(locations), tuple(map(fingerprint, locations)), columns, format, on_bad_row
    )
    work = folder.absolute().with_name(f".{folder.name}.converting")
    work.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(work, "output"):
            try:
                return _run(job, folder, work, overwrite, progress)
            except BaseException:
                # Without a finished shard there is nothing to resume.
                if not any(work.glob("progress/*.json")):
                    clear(work)
                raise
    finally:
        # Fails, as intended, if the folder contains finished shards.
        with suppress(OSError):
            work.rmdir()


def _run(
    job: ConversionRequest, folder: Path, work: Path, overwrite: bool, progress: Progress
) -> Conversion:
    """Convert, or resume, in a locked folder."""
    settle(folder)
    if (there := _there(folder, job, overwrite)) is not None:
        clear(work)
        return there
    state = Reached.stored(work, job, overwrite)
    for name in ("data", "progress"):
        (work / name).mkdir(exist_ok=True)
    resumed = state.statistics.sequences
    _Writer(work, job, state, progress).run()
    progress.stage("writing what was counted")
    _finish(work / "data", job, state)
    put_folder(work / "data", folder)
    clear(work)
    return Conversion(folder, state.statistics, len(state.skipped), resumed)


def _check_paths(folder: Path, locations: Sequence[str]) -> None:
    """Raise if the output is a file, or is the data or in it, or if an input is named twice."""
    check_writable("output", folder.parent)
    fix = f"pass another {argument('output')}"
    if not folder.name or (os.path.lexists(folder) and not folder.is_dir()):
        raise ArgumentError(
            "output", quote(str(folder)), "the name of a folder, not of a file", fix
        )
    output = folder.resolve()
    sources = set[Path | str]()
    for location in locations:
        source = Path(location).resolve() if Path(location).exists() else location
        if source in sources:
            raise ArgumentError(
                "inputs", f"{quote(str(source))} twice", "different places", "leave one out"
            )
        sources.add(source)
        if source in (output, *output.parents):
            got = f"{quote(str(folder))}, which is, or is in, the data {quote(str(source))}"
            raise ArgumentError("output", got, "a folder outside the data", fix)


class _Writer:
    """Reads the inputs and writes shards."""

    def __init__(
        self, work: Path, job: ConversionRequest, state: Reached, progress: Progress
    ) -> None:
        self._work = work
        self._job = job
        self._state = state
        self._progress = progress
        self._pending: list[Records] = []
        self._pending_bytes = 0
        self._skipped: list[dict[str, str]] = []
        # Whether the last shard ends within a piece, so that a conversion cannot resume after it.
        self._is_loose = False

    def run(self) -> None:
        """Convert the remaining inputs."""
        job = self._job
        state = self._state
        for number in range(state.source, len(job.locations)):
            location = job.locations[number]
            self._progress.stage(f"converting {Path(location).name}")
            with local(location, self._work) as path:
                self._convert(number, path, state.start if number == state.source else ())
        if self._pending:
            self._write((len(job.locations),))
        # Rows that were skipped after the last shard.
        state.skipped += self._skipped
        if not state.shards:
            got = "no sequence"
            if state.skipped:
                got += f", but {len(state.skipped):,} rows that were skipped; the first: {state.skipped[0]['error']}"
            raise DataError(job.locations[0], got, "at least one sequence", "check the data")

    def _convert(self, number: int, path: Path, start: tuple[int, ...]) -> None:
        """Convert one input from a position."""
        job = self._job
        location = self._job.locations[number]
        columns = self._state.columns or job.columns
        done = 0
        size = max(size_of(location), 1)
        for piece in pick(path, job.format).pieces(path, columns, start):
            bad: list[Skipped] | None = [] if job.on_bad_row == "skip" else None
            read = 0
            kinds = set[str]()
            piece = without_bad_elements(piece, bad, location)
            for records in sift(piece, bad, self._state.checked, location):
                read += 1
                kinds.update(StoreLayout.of(records).label_kinds)
                done += self._add(records)
            may_lack = self._state.layout is not None and self._state.layout.may_lack_labels
            if bad and not start and (not read or (may_lack and not kinds)):
                # All rows fail, or all that have labels, so the columns are wrong.
                raise DataError(bad[0].error)
            self._note_labels(kinds, "" if start else location)
            start = piece.end
            self._skipped += map(asdict, bad or ())
            if self._pending_bytes >= shards.SHARD or (self._is_loose and self._pending):
                self._write((number, *piece.end))
            self._progress.done(min(done / size, 1.0))

    def _add(self, records: Records) -> int:
        """Add records to those of the next shards; return their bytes."""
        size = 0
        for shard_records in bounded(records, shards.SHARD):
            if self._pending_bytes >= 2 * shards.SHARD:
                self._write(None)
            count = bytes_of(shard_records)
            self._pending.append(shard_records)
            self._pending_bytes += count
            size += count
        return size

    def _note_labels(self, kinds: set[str], begun: str) -> None:
        """Add the kinds of the labels of a piece; if it begins a file, raise unless one of them
        occurred before.
        """
        if (layout := self._state.layout) is not None:
            if begun:
                check_labels(
                    tuple(sorted(kinds)), begun, layout.label_kinds, self._job.locations[0]
                )
            self._state.layout = replace(
                layout, label_kinds=tuple(sorted({*layout.label_kinds, *kinds}))
            )

    def _write(self, position: tuple[int, ...] | None) -> None:
        """Write a shard, its description, and the next position; None if only a later shard ends at
        a piece.
        """
        state = self._state
        layout = state.layout or StoreLayout.of(self._pending[0])
        name = f"part-{len(state.shards):05d}.arrow"
        statistics = sum(map(Statistics.of, self._pending), Statistics())
        path = self._work / "data" / name
        write_shard(path, self._pending, layout, state.names)
        shard: dict[str, Any] = {
            "file": name,
            "sequences": statistics.sequences,
            "elements": statistics.elements,
        }
        shard |= {
            "values": span_in(path, state.names["sequence"], layout),
            "checksums": checksums(path),
        }
        entry = {
            "shard": shard,
            "position": position,
            "statistics": statistics.to_config(),
            "skipped": self._skipped,
            "layout": layout.to_config(),
            "columns": asdict(state.columns or self._job.columns),
        }
        write_file(progress_file(self._work, len(state.shards)), json.dumps(entry).encode())
        state.add(entry)
        self._pending = []
        self._pending_bytes = 0
        self._skipped = []
        self._is_loose = position is None


def _finish(folder: Path, job: ConversionRequest, state: Reached) -> None:
    """Write statistics, lengths and the description."""
    _write_lengths(folder, state)
    _write_json(folder / STATISTICS, state.statistics.to_config())
    if job.on_bad_row == "skip":
        write_file(folder / SKIPPED, skipped_lines(state.skipped))
    read = state.columns or job.columns
    names = (*LISTS, "split", "label_split", "tokens", *READING)
    description = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sequences": state.statistics.sequences,
        "elements": state.statistics.elements,
        "longest": state.statistics.longest,
        "task": job.columns.task,
        # A guessed time column is guessed again, because other data may not have it.
        "columns": {
            **state.names,
            **{name: getattr(read, name) for name in names},
            "time": job.columns.time,
        },
        **({} if state.layout is None else state.layout.to_config()),
        "skipped": len(state.skipped),
        "shards": state.shards,
        "checksums": {name: checksums(folder / name) for name in (LENGTHS, STATISTICS)},
        "sources": job.sources(),
        "key": job.key(),
    }
    _write_json(folder / DESCRIPTION, seal(description))


def _write_lengths(folder: Path, state: Reached) -> None:
    kind = np.dtype(np.int32 if state.statistics.longest < 2**31 else np.int64)
    with whole_file(folder / LENGTHS) as file:
        header = {"descr": kind.str, "fortran_order": False, "shape": (state.statistics.sequences,)}
        np.lib.format.write_array_header_1_0(file, header)
        for shard in state.shards:
            file.write(
                np.diff(offsets_in(folder / shard["file"], state.names["sequence"]))
                .astype(kind)
                .data
            )


def _write_json(path: Path, content: Any) -> None:
    write_file(
        path,
        (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogatepass"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or {} if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _there(folder: Path, job: ConversionRequest, overwrite: bool) -> Conversion | None:
    """Return the result of the same conversion if it is at the output."""
    if not os.path.lexists(folder) or (not is_converted(folder) and not any(folder.iterdir())):
        return None
    description = _read_json(folder / DESCRIPTION)
    key = description.get("key")
    if key == job.key():
        statistics = Statistics.from_config(json.loads((folder / STATISTICS).read_bytes()))
        return Conversion(
            folder, statistics, description["skipped"], statistics.sequences, was_there=True
        )
    if overwrite and key is not None:
        return None
    got = f"{quote(str(folder))}, which contains " + (
        "something else" if key is None else "other converted data"
    )
    fix = f"pass another {argument('output')}"
    if key is not None:
        fix += f", or {argument('overwrite', True)} to replace it"
    raise ArgumentError("output", got, "a new folder", fix)


class ConversionRequest(NamedTuple):
    """The inputs and options that identify a conversion."""

    locations: tuple[str, ...]
    fingerprints: tuple[str, ...]
    columns: Columns
    format: str | None
    on_bad_row: str

    def sources(self) -> list[dict[str, str]]:
        """Return the locations and fingerprints of the data."""
        pairs = zip(self.locations, self.fingerprints, strict=True)
        return [{"location": location, "fingerprint": mark} for location, mark in pairs]

    def key(self) -> str:
        """Return a hash of the data and the options."""
        facts = [
            self.sources(),
            asdict(self.columns),
            self.format,
            self.on_bad_row,
            shards.SHARD,
            FORMAT_VERSION,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@dataclass
class Reached(Alike):
    """The progress of a conversion, and the common properties of its rows."""

    shards: list[dict[str, Any]] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    skipped: list[dict[str, str]] = field(default_factory=list)
    source: int = 0
    start: tuple[int, ...] = ()

    @classmethod
    def stored(cls, work: Path, job: ConversionRequest, overwrite: bool) -> Reached:
        """Return the state of an earlier conversion, or a new one."""
        path = work / "job.json"
        key = _read_json(path).get("key")
        if key not in (None, job.key()) and not overwrite:
            got = (
                f"{quote(str(work))}, an unfinished conversion of other data or with other options"
            )
            fix = f"finish it first, or drop it with {argument('overwrite', True)}"
            raise ArgumentError("output", got, "without another unfinished conversion", fix)
        if key != job.key():
            clear(work)
            write_file(path, json.dumps({"key": job.key()}).encode())
            return cls(first=job.locations[0])
        state = cls(first=job.locations[0])
        sound = cls(first=job.locations[0])
        while entry := _read_json(progress_file(work, len(state.shards))):
            if not (work / "data" / entry["shard"]["file"]).is_file():
                break
            state.add(entry)
            if entry["position"] is not None:
                sound = replace(state, shards=list(state.shards), skipped=list(state.skipped))
        return sound

    @property
    def names(self) -> dict[str, str]:
        """The names of the columns of the shards by their roles."""
        return (
            {} if self.layout is None or self.columns is None else self.layout.names(self.columns)
        )

    def add(self, entry: dict[str, Any]) -> None:
        """Add the description of a shard."""
        self.shards.append(entry["shard"])
        self.statistics = self.statistics + Statistics.from_config(entry["statistics"])
        self.skipped += entry["skipped"]
        self.layout = StoreLayout.from_config(entry["layout"])
        # Tuples are lists in JSON.
        named: dict[str, Any] = entry["columns"]
        lists = {role: tuple(name) for role, name in named.items() if isinstance(name, list)}
        self.columns = Columns(**{**named, **lists})
        if entry["position"] is not None:
            self.source, *start = entry["position"]
            self.start = tuple(start)


def progress_file(work: Path, number: int) -> Path:
    """Return the path of the description of a shard during the conversion."""
    return work / "progress" / f"{number:05d}.json"


def clear(work: Path) -> None:
    """Empty the work folder of a conversion, except for its lock."""
    for path in work.iterdir():
        if path.name != LOCK:
            remove(path)
