"""The words that training has seen, in order, and the ends of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from raglane import segments
from raglane.errors import DataError, message

__all__ = ["END", "UNKNOWN", "between_ends", "fit_vocabulary", "no_tokens"]

# What stands for every word that training has not seen: the first entry of each vocabulary.
UNKNOWN = "<unk>"
# What stands before and after each text of a language model: the second entry of its vocabulary.
END = "<end>"


def fit_vocabulary(
    counted: Mapping[str, int], special: tuple[str, ...] = (UNKNOWN,), minimum_count: int = 1, most: int | None = None
) -> tuple[str, ...]:
    """The special words, then the others from the most frequent, in alphabetical order where equally frequent.

    Example:
        >>> fit_vocabulary({"b": 1, "a": 1, "c": 3, "<unk>": 9}, most=3)
        ('<unk>', 'c', 'a')
    """
    counts = Counter(counted)
    for word in special:
        del counts[word]
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    kept = [word for word, count in ranked if count >= minimum_count]
    return (*special, *(kept if most is None else kept[: most - len(special)]))


def no_tokens() -> DataError:
    """What to raise where a language model is to read numbers."""
    rule = "a language model reads tokens"
    return DataError(message("task", "'language' and sequences of numbers", rule, "use forecast"))


def between_ends(values: Tensor, offsets: Tensor, *, with_last: bool) -> tuple[Tensor, Tensor]:
    """Tokens with the one of the end before each sequence and, where the end is to be learned, after it."""
    if len(values) and values.dim() > 1:
        raise no_tokens()
    more = 2 if with_last else 1
    lengths = offsets.diff() + more
    wrapped = segments.offsets_from_lengths(lengths)
    result = torch.ones(int(wrapped[-1]), dtype=torch.int64)
    before = torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff()) * more + 1
    result[torch.arange(len(values)) + before] = values.reshape(len(values)).long()
    return result, wrapped
