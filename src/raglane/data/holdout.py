"""The random split of sequences into a training part and a part held out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_flag, check_kind, check_real, check_whole
from raglane._utils.messages import argument, count_of
from raglane.data.dataset import Dataset
from raglane.errors import ArgumentError


def split(
    data: Dataset, fraction: float, seed: int = 0, stratify: bool = True
) -> tuple[Dataset, Dataset]:
    """Split sequences at random into a part to train on and a part held out for validation.

    The held-out part has ``round(fraction * B)`` sequences, at least 1 and at most ``B - 1``. With
    one label per sequence and ``stratify``, each class contributes its share, rounded by largest
    remainder, and keeps at least one sequence in the first part. So a class of one sequence is
    never held out, and the held-out part is smaller if the classes cannot fill it. Without labels,
    or if no class has two sequences, every sequence is equally likely. Both parts keep the order of
    ``data``. :func:`raglane.fit` holds out its validation part by this rule.

    Args:
        data: at least 2 sequences.
        fraction: the share to hold out, above 0 and below 1.
        seed: 0 or above; the same seed gives the same parts.
        stratify: whether each class contributes its share.

    Returns:
        The part to train on, and the part held out.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ArgumentError: ``fraction`` is not between 0 and 1, ``seed`` is below 0, or there are fewer
            than 2 sequences.

    Example:
        >>> from raglane.data import read
        >>> ten = read([[0.5]] * 10, labels=["a"] * 8 + ["b"] * 2)
        >>> kept, held_out = split(ten, 0.5)
        >>> sorted(held_out.labels)
        ['a', 'a', 'a', 'a', 'b']
    """
    check_kind("data", data, Dataset, "a Dataset", "read it with rl.data.read")
    mask = held_out(data, fraction, seed, stratify)
    return data.subset(~mask), data.subset(mask)


def ends_held_out(series: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Return the beginnings of sequences, and the sequences whose targets are only those of their
    ends.

    A sequence that is too short for both is only in the first part.
    """
    counts = np.asarray(series.element_counts, dtype=np.int64)
    sizes = np.maximum(np.round(fraction * counts).astype(np.int64), 1)
    divided = np.flatnonzero(counts - sizes >= 2)
    if len(divided) == 0:
        longest = int(counts.max(initial=0))
        fix = f"pass more data, or hold nothing out with {argument('validation_fraction', 0)}"
        got = f"a sequence of {longest}" if len(counts) == 1 else f"sequences of at most {longest}"
        least = max(round(fraction * longest), 1) + 2
        raise ArgumentError("data", got, f"at least {least} elements", fix)
    lengths = counts.copy()
    lengths[divided] -= sizes[divided]
    beginnings = Dataset(series.records.select(range(len(series)), lengths), series.columns)
    whole = series.subset(divided)
    whole._context = np.zeros(len(series._fragments), dtype=np.int64)
    whole._context[whole._source_rows()] = lengths[divided] - 1
    return beginnings, whole


def elements_held_out(data: Dataset) -> int:
    """Return the smallest number of elements at the ends of sequences that :func:`ends_held_out`
    holds out, else 0.
    """
    if data._context is None:
        return 0
    return int((data.element_counts - data._context[data._source_rows()] - 1).min())


def held_out(
    data: Dataset, fraction: float, seed: int, stratify: bool = True
) -> npt.NDArray[np.bool_]:
    """Return the mask of the sequences that :func:`split` holds out."""
    check_flag("stratify", stratify)
    rule = "above 0 and below 1"
    fix = "pass 0.1, for a tenth"
    fraction = check_real("fraction", fraction, rule, lambda share: 0 < share < 1, fix)
    seed = check_whole("seed", seed, 0, most=2**63 - 1)
    count = len(data)
    if count < 2:
        fix = f"pass more data, or hold nothing out with {argument('validation_fraction', 0)}"
        raise ArgumentError(
            "data", count_of(count, "sequence"), "at least 2 sequences, for two parts", fix
        )
    classes = data.label_ranks() if stratify else None
    mask = np.zeros(count, dtype=np.bool_)
    size = min(max(round(fraction * count), 1), count - 1)
    shuffled = np.random.default_rng(seed).permutation(count)
    quota = np.zeros(0, dtype=np.int64)
    if classes is not None:
        classes = classes[shuffled]
        quota = _quotas(np.bincount(classes), fraction, size)
    if classes is not None and quota.any():
        # The rank of each within its class, in the shuffled order: the first `quota` of a class are
        # held out.
        by_class = np.argsort(classes, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(classes))[:-1]])
        rank = np.empty(count, dtype=np.int64)
        rank[by_class] = np.arange(count) - starts[classes[by_class]]
        mask[shuffled[rank < quota[classes]]] = True
    else:
        mask[shuffled[:size]] = True
    return mask


def _quotas(sizes: npt.NDArray[np.int64], fraction: float, total: int) -> npt.NDArray[np.int64]:
    """Return the number of held-out sequences per class: below the class size, and ``total``
    together if possible.
    """
    room = sizes - 1
    quota: npt.NDArray[np.int64] = np.minimum(np.floor(sizes * fraction).astype(np.int64), room)
    while (missing := total - int(quota.sum())) > 0 and (quota < room).any():
        remainder = np.where(quota < room, sizes * fraction - quota, -np.inf)
        most = np.argsort(-remainder, kind="stable")[: min(missing, int((quota < room).sum()))]
        quota[most] += 1
    return quota
