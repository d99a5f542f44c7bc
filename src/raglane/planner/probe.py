"""Short measurements of a layer on this machine: for the model of time, and for ``raglane bench``."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import ProfilerActivity, profile

from raglane import nn
from raglane._utils.files import read_file
from raglane._utils.messages import message, quote
from raglane.errors import DataError
from raglane.kernels.dispatch import use_backend
from raglane.native import library
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.model import Way
from raglane.ragged import Ragged

MODES = ("train", "infer")
"""``train``: forward, and backward to values and weights. ``infer``: forward, without gradients."""

Call = Callable[[], object]

# A group of calls is repeated for so long, and after the first round at least so often; but once where the first round
# takes three times as long.
_SECONDS, _FEWEST = 0.06, 3
# What the yardstick's batch has: sequences at most and at least, steps on average, and elements times weights, about.
# Calls at each look.
_MOST_YARD, _LEAST_YARD, _MEAN, _YARD_WORK, _LOOKS = 64, 4, 16, 1e8, 7


def lognormal(count: int, mean: float, seed: int) -> list[int]:
    """Lengths as text and events have them: many short ones, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.3, 0.77, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, 8 * mean)]


PROBES: tuple[tuple[list[int], ...], ...] = (
    ([12], [2] * 8, lognormal(8, 12, 1), [16] * 4, [96], [5] * 12),
    ([6] * 64, lognormal(24, 20, 2), [40] * 16, lognormal(64, 16, 3), [200, *[6] * 63], lognormal(32, 9, 7)),
    ([24] * 64, lognormal(200, 10, 4), [300] * 6, lognormal(96, 40, 5), [64] * 128, lognormal(256, 40, 6)),
    (lognormal(24, 250, 8),),
)
"""Lengths of the batches that are measured, from small to large ones, in each group equal and ragged ones."""


def large_probes(elements: float) -> tuple[list[int], ...]:
    """Batches of about so many elements, within limits, and of three times as many: equal and ragged."""
    count = int(min(max(elements, 3000), 200_000)) // 100
    return [100] * count, lognormal(count, 100, 10), lognormal(count // 2, 100, 11), lognormal(3 * count, 100, 12)


def device_of(layer: RecurrentLayer) -> torch.device:
    """Where a layer's weights are; the CPU for a layer without any."""
    return next(layer.parameters(), torch.empty(0)).device


def make_batch(layer: RecurrentLayer, lengths: Sequence[int] | Tensor) -> Ragged:
    """Random values for a layer, of its dtype and on its device."""
    like = next(layer.parameters(), torch.empty(0))
    known = torch.as_tensor(lengths, dtype=torch.int64)
    values = torch.randn(int(known.sum()), layer.input_size, dtype=torch.float32)
    return Ragged.from_flat(values.to(like), lengths=known)


def step_of(layer: RecurrentLayer | torch.nn.RNNBase, batch: Ragged | PackedSequence | Tensor, mode: str) -> Call:
    """A call that does what an epoch does with a batch."""
    if mode == "infer":

        def infer() -> object:
            with torch.no_grad():
                return layer(batch)

        return infer
    weights = list(layer.parameters())
    values = _values_of(batch).detach().requires_grad_()
    wanted: Any = values
    if isinstance(batch, Ragged):
        wanted = batch.with_values(values)
    elif isinstance(batch, PackedSequence):
        wanted = batch._replace(data=values)
    width = layer.output_size if isinstance(layer, RecurrentLayer) else layer.hidden_size
    slope = values.new_ones(*values.shape[:-1], width)

    def train() -> None:
        output, _ = layer(wanted)
        torch.autograd.backward(_values_of(output), slope)
        values.grad = None
        for weight in weights:
            weight.grad = None

    return train


def _values_of(batch: Ragged | PackedSequence | Tensor) -> Tensor:
    if isinstance(batch, Ragged):
        return batch.values
    return batch.data if isinstance(batch, PackedSequence) else batch


def time_in_turns(
    calls: Sequence[Call], device: torch.device, rounds: int = 15, within: float = math.inf
) -> list[float]:
    """Time calls: the median of some rounds, in each of which all take a turn; after a round to get warm."""
    wait = _wait_of(device)
    spent, warm = 0.0, 0
    while warm < len(calls) and spent < within:
        spent += _clock(calls[warm], wait)
        warm += 1
    kept: list[list[float]] = []
    fewest = min(_FEWEST, rounds) if spent < 3 * _SECONDS else 1
    while len(kept) < fewest or (spent < _SECONDS and len(kept) < rounds):
        kept.append([_clock(call, wait) for call in calls[:warm]])
        spent += sum(kept[-1])
    return [statistics.median_low(times) for times in zip(*kept, strict=True)]


class Yardstick:
    """The speed of the machine at the moment: the time of a small training step of the layer."""

    def __init__(self, layer: RecurrentLayer, way: Way) -> None:
        self._way, self._wait = way, _wait_of(device_of(layer))
        weights = sum(weight.numel() for weight in layer.parameters())
        count = min(max(int(_YARD_WORK / (_MEAN * max(weights, 1))), _LEAST_YARD), _MOST_YARD)
        self._step = step_of(layer, make_batch(layer, lognormal(count, _MEAN, 3)), "train")
        self._call()

    def look(self) -> float:
        """Seconds, the median of some calls."""
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
    """What a call adds to the memory that torch has allocated, at most, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # The profiler reports its own start and end on the error stream, unless it is told not to before its first use.
    said = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = said or "99"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with library.from_torch(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                call()
        results: Any = getattr(record.profiler, "kineto_results", None)
        events = [event for event in results.events() if event.name() == "[memory]"]
    finally:
        if said is None:
            del os.environ["KINETO_LOG_LEVEL"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# -- raglane bench: a layer of ours against PyTorch's on one batch -----------------------------------------------------


CELLS = {"lstm": (nn.LSTM, torch.nn.LSTM), "gru": (nn.GRU, torch.nn.GRU), "rnn_tanh": (nn.RNN, torch.nn.RNN)}
"""The cells that both have: our layer and torch's."""

COLUMNS = ("cell", "size", "mode", "elements", "ours_ms", "packed_ms", "padded_ms", "times_faster")
"""The columns of the table."""

# Rounds of a case at most, and seconds after which no other begins.
_BENCH_ROUNDS, _BENCH_SECONDS = 7, 5.0
# The largest difference from torch in float64, whose outputs are at most 1.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Size:
    """Sequences of a batch, units of a layer, features of an element: ``B``, ``H``, ``D``."""

    batch: int
    hidden: int
    input: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.hidden}x{self.input}"


def time_layer(cell: str, size: Size, lengths: Sequence[int], mode: str) -> tuple[Any, ...]:
    """A row of the table; ``times_faster`` is to the faster of torch's, the median of the ratios of rounds."""
    ours, torchs = (kind(size.input, size.hidden) for kind in CELLS[cell])
    torchs.load_state_dict(ours.state_dict())
    batch = make_batch(ours, draw(lengths, size.batch))
    packed, padded = batch.to_packed(), batch.to_padded(batch_first=False)[0]
    with torch.no_grad():
        truth = Ragged.from_packed(torchs.double()(packed.double())[0]).values
        torchs.float()
        error = float((ours(batch)[0].values - truth).abs().max())
    # So that NaN is a fault too.
    if not error <= _TOLERANCE:
        raise ArithmeticError(f"{cell} {size}: outputs differ from torch's in float64 by {error:.1e}")
    steps = [step_of(ours, batch, mode), step_of(torchs, packed, mode), step_of(torchs, padded, mode)]
    begun, rounds = time.perf_counter(), [time_in_turns(steps, batch.values.device)]
    while len(rounds) < _BENCH_ROUNDS and time.perf_counter() - begun < _BENCH_SECONDS:
        rounds.append(time_in_turns(steps, batch.values.device))
    taken = [1000 * statistics.median(times) for times in zip(*rounds, strict=True)]
    faster = statistics.median(min(others) / own for own, *others in rounds)
    return cell, str(size), mode, len(batch.values), *taken, faster


def lengths_of_file(path: Path) -> list[int]:
    """Read a text file of lengths, an integer of at least 1 per line; empty lines are passed over."""
    fix = "write one length per line, and nothing else"
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        got = f"{str(path)!r}, which cannot be read ({why})"
        raise DataError(message("lengths", got, "a text file", fix)) from error
    found: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= 10**6):
            rule = "an integer from 1 to 1,000,000 per line"
            raise DataError(message("lengths", f"{quote(text)} in line {number} of {path}", rule, fix))
        found.append(int(text))
    if not found:
        raise DataError(message("lengths", f"no length in {path}", "an integer of at least 1 per line", fix))
    return found


def draw(lengths: Sequence[int], count: int) -> list[int]:
    """As many of the lengths as a batch has sequences, drawn with replacement; unchanged if it has as many."""
    if count == len(lengths):
        return list(lengths)
    places = torch.randint(len(lengths), (count,), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return [lengths[place] for place in places.tolist()]
