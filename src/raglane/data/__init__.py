"""From files to batches: readers, preprocessing, datasets, batch samplers and ``collate``.

Reading: reading.py reads files (formats/) and objects into records.py, the content of a file.
typed.py has the columns of a table, dates.py reads dates in them, roles/ decides which is what, and
padding.py ends padded sequences. splitting.py splits texts into tokens. stores.py finds the
sources of a dataset; conversion.py writes the Arrow files of shards.py.

Datasets: dataset.py, over fragments.py (flat arrays of some sequences) and gathering.py (batches of
their rows); holdout.py splits one, hashing.py identifies it, and statistics.py and lengths.py count
it.

Preprocessing: preprocess.py, with encoders.py (vocabularies, scales, labels) and missing.py.

Batches: tensors.py, collate.py; order/ and tbptt.py are samplers, and epochs.py their base.

All names except ``collate`` load their module when they are first used, because most programs read
no files, and ``import raglane`` should take hardly longer than ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raglane.data.collate import collate

if TYPE_CHECKING:
    from raglane.data.conversion import convert as convert
    from raglane.data.dataset import Dataset as Dataset
    from raglane.data.formats import FORMATS as FORMATS
    from raglane.data.formats import Format as Format
    from raglane.data.holdout import split as split
    from raglane.data.missing import observations as observations
    from raglane.data.order import BatchLimit as BatchLimit
    from raglane.data.order import BatchSampler as BatchSampler
    from raglane.data.order import EpochOrder as EpochOrder
    from raglane.data.preprocess import Preprocessor as Preprocessor
    from raglane.data.reading import japanese_vowels as japanese_vowels
    from raglane.data.reading import read as read
    from raglane.data.records import Columns as Columns
    from raglane.data.records import Feature as Feature
    from raglane.data.statistics import Statistics as Statistics
    from raglane.data.tbptt import TBPTTSampler as TBPTTSampler

_HOMES = {
    "BatchSampler": "order",
    "Columns": "records",
    "Dataset": "dataset",
    "EpochOrder": "order",
    "Preprocessor": "preprocess",
    "TBPTTSampler": "tbptt",
    "convert": "conversion",
    "observations": "missing",
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
    "Statistics": "statistics",
    "japanese_vowels": "reading",
}

__all__ = ["collate", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _OTHERS.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
