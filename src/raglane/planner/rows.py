"""What is predicted for one way and one kind of batch: a row of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from raglane.data.order import Limit
from raglane.planner.batches import Epoch
from raglane.planner.calibration import Calibration
from raglane.planner.model import Floats, Profile
from raglane.planner.probe import MODES
from raglane.planner.ways import Way

__all__ = ["LEAST", "Row", "row_of"]

# Steps of several processes that are drawn to see how long the slowest of them takes.
_DRAWN = 512
# Seconds that any call takes: on a busy machine a line through measured times can reach 0.
LEAST = 1e-7


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
    def limit(self) -> Limit:
        """How large a batch is."""
        return Limit(sequences=self.batch_size, elements=self.batch_elements, too_long="alone")

    @property
    def rank_seconds(self) -> float:
        """What an epoch of training takes in proportion, where several processes wait for the slowest of each step."""
        return self.train_seconds * self.rank_spread

    def __str__(self) -> str:
        order = "grouped by length" if self.grouped else "random"
        return f"{self.way}, {order} batches of {self.limit}"


def row_of(
    way: Way,
    limit: Limit,
    grouped: bool,
    epoch: Epoch,
    calibration: Calibration,
    *,
    factor: float,
    ranks: int,
    weights: int,
    profiles: Callable[[Way, Tensor], Profile] = Profile.of,
) -> Row:
    """Predict what an epoch costs."""
    found = [profiles(way, lengths) for lengths in epoch.batches]
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
