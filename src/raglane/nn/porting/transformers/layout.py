"""Where the elements of a padded batch are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.tracing import records_operators
from raglane.errors import ShapeError
from raglane.kernels.cpu.layer import offsets_of_steps
from raglane.segments import offsets_from_lengths
from raglane.segments.indexing import place_rows, take_rows


class BatchLayout(NamedTuple):
    """The elements of a batch of B rows and T steps, without padding."""

    shape: tuple[int, int]
    elements: Tensor | None  # ``(N,)``, the elements of the flattened batch; None for all
    offsets: Tensor  # of rows; a graph has a last one of all padding
    resets: Tensor | None  # bools ``(N,)``: another sequence begins within a row

    @property
    def is_step(self) -> bool:
        """True for one element of each row, which continues its sequence."""
        return self.shape[1] == 1 and self.elements is None and self.resets is None

    def rows(self, batch: Tensor) -> Tensor:
        """Return the elements of ``(B, T, D)`` as ``(1, N, D)``, or the batch if these are all."""
        if self.elements is None:
            return batch
        return take_rows(batch.flatten(0, 1), self.elements).unsqueeze(0)

    def batch(self, rows: Tensor) -> Tensor:
        """Return elements as a padded batch, with zeros as padding."""
        if self.elements is None:
            return rows
        count, steps = self.shape
        placed = place_rows(rows.flatten(0, 1), self.elements, count * steps)
        return placed.unflatten(0, self.shape)

    def begins(self, is_empty: bool) -> Tensor:
        """Return where sequences begin, bools ``(N,)``: those of rows only without states."""
        total = self.shape[0] * self.shape[1] if self.elements is None else len(self.elements)
        begins = torch.zeros(total + 1, dtype=torch.bool, device=self.offsets.device)
        if is_empty:
            # The last place takes offsets of empty rows at the end.
            begins = begins.index_fill(0, self.offsets[:-1], True)
        return begins[:total] if self.resets is None else begins[:total] | self.resets

    def restarted(self, positions: Tensor | None) -> BatchLayout:
        """Return the layout in which sequences also begin at the position 0."""
        if positions is None:
            return self
        first = self.rows(positions.expand(self.shape).unsqueeze(2)).flatten() == 0
        if not records_operators() and not bool(first.any()):
            return self
        return self._replace(resets=first if self.resets is None else first | self.resets)

    def states(self, states: Tensor | None) -> Tensor | None:
        """Return states of rows, with zeros for that of all padding."""
        surplus = self.offsets.shape[0] - 1 - self.shape[0]
        if states is None or surplus == 0:
            return states
        return torch.cat([states, states.new_zeros(surplus, *states.shape[1:])])


def layout_of(batch: Tensor, sequences: Tensor | None, mask: Tensor | None) -> BatchLayout:
    """Return the layout of ``(B, T, D)``.

    A sequence begins where the number of ``sequences``, or else of the mask, changes. Elements
    are padding where the mask is 0, or the number of the sequence negative. Both may also have
    columns of earlier calls.
    """
    count, steps, _ = batch.shape
    mask = None if mask is None or mask.dim() != 2 else mask[:, -steps:]
    if sequences is None and steps == 1 and _continues(batch, mask):
        return BatchLayout((count, 1), None, offsets_of_steps(count), None)
    if sequences is None and mask is None:
        offsets = torch.arange(count + 1, device=batch.device) * steps
        return BatchLayout((count, steps), None, offsets, None)
    numbers: Any = mask
    if sequences is not None:
        numbers = sequences[:, -steps:].expand(count, -1) + 1
        numbers = numbers if mask is None else numbers.masked_fill(mask == 0, 0)
    is_real = numbers > 0
    lengths = is_real.sum(1)
    index: Tensor | None
    if records_operators():
        index = (~is_real).flatten().sort(stable=True).indices
        offsets = offsets_from_lengths(torch.cat([lengths, count * steps - lengths.sum(0, True)]))
    else:
        index = is_real.flatten().nonzero().squeeze(1)
        index = None if index.shape[0] == count * steps else index
        offsets = offsets_from_lengths(lengths)
    flat = numbers.flatten() if index is None else numbers.flatten().index_select(0, index)
    resets = _changes(flat, offsets)
    if not records_operators() and not bool(resets.any()):
        return BatchLayout((count, steps), index, offsets, None)
    return BatchLayout((count, steps), index, offsets, resets)


def _continues(batch: Tensor, mask: Tensor | None) -> bool:
    """Return True if no element of a step of inference is padding."""
    is_inference = batch.is_cpu and not torch.is_grad_enabled() and not records_operators()
    return is_inference and _is_whole(mask)


def _changes(numbers: Tensor, offsets: Tensor) -> Tensor:
    """Return where a number is not that before it in its row."""
    total = numbers.shape[0]
    changes = torch.zeros(total + 1, dtype=torch.bool, device=numbers.device)
    changes[1:total] = numbers[1:] != numbers[:-1]
    # Rows begin with their own state. The last place takes offsets of empty rows at the end.
    return changes.index_fill(0, offsets[:-1], False)[:total]


class Numbers(NamedTuple):
    """The numbers of the sequences of each row from 1, 0 for padding."""

    numbers: Tensor
    are_several: bool  # a row has more than one


def numbers_of(call: dict[str, Any], shape: Sequence[int], is_needed: bool) -> Numbers | None:
    """Return the numbers of sequences by the arguments of a call of ``(B, T)`` elements.

    None if each row is one sequence, and without ``is_needed`` also where the mask alone tells what
    is padding.
    """
    count, steps = shape
    mask = mask_of(call)
    mask = None if mask is None else mask[:, -steps:]
    positions = _positions(call)
    sequences = _sequences(call, count, steps)
    tensors = [each for each in (mask, sequences, positions) if each is not None]
    if not tensors or (steps == 1 and _is_whole(mask)):
        return None
    is_real = torch.ones(count, steps, dtype=torch.bool, device=tensors[0].device)
    is_real = is_real if mask is None else is_real & (mask > 0)
    is_real = is_real if sequences is None else is_real & (sequences >= 0)
    begins = torch.zeros_like(is_real)
    for numbers, step in ((sequences, 0), (positions, 1), (mask, 0)):
        begins |= _breaks(numbers, step, is_real)
    # A graph is for all numbers.
    is_graph = records_operators()
    are_several = sequences is not None if is_graph else bool(begins.any())
    if not (are_several or is_graph or is_needed or steps == 1):
        return None
    return Numbers((begins.cumsum(1) + 1).masked_fill(~is_real, 0), are_several)


def mask_of(call: dict[str, Any]) -> Tensor | None:
    """Return the mask of padding, also of masks by kind of layer, which ``generate`` prepares."""
    mask = call.get("attention_mask")
    mask = mask.get("linear_attention") if isinstance(mask, dict) else mask
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _breaks(numbers: Tensor | None, step: int, is_real: Tensor) -> Tensor:
    """Return where a number is not that of the real element before it in its row plus a step."""
    if numbers is None:
        return torch.zeros_like(is_real)
    numbers = numbers.expand_as(is_real)
    places = torch.where(is_real, torch.arange(numbers.shape[1], device=numbers.device), -1)
    before = places.cummax(1).values.roll(1, 1).index_fill(1, places.new_zeros(1), -1)
    is_equal = numbers == numbers.gather(1, before.clamp(min=0)) + step
    return ~is_equal & is_real & (before >= 0)


def _is_whole(mask: Tensor | None) -> bool:
    """Return True if no element is padding."""
    return mask is None or records_operators() or bool(mask.all())


def _positions(call: dict[str, Any]) -> Tensor | None:
    """Return the positions of tokens, which may precede those of time, height and width."""
    positions: Tensor | None = call.get("position_ids")
    if positions is None or positions.dim() < 3:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def _sequences(call: dict[str, Any], count: int, steps: int) -> Tensor | None:
    """Return the numbers of sequences that ``seq_idx`` or ``cu_seq_lens_q`` has."""
    numbers: Tensor | None = call.get("seq_idx")
    if numbers is not None:
        if tuple(numbers.shape) not in {(count, steps), (1, steps)}:
            rule = f"a number for each of {count} x {steps} elements"
            fix = "pass seq_idx as DataCollatorWithFlattening returns it"
            raise ShapeError("seq_idx", f"shape {tuple(numbers.shape)}", rule, fix)
        return numbers
    borders: Tensor | None = call.get("cu_seq_lens_q")
    if borders is None:
        return None
    if count != 1:
        fix = "join the sequences in one row, or pass an attention_mask"
        raise ShapeError("cu_seq_lens_q", f"a batch of {count} rows", "those of one row", fix)
    places = torch.arange(steps, device=borders.device)
    return torch.bucketize(places, borders[1:], right=True).unsqueeze(0)
