"""From files to batches: readers, preprocessing, datasets, batch samplers and ``collate``.

Reading, in rooms: sources/ makes typed columns (typed/) of files, roles/ decides which column is
what, by what the user asked for (columns.py), and assemble/ makes records of both (records.py).
formats.py lists the formats, reading.py reads paths and objects of a program, and splitting.py
splits texts into tokens.

Datasets: dataset.py, over the fragments of store/, which are in memory or on disk; holdout.py
splits one.

Preparation: prepare/ has what a model keeps of its data, and the statistics of sequences.

Batches: tensors.py, collation.py; order/ has the samplers.

All names load their module when they are first used, because most programs read no files,
``import raglane`` should take hardly longer than ``import torch``, and help pages, which have the
texts of columns.py, need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raglane._utils.lazy import lazy_names

if TYPE_CHECKING:
    from raglane.data.collation import collate as collate
    from raglane.data.columns import Columns as Columns
    from raglane.data.dataset import Dataset as Dataset
    from raglane.data.formats import FORMATS as FORMATS
    from raglane.data.formats import Format as Format
    from raglane.data.holdout import split as split
    from raglane.data.order import BatchLimit as BatchLimit
    from raglane.data.order import BatchSampler as BatchSampler
    from raglane.data.order import EpochOrder as EpochOrder
    from raglane.data.order.tbptt import TBPTTSampler as TBPTTSampler
    from raglane.data.prepare.missing import mark_missing as mark_missing
    from raglane.data.prepare.preprocess import Preprocessor as Preprocessor
    from raglane.data.prepare.statistics import Statistics as Statistics
    from raglane.data.reading import japanese_vowels as japanese_vowels
    from raglane.data.reading import read as read
    from raglane.data.records import Feature as Feature
    from raglane.data.store.conversion import convert as convert

_HOMES = {
    "BatchSampler": "order",
    "Columns": "columns",
    "Dataset": "dataset",
    "EpochOrder": "order",
    "Preprocessor": "prepare.preprocess",
    "TBPTTSampler": "order.tbptt",
    "collate": "collation",
    "convert": "store.conversion",
    "mark_missing": "prepare.missing",
    "read": "reading",
    "split": "holdout",
}
# Classes of attributes, the registry of formats, and the data of the demo: importable, but not in
# the reference.
_OTHERS = {
    "BatchLimit": "order",
    "FORMATS": "formats",
    "Feature": "records",
    "Format": "formats",
    "Statistics": "prepare.statistics",
    "japanese_vowels": "reading",
}

__all__ = [*_HOMES]


__getattr__ = lazy_names(__name__, {**_HOMES, **_OTHERS})


def __dir__() -> list[str]:
    return sorted(__all__)
