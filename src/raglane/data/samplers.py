"""In which order a loader goes through the sequences: batches of similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Sampler

from raglane import interop
from raglane.checks import check_flag
from raglane.data.epochs import Epochs, check_least

__all__ = ["BucketBatchSampler"]


class BucketBatchSampler(Epochs[list[int]], Sampler[list[int]]):
    """Batches of similar lengths, for a DataLoader's ``batch_sampler``.

    The sequences are shuffled and cut into pools of ``bucket_batches`` batches; each pool is sorted by length and cut
    into batches; then the batches are shuffled. So a batch holds sequences of similar lengths, and yet neither the
    company that a sequence keeps nor the order of lengths is the same in two epochs. Larger pools give more similar
    lengths and less chance. Every sequence comes exactly once per epoch, but for what ``drop_last`` leaves out.

    The order follows from ``seed`` and the epoch alone. Each time that an epoch was iterated to its end, the next
    iteration is the next epoch; :meth:`set_epoch` chooses another (Lightning calls it).

    Args:
        lengths: ``(B,)`` integers, each at least 0: list, NumPy array or tensor.
        batch_size: sequences in a batch, at least 1. The last batch made may be smaller.
        shuffle: False gives the same batches every epoch: all sequences sorted, from the longest, so that a batch
            that does not fit the memory is the first.
        drop_last: leave out, each epoch, the few sequences that fill no batch: a random few, or without ``shuffle``
            the shortest.
        seed: 0 or above.
        bucket_batches: batches in a pool, at least 1.

    Raises:
        ArgumentTypeError: lengths or another argument of the wrong kind.
        ShapeError: lengths that are not a flat list.
        ArgumentError: a length, a size or the seed is too small.

    Example:
        >>> sampler = BucketBatchSampler([5, 1, 9, 2, 8, 1], batch_size=2, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[2, 4], [0, 3], [1, 5]], 3)
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any] | Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        bucket_batches: int = 50,
    ) -> None:
        super().__init__()
        self._lengths: npt.NDArray[np.int64] = interop.read_lengths(lengths).numpy()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("bucket_batches", bucket_batches, 1),
        ):
            check_least(name, value, least)
        self.batch_size = batch_size
        self.shuffle = check_flag("shuffle", shuffle)
        self.drop_last = check_flag("drop_last", drop_last)
        self.seed = seed
        self.bucket_batches = bucket_batches

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        full, rest = divmod(len(self._lengths), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def _items(self, start: int) -> Iterator[list[int]]:
        order, starts = self._arrange()
        for first in starts[start:].tolist():
            yield order[first : first + self.batch_size].tolist()

    def _arrange(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The epoch's order of sequences, ``(M,)``, and where in it each batch starts, in the order of batches."""
        count = len(self._lengths)
        kept = count - count % self.batch_size if self.drop_last else count
        starts = np.arange(0, kept, self.batch_size)
        if not self.shuffle:
            return np.argsort(-self._lengths, kind="stable")[:kept], starts
        random = np.random.default_rng([self.seed, self.epoch])
        shuffled = random.permutation(count)[:kept]
        # Not beyond what NumPy can divide by.
        pools = np.arange(kept) // min(self.batch_size * self.bucket_batches, count + 1)
        order = shuffled[np.lexsort((self._lengths[shuffled], pools))]
        return order, random.permutation(starts)

    def _identity(self) -> dict[str, int]:
        return {
            "sequences": len(self._lengths),
            "elements": int(self._lengths.sum()),
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
            "seed": self.seed,
            "bucket_batches": self.bucket_batches,
        }
