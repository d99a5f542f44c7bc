"""Hashes of sequences with their labels, of which the fingerprints of data are made."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.records import Feature, Records
from raglane.data.typed.arrays import Array

Hashes = npt.NDArray[np.uint64]


def sequence_hashes(records: Records) -> Hashes:
    """Return a hash of each sequence: its elements in order, and its targets."""
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
    # Differences of running sums are exact modulo 2**64.
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    sums = running[records.offsets[1:]] - running[records.offsets[:-1]]
    hashes = sums + lengths.astype(np.uint64)
    if records.labels is not None:
        hashes = _mixed(hashes + _mixed(_words(records.labels)))
    if targets is not None and not targets.per_element:
        hashes = _mixed(hashes + _mixed(_words(targets.values.tolist())))
    for feature in records.features:
        if feature.per_sequence:
            hashes = _mixed(hashes) + _column(feature)
    return _mixed(hashes)


def _column(feature: Feature) -> Hashes:
    """Return a hash of each entry of a feature, which depends on its name."""
    entries = (
        _rows(feature.values[:, None]) if feature.is_numbers else _words(feature.values.tolist())
    )
    return _mixed(entries + np.uint64(zlib.crc32(feature.name.encode(errors="surrogatepass"))))


def _rows(values: Array) -> Hashes:
    """Return a hash of each row of float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    columns = _mixed(np.arange(1, values.shape[1] + 1, dtype=np.uint64))
    return _mixed(bits + columns).sum(axis=1, dtype=np.uint64)


def _words(words: Iterable[Any]) -> Hashes:
    """Return a hash of each text, number or list; equal ones are hashed once."""
    texts = [word if isinstance(word, str) else repr(word) for word in words]
    crc_of = {text: zlib.crc32(text.encode(errors="surrogatepass")) for text in set(texts)}
    return np.array([crc_of[text] for text in texts], dtype=np.uint64)


def _mixed(numbers: Hashes) -> Hashes:
    """Mix the bits of numbers with the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
