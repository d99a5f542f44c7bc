"""A sampler of long sequences in chunks, for truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_flag, check_tensor, check_whole
from raglane._utils.messages import count_of
from raglane.data.collation import collate
from raglane.data.dataset import Dataset
from raglane.data.order.batches import balance, replicas
from raglane.data.order.epochs import Epochs
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged import Ragged

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The next few steps of ``B`` streams; the attributes are documented in
    :class:`TBPTTSampler`.
    """

    inputs: Ragged
    targets: Ragged | Tensor | None
    begins: Tensor
    ends: Tensor
    sequences: Tensor


class TBPTTSampler(Epochs[Chunk]):
    """A dataset as streams of chunks, for truncated backpropagation through time (Williams and
    Peng, 1990).

    Each of ``batch_size`` streams processes one sequence after another. A chunk has the next piece
    of every stream: at most ``steps`` elements, fewer at the end of a sequence, and none for an
    empty sequence. The next sequence begins in the next chunk. Nothing is padded. A finished stream
    has pieces of length 0, so that row ``b`` of every chunk, and its state, continues row ``b`` of
    the previous chunk::

        state = None
        for chunk in TBPTTSampler(data, batch_size=32, steps=100):
            out, state = layer(chunk.inputs, state, begins=chunk.begins)
            loss = ...
            loss.backward()

    ``begins`` detaches the state from the graph of the previous chunk, and resets it where a
    sequence begins. The outputs are those of whole sequences, bit-identical on the cpu backend.

    A chunk has five attributes. The last three are on the CPU for data on any device, so that
    reading them does not wait for a GPU:

    - ``inputs``: Ragged, one piece per stream.
    - ``targets``: None without targets. With one per element, a Ragged that is cut like the inputs.
      With one per sequence, a tensor ``(ends.sum(), *features)``: the targets of the sequences that
      end in this chunk, in the order of the rows, so every target occurs once.
    - ``begins``: ``(B,)`` bool, True for the first piece of a sequence.
    - ``ends``: ``(B,)`` bool, True for the last piece of a sequence.
    - ``sequences``: ``(B,)`` int64, the index in the data of each row's sequence, or -1 for a
      finished stream.

    The sequences are distributed longest first, each to the stream with the least work. So the
    streams end together, and an epoch has the same number of chunks in any order. With ``shuffle``,
    sequences with equally many chunks go to random streams, and a stream processes its sequences in
    random order; without it, a stream begins with its longest. The order is a function of ``seed``
    and the epoch. After all chunks of an epoch were returned, the next iteration is the next epoch,
    and a state is that of its start; :meth:`set_epoch` selects one. To resume within an epoch, save
    :meth:`state_dict` and the last state that the layer returned.

    Args:
        data: a Ragged batch; a :class:`~raglane.data.Dataset`; or a list of samples, each a tensor
            or array ``(L, *features)``, a pair of that and its target, or a dict with ``"inputs"``
            and optionally ``"target"``.
        batch_size: the number of streams, at least 1.
        steps: the maximum number of elements of a piece, at least 1.
        targets: for data without targets: Ragged with the lengths of the data, one per element; or
            a tensor ``(sequences, *features)``, one per sequence.
        shuffle: draw a new order for every epoch.
        seed: 0 or above.
        num_replicas: the number of processes that share the streams, or ``"auto"``, as for
            :class:`BatchSampler`. Each has every ``num_replicas``-th stream, and all have equally
            many chunks. With fewer streams than ranks, the chunks of the other ranks have no rows.
        rank: the number of this process, from 0.

    Raises:
        ArgumentTypeError: data or targets have the wrong type, or ``shuffle`` is not a bool.
        ShapeError: targets have other lengths, or samples differ in their trailing dimensions.
        ArgumentError: ``batch_size``, ``steps`` or ``seed`` is too small, the list is empty, or
            both the data and ``targets`` contain targets.

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
        data: Ragged | Dataset | Sequence[Any],
        batch_size: int,
        steps: int,
        *,
        targets: Ragged | Tensor | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | Literal["auto"] = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = check_whole("batch_size", batch_size, 1, most=2**31 - 1)
        self.steps = check_whole("steps", steps, 1)
        self.seed = check_whole("seed", seed, 0, most=2**63 - 1)
        ranks, rank = replicas(num_replicas, rank)
        self._inputs, own_targets = _read(data)
        if targets is not None and own_targets is not None:
            rule = "None, because the data has targets"
            raise ArgumentError(
                "targets", f"a {type(targets).__name__}", rule, "leave one of them out"
            )
        self._targets = _check_targets(own_targets if targets is None else targets, self._inputs)
        self.shuffle = check_flag("shuffle", shuffle)
        # The streams of this rank, one per row of its chunks.
        self.streams = range(rank, self.batch_size, ranks)
        self._lengths: _Integers = self._inputs.lengths_cpu.numpy()
        self._offsets: _Integers = offsets_of(self._lengths)
        # The number of pieces of each sequence. An empty sequence has one, so that it begins and
        # ends in a chunk.
        self._counts: _Integers = np.maximum(-(-self._lengths // self.steps), 1)
        # The order of sequences with equally many pieces does not change the number of chunks.
        self._chunks = int(self._distribute(np.arange(len(self._lengths)))[1].max(initial=0))

    def __repr__(self) -> str:
        count = len(self._lengths)
        streams = count_of(self.batch_size, "stream")
        steps = count_of(self.steps, "step")
        return f"TBPTTSampler({count_of(count, 'sequence')}; {streams}, {steps})"

    def __len__(self) -> int:
        """The number of chunks in any epoch: the number of pieces of the longest stream."""
        return self._chunks

    def _items(self, start: int) -> Iterator[Chunk]:
        order, begin, streams = self._arrange()
        # One entry per piece, sorted by chunk: its chunk, the index of its sequence in ``order``,
        # and its number there.
        counts = self._counts[order]
        pieces = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks = np.repeat(begin, counts) + pieces
        owners = np.repeat(np.arange(len(order)), counts)
        mine = self.streams
        by_chunk = np.argsort(chunks, kind="stable")
        by_chunk = by_chunk[streams[owners[by_chunk]] % mine.step == mine.start]
        bounds = np.searchsorted(chunks[by_chunk], np.arange(start, len(self) + 1))
        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            now = by_chunk[first:end]
            yield self._cut(streams[owners[now]] // mine.step, order[owners[now]], pieces[now])

    def _arrange(self) -> tuple[_Integers, _Integers, _Integers]:
        """Return the epoch's sequences, stream after stream, the chunk in which each begins, and
        its stream.
        """
        order = np.arange(len(self._lengths))
        random = np.random.default_rng([self.seed, self.epoch])
        if self.shuffle:
            order = random.permutation(order)
        order, _, streams = self._distribute(order)
        within = random.random(len(order)) if self.shuffle else np.arange(len(order))
        by_stream = np.lexsort((within, streams))
        order = order[by_stream]
        streams = streams[by_stream]
        before = np.cumsum(self._counts[order]) - self._counts[order]
        return order, before - before[np.searchsorted(streams, streams)], streams

    def _distribute(self, order: _Integers) -> tuple[_Integers, _Integers, _Integers]:
        """Assign sequences, longest first, to streams; return them, the chunk in which each ends,
        and its stream.
        """
        sizes = self._counts if self.shuffle else self._lengths
        order = order[np.argsort(-sizes[order], kind="stable")]
        streams, before = balance(self._counts[order], self.batch_size)
        return order, before + self._counts[order], streams

    def _cut(self, rows: _Integers, sequences: _Integers, pieces: _Integers) -> Chunk:
        """Return the chunk with these pieces of these sequences in these rows; other rows are
        empty.
        """
        count = len(self.streams)
        chosen, begins, ends = (
            torch.full((count,), value, device="cpu") for value in (-1, False, False)
        )
        starts, lengths = (torch.zeros(count, dtype=torch.int64, device="cpu") for _ in range(2))
        within = pieces * self.steps
        index = torch.from_numpy(rows)
        for column, values in (
            (chosen, sequences),
            (begins, pieces == 0),
            (ends, pieces + 1 == self._counts[sequences]),
            (starts, self._offsets[sequences] + within),
            (lengths, np.minimum(self._lengths[sequences] - within, self.steps)),
        ):
            column[index] = torch.from_numpy(values)
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
    """Return inputs and targets of any supported data; targets are None if it has none."""
    if isinstance(data, Ragged):
        return data, None
    batch: Any = data.tensors().batch() if isinstance(data, Dataset) else collate(data)
    targets: Any = None
    if isinstance(batch, Mapping):
        targets = batch.get("target")
        batch = batch.get("inputs")
    elif isinstance(batch, tuple) and len(batch) == 2:
        batch, targets = batch
    if not isinstance(batch, Ragged):
        rule = "tensors or arrays (L, *features), pairs of these and their targets, or dicts with 'inputs'"
        fix = "convert them, e.g. with [(inputs, target) for inputs, target, name in samples]"
        raise ArgumentTypeError("data", f"samples of type {type(data[0]).__name__}", rule, fix)
    return batch, targets


def _check_targets(targets: Any, inputs: Ragged) -> Ragged | Tensor | None:
    """Return the targets unchanged, or raise if their number differs from the inputs'."""
    if targets is None:
        return None
    if isinstance(targets, Ragged):
        if not torch.equal(targets.lengths_cpu, inputs.lengths_cpu):
            got = "a Ragged of other lengths"
            rule = "one target per element, with the lengths of the inputs"
            fix = "pass a tensor with one target per sequence, or a target for each element"
            raise ShapeError("targets", got, rule, fix)
        return targets
    if isinstance(targets, Tensor):
        check_tensor("targets", targets)
        if targets.shape[:1] != (len(inputs),):
            rule = f"one target per sequence: ({len(inputs)}, *features)"
            fix = "pass one per sequence, or a Ragged with one per element"
            raise ShapeError("targets", f"shape {tuple(targets.shape)}", rule, fix)
        return targets
    rule = "a Ragged with one per element, or a tensor with one per sequence"
    raise ArgumentTypeError("targets", f"a {type(targets).__name__}", rule, "convert them")
