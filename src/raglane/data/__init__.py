"""From files to batches: readers, what is learned of the training part, datasets, samplers and ``collate``.

All names but ``collate`` load the module that they come from when they are first used: reading files is not what most
programs import Raglane for, and ``import raglane`` should cost almost nothing beside torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raglane.data.collate import collate

if TYPE_CHECKING:
    from raglane.data.chunks import Chunk, Chunks
    from raglane.data.dataset import SequenceDataset, split
    from raglane.data.formats import FORMATS, Format, japanese_vowels, read
    from raglane.data.objects import records_from
    from raglane.data.preprocess import Preprocessor
    from raglane.data.records import Columns, Records
    from raglane.data.samplers import BucketBatchSampler

__all__ = [
    "FORMATS",
    "BucketBatchSampler",
    "Chunk",
    "Chunks",
    "Columns",
    "Format",
    "Preprocessor",
    "Records",
    "SequenceDataset",
    "collate",
    "japanese_vowels",
    "read",
    "records_from",
    "split",
]

_HOMES = {
    "FORMATS": "formats",
    "BucketBatchSampler": "samplers",
    "Chunk": "chunks",
    "Chunks": "chunks",
    "Columns": "records",
    "Format": "formats",
    "Preprocessor": "preprocess",
    "Records": "records",
    "SequenceDataset": "dataset",
    "japanese_vowels": "formats",
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
