"""``raglane bench``: a layer of ours against PyTorch's on one batch, and the lengths of its sequences."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raglane import nn
from raglane._utils.files import read_file
from raglane.errors import DataError, message, quote
from raglane.planner.probe import make_batch, step_of, time_in_turns
from raglane.ragged import Ragged

CELLS = {"lstm": (nn.LSTM, torch.nn.LSTM), "gru": (nn.GRU, torch.nn.GRU), "rnn_tanh": (nn.RNN, torch.nn.RNN)}
"""The cells that both have: our layer and torch's."""

COLUMNS = ("cell", "size", "mode", "elements", "ours_ms", "packed_ms", "padded_ms", "times_faster")
"""The columns of the table."""

# Rounds of a case at most, and seconds after which no other begins.
_ROUNDS, _SECONDS = 7, 5.0
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
    while len(rounds) < _ROUNDS and time.perf_counter() - begun < _SECONDS:
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
