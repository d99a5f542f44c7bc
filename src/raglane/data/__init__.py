"""From files to batches: readers, what is learned of the training part, datasets, batches and ``collate``.

All names but ``collate`` load the module that they come from when they are first used: reading files is not what most
programs import Raglane for, and ``import raglane`` should cost almost nothing beside torch.
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
    "FORMATS": "formats",
    "BatchSampler": "order",
    "TBPTTSampler": "tbptt",
    "Columns": "records",
    "Dataset": "dataset",
    "Feature": "records",
    "Format": "formats",
    "BatchLimit": "order",
    "EpochOrder": "order",
    "Preprocessor": "preprocess",
    "Statistics": "statistics",
    "convert": "conversion",
    "japanese_vowels": "reading",
    "observations": "missing",
    "read": "reading",
    "split": "holdout",
}

__all__ = ["collate", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
