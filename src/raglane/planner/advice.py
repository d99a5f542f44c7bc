"""Predicts the time of an epoch for every way to run a layer, and recommends one: ``rl.plan``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_flag, check_kind, check_whole
from raglane._utils.memory import available_memory
from raglane._utils.messages import argument, quote
from raglane._utils.table import aligned
from raglane._utils.words import bytes_in_words
from raglane.data.order import BatchLimit
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError
from raglane.kernels.dispatch import BACKENDS
from raglane.native.machine import is_busy, load, processors
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import calibration as calibrations
from raglane.planner import texts
from raglane.planner.calibration import Calibration
from raglane.planner.model import LayerWay, as_layer, thread_counts, ways_of
from raglane.planner.predicted import (
    Ratio,
    Row,
    compare_cells,
    epoch_of,
    largest_batch,
    row_of,
    thin_out,
)
from raglane.plot.picture import Picture
from raglane.schedules import lengths_of

_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512)
# An epoch of fewer batches has too few optimizer steps to learn from.
_FEWEST_BATCHES = 8
# Smaller differences are ties: then the smaller batch, the random order and fewer threads win.
_TIE = 1.03


@dataclass(frozen=True, eq=False)
class Plan:
    """The predicted cost of every way to run a layer on some data, and a recommendation.

    ``print`` shows a table; :meth:`plot` draws it.

    Attributes:
        rows: one per way and kind of batch, the fastest epoch of training first.
        best: the recommended row. Among the rows within 3 % of the fastest, random batches are
            preferred to bucketed ones, then fewer threads, then smaller batches. Only rows in the
            layer's own dtype are recommended.
        best_by_elements: the recommendation among batches that are limited by their number of
            elements.
        why: the reason, as a sentence.
        others: the training time of other cells of the same width, relative to the layer, by the
            name of the cell: ``(median, least, most)`` of five measurements in turns.
        most_elements: the largest number of elements of a batch whose training step fits into the
            memory.
        most_bytes: the measured peak of such a step; None without ``max_memory``, or if the run would
            have taken more than half of the free memory, or half a minute.
        tail: the cost of the longest sequences, as a sentence; None without a long tail.
        layer: the layer's ``repr``.
        count: the number of sequences.
        ranks: the number of processes.
        busy: True if other programs use the processors, so that the times are too long.
    """

    rows: tuple[Row, ...]
    best: Row
    best_by_elements: Row
    why: str
    others: dict[str, Ratio]
    most_elements: int
    most_bytes: int | None
    tail: str | None
    layer: str
    count: int
    ranks: int
    busy: bool

    @property
    def memory_limit(self) -> BatchLimit:
        """The largest batch of all ``ranks`` that fits into their memory; a longer sequence raises
        an error.
        """
        return BatchLimit(elements=min(max(1, self.ranks * self.most_elements), 2**62))

    def plot(self, *, axes: Any = None) -> Picture:
        """Draw the time of an epoch of training against the batch size, a line per backend and
        schedule.

        Args:
            axes: matplotlib axes to draw into; None makes a figure.

        Returns:
            The picture.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentTypeError, ShapeError: ``axes`` is not one pair of axes.
        """
        return texts.draw(self.rows, self.best, f"{self.count:,} sequences, {self.layer}", axes)

    def __str__(self) -> str:
        seen = texts.shown(self.rows, self.best)
        rows = [
            ("", *texts.COLUMNS),
            *((">" if row is self.best else "", *texts.fields(row)) for row in seen),
        ]
        lines = aligned(rows, words=3)
        head = f"{self.count:,} sequences, {self.layer}; times of an epoch"
        if self.ranks > 1:
            head += f" on one of {self.ranks} processes, which wait for the slowest: {self.best.rank_spread:.2f} times"
        notes = [f"best: {self.best}", self.why]
        if self.others:
            ratios = ", ".join(f"{name} {ratio}" for name, ratio in self.others.items())
            notes.append(f"other cells of this width, time of training in proportion: {ratios}")
        fits = f"a training step fits into memory up to {self.most_elements:,} elements"
        if self.most_bytes is not None:
            fits += f" (one was run: {bytes_in_words(self.most_bytes)})"
        notes.append(fits)
        notes += [self.tail] if self.tail else []
        notes += [texts.ROUGH] if any(row.is_rough for row in seen) else []
        if self.busy:
            notes.append(
                f"other programs kept this machine busy: plan again with {argument('fresh', True)} when it is idle"
            )
        return "\n".join([head, "", *lines, "", *notes])

    def __repr__(self) -> str:
        return f"<Plan of {len(self.rows)} rows: {self.why}>"


def plan(
    lengths: Any,
    layer: torch.nn.Module,
    *,
    batch_sizes: Sequence[int] | None = None,
    processes: int = 1,
    max_memory: int | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    threads: Sequence[int] | None = None,
    fresh: bool = False,
    progress: Callable[[float], object] | None = None,
) -> Plan:
    """Measure a layer for a minute or two, and predict the cost of every way to run it on these
    lengths.

    The measurement does not depend on the lengths. It is cached in the user's folder, so another
    plan for the same layer, machine and versions takes some seconds. The times are those of the
    layer only.

    Args:
        lengths: the lengths of all sequences, ``(B,)`` integers of at least 0, or an object with
            ``lengths``, such as a Ragged.
        layer: a recurrent layer of ``rl.nn`` or ``torch.nn``, in training or evaluation mode.
        batch_sizes: numbers of sequences per batch; None for powers of two from 8 to 512 that give
            at least 8 batches per process. Each size also gives a limit by elements: that many
            times the mean length.
        processes: the number of processes that train together on this machine. All figures of a batch
            are per process.
        max_memory: bytes that a training step may use per process; None for its share of the available
            memory.
        backends: keys of ``BACKENDS``; None for all that support the layer.
        dtypes: further dtypes to run the layer in.
        threads: numbers of threads; None for powers of two, up to the number of this process.
        fresh: True to measure again instead of reading the cache.
        progress: called with the finished share of the measurement, from 0 to 1; None writes it to
            a terminal.

    Returns:
        The rows, the recommended ones and the reasons. ``print`` shows them as a table.

    Raises:
        ArgumentTypeError: ``layer`` is not such a layer, or another argument has the wrong type.
        ArgumentError: all sequences are empty, a number is too small, or no batch fits into
            ``max_memory``.
        DispatchError: a backend does not exist, or none of ``backends`` supports the layer.

    Example:
        >>> import raglane as rl
        >>> advice = rl.plan([4, 6, 8, 5, 4, 3, 7, 8] * 100, rl.nn.GRU(8, 16), batch_sizes=[32], backends=["cpu"])
        >>> advice.best.batch_size, advice.best in advice.rows
        (32, True)
    """
    counts = lengths_of(lengths)
    if not bool(counts.any()):
        got = f"{counts.shape[0]} sequences, all of length 0"
        raise ArgumentError(
            "lengths", got, "lengths with at least one above 0", "check the lengths"
        )
    twin = as_layer(layer)
    ranks = check_whole("processes", processes, 1, "pass the number of processes")
    check_flag("fresh", fresh)
    check_kind(
        "progress",
        progress,
        (Callable, type(None)),
        "a function of the finished share",
        "leave it out",
    )
    sizes = _sizes(batch_sizes, max(counts.shape[0] // ranks, 1))
    dtype = next(twin.parameters(), torch.empty(0)).dtype
    most = (
        None
        if max_memory is None
        else check_whole("max_memory", max_memory, 1, "pass a number of bytes")
    )
    ways = ways_of(twin, list(dict.fromkeys((dtype, *_dtypes(dtypes)))), _threads(threads))
    ways = _of_backends(ways, backends)
    with torch.random.fork_rng():
        calibration, busy = _calibration(twin, ways, fresh, progress or _show_progress)
    weights = sum(weight.numel() * weight.element_size() for weight in twin.parameters())
    limit = available_memory() / ranks if most is None else most
    rows = _rows(counts, sizes, ways, calibration, ranks, weights)
    offered = [row for row in rows if row.dtype == str(dtype).removeprefix("torch.")]
    best = _best([row for row in offered if row.batch_size is not None], limit)
    by_elements = _best([row for row in offered if row.batch_size is None], limit)
    with torch.random.fork_rng():
        others = compare_cells(twin, counts, best)
        elements, peak = largest_batch(
            twin, counts, best, calibration, limit, weights, runs=max_memory is not None
        )
    return Plan(
        tuple(rows),
        best,
        by_elements,
        texts.why(best, rows, ranks),
        others,
        elements,
        peak,
        texts.tail(counts, best, rows, calibration),
        " ".join(repr(twin).split()),
        counts.shape[0],
        ranks,
        busy,
    )


def _listed(name: str, value: Any, rule: str, example: str) -> list[Any]:
    items = [] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if not items:
        raise ArgumentError(name, quote(value), rule, f"pass e.g. {example}, or leave it out")
    return items


def _sizes(batch_sizes: Sequence[int] | None, count: int) -> list[int]:
    if batch_sizes is None:
        usual = [size for size in _BATCH_SIZES if size * _FEWEST_BATCHES <= count]
        return usual or [min(_BATCH_SIZES[0], count)]
    sizes = _listed("batch_sizes", batch_sizes, "a list of numbers of sequences", "[32]")
    return [check_whole("batch_sizes", size, 1, "pass numbers of sequences") for size in sizes]


def _threads(threads: Sequence[int] | None) -> list[int]:
    if threads is None:
        return thread_counts(min(processors(), max(torch.get_num_threads(), 1)))
    counts = _listed("threads", threads, "a list of numbers of threads", "[1]")
    return [
        check_whole("threads", count, 1, most=max(processors(), torch.get_num_threads()))
        for count in counts
    ]


def _dtypes(dtypes: Sequence[torch.dtype] | None) -> list[torch.dtype]:
    rule = "floating-point dtypes of torch"
    if dtypes is None or (isinstance(dtypes, Sequence) and not dtypes):
        return []
    listed = _listed("dtypes", dtypes, rule, "[torch.bfloat16]")
    for dtype in listed:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentTypeError("dtypes", quote(dtype), rule, "pass e.g. [torch.bfloat16]")
    return listed


def _of_backends(ways: list[LayerWay], backends: Sequence[str] | None) -> list[LayerWay]:
    if backends is None:
        return ways
    names = _listed("backends", backends, "a list of names", '["cpu"]')
    chosen = [way for way in ways if way.backend in names]
    if not chosen or any(name not in list(BACKENDS) for name in names):
        able = ", ".join(dict.fromkeys(way.backend for way in ways))
        rule = f"backends that can run this layer, {able}"
        raise DispatchError("backends", quote(names), rule, "pass one of these, or leave it out")
    return chosen


def _calibration(
    layer: RecurrentLayer,
    ways: Sequence[LayerWay],
    fresh: bool,
    progress: Callable[[float], object],
) -> tuple[Calibration, bool]:
    """Return the cached calibration or a new one, and True if the machine is busy."""
    busy = is_busy(load())
    key = calibrations.key_of(layer, ways)
    cached = None if fresh else calibrations.load(key, ways)
    current = None if cached is None else calibrations.scaled_to_now(cached, layer, ways)
    if current is not None:
        return current, busy
    measured = calibrations.calibrate(layer, ways, progress)
    calibrations.save(key, measured)
    return measured, busy


def _rows(
    lengths: Tensor,
    sizes: Sequence[int],
    ways: Sequence[LayerWay],
    calibration: Calibration,
    ranks: int,
    weights: int,
) -> list[Row]:
    sample, factor = thin_out(lengths)
    mean = float(lengths.float().mean())
    limits = [BatchLimit(sequences=size) for size in sizes]
    limits += [BatchLimit(elements=max(1, round(size * mean)), too_long="alone") for size in sizes]
    rows: list[Row] = []
    options: dict[str, Any] = {"factor": factor, "ranks": ranks, "weights": weights}
    for limit in limits:
        for bucketed in (False, True):
            epoch = epoch_of(sample, limit, bucketed=bucketed)
            rows += [row_of(way, limit, bucketed, epoch, calibration, **options) for way in ways]
    return sorted(rows, key=lambda row: row.rank_seconds)


def _best(offered: Sequence[Row], most: float) -> Row:
    fitting = [row for row in offered if row.peak_bytes <= most]
    if not fitting:
        least = min(row.peak_bytes for row in offered)
        rule = f"at least {least:,} bytes, which the smallest of batch_sizes needs"
        raise ArgumentError(
            "max_memory", f"{most:,.0f} bytes", rule, "pass more memory, or smaller batch_sizes"
        )
    fastest = min(row.rank_seconds for row in fitting)
    near = [row for row in fitting if row.rank_seconds <= _TIE * fastest]
    return min(near, key=lambda row: (row.bucketed, row.threads, row.size, row.rank_seconds))


def _show_progress(share: float) -> None:
    if sys.stderr.isatty():
        end = "\r" if share < 1 else "\r\033[K"
        sys.stderr.write(f"measuring this machine: {share:4.0%}{end}")
        sys.stderr.flush()
