"""How many lanes the kernels would use for a batch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["lanes_of"]

# As ``lane_capacity`` in csrc/scan/lanes.h has it, with the constants of csrc/runtime/tuning.h, for caches that hold
# the most lanes.
_SURPLUS, _MOST, _EVEN = 1.15, 48, 6


def lanes_of(lengths: Tensor, threads: int) -> int:
    """The lanes of all threads together, at least 1; an estimate for those who predict times.

    Args:
        lengths: ``(B,)`` int64 on the CPU.
        threads: that run the call.

    Example:
        >>> import torch
        >>> lanes_of(torch.full((100,), 10), 2), lanes_of(torch.tensor([100, 1, 1]), 2)
        (96, 4)
    """
    count, total = int(lengths.count_nonzero()), int(lengths.sum())
    if count == 0:
        return 1
    needed = int(_SURPLUS * total / (threads * int(lengths.max()))) + 1
    share = -(-count // threads)
    return threads * min(share, _MOST, -(-needed // _EVEN) * _EVEN)
