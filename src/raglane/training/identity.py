"""Two texts for the data of a run: a fingerprint of its parts in their order, and an identity in whatever order."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.records import Feature, Records
from raglane.data.statistics import Counted

_Hashes = npt.NDArray[np.uint64]


def fingerprint(*parts: Records | Counted | None) -> str:
    """A short text that differs for different sequences, labels or order."""
    digest = hashlib.sha256()
    for records in parts:
        if records is None:
            continue
        if isinstance(records, Counted):
            digest.update(records.fingerprint.encode())
            continue
        digest.update(np.ascontiguousarray(records.offsets).tobytes())
        for words in (records.labels, records.tags, records.values if records.is_tokens else None):
            if words is not None:
                # repr keeps ("a b",) and ("a", "b") apart.
                digest.update(repr(list(words)).encode())
        if records.targets is not None:
            digest.update(repr(records.targets.values.tolist()).encode())
        if not records.is_tokens:
            digest.update(np.ascontiguousarray(records.values).tobytes())
        for feature in records.features:
            digest.update(repr((feature.name, feature.kind, feature.values.tolist())).encode())
    return digest.hexdigest()[:16]


def identity(*parts: Records | Counted | None) -> str:
    """A short text that differs for different sequences or labels, in whatever order and parts."""
    total, count = 0, 0
    for part in parts:
        if isinstance(part, Counted):
            # Its parts are rows of one folder, whose counts they share.
            return f"folder-{zlib.crc32(repr(part.statistics.to_config()).encode()):08x}"
        if part is not None:
            total += int(_sequences(part).sum(dtype=np.uint64))
            count += len(part)
    return f"{count}-{total % 2**64:016x}"


def _sequences(records: Records) -> _Hashes:
    """A number for each sequence: its elements in their order, and what it is to be taken for."""
    elements = _words(records.values) if records.is_tokens else _rows(records.values)
    for feature in records.features:
        if not feature.per_sequence:
            elements = _mixed(elements) + _column(feature)
    if records.tags is not None:
        elements = _mixed(elements + _mixed(_words(records.tags)))
    targets = records.targets
    if targets is not None and targets.per_element:
        elements = _mixed(elements + _mixed(_words(targets.values.tolist())))
    lengths = records.lengths
    steps = np.arange(len(elements)) - np.repeat(records.offsets[:-1], lengths)
    elements = _mixed(elements + _mixed(steps.astype(np.uint64)))
    # Differences of running sums are right although the sums overflow.
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    found = running[records.offsets[1:]] - running[records.offsets[:-1]] + lengths.astype(np.uint64)
    for words in (records.labels, None if targets is None or targets.per_element else targets.values.tolist()):
        if words is not None:
            found = _mixed(found + _mixed(_words(words)))
    for feature in records.features:
        if feature.per_sequence:
            found = _mixed(found) + _column(feature)
    return _mixed(found)


def _column(feature: Feature) -> _Hashes:
    """A number for each entry of a column beside the main one, another in each column."""
    entries = _rows(feature.values[:, None]) if feature.is_numbers else _words(feature.values.tolist())
    return _mixed(entries + np.uint64(zlib.crc32(feature.name.encode(errors="surrogatepass"))))


def _rows(values: npt.NDArray[Any]) -> _Hashes:
    """A number for each row of float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    places = _mixed(np.arange(1, values.shape[1] + 1, dtype=np.uint64))
    found: _Hashes = _mixed(bits + places).sum(axis=1, dtype=np.uint64)
    return found


def _words(words: Iterable[Any]) -> _Hashes:
    """A number for each text, number or list of them; equal ones are looked at once."""
    texts = [word if isinstance(word, str) else repr(word) for word in words]
    known = {text: zlib.crc32(text.encode(errors="surrogatepass")) for text in set(texts)}
    return np.array([known[text] for text in texts], dtype=np.uint64)


def _mixed(numbers: _Hashes) -> _Hashes:
    """The last steps of splitmix64 (Steele, Lea and Flood, 2014), which spread every bit over all."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
