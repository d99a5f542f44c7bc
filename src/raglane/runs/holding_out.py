"""How a part of the data is held out, to validate on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from raglane.data.dataset import split
from raglane.data.records import Records


def hold_out(records: Records, fraction: float, seed: int) -> tuple[Records, Records]:
    """Split off a validation part that holds no label and no tag which the training part lacks.

    A sequence with a label or a tag that only the held-out part has goes back to the training part: a model can
    neither learn nor be measured on what it has never seen.
    """
    numbered = replace(records, ids=tuple(range(len(records))))
    kept, held_out = split(numbered, fraction, seed)
    rows = np.array(held_out.ids, dtype=np.int64)
    if held_out.labels is not None and kept.labels is not None:
        rows = rows[_known(held_out.labels, kept.labels)]
    elif held_out.tags is not None and kept.tags is not None:
        rows = rows[_all_in_each(_known(held_out.tags.tolist(), kept.tags.tolist()), held_out.offsets)]
    elif held_out.targets is not None and kept.targets is not None and not kept.targets.is_numbers:
        seen = set(chain.from_iterable(kept.targets.values))
        known = np.array([seen.issuperset(labels) for labels in held_out.targets.values], dtype=np.bool_)
        rows = rows[_all_in_each(known, held_out.offsets) if held_out.targets.per_element else known]
    mask = np.zeros(len(records), dtype=np.bool_)
    mask[rows] = True
    return records.select(~mask), records.select(mask)


def _all_in_each(holds: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each sequence, whether something holds of all its elements."""
    broken = np.add.accumulate(np.concatenate([[0], ~holds]))
    all_hold: NDArray[np.bool_] = broken[offsets[1:]] == broken[offsets[:-1]]
    return all_hold


def _known(words: Iterable[str], there: Iterable[str]) -> NDArray[np.bool_]:
    """For each word, whether it is there too; as objects, since NumPy makes room in each for the longest."""
    known = set(there)
    return np.array([word in known for word in words], dtype=np.bool_)
