"""Attention of rows over the elements of their items, without padding.

NOTE [blocks]: the rows of an item are adjacent, so its weights are one matrix, (rows, elements). A
loop over the items computes each with products of exactly that size, which stay in the caches;
padded products would compute and mask the rest. Only the weights are kept for backward, not the
hidden layer of additive attention, which backward computes again.

NOTE [single rows]: in a loop over steps every item has one row. Products of one row take less time
than their calls, so all items are computed at once, pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raglane import segments
from raglane.nn.losses.comparison import check_untransformed, once
from raglane.ragged import Ragged

KINDS = ("additive", "dot", "location")

# The numbers of a tile of the hidden layer of additive attention, which fits the caches.
_TILE = 1 << 17


class ItemRows(NamedTuple):
    """The rows of one item, its elements in the memory, and their pairs, rows first."""

    rows: slice
    elements: slice
    pairs: slice
    shape: tuple[int, int]


def blocks_of(memory: Ragged, items: Sequence[int], counts: Sequence[int]) -> list[ItemRows]:
    """Return the blocks of rows in the order of their items, ``counts`` each; no empty blocks."""
    starts = memory._host_offsets().tolist()
    lengths = memory.lengths_cpu.tolist()
    blocks = []
    row = 0
    pair = 0
    for item, count in zip(items, counts, strict=True):
        start = starts[item]
        length = lengths[item]
        if count * length:
            pairs = slice(pair, pair + count * length)
            blocks.append(
                ItemRows(
                    slice(row, row + count), slice(start, start + length), pairs, (count, length)
                )
            )
            pair = pairs.stop
        row += count
    return blocks


class _Pairs(NamedTuple):
    """The pairs of rows and elements, flat; ``lengths`` is the number of pairs of each row."""

    rows: Tensor
    elements: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, blocks: list[ItemRows], rows: int, device: torch.device) -> _Pairs:
        """Return the pairs of blocks with one row each."""
        counts = [0] * rows
        starts = [0] * rows
        for block in blocks:
            counts[block.rows.start] = block.shape[1]
            starts[block.rows.start] = block.elements.start
        lengths = torch.tensor(counts, device="cpu").to(device, non_blocking=True)
        total = blocks[-1].pairs.stop
        owners = segments.repeated(torch.arange(rows, device=device), lengths, total)
        first = torch.tensor(starts, device="cpu").to(device, non_blocking=True)
        return cls(owners, segments.element_index(first, lengths, total), lengths)

    def reduced(self, values: Tensor, how: str) -> Tensor:
        """Return the sum or maximum of the values of each row's pairs."""
        start = 0.0 if how == "sum" else -torch.inf
        options: Any = {"lengths": self.lengths, "axis": 0, "unsafe": True, "initial": start}
        return torch.segment_reduce(values.contiguous(), how, **options)

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the softmax over the pairs of each row."""
        raised = (scores - self.reduced(scores, "max")[self.rows]).exp()
        return raised / self.reduced(raised, "sum")[self.rows]


def _has_single_rows(blocks: list[ItemRows], kernel: Tensor | None) -> bool:
    """Return True for several items with one row each, whose scores read no other elements."""
    return kernel is None and len(blocks) > 1 and all(block.shape[0] == 1 for block in blocks)


class DecoderAttention(nn.Module):
    """Weights of a memory's elements for rows of queries, and weighted sums of the elements."""

    def __init__(
        self, kind: str, query_size: int, memory_size: int, size: int, width: int, placed: Any
    ) -> None:
        super().__init__()
        self.kind = kind
        self.query = nn.Linear(
            query_size, memory_size if kind == "dot" else size, bias=kind != "dot", **placed
        )
        self.key = None if kind == "dot" else nn.Linear(memory_size, size, bias=False, **placed)
        self.vector = None if kind == "dot" else nn.Parameter(torch.empty(size, **placed))
        self.kernel = (
            nn.Parameter(torch.empty(width, size, **placed)) if kind == "location" else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters of this module; those of its linear layers are their own."""
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(parameter.shape[0] ** -0.5), parameter.shape[0] ** -0.5)

    def keys(self, memory: Tensor) -> Tensor:
        """Return the part of the scores that depends only on the memory, ``(M, size)``."""
        keys: Tensor = memory if self.key is None else self.key(memory)
        return keys

    def forward(
        self,
        outputs: Tensor,
        keys: Tensor,
        memory: Tensor,
        blocks: list[ItemRows],
        previous: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return contexts ``(N, memory_size)`` of outputs ``(N, query_size)``, and flat weights."""
        tensors = (self.query(outputs), keys, memory, self.vector, self.kernel, previous)
        # Products of autocast in a Function would have no counterpart in backward.
        with torch.autocast(memory.device.type, enabled=False):
            cast = [None if tensor is None else tensor.to(memory.dtype) for tensor in tensors]
            present = [tensor for tensor in cast if tensor is not None]
            check_untransformed("AttentionDecoder", "memory", present)
            contexts, weights = _Attend.apply(*cast, blocks)  # type: ignore[no-untyped-call]
        return contexts, weights


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        memory: Tensor,
        vector: Tensor | None,
        kernel: Tensor | None,
        previous: Tensor | None,
        blocks: list[ItemRows],
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        if _has_single_rows(blocks, kernel):
            pairs = _Pairs.of(blocks, queries.shape[0], queries.device)
            rows = queries.index_select(0, pairs.rows)
            hidden = keys.index_select(0, pairs.elements)
            scores = (
                (rows * hidden).sum(1) if vector is None else hidden.add_(rows).tanh_() @ vector
            )
            weights = pairs.softmax(scores)
            contexts = pairs.reduced(memory[pairs.elements].mul_(weights.unsqueeze(1)), "sum")
            ctx.save_for_backward(queries, keys, memory, vector, kernel, previous, weights)
            return contexts, weights
        contexts = memory.new_zeros(queries.shape[0], memory.shape[1])
        weights = memory.new_empty(blocks[-1].pairs.stop if blocks else 0)
        for block in blocks:
            rows = queries[block.rows]
            elements = keys[block.elements]
            if vector is None:
                scores = rows @ elements.t()
            else:
                tiles = _tiles(rows, elements, _windows(previous, kernel, block), kernel)
                scores = torch.cat([hidden @ vector for _, hidden in tiles])
            shares = scores.softmax(1)
            weights[block.pairs] = shares.view(-1)
            torch.mm(shares, memory[block.elements], out=contexts[block.rows])
        ctx.save_for_backward(queries, keys, memory, vector, kernel, previous, weights)
        return contexts, weights

    @staticmethod
    def backward(
        ctx: Any, of_contexts: Tensor | None, of_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as in kernels/program/backend.py
        grads = torch.no_grad()(_Attend._gradients)(ctx, saved, of_contexts, of_weights)
        return *once(grads, "AttentionDecoder", "memory", *saved[:6], of_contexts, of_weights), None

    @staticmethod
    def _gradients(
        ctx: Any, saved: Any, of_contexts: Tensor | None, of_weights: Tensor | None
    ) -> list[Any]:
        queries, keys, memory, vector, kernel, previous, weights = saved
        if _has_single_rows(ctx.blocks, kernel):
            return _gradients_of_single_rows(ctx.blocks, saved, of_contexts, of_weights)
        grads: list[Any] = [
            None if tensor is None else torch.zeros_like(tensor) for tensor in saved[:6]
        ]
        of_queries, of_keys, of_memory, of_vector, of_kernel, of_previous = grads
        for block in ctx.blocks:
            rows = queries[block.rows]
            elements = keys[block.elements]
            values = memory[block.elements]
            shares = weights[block.pairs].view(block.shape)
            of_shares = (
                shares.new_zeros(())
                if of_weights is None
                else of_weights[block.pairs].view(block.shape)
            )
            if of_contexts is not None:
                of_shares = of_shares + of_contexts[block.rows] @ values.t()
                of_memory[block.elements].addmm_(shares.t(), of_contexts[block.rows])
            of_scores = shares * of_shares
            of_scores -= shares * of_scores.sum(1, keepdim=True)
            if vector is None:
                of_queries[block.rows] = of_scores @ elements
                of_keys[block.elements].addmm_(of_scores.t(), rows)
                continue
            windows = _windows(previous, kernel, block)
            of_windows = None if windows is None else torch.empty_like(windows)
            for tile, hidden in _tiles(rows, elements, windows, kernel):
                of_tile = of_scores[tile]
                of_vector += of_tile.flatten() @ hidden.flatten(0, 1)
                # In place: the gradient before tanh.
                slope = hidden.square_().neg_().add_(1).mul_(of_tile.unsqueeze(2)).mul_(vector)
                of_queries[block.rows][tile] = slope.sum(1)
                of_keys[block.elements] += slope.sum(0)
                if windows is not None and of_windows is not None:
                    of_kernel += windows[tile].flatten(0, 1).t() @ slope.flatten(0, 1)
                    of_windows[tile] = slope @ kernel.t()
            if of_windows is not None:
                of_previous[block.pairs] = _folded(of_windows).flatten()
        return grads


def _gradients_of_single_rows(
    blocks: list[ItemRows], saved: Any, of_contexts: Tensor | None, of_weights: Tensor | None
) -> list[Any]:
    """Return the gradients of queries, keys, memory and vector; the others are None."""
    queries, keys, memory, vector, _, _, weights = saved
    pairs = _Pairs.of(blocks, queries.shape[0], queries.device)
    of_shares = torch.zeros_like(weights) if of_weights is None else of_weights
    of_memory = torch.zeros_like(memory)
    if of_contexts is not None:
        outer = of_contexts.index_select(0, pairs.rows)
        of_shares = of_shares + (outer * memory[pairs.elements]).sum(1)
        # Each element has one pair at most.
        of_memory.index_copy_(0, pairs.elements, outer.mul_(weights.unsqueeze(1)))
    of_scores = weights * of_shares
    of_scores = of_scores - weights * pairs.reduced(of_scores, "sum")[pairs.rows]
    rows = queries.index_select(0, pairs.rows)
    slope = keys.index_select(0, pairs.elements)
    of_vector = None
    if vector is None:
        of_pairs = slope.mul_(of_scores.unsqueeze(1))
        slope = rows.mul_(of_scores.unsqueeze(1))
    else:
        hidden = slope.add_(rows).tanh_()
        of_vector = of_scores @ hidden
        # In place: the gradient before tanh.
        slope = hidden.square_().neg_().add_(1).mul_(of_scores.unsqueeze(1)).mul_(vector)
        of_pairs = slope
    of_keys = torch.zeros_like(keys).index_copy_(0, pairs.elements, slope)
    return [pairs.reduced(of_pairs, "sum"), of_keys, of_memory, of_vector, None, None]


def _windows(previous: Tensor | None, kernel: Tensor | None, block: ItemRows) -> Tensor | None:
    """Return the previous weights around each element of a block, ``(rows, elements, width)``."""
    if previous is None or kernel is None:
        return None
    width = kernel.shape[0]
    padded = nn.functional.pad(
        previous[block.pairs].view(block.shape), (width // 2, (width - 1) // 2)
    )
    return padded.unfold(1, width, 1)


def _folded(windows: Tensor) -> Tensor:
    """Return the sum of each element's entries in windows, the transpose of :func:`_windows`."""
    rows, length, width = windows.shape
    padded = windows.new_zeros(rows, length + width - 1)
    for column in range(width):
        padded[:, column : column + length] += windows[:, :, column]
    return padded[:, width // 2 : width // 2 + length]


def _tiles(rows: Tensor, keys: Tensor, windows: Tensor | None, kernel: Tensor | None) -> Any:
    """Yield slices of rows with their hidden layer, ``tanh(query + key + location)``, ``(rows,
    elements, size)``.
    """
    step = max(1, _TILE // max(1, keys.numel()))
    for start in range(0, rows.shape[0], step):
        tile = slice(start, start + step)
        hidden = rows[tile].unsqueeze(1) + keys
        if windows is not None and kernel is not None:
            hidden += windows[tile] @ kernel
        yield tile, hidden.tanh_()
