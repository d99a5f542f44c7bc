"""In which order sequences come to batches."""

from __future__ import annotations

from dataclasses import dataclass

from raglane._utils.checks import check_flag, check_real
from raglane.data.epochs import check_least

__all__ = ["KINDS", "Order"]

KINDS = ("random", "sorted", "grouped", "windows")


@dataclass(frozen=True)
class Order:
    """In which order sequences come to batches: :meth:`random`, :meth:`sorted`, :meth:`grouped` or :meth:`windows`.

    Attributes:
        kind: the name of the method.
        pool: batches whose sequences are arranged together.
        window: sequences that are arranged together, for windows.
        by_length: whether batches are made of similar lengths.
        noise: how far a length may be off where sequences are arranged by it, as a share of it.

    Example:
        >>> print(Order.random(), Order.grouped(noise=0.1), Order.windows(1000), sep="; ")
        random; grouped, pools of 200 batches, noise 0.1; windows of 1,000 sequences, grouped
    """

    kind: str
    pool: int = 200
    window: int = 0
    by_length: bool = False
    noise: float = 0.0

    @staticmethod
    def random() -> Order:
        """Every order of the sequences is as likely as any other, and batches are cut from it.

        Example:
            >>> print(Order.random())
            random
        """
        return Order("random")

    @staticmethod
    def sorted() -> Order:
        """From the longest sequence to the shortest, the same in every epoch.

        Example:
            >>> print(Order.sorted())
            sorted
        """
        return Order("sorted", by_length=True)

    @staticmethod
    def grouped(pool: int = 200, noise: float = 0.0) -> Order:
        """Batches of similar lengths, and yet other batches in every epoch.

        The sequences come in a random order, in pools of some batches. A pool is sorted by length and cut into batches,
        and its batches are shuffled.

        Args:
            pool: batches in a pool, at least 1. Larger pools give more similar lengths and less chance.
            noise: lengths are taken for up to so much longer or shorter where they are sorted, from 0 to 1, as a
                share. It gives a sequence more others to meet, and batches more padding.

        Raises:
            ArgumentTypeError: something else than numbers.
            ArgumentError: a number out of its range.

        Example:
            >>> print(Order.grouped(pool=100))
            grouped, pools of 100 batches
        """
        check_least("pool", pool, 1)
        return Order("grouped", pool=pool, by_length=True, noise=_check_noise(noise))

    @staticmethod
    def windows(sequences: int, *, by_length: bool = True, noise: float = 0.0) -> Order:
        """The order of the data, but for what lies near: for data that is read as a stream.

        Each window of successive sequences is shuffled, and no batch holds sequences of two windows. So no more than a
        window has to be held at a time.

        Args:
            sequences: in a window at most, at least 1; better many times those of a batch. Windows are of equal size.
            by_length: make batches of similar lengths within the window, and shuffle them.
            noise: as for :meth:`grouped`.

        Raises:
            ArgumentTypeError: something else than numbers, or than a bool for ``by_length``.
            ArgumentError: a number out of its range.

        Example:
            >>> print(Order.windows(512, by_length=False))
            windows of 512 sequences
        """
        check_least("sequences", sequences, 1)
        grouped = check_flag("by_length", by_length)
        return Order("windows", window=sequences, by_length=grouped, noise=_check_noise(noise))

    def __str__(self) -> str:
        parts = [self.kind]
        if self.kind == "grouped":
            parts.append(f"pools of {self.pool:,} batches")
        if self.kind == "windows":
            parts = [f"windows of {self.window:,} sequences", *["grouped"] * self.by_length]
        if self.noise:
            parts.append(f"noise {self.noise:g}")
        return ", ".join(parts)


def _check_noise(noise: float) -> float:
    return check_real("noise", noise, "from 0 to 1", lambda share: 0 <= share <= 1, "pass 0.1, say")
