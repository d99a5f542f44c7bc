"""Linear recurrences in plain torch by chunks of their sequences: for devices other than the CPU.

Nothing reads a length, so no call waits for a device, and the number of operators grows with the
logarithm of the number of chunks. The steps of all chunks run side by side, twice: from zeros,
which gives the effect of each chunk on the state before it; and, when these effects have been
composed, from the state before each chunk, which gives the outputs. Chunks begin at the start of
their sequence, so results do not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic
from raglane.kernels.cpu.recurrences import RecurrenceCall
from raglane.nn.recurrences.loops import RecurrenceSteps, States, restarted
from raglane.segments import like_rows

# Steps of a chunk. More make fewer states, and less of the work parallel.
SIZE = 32


@dataclass(frozen=True, eq=False)
class _Grid:
    """Where the elements of R chunks are, of which the last may be empty."""

    rows: Tensor  # ``(R, SIZE)``, the element of each step
    is_element: Tensor  # ``(R, SIZE)``
    sequence: Tensor  # ``(R,)``, the sequence of each chunk
    number: Tensor  # ``(R,)``, how many chunks of its sequence are before it
    steps: Tensor  # ``(N,)``, the place of each element in the grid
    last: Tensor  # ``(B,)``, the last chunk of each sequence
    is_empty: Tensor  # ``(B,)``


@index_arithmetic
def _grid_of(offsets: Tensor, total: int) -> _Grid:
    count = offsets.shape[0] - 1
    chunks = (offsets.diff() + SIZE - 1) // SIZE
    first = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
    # As many chunks as sequences of any lengths can have.
    index = torch.arange(total // SIZE + count, device=offsets.device)
    sequence = (torch.searchsorted(first, index, right=True) - 1).clamp(max=count - 1)
    number = index - first[sequence]
    places = (offsets[sequence] + number * SIZE).unsqueeze(1)
    places = places + torch.arange(SIZE, device=offsets.device)
    elements = torch.arange(total, device=offsets.device)
    owner = torch.searchsorted(offsets, elements, right=True) - 1
    return _Grid(
        rows=places.clamp(max=total - 1),
        is_element=places < offsets[sequence + 1].unsqueeze(1),
        sequence=sequence,
        number=number,
        steps=first[owner] * SIZE + elements - offsets[owner],
        last=(first[1:] - 1).clamp(min=0),
        is_empty=chunks == 0,
    )


class Diagonal:
    """The effect of chunks on states that only decay: a factor of each number."""

    before: tuple[float, ...] = (0.0,)
    factor_before = 0.0

    def factor(self, chunks: _Chunks) -> Tensor:
        """Return the factor of the states before each chunk."""
        total = _log_decays(chunks)
        return (total.unsqueeze(2) if total.dim() == 2 else total).unsqueeze(3).exp()

    def after(self, factor: Tensor, states: States, local: States) -> States:
        """Return the states after chunks, of those before and what the chunks add."""
        return (factor * states[0] + local[0],)

    def composed(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Return the effect of two chunks, one after the other."""
        return later * earlier


class Selective(Diagonal):
    """The effect of a selective scan, whose decays depend on the rates of states."""

    def __init__(self, rates: Tensor) -> None:
        self._rates = rates

    def factor(self, chunks: _Chunks) -> Tensor:
        """Return the factor of the states before each chunk."""
        delta: Any = chunks.columns[1]
        return (delta.sum(1).unsqueeze(2) * self._rates).exp()


class Matrix(Diagonal):
    """The effect of the delta rule: a matrix for each head."""

    def factor(self, chunks: _Chunks) -> Tensor:
        """Return what the rule makes of the columns of an identity matrix, with values of 0."""
        q, k, _v, *rest = chunks.columns
        state = chunks.starts[0]
        rows = chunks.grid.number.shape[0]
        heads, size = state.shape[1:3]
        identity = torch.eye(size, dtype=state.dtype, device=state.device)
        zeros: Any = state.new_zeros(rows, SIZE, heads, size)
        _, (factor,) = chunks.run([q, k, zeros, *rest], (identity.expand(rows, heads, -1, -1),))
        return factor

    def after(self, factor: Tensor, states: States, local: States) -> States:
        """Return the states after chunks, of those before and what the chunks add."""
        return (factor @ states[0] + local[0],)

    def composed(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Return the effect of two chunks, one after the other."""
        return later @ earlier


class Stabilised(Diagonal):
    """The effect of mLSTM: the logarithm of the decay of each head."""

    before = (0.0, 0.0, -math.inf)
    factor_before = -math.inf

    def factor(self, chunks: _Chunks) -> Tensor:
        """Return the logarithm of the decay of each head over each chunk."""
        return _log_decays(chunks)

    def after(self, factor: Tensor, states: States, local: States) -> States:
        """Return the states after chunks, of those before and what the chunks add."""
        level = torch.maximum(factor + states[2], local[2])
        finite = level.masked_fill(level == -math.inf, 0.0)
        keeps = (factor + states[2] - finite).exp().unsqueeze(2)
        adds = (local[2] - finite).exp().unsqueeze(2)
        state = keeps.unsqueeze(3) * states[0] + adds.unsqueeze(3) * local[0]
        return state, keeps * states[1] + adds * local[1], level

    def composed(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Return the effect of two chunks, one after the other."""
        return later + earlier


class _Chunks:
    """The steps of all chunks of a batch, side by side."""

    def __init__(
        self, steps: RecurrenceSteps, offsets: Tensor, resets: Tensor | None, total: int
    ) -> None:
        self.grid = _grid_of(offsets, total)
        self.step = steps.step
        self.starts = steps.starts
        self.columns = [None if each is None else self._gathered(each) for each in steps.elements]
        self.resets = None if resets is None else self._gathered(resets)

    def _gathered(self, elements: Tensor) -> Tensor:
        """Return elements ``(R, SIZE, ...)``, zeros after the end of a chunk."""
        rows = elements.index_select(0, self.grid.rows.view(-1))
        rows = rows.masked_fill(~like_rows(self.grid.is_element.view(-1), rows), 0)
        return rows.view(-1, SIZE, *elements.shape[1:])

    def has_reset(self) -> Tensor:
        """Return True for chunks with a reset, ``(R,)``."""
        if self.resets is None:
            return torch.zeros_like(self.grid.number, dtype=torch.bool)
        return self.resets.any(1)

    def run(self, columns: list[Tensor | None], states: States) -> tuple[list[Tensor], States]:
        """Run all steps from a state for each chunk; return their outputs and the states after."""
        outputs = []
        for number in range(SIZE):
            current = [None if each is None else each[:, number] for each in columns]
            if self.resets is not None:
                states = restarted(states, self.resets[:, number])
            output, after = self.step(current, states)
            outputs.append(output)
            is_element = self.grid.is_element[:, number]
            states = _where(is_element, after, states)
        return outputs, states

    def blank(self, values: tuple[float, ...]) -> States:
        """Return a state for each chunk, filled with a value each."""
        rows = self.grid.number.shape[0]
        return tuple(
            [
                start.new_full((rows, *start.shape[1:]), value)
                for start, value in zip(self.starts, values, strict=True)
            ]
        )


def run_chunks(
    steps_of: Callable[..., RecurrenceSteps],
    effect_of: Callable[..., Diagonal],
    call: RecurrenceCall,
) -> tuple[Tensor, ...]:
    """Return the outputs of all elements and the final states."""
    steps = steps_of(call.tensors, call.offsets, *call.options)
    kind = effect_of(call.tensors, *call.options)
    total = steps.elements[0].shape[0]
    if total == 0:
        return steps.empty, *steps.starts
    chunks = _Chunks(steps, call.offsets, call.resets, total)
    grid = chunks.grid
    _, local = chunks.run(chunks.columns, chunks.blank(kind.before))
    is_first = grid.number == 0
    keeps = ~chunks.has_reset()
    factor = _chosen(keeps, kind.factor(chunks), kind.factor_before)
    starts = tuple([start.index_select(0, grid.sequence) for start in chunks.starts])
    entering = _visible(is_first & keeps, starts, kind)
    done = kind.after(factor, entering, local)
    distance = 1
    while distance < grid.number.shape[0]:
        reads = keeps & (grid.number >= distance)
        earlier = _visible(reads, tuple([_shifted(state, distance) for state in done]), kind)
        done = kind.after(factor, earlier, done)
        before = _chosen(reads, _shifted(factor, distance), kind.factor_before)
        factor = kind.composed(before, factor)
        keeps = reads & _shifted(keeps, distance)
        distance *= 2
    entering = _where(is_first, starts, tuple([_shifted(state, 1) for state in done]))
    outputs, after = chunks.run(chunks.columns, entering)
    rows = torch.stack(outputs, 1).flatten(0, 1).index_select(0, grid.steps)
    ends = tuple([state.index_select(0, grid.last) for state in after])
    finals = _where(grid.is_empty, chunks.starts, ends)
    return rows.to(steps.empty.dtype), *finals


def _where(chosen: Tensor, states: States, others: States) -> States:
    """Return the states of chosen rows, and the others of others."""
    return tuple(
        [
            torch.where(like_rows(chosen, state), state, other)
            for state, other in zip(states, others, strict=True)
        ]
    )


def _shifted(rows: Tensor, distance: int) -> Tensor:
    return torch.cat([rows[:distance], rows[:-distance]])


def _chosen(chosen: Tensor, rows: Tensor, value: float) -> Tensor:
    return rows.masked_fill(~like_rows(chosen, rows), value)


def _visible(chosen: Tensor, states: States, kind: Diagonal) -> States:
    """Return states, and those without an effect where not chosen."""
    return tuple(
        [_chosen(chosen, state, value) for state, value in zip(states, kind.before, strict=True)]
    )


def _log_decays(chunks: _Chunks) -> Tensor:
    """Return the logarithm of the decay of states over each chunk, of heads or keys."""
    log_decay = chunks.columns[3]
    if log_decay is not None:
        return log_decay.sum(1)
    return chunks.starts[0].new_zeros(chunks.grid.number.shape[0], chunks.starts[0].shape[1])


def selective_effect(tensors: tuple[Any, ...], *_: Any) -> Diagonal:
    """Return the effect of the chunks of a selective scan."""
    return Selective(tensors[2])


def attention_effect(tensors: tuple[Any, ...], _scale: float, delta: bool, _eps: float) -> Diagonal:
    """Return the effect of the chunks of linear attention."""
    if delta:
        return Matrix()
    return Diagonal() if tensors[5] is None else Stabilised()
