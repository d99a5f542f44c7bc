"""Long sequences in chunks of a few steps, for backpropagation that is truncated there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_flag, check_tensor
from raglane._utils.messages import message
from raglane.data.collate import collate
from raglane.data.dataset import SequenceDataset
from raglane.data.epochs import Epochs, check_least
from raglane.data.order.batches import balance
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The next few steps of each of ``B`` streams.

    What it says of its rows, the last three, is on the CPU wherever the data is, so that a loop that asks does not wait
    for a GPU.

    Attributes:
        inputs: ``B`` pieces, each of one sequence.
        targets: as the data has them. One per element: Ragged, cut as the inputs are. One per sequence: a tensor
            ``(ends.sum(), *features)``, the targets of the sequences that end here, in the order of the rows; so
            every target comes once. None: the data has none.
        begins: ``(B,)`` bool, the rows whose piece is the first of its sequence.
        ends: ``(B,)`` bool, the rows whose piece is the last of its sequence.
        sequences: ``(B,)`` int64, the sequence of each row, numbered as in the data; -1 for a stream that has no more.
    """

    inputs: Ragged
    targets: Ragged | Tensor | None
    begins: Tensor
    ends: Tensor
    sequences: Tensor


class TBPTTSampler(Epochs[Chunk]):
    """A dataset as streams, for truncated backpropagation through time (Williams and Peng, 1990).

    Each of ``batch_size`` streams works through one sequence after another. A :class:`Chunk` holds the next piece of
    every stream: at most ``steps`` elements, fewer where the sequence ends, none for an empty sequence; the next
    sequence begins with the next chunk. Nothing is padded. A stream that has no more sequences stays, with pieces of
    length 0, so that row ``b`` of every chunk goes on from row ``b`` of the chunk before, and so do its states::

        state = None
        for chunk in TBPTTSampler(data, batch_size=32, steps=100):
            state = carry(layer, chunk.inputs, state, chunk.begins)
            out, state = layer(chunk.inputs, state)
            loss = ...
            loss.backward()

    ``rl.nn.carry`` cuts the state off from the graph of the chunk before, and gives the rows that begin the layer's
    initial state. The outputs are those of whole sequences, bit-identical on the cpu backend.

    The sequences are shared out, the longest first, each to the stream that has least to do: so the streams end
    together, and an epoch has the same number of chunks however it is shuffled. With ``shuffle``, chance decides which
    of the sequences with equally many chunks a stream gets, and in which order a stream works through its own; without,
    a stream begins with its longest. The order follows from ``seed`` and the epoch alone. Each time that an epoch was
    iterated to its end, the next iteration is the next epoch; :meth:`set_epoch` chooses another. To go on in the middle
    of an epoch, save :meth:`state_dict` and, with it, the state that the layer returned last.

    Args:
        data: a Ragged batch; a :class:`~raglane.data.SequenceDataset`; or a list of samples, each a tensor or array
            ``(L, *features)``, a pair of that and its target, or a dict with ``"inputs"`` and, maybe, ``"target"``.
        batch_size: the number of streams, at least 1.
        steps: the most elements of a piece, at least 1.
        targets: for data without targets of its own: Ragged with the lengths of the data, one per element; or a tensor
            ``(sequences, *features)``, one per sequence.
        shuffle: whether every epoch has an order of its own.
        seed: 0 or above.
        ranks: processes that share the streams: each has every ``ranks``-th of them, and all have equally many chunks.
            Where there are fewer streams than ranks, the others' chunks have no rows.
        rank: which of them this is, from 0.

    Raises:
        ArgumentTypeError: data or targets of the wrong kind, or ``shuffle`` is not a bool.
        ShapeError: targets of other lengths, or samples that do not fit together.
        ArgumentError: ``batch_size``, ``steps`` or ``seed`` is too small, the list is empty, or targets come
            twice.

    Example:
        >>> songs = Ragged([torch.arange(5), torch.arange(10, 12), torch.arange(20, 21)])
        >>> for chunk in TBPTTSampler(songs, batch_size=2, steps=2, shuffle=False):
        ...     print([piece.tolist() for piece in chunk.inputs], chunk.begins.tolist(), chunk.sequences.tolist())
        [[0, 1], [10, 11]] [True, True] [0, 1]
        [[2, 3], [20]] [False, True] [0, 2]
        [[4], []] [False, False] [0, -1]
    """

    def __init__(
        self,
        data: Ragged | SequenceDataset | Sequence[Any],
        batch_size: int,
        steps: int,
        *,
        targets: Ragged | Tensor | None = None,
        shuffle: bool = True,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        check_least("batch_size", batch_size, 1, most=2**31 - 1)
        check_least("ranks", ranks, 1)
        check_least("rank", rank, 0, ranks - 1)
        check_least("steps", steps, 1)
        check_least("seed", seed, 0)
        self._inputs, own_targets = _read(data)
        if targets is not None and own_targets is not None:
            got = "targets, and data that has its own"
            raise ArgumentError(message("targets", got, "left out if samples contain targets", "leave one of them out"))
        self._targets = _check_targets(own_targets if targets is None else targets, self._inputs)
        self.batch_size = batch_size
        self.steps = steps
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed = seed
        # The streams of this rank, of which the rows of its chunks are made.
        self.streams = range(rank, batch_size, ranks)
        self._lengths: _Numbers = self._inputs.host_lengths.numpy()
        self._offsets: _Numbers = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        # The pieces of each sequence. An empty one has a piece too, so that it begins and ends somewhere.
        self._counts: _Numbers = np.maximum(-(-self._lengths // steps), 1)
        # Which of several sequences with equally many pieces a stream gets does not change how much it gets.
        self._chunks = int(self._share_out(np.arange(len(self._lengths)))[1].max(initial=0))

    def __len__(self) -> int:
        """The number of chunks in any epoch: as many as the busiest stream has pieces."""
        return self._chunks

    def _items(self, start: int) -> Iterator[Chunk]:
        order, begin, streams = self._arrange()
        # A row for each piece, in the order of chunks: of which sequence, and which of its pieces.
        counts = self._counts[order]
        pieces = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks, owners = np.repeat(begin, counts) + pieces, np.repeat(np.arange(len(order)), counts)
        mine = self.streams
        in_turn = np.argsort(chunks, kind="stable")
        in_turn = in_turn[streams[owners[in_turn]] % mine.step == mine.start]
        bounds = np.searchsorted(chunks[in_turn], np.arange(start, len(self) + 1))
        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            now = in_turn[first:end]
            yield self._cut(streams[owners[now]] // mine.step, order[owners[now]], pieces[now])

    def _arrange(self) -> tuple[_Numbers, _Numbers, _Numbers]:
        """The epoch's sequences in some order; the chunk in which each begins; the stream that each is in."""
        order = np.arange(len(self._lengths))
        random = np.random.default_rng([self.seed, self.epoch])
        if self.shuffle:
            order = random.permutation(order)
        order, _, streams = self._share_out(order)
        # Stream after stream, each from its longest, or in an order of its own.
        within = random.random(len(order)) if self.shuffle else np.arange(len(order))
        by_stream = np.lexsort((within, streams))
        order, streams = order[by_stream], streams[by_stream]
        before = np.cumsum(self._counts[order]) - self._counts[order]
        firsts = np.searchsorted(streams, streams)
        return order, before - before[firsts], streams

    def _share_out(self, order: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Give the sequences to the streams: the longest first, each to the stream that would begin it earliest."""
        sizes = self._counts if self.shuffle else self._lengths
        order = order[np.argsort(-sizes[order], kind="stable")]
        streams, before = balance(self._counts[order], self.batch_size)
        return order, before + self._counts[order], streams

    def _cut(self, rows: _Numbers, sequences: _Numbers, pieces: _Numbers) -> Chunk:
        """The chunk with these pieces of these sequences in these rows, and nothing in the others."""
        count = len(self.streams)
        chosen, begins, ends = (torch.full((count,), value, device="cpu") for value in (-1, False, False))
        starts, lengths = (torch.zeros(count, dtype=torch.int64, device="cpu") for _ in range(2))
        within = pieces * self.steps
        is_last = pieces + 1 == self._counts[sequences]
        index = torch.from_numpy(rows)
        for column, found in (
            (chosen, sequences),
            (begins, pieces == 0),
            (ends, is_last),
            (starts, self._offsets[sequences] + within),
            (lengths, np.minimum(self._lengths[sequences] - within, self.steps)),
        ):
            column[index] = torch.from_numpy(found)
        targets = self._targets
        if isinstance(targets, Ragged):
            targets = targets._slices(starts.to(targets.device, non_blocking=True), lengths)
        elif targets is not None:
            targets = targets.index_select(0, chosen[ends].to(targets.device, non_blocking=True))
        inputs = self._inputs._slices(starts.to(self._inputs.device, non_blocking=True), lengths)
        return Chunk(inputs, targets, begins, ends, chosen)

    def _identity(self) -> dict[str, int]:
        return {
            "sequences": len(self._lengths),
            "elements": int(self._offsets[-1]),
            "batch_size": self.batch_size,
            "steps": self.steps,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
        }


def _read(data: Any) -> tuple[Ragged, Any]:
    """Inputs and targets of whatever holds them; None where there are no targets."""
    if isinstance(data, Ragged):
        return data, None
    if isinstance(data, SequenceDataset):
        inputs = Ragged.from_flat(data.values, offsets=data.offsets)
        if data.targets is not None and data.per_element:
            return inputs, inputs._like(data.targets)
        return inputs, data.targets
    batch: Any = collate(data)
    targets: Any = None
    if isinstance(batch, Mapping):
        batch, targets = batch.get("inputs"), batch.get("target")
    elif isinstance(batch, tuple) and len(batch) == 2:
        batch, targets = batch
    if not isinstance(batch, Ragged):
        raise ArgumentTypeError(
            message(
                "data",
                f"samples of type {type(data[0]).__name__}",
                "samples that are tensors (L, *features), pairs of these and their targets, or dicts with 'inputs'",
                "convert them, e.g. with [(inputs, target) for inputs, target, name in samples]",
            )
        )
    return batch, targets


def _check_targets(targets: Any, inputs: Ragged) -> Ragged | Tensor | None:
    """The targets as they are, if they fit the inputs."""
    if targets is None:
        return None
    if isinstance(targets, Ragged):
        if not torch.equal(targets.host_lengths, inputs.host_lengths):
            got, rule = "a Ragged of other lengths", "one target per element: the lengths of the inputs"
            fix = "pass a tensor with one target per sequence, or a target for each element"
            raise ShapeError(message("targets", got, rule, fix))
        return targets
    if isinstance(targets, Tensor):
        check_tensor("targets", targets)
        if targets.shape[:1] != (len(inputs),):
            rule = f"one target per sequence: ({len(inputs)}, *features)"
            fix = "pass one each, or a Ragged with one for each element"
            raise ShapeError(message("targets", f"shape {tuple(targets.shape)}", rule, fix))
        return targets
    rule = "a Ragged with one per element, or a tensor with one per sequence"
    raise ArgumentTypeError(message("targets", f"a {type(targets).__name__}", rule, "convert them"))
