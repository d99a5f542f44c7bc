"""Rows of a plan: the batches of an epoch and their predicted cost; comparisons and limits that are
measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane import nn
from raglane._utils.memory import available_memory
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.prepare.lengths import longest_and_elements
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.calibration import Calibration
from raglane.planner.model import Floats, Integers, LayerWay, Profile, at, cast, ways_of
from raglane.planner.probe import MODES, device_of, make_batch, peak_bytes, step_of, time_in_turns
from raglane.ragged import Ragged

# Random steps of several processes, from which the mean time of the slowest process is estimated.
_DRAWN = 512
# The share of measured epochs inside the interval of a row.
_INSIDE = 0.9
# The least time of a call in seconds: on a busy machine a line through measured times can reach 0.
LEAST = 1e-7
# The most sequences that are evaluated; longer lists are sampled.
_SEQUENCES = 1 << 16
# The most batches that are evaluated.
_BATCHES = 64
# A run is skipped if it would take more seconds.
_LONGEST = 30.0
# A run is skipped if it would take a larger share of the free memory.
_SHARE = 0.5
# The repeats of the comparison of cells, of which each takes turns.
_REPEATS = 5
# Cells that are compared with the layer.
_CELLS: tuple[Any, ...] = (
    nn.LSTM,
    nn.GRU,
    nn.RNN,
    nn.IndRNN,
    nn.SRU,
    nn.QRNN,
    nn.MinGRU,
    nn.MinLSTM,
)
# The most elements of the batch on which they are timed.
_ELEMENTS = 4096


@dataclass(frozen=True)
class Row:
    """The predicted cost of one backend and schedule on one kind of batch.

    Attributes:
        backend: a key of ``BACKENDS``.
        schedule: a key of ``SCHEDULES``.
        batch_size: the number of sequences per batch; None if ``batch_elements`` limits batches.
        batch_elements: the largest number of elements per batch; None if ``batch_size`` limits
            batches.
        bucketed: True if the sequences of a batch have similar lengths.
        dtype: the dtype of values and weights, such as ``"float32"``.
        threads: the number of threads.
        batches: the number of batches per epoch.
        elements: the number of computed elements per epoch, including padding that the schedule
            computes.
        waste: the number of computed elements that are padding.
        train_seconds: seconds of the layer's forward and backward pass over an epoch, on one
            process.
        infer_seconds: seconds of its forward pass without gradients.
        train_range: the interval, from low to high, that contains 90 % of measured
            ``train_seconds``.
        infer_range: that of ``infer_seconds``.
        step_p50: the median of the seconds of a training step.
        step_p90: their 90th percentile.
        step_max: the longest of them.
        peak_bytes: the peak memory of a training step on the largest batch: input, output, tensors
            saved for the backward pass, gradients and weights.
        rank_spread: the mean time of the slowest process in a step, relative to the mean of all; 1
            for one process.
        is_rough: True if the time is extrapolated, because most of it is in calls several times as
            long as any that was measured; it may be off by a factor. Slow ways are measured only on
            short calls.
    """

    backend: str
    schedule: str
    batch_size: int | None
    batch_elements: int | None
    bucketed: bool
    dtype: str
    threads: int
    batches: int
    elements: int
    waste: int
    train_seconds: float
    infer_seconds: float
    train_range: tuple[float, float]
    infer_range: tuple[float, float]
    step_p50: float
    step_p90: float
    step_max: float
    peak_bytes: int
    rank_spread: float
    is_rough: bool

    @property
    def way(self) -> LayerWay:
        """The backend, schedule, dtype and number of threads."""
        return LayerWay(self.backend, self.schedule, self.dtype, self.threads)

    @property
    def size(self) -> int:
        """The limit of a batch, in sequences or else in elements."""
        return self.batch_size or self.batch_elements or 0

    @property
    def limit(self) -> BatchLimit:
        """The limit of a batch."""
        return BatchLimit(sequences=self.batch_size, elements=self.batch_elements, too_long="alone")

    @property
    def rank_seconds(self) -> float:
        """Seconds of an epoch of training if all processes wait for the slowest in each step."""
        return self.train_seconds * self.rank_spread

    def __str__(self) -> str:
        order = "bucketed by length" if self.bucketed else "random"
        return f"{self.way}, {order} batches of {self.limit}"


@dataclass(frozen=True, eq=False)
class EpochSample:
    """Some batches of an epoch, the number of batches that each represents, and totals of the
    epoch.
    """

    batches: tuple[Tensor, ...]
    weights: NDArray[np.float64]
    elements: int
    padded: int
    count: int


def thin_out(lengths: Tensor) -> tuple[Tensor, float]:
    """Return a random part of a long list of lengths, its longest included, and the sequences per
    drawn length.
    """
    count = lengths.shape[0]
    if count <= _SEQUENCES:
        return lengths, 1.0
    drawn = torch.from_numpy(
        np.random.default_rng(0).choice(count, _SEQUENCES, replace=False, shuffle=False)
    )
    # The longest must be included, because it determines the memory of the largest batch.
    drawn[lengths[drawn].argmax()] = lengths.argmax()
    return lengths[drawn], count / _SEQUENCES


def epoch_of(lengths: Tensor, limit: BatchLimit, *, bucketed: bool, seed: int = 0) -> EpochSample:
    """Return the batches of an epoch."""
    counts = lengths.numpy()
    order = EpochOrder.bucketed() if bucketed else EpochOrder.random()
    rows, bounds = BatchSampler(counts, limit, order, seed=seed).whole()
    ordered = counts[rows]
    starts = bounds[:-1]
    ends = bounds[1:]
    longest, real = longest_and_elements(counts, rows, bounds)
    chosen, weights = _choose(longest, real, seed)
    return EpochSample(
        tuple(torch.from_numpy(ordered[starts[index] : ends[index]]) for index in chosen),
        weights,
        int(real.sum()),
        int((longest * (ends - starts)).sum()),
        len(starts),
    )


def _choose(longest: Integers, real: Integers, seed: int) -> tuple[Integers, NDArray[np.float64]]:
    """Return the indices of a sample of batches, and the weight of each; weights preserve the total
    of elements.
    """
    count = len(real)
    if count <= _BATCHES:
        return np.arange(count), np.ones(count)
    # The slowest batch and the one that needs the most memory are always included.
    extreme = np.unique([longest.argmax(), real.argmax()])
    others = np.setdiff1d(np.arange(count), extreme, assume_unique=True)
    drawn = np.random.default_rng(seed).choice(
        others, _BATCHES - len(extreme), replace=False, shuffle=False
    )
    drawn_elements = int(real[drawn].sum())
    each = int(real[others].sum()) / drawn_elements if drawn_elements else len(others) / len(drawn)
    return np.concatenate((extreme, drawn)), np.repeat([1.0, each], [len(extreme), len(drawn)])


def row_of(
    way: LayerWay,
    limit: BatchLimit,
    bucketed: bool,
    epoch: EpochSample,
    calibration: Calibration,
    *,
    factor: float,
    ranks: int,
    weights: int,
) -> Row:
    """Predict the cost of an epoch."""
    profiles = [Profile.of(way, lengths) for lengths in epoch.batches]
    seen = np.array([calibration.features(way, profile) for profile in profiles])
    train, infer = (np.maximum(seen @ calibration.seconds[way, mode], LEAST) for mode in MODES)
    total = epoch.weights @ seen * factor
    train_range, infer_range = (_range(calibration.spread[way, mode] @ total) for mode in MODES)
    computed = epoch.padded if way.schedule in ("padded", "masked") else epoch.elements
    return Row(
        way.backend,
        way.schedule,
        limit.sequences,
        limit.elements,
        bucketed,
        way.dtype,
        way.threads,
        batches=round(epoch.count * factor),
        elements=round(computed * factor),
        waste=round((computed - epoch.elements) * factor),
        train_seconds=float(train @ epoch.weights) * factor,
        infer_seconds=float(infer @ epoch.weights) * factor,
        train_range=train_range,
        infer_range=infer_range,
        step_p50=_quantile(train, epoch.weights, 0.5),
        step_p90=_quantile(train, epoch.weights, 0.9),
        step_max=float(train.max()),
        peak_bytes=weights + max(calibration.bytes_of(way, profile) for profile in profiles),
        rank_spread=_spread(train, epoch.weights, ranks),
        is_rough=not all(
            calibration.reaches(way, mode, seconds, epoch.weights)
            for mode, seconds in zip(MODES, (train, infer), strict=True)
        ),
    )


def _quantile(seconds: Floats, weights: Floats, share: float) -> float:
    """Return the weighted quantile of some times."""
    order = np.argsort(seconds)
    ends = np.cumsum(weights[order])
    return float(seconds[order[np.searchsorted(ends, share * ends[-1] * (1 - 1e-12))]])


def _range(predicted: Floats) -> tuple[float, float]:
    """Return the jackknife+ interval of an epoch from its predictions by ``Calibration.spread``."""
    ordered = np.sort(predicted)
    outside = max(1, int((1 - _INSIDE) / 2 * (len(ordered) + 1)))
    return float(ordered[outside - 1]), float(ordered[-outside])


def _spread(seconds: Floats, weights: Floats, ranks: int) -> float:
    """Return the mean time of the slowest of ``ranks`` batches, relative to the mean time of
    one.
    """
    if ranks == 1 or not seconds.mean() > 0:
        return 1.0
    drawn = np.random.default_rng(0).choice(seconds, (_DRAWN, ranks), p=weights / weights.sum())
    return float(drawn.max(1).mean() / drawn.mean())


class Ratio(NamedTuple):
    """A time relative to another: the median of repeated measurements, the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def compare_cells(layer: RecurrentLayer, lengths: Tensor, best: Row) -> dict[str, Ratio]:
    """Measure the training step of other cells in turns; return times relative to that of the
    layer.
    """
    device = device_of(layer)
    batch = make_batch(layer, _sample(lengths, best))
    calls = {"": _step(layer, batch, best.way)}
    for kind in _CELLS:
        if type(layer) is kind:
            continue
        sizes = {"num_layers": layer.num_layers, "bidirectional": layer.bidirectional}
        other = kind(layer.input_size, layer.hidden_size, **sizes).to(device, batch.values.dtype)
        ways = ways_of(other, [batch.values.dtype], [best.threads])
        calls[kind.__name__] = _step(other.train(layer.training), batch, ways[0])
    repeats = [time_in_turns(list(calls.values()), device) for _ in range(_REPEATS)]
    # Relative to the layer in the same repeat, since the speed of shared machines varies.
    relative = [[taken / times[0] for taken in times[1:]] for times in repeats]
    names = list(calls)[1:]
    ratios = {
        name: Ratio(statistics.median(column), min(column), max(column))
        for name, column in zip(names, zip(*relative, strict=True), strict=True)
    }
    return dict(sorted(ratios.items(), key=lambda item: item[1]))


def _step(layer: RecurrentLayer, batch: Ragged, way: LayerWay) -> Callable[[], object]:
    call = step_of(layer, batch, "train")

    def run() -> None:
        with at(way):
            call()

    return run


def _sample(lengths: Tensor, best: Row) -> Tensor:
    """Return the lengths of the batch whose number of elements is the median, shortened to
    ``_ELEMENTS``.
    """
    sample, _ = thin_out(lengths)
    batches = epoch_of(sample, best.limit, bucketed=best.bucketed).batches
    typical = sorted(batches, key=lambda batch: int(batch.sum()))[len(batches) // 2]
    count = int((typical.cumsum(0) <= _ELEMENTS).sum())
    return typical[: max(count, 1)].clamp(max=_ELEMENTS)


def largest_batch(
    layer: RecurrentLayer,
    lengths: Tensor,
    best: Row,
    calibration: Calibration,
    memory: float,
    weights: int,
    *,
    runs: bool,
) -> tuple[int, int | None]:
    """Return the most elements of a training step that fits into ``memory``, and its measured
    bytes, or None.
    """
    sample, _ = thin_out(lengths)
    order = np.random.default_rng(0).permutation(len(sample))
    drawn = sample[torch.from_numpy(order)]
    call_bytes, element_bytes, sequence_bytes = calibration.memory[best.way]
    # Includes padding in the proportion of the recommended batches.
    element_bytes *= best.elements / (best.elements - best.waste)
    element_bytes += sequence_bytes / float(drawn.double().mean())
    elements = max(0, int(min((memory - weights - call_bytes) / max(element_bytes, 1e-9), 2**62)))
    seconds = best.train_seconds / (best.elements - best.waste) * elements
    if not runs or elements == 0 or seconds > _LONGEST or memory > _SHARE * available_memory():
        return elements, None
    twin = cast(layer, best.dtype)
    call = step_of(twin, make_batch(twin, _batch(drawn, elements)), "train")
    with at(best.way):
        return elements, weights + peak_bytes(call, device_of(layer))


def _batch(drawn: Tensor, elements: int) -> Tensor:
    """Return the lengths of a batch of ``elements``: the drawn ones, repeated, and a shortened one
    at the end.
    """
    total = int(drawn.sum())
    whole = drawn.repeat(elements // total + 1)
    ends = whole.cumsum(0)
    count = int((ends <= elements).sum())
    rest = elements - (int(ends[count - 1]) if count else 0)
    return torch.cat((whole[:count], torch.tensor([rest]))) if rest else whole[:count]
