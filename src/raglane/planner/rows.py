"""A row of a plan: the batches of an epoch, their predicted cost in one way, and runs beside the prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane import nn
from raglane._utils.memory import available_memory
from raglane.data.lengths import longest_and_elements
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.calibration import Calibration
from raglane.planner.model import Floats, Integers, Profile, Way, at, cast, ways_of
from raglane.planner.probe import MODES, device_of, make_batch, peak_bytes, step_of, time_in_turns
from raglane.ragged import Ragged

# Steps of several processes that are drawn to see how long the slowest of them takes.
_DRAWN = 512
# Seconds that any call takes: on a busy machine a line through measured times can reach 0.
LEAST = 1e-7
# Sequences of a longer list that are looked at, and batches of an epoch.
_SEQUENCES, _BATCHES = 1 << 16, 64
# A run that would take longer, in seconds, or more of the free memory, is left out.
_LONGEST, _SHARE = 30.0, 0.5
# Other cells of the same width, and the elements that they are timed on at most.
_CELLS: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN, nn.IndRNN, nn.SRU, nn.QRNN, nn.MinGRU, nn.MinLSTM)
_ELEMENTS = 4096


@dataclass(frozen=True)
class Row:
    """What one way to run a layer on one kind of batch costs.

    Attributes:
        backend: a key of ``BACKENDS``.
        schedule: a key of ``SCHEDULES``.
        batch_size: sequences in a batch; None where ``batch_elements`` limits it.
        batch_elements: elements in a batch at most; None where ``batch_size`` limits it.
        grouped: whether batches hold sequences of similar lengths.
        dtype: of values and weights, such as ``"float32"``.
        threads: that torch uses.
        batches: in an epoch.
        elements: computed in an epoch, padding included where the schedule computes it.
        waste: how many of them do not exist.
        train_seconds: the layer's forward and backward pass over an epoch, on one process.
        infer_seconds: its forward pass without gradients.
        step_p50: seconds of a training step, the median.
        step_p90: the same, the 90th percentile.
        step_max: the same, the longest.
        peak_bytes: of memory that a training step of the largest batch holds: input, output, what is saved for the
            backward pass, gradients and weights.
        rank_spread: how long a step of several processes takes, which is that of the slowest, in proportion to the
            mean; 1 for one process.
        is_rough: whether most of the time is in calls several times as long as any that was measured in this way: it is
            extrapolated, and may be off by a factor. Ways that cannot win are measured on shorter calls than others.
    """

    backend: str
    schedule: str
    batch_size: int | None
    batch_elements: int | None
    grouped: bool
    dtype: str
    threads: int
    batches: int
    elements: int
    waste: int
    train_seconds: float
    infer_seconds: float
    step_p50: float
    step_p90: float
    step_max: float
    peak_bytes: int
    rank_spread: float
    is_rough: bool

    @property
    def way(self) -> Way:
        """The way without the batches."""
        return Way(self.backend, self.schedule, self.dtype, self.threads)

    @property
    def size(self) -> int:
        """How large a batch is, in sequences or else in elements."""
        return self.batch_size or self.batch_elements or 0

    @property
    def limit(self) -> BatchLimit:
        """How large a batch is."""
        return BatchLimit(sequences=self.batch_size, elements=self.batch_elements, too_long="alone")

    @property
    def rank_seconds(self) -> float:
        """What an epoch of training takes in proportion, where several processes wait for the slowest of each step."""
        return self.train_seconds * self.rank_spread

    def __str__(self) -> str:
        order = "grouped by length" if self.grouped else "random"
        return f"{self.way}, {order} batches of {self.limit}"


@dataclass(frozen=True, eq=False)
class Epoch:
    """What is known of an epoch's batches."""

    batches: tuple[Tensor, ...]
    weights: NDArray[np.float64]
    elements: int
    padded: int
    count: int


def thin_out(lengths: Tensor, seed: int = 0) -> tuple[Tensor, float]:
    """A random part of a long list of lengths, with its longest, and the number of sequences that each stands for."""
    count = lengths.shape[0]
    if count <= _SEQUENCES:
        return lengths, 1.0
    drawn = torch.from_numpy(np.random.default_rng(seed).choice(count, _SEQUENCES, replace=False, shuffle=False))
    # In place of the longest drawn: the memory of the largest batch must not be left to chance.
    drawn[lengths[drawn].argmax()] = lengths.argmax()
    return lengths[drawn], count / _SEQUENCES


def epoch_of(lengths: Tensor, limit: BatchLimit, *, grouped: bool, seed: int = 0) -> Epoch:
    """The batches of an epoch."""
    known = lengths.numpy()
    order = EpochOrder.grouped() if grouped else EpochOrder.random()
    rows, bounds = BatchSampler(known, limit, order, seed=seed).whole()
    ordered, starts, ends = known[rows], bounds[:-1], bounds[1:]
    longest, real = longest_and_elements(known, rows, bounds)
    chosen, weights = _choose(longest, real, seed)
    return Epoch(
        tuple(torch.from_numpy(ordered[starts[place] : ends[place]]) for place in chosen),
        weights,
        int(real.sum()),
        int((longest * (ends - starts)).sum()),
        len(starts),
    )


def _choose(longest: Integers, real: Integers, seed: int) -> tuple[Integers, NDArray[np.float64]]:
    """Which batches are looked at, and how many each stands for, so that the elements of the epoch come out right."""
    count = len(real)
    if count <= _BATCHES:
        return np.arange(count), np.ones(count)
    # What takes longest and what needs the most memory must not be left out by chance.
    extreme = np.unique([longest.argmax(), real.argmax()])
    others = np.setdiff1d(np.arange(count), extreme, assume_unique=True)
    drawn = np.random.default_rng(seed).choice(others, _BATCHES - len(extreme), replace=False, shuffle=False)
    known = int(real[drawn].sum())
    each = int(real[others].sum()) / known if known else len(others) / len(drawn)
    return np.concatenate((extreme, drawn)), np.repeat([1.0, each], [len(extreme), len(drawn)])


def row_of(
    way: Way,
    limit: BatchLimit,
    grouped: bool,
    epoch: Epoch,
    calibration: Calibration,
    *,
    factor: float,
    ranks: int,
    weights: int,
) -> Row:
    """Predict what an epoch costs."""
    found = [Profile.of(way, lengths) for lengths in epoch.batches]
    seen = np.array([calibration.features(way, profile) for profile in found])
    train, infer = (np.maximum(seen @ calibration.seconds[way, mode], LEAST) for mode in MODES)
    computed = epoch.padded if way.schedule in ("padded", "masked") else epoch.elements
    return Row(
        way.backend,
        way.schedule,
        limit.sequences,
        limit.elements,
        grouped,
        way.dtype,
        way.threads,
        batches=round(epoch.count * factor),
        elements=round(computed * factor),
        waste=round((computed - epoch.elements) * factor),
        train_seconds=float(train @ epoch.weights) * factor,
        infer_seconds=float(infer @ epoch.weights) * factor,
        step_p50=_quantile(train, epoch.weights, 0.5),
        step_p90=_quantile(train, epoch.weights, 0.9),
        step_max=float(train.max()),
        peak_bytes=weights + max(calibration.bytes_of(way, profile) for profile in found),
        rank_spread=_spread(train, epoch.weights, ranks),
        is_rough=not all(
            calibration.reaches(way, mode, seconds, epoch.weights)
            for mode, seconds in zip(MODES, (train, infer), strict=True)
        ),
    )


def _quantile(seconds: Floats, weights: Floats, share: float) -> float:
    """The least time that so large a share of the batches does not exceed."""
    order = np.argsort(seconds)
    ends = np.cumsum(weights[order])
    return float(seconds[order[np.searchsorted(ends, share * ends[-1] * (1 - 1e-12))]])


def _spread(seconds: Floats, weights: Floats, ranks: int) -> float:
    """The mean time of the slowest of so many batches, in proportion to that of one."""
    if ranks == 1 or not seconds.mean() > 0:
        return 1.0
    drawn = np.random.default_rng(0).choice(seconds, (_DRAWN, ranks), p=weights / weights.sum())
    return float(drawn.max(1).mean() / drawn.mean())


def compare_cells(layer: RecurrentLayer, lengths: Tensor, best: Row) -> dict[str, float]:
    """The time of a training step of other cells, in proportion to that of the layer, measured in turns."""
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
    times = dict(zip(calls, time_in_turns(list(calls.values()), device), strict=True))
    own = times.pop("")
    found = {name: taken / own for name, taken in times.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _step(layer: RecurrentLayer, batch: Ragged, way: Way) -> Callable[[], object]:
    call = step_of(layer, batch, "train")

    def run() -> None:
        with at(way):
            call()

    return run


def _sample(lengths: Tensor, best: Row) -> Tensor:
    """The lengths of a typical batch: of those of the row, the one whose number of elements is the median."""
    part, _ = thin_out(lengths)
    batches = epoch_of(part, best.limit, grouped=best.grouped).batches
    typical = sorted(batches, key=lambda batch: int(batch.sum()))[len(batches) // 2]
    kept = int((typical.cumsum(0) <= _ELEMENTS).sum())
    return typical[: max(kept, 1)].clamp(max=_ELEMENTS)


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
    """How many elements a training step may have."""
    part, _ = thin_out(lengths)
    order = np.random.default_rng(0).permutation(len(part))
    drawn = part[torch.from_numpy(order)]
    elements = _most(drawn, best, calibration, memory - weights)
    seconds = best.train_seconds / (best.elements - best.waste) * elements
    if not runs or elements == 0 or seconds > _LONGEST or memory > _SHARE * available_memory():
        return elements, None
    twin = cast(layer, best.dtype)
    call = step_of(twin, make_batch(twin, _batch(drawn, elements)), "train")
    with at(best.way):
        return elements, weights + peak_bytes(call, device_of(layer))


def _most(lengths: Tensor, best: Row, calibration: Calibration, memory: float) -> int:
    """The elements of the largest batch that is predicted to fit: memory follows a straight line."""
    call, computed, sequence = calibration.memory[best.way]
    mean = float(lengths.double().mean())
    # With padding, as much of it as the recommended batches have.
    element = computed * best.elements / (best.elements - best.waste) + sequence / mean
    return max(0, int(min((memory - call) / max(element, 1e-9), 2**62)))


def _batch(drawn: Tensor, elements: int) -> Tensor:
    """Lengths of a batch of so many elements: those drawn, again and again, and a part of one at the end."""
    total = int(drawn.sum())
    whole = drawn.repeat(elements // total + 1)
    ends = whole.cumsum(0)
    kept = int((ends <= elements).sum())
    rest = elements - (int(ends[kept - 1]) if kept else 0)
    return torch.cat((whole[:kept], torch.tensor([rest]))) if rest else whole[:kept]
