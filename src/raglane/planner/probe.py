"""Timing and memory of a layer on this machine, for the model of time and for ``raglane bench``."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import ProfilerActivity, profile

from raglane import nn
from raglane._utils.files import read_file
from raglane._utils.messages import quote
from raglane.errors import DataError
from raglane.kernels.dispatch import use_backend
from raglane.native import library
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.model import LayerWay
from raglane.ragged import Ragged

MODES = ("train", "infer")
"""``train``: forward, and backward to values and weights. ``infer``: forward, without gradients."""

Call = Callable[[], object]

# The seconds for which a group of calls is repeated.
_SECONDS = 0.06
# The least number of rounds after the first; one round if the first takes three times as long.
_FEWEST = 3
# Bytes of the copies of a batch: twice the 32 MB of cache that cores of AMD Zen 3 to 5 share.
_CACHES = 64e6
# The most and fewest sequences of the yardstick's batch, and their mean length.
_MOST_YARD = 64
_LEAST_YARD = 4
_MEAN = 16
# About the product of its elements and weights.
_YARD_WORK = 1e8
# The calls of the yardstick per measurement.
_LOOKS = 7


def lognormal(count: int, mean: float, seed: int) -> list[int]:
    """Draw lengths like those of texts and events: many short ones, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.3, 0.77, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, 8 * mean)]


PROBES: tuple[tuple[list[int], ...], ...] = (
    ([12], [2] * 8, lognormal(8, 12, 1), [16] * 4, [96], [5] * 12),
    (
        [6] * 64,
        lognormal(24, 20, 2),
        [40] * 16,
        lognormal(64, 16, 3),
        [200, *[6] * 63],
        lognormal(32, 9, 7),
        [3] * 128,
    ),
    (
        [24] * 64,
        lognormal(200, 10, 4),
        [300] * 6,
        lognormal(96, 40, 5),
        [64] * 128,
        lognormal(256, 40, 6),
    ),
    (lognormal(24, 250, 8),),
)
"""Lengths of the measured batches, from small to large; each group has equal and ragged ones."""


def large_probes(elements: float) -> tuple[list[int], ...]:
    """Return equal and ragged batches of about ``elements``, within limits, and of three times as
    many.
    """
    count = int(min(max(elements, 3000), 200_000)) // 100
    return (
        [100] * count,
        lognormal(count, 100, 10),
        lognormal(count // 2, 100, 11),
        lognormal(3 * count, 100, 12),
    )


def device_of(layer: RecurrentLayer) -> torch.device:
    """Return the device of a layer's weights; the CPU for a layer without weights."""
    return next(layer.parameters(), torch.empty(0)).device


def make_batch(layer: RecurrentLayer, lengths: Sequence[int] | Tensor) -> Ragged:
    """Return a batch of random values in the layer's dtype and on its device."""
    like = next(layer.parameters(), torch.empty(0))
    counts = torch.as_tensor(lengths, dtype=torch.int64)
    values = torch.randn(int(counts.sum()), layer.input_size, dtype=torch.float32)
    return Ragged.from_flat(values.to(like), lengths=counts)


def step_of(
    layer: RecurrentLayer | torch.nn.RNNBase,
    batch: Ragged | PackedSequence | Tensor,
    mode: str,
    calls: int = 1,
) -> Call:
    """Return a function that runs one step of a mode of ``MODES``.

    Up to ``calls`` calls in turn read copies of the batch that exceed the caches together, like the
    batches of an epoch.
    """
    values = _values_of(batch).detach()
    count = min(calls, 1 + int(_CACHES / max(values.nbytes, 1)))
    copies = [values, *(values.clone() for _ in range(count - 1))]
    turns = itertools.cycle(
        [_with_values(batch, copy.requires_grad_(mode == "train")) for copy in copies]
    )
    if mode == "infer":

        def infer() -> object:
            with torch.no_grad():
                return layer(next(turns))

        return infer
    weights = list(layer.parameters())
    width = layer.output_size if isinstance(layer, RecurrentLayer) else layer.hidden_size
    slope = values.new_ones(*values.shape[:-1], width)

    def train() -> None:
        inputs = next(turns)
        output, _ = layer(inputs)
        torch.autograd.backward(_values_of(output), slope)
        _values_of(inputs).grad = None
        for weight in weights:
            weight.grad = None

    return train


def _with_values(batch: Ragged | PackedSequence | Tensor, values: Tensor) -> Any:
    if isinstance(batch, Ragged):
        return batch.with_values(values)
    return batch._replace(data=values) if isinstance(batch, PackedSequence) else values


def _values_of(batch: Ragged | PackedSequence | Tensor) -> Tensor:
    if isinstance(batch, Ragged):
        return batch.values
    return batch.data if isinstance(batch, PackedSequence) else batch


def time_in_turns(
    calls: Sequence[Call], device: torch.device, rounds: int = 15, within: float = math.inf
) -> list[float]:
    """Return the median time of each call over rounds in which the calls take turns; the first
    round warms up.
    """
    wait = _wait_of(device)
    spent = 0.0
    warm = 0
    while warm < len(calls) and spent < within:
        spent += _clock(calls[warm], wait)
        warm += 1
    timings: list[list[float]] = []
    fewest = min(_FEWEST, rounds) if spent < 3 * _SECONDS else 1
    while len(timings) < fewest or (spent < _SECONDS and len(timings) < rounds):
        timings.append([_clock(call, wait) for call in calls[:warm]])
        spent += sum(timings[-1])
    return [statistics.median_low(times) for times in zip(*timings, strict=True)]


class Yardstick:
    """The current speed of the machine: the time of a small training step of the layer."""

    def __init__(self, layer: RecurrentLayer, way: LayerWay) -> None:
        self._way = way
        self._wait = _wait_of(device_of(layer))
        weights = sum(weight.numel() for weight in layer.parameters())
        count = min(max(int(_YARD_WORK / (_MEAN * max(weights, 1))), _LEAST_YARD), _MOST_YARD)
        self._step = step_of(layer, make_batch(layer, lognormal(count, _MEAN, 3)), "train")
        self._call()

    def look(self) -> float:
        """Return the median of some calls, in seconds."""
        return statistics.median(_clock(self._call, self._wait) for _ in range(_LOOKS))

    def _call(self) -> None:
        with use_backend(schedule=self._way.schedule, backend=self._way.backend):
            self._step()


def _wait_of(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _clock(call: Call, wait: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begun


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the memory that a call allocates in torch, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # The profiler logs its start and end to stderr unless the level is set before its first use.
    level = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = level or "99"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with (
                library.from_torch(),
                profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record,
            ):
                call()
        results: Any = getattr(record.profiler, "kineto_results", None)
        events = [event for event in results.events() if event.name() == "[memory]"]
    finally:
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]
    memory = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        memory += event.nbytes()
        peak = max(peak, memory)
    return peak


CELLS = {
    "lstm": (nn.LSTM, torch.nn.LSTM),
    "gru": (nn.GRU, torch.nn.GRU),
    "rnn": (nn.RNN, torch.nn.RNN),
}
"""The cells that Raglane and torch have, with the layer of each."""

COLUMNS = ("cell", "size", "mode", "elements", "ours_ms", "packed_ms", "padded_ms", "times_faster")
"""The columns of the table of ``raglane bench``."""

# The most rounds of a case.
_BENCH_ROUNDS = 7
# The seconds after which no further round of a case begins.
_BENCH_SECONDS = 5.0
# The largest error relative to torch in float64, whose outputs are at most 1.
_TOLERANCE = 1e-4


class Size(NamedTuple):
    """The number of sequences of a batch, of hidden units and of input features: ``B``, ``H``,
    ``D``.
    """

    batch: int
    hidden: int
    input: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.hidden}x{self.input}"


def time_layer(cell: str, size: Size, lengths: Sequence[int], mode: str) -> tuple[Any, ...]:
    """Return a row of the table; ``times_faster`` is the median over rounds of the ratio to torch's
    faster way.
    """
    ours, torchs = (kind(size.input, size.hidden) for kind in CELLS[cell])
    torchs.load_state_dict(ours.state_dict())
    batch = make_batch(ours, draw(lengths, size.batch))
    packed = batch.to_packed()
    padded = batch.to_padded(batch_first=False)[0]
    with torch.no_grad():
        truth = Ragged.from_packed(torchs.double()(packed.double())[0]).values
        torchs.float()
        error = float((ours(batch)[0].values - truth).abs().max())
    # Negated, so that NaN is an error too.
    if not error <= _TOLERANCE:
        raise ArithmeticError(
            f"{cell} {size}: outputs differ from torch's in float64 by {error:.1e}"
        )
    steps = [
        step_of(ours, batch, mode),
        step_of(torchs, packed, mode),
        step_of(torchs, padded, mode),
    ]
    begun = time.perf_counter()
    rounds = [time_in_turns(steps, batch.values.device)]
    while len(rounds) < _BENCH_ROUNDS and time.perf_counter() - begun < _BENCH_SECONDS:
        rounds.append(time_in_turns(steps, batch.values.device))
    taken = [1000 * statistics.median(times) for times in zip(*rounds, strict=True)]
    faster = statistics.median(
        min(in_packs, in_padding) / layer_seconds for layer_seconds, in_packs, in_padding in rounds
    )
    return cell, str(size), mode, len(batch.values), *taken, faster


def lengths_of_file(path: Path) -> list[int]:
    """Read a readable text file of lengths, a file with one integer of at least 1 per line; empty
    lines are ignored.
    """
    fix = "write one length per line, and nothing else"
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        got = f"{str(path)!r}, which cannot be read ({why})"
        raise DataError("lengths", got, "a readable text file", fix) from error
    lengths: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= 10**6):
            rule = "a file with one integer from 1 to 1,000,000 per line"
            raise DataError("lengths", f"{quote(text)} in line {number} of {path}", rule, fix)
        lengths.append(int(text))
    if not lengths:
        rule = "a file with one integer of at least 1 per line"
        raise DataError("lengths", f"no length in {path}", rule, fix)
    return lengths


def draw(lengths: Sequence[int], count: int) -> list[int]:
    """Draw ``count`` of the lengths with replacement; return them unchanged if there are
    ``count``.
    """
    if count == len(lengths):
        return list(lengths)
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(len(lengths), (count,), generator=generator, device="cpu")
    return [lengths[index] for index in drawn.tolist()]
