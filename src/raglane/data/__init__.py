"""From files to batches: readers, what is learned of the training part, datasets, batches and ``collate``.

All names but ``collate`` load the module that they come from when they are first used: reading files is not what most
programs import Raglane for, and ``import raglane`` should cost almost nothing beside torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raglane.data.collate import collate

if TYPE_CHECKING:
    from raglane.data.chunks import Chunk, Chunks
    from raglane.data.conversion import Conversion, convert
    from raglane.data.dataset import SequenceDataset, split
    from raglane.data.formats import FORMATS, Format, japanese_vowels, read
    from raglane.data.missing import observations
    from raglane.data.objects import records_from
    from raglane.data.order import Batches, Limit, Order
    from raglane.data.preprocess import Preprocessor
    from raglane.data.records import Columns, Feature, Records
    from raglane.data.statistics import Statistics
    from raglane.data.stored_dataset import Dataset

__all__ = [
    "FORMATS",
    "Batches",
    "Chunk",
    "Chunks",
    "Columns",
    "Conversion",
    "Dataset",
    "Feature",
    "Format",
    "Limit",
    "Order",
    "Preprocessor",
    "Records",
    "SequenceDataset",
    "Statistics",
    "collate",
    "convert",
    "japanese_vowels",
    "observations",
    "read",
    "records_from",
    "split",
]

_HOMES = {
    "FORMATS": "formats",
    "Batches": "order",
    "Chunk": "chunks",
    "Chunks": "chunks",
    "Columns": "records",
    "Conversion": "conversion",
    "Dataset": "stored_dataset",
    "Feature": "records",
    "Format": "formats",
    "Limit": "order",
    "Order": "order",
    "Preprocessor": "preprocess",
    "Records": "records",
    "SequenceDataset": "dataset",
    "Statistics": "statistics",
    "convert": "conversion",
    "japanese_vowels": "formats",
    "observations": "missing",
    "read": "formats",
    "records_from": "objects",
    "split": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
