"""Short measurements of a layer on this machine: what the model of time is fitted to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.ragged import Ragged

__all__ = ["MODES", "PROBES", "Call", "device_of", "make_batch", "step_of", "time_call"]

MODES = ("train", "infer")
"""``train``: forward, and backward to values and weights. ``infer``: forward, without gradients."""

Call = Callable[[], object]

# A call is repeated for so long until it is warm; then for so long while it is timed, at least and at most so often.
_WARM, _SECONDS, _FEWEST, _MOST = 0.008, 0.006, 2, 15


def _lognormal(count: int, mean: float, seed: int) -> list[int]:
    """Lengths as text and events have them: many short ones, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.3, 0.77, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, 8 * mean)]


PROBES: tuple[list[int], ...] = (
    [12],
    [2] * 8,
    _lognormal(8, 12, 1),
    [16] * 4,
    [96],
    [6] * 64,
    _lognormal(24, 20, 2),
    [40] * 16,
    _lognormal(64, 16, 3),
    [200, *[6] * 63],
    [24] * 64,
    _lognormal(200, 10, 4),
    [300] * 6,
    _lognormal(96, 40, 5),
    [64] * 128,
    _lognormal(256, 40, 6),
)
"""Lengths of the batches that are measured, from small to large: equal and ragged ones, few rows and many.

Of the first five and of those at even places, which some ways are measured on alone, each has both kinds."""


def device_of(layer: RecurrentLayer) -> torch.device:
    """Where a layer's weights are; the CPU for a layer without any."""
    return next(layer.parameters(), torch.empty(0)).device


def make_batch(layer: RecurrentLayer, lengths: Sequence[int] | Tensor) -> Ragged:
    """Random values for a layer, of its dtype and on its device."""
    like = next(layer.parameters(), torch.empty(0))
    known = torch.as_tensor(lengths, dtype=torch.int64)
    values = torch.randn(int(known.sum()), layer.input_size, dtype=torch.float32)
    return Ragged.from_flat(values.to(like), lengths=known)


def step_of(layer: RecurrentLayer, batch: Ragged, mode: str) -> Call:
    """A call that does what an epoch does with a batch.

    Args:
        layer: in the mode of training that is wanted.
        batch: values of the layer's dtype.
        mode: of ``MODES``.
    """
    if mode == "infer":

        def infer() -> object:
            with torch.no_grad():
                return layer(batch)

        return infer
    weights = list(layer.parameters())
    values = batch.values.detach().requires_grad_()
    wanted = batch.with_values(values)
    slope = torch.ones(values.shape[0], layer.output_size, dtype=values.dtype, device=values.device)

    def train() -> None:
        output, _ = layer(wanted)
        torch.autograd.backward(output.values, slope)
        values.grad = None
        for weight in weights:
            weight.grad = None

    return train


def time_call(call: Call, device: torch.device) -> float:
    """Seconds per call: the median of some.

    Short calls run for a while before: caches get warm, and threads that were woken find processors of their own.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    last = spent = _clock(call, wait)
    while spent + last < _WARM:
        last = _clock(call, wait)
        spent += last
    times = [last] if last > _WARM else []
    while len(times) < _FEWEST or (sum(times) < _SECONDS and len(times) < _MOST):
        times.append(_clock(call, wait))
    return statistics.median_low(times)


def _clock(call: Call, wait: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begun


def _nothing() -> None:
    pass
