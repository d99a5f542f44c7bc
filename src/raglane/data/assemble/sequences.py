"""The values of sequences from an Arrow column of lists or texts, converted as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from raglane._utils.messages import count_of, quote, require
from raglane.data.assemble.reader import Reader, first_null, not_utf8, numbers_of, words_of
from raglane.data.columns import Columns, option
from raglane.data.prepare.missing import how_to_fill
from raglane.data.records import offsets_of, place_of
from raglane.data.roles.rules import takes_tokens
from raglane.data.splitting import split_texts
from raglane.data.typed.arrays import Array, Entries, Integers, Values
from raglane.data.typed.arrow import (
    arrow_types,
    as_numpy,
    as_texts,
    explode,
    is_list,
    is_sequence,
    is_text,
)

# Sets of numbers are those of MIDI, such as the pitches of a chord. A fixed size gives all files
# the same channels.
SET_SIZE = 128


def sequences_of(
    reader: Reader, column: Any, name: str, columns: Columns
) -> tuple[Array, Integers]:
    """Return the flat values of a sequence column, ``(N, C)`` float32 or ``(N,)`` tokens, and their
    offsets.
    """
    reader.check_nulls(column, name, "sequence")
    if is_text(column.type):
        return _split_texts(reader, column, name, columns.split)
    if not is_sequence(column.type):
        rule = "lists of numbers, lists of lists of numbers, lists of strings, or texts"
        raise reader.type_error(column, name, rule, f"name another with {option('sequence')}")
    lengths, elements = explode(column)
    offsets = offsets_of(lengths)
    reader.check_inner_nulls(elements, offsets, name)
    if is_text(elements.type):
        return words_of(reader, elements, name, offsets), offsets
    types = arrow_types()
    if types.is_integer(elements.type) and takes_tokens(columns, name)[0]:
        return elements.cast("large_string").to_numpy().astype(object), offsets
    is_category = name in (columns.categorical or ())
    if is_list(elements.type):
        return _channels_of(reader, elements, name, offsets, is_category=is_category), offsets
    if is_category and types.is_floating(elements.type):
        raise reader.category_error(column, name)
    return numbers_of(elements)[:, None], offsets


def _channels_of(
    reader: Reader, elements: Any, name: str, offsets: Integers, *, is_category: bool
) -> Values:
    """Return the channels of elements that are lists of numbers, or sets of categories."""
    types = arrow_types()
    kind = elements.type.value_type
    if is_category and (types.is_integer(kind) or types.is_null(kind)):
        return _multi_hot(reader, elements, name, offsets)
    widths, entries = explode(elements)
    if len(widths) == 0:
        # All sequences are empty, so the number of channels is unknown.
        return np.zeros((0, 0), dtype=np.float32)
    fix = "correct the row, or remove it"
    if (widths != widths[0]).any():
        odd = int((widths != widths[0]).argmax())
        got = count_of(widths[odd], "channel")
        after = f", after {count_of(widths[0], 'channel')}"
        rule = "the same number of channels in all steps"
        raise reader.entry_error(got, odd, name, rule, fix, offsets, after)
    if widths[0] == 0:
        fix = "write the empty sequence as an empty list"
        rule = "at least one channel per step"
        raise reader.entry_error("no channel", 0, name, rule, fix, offsets)
    if entries.null_count:
        element, channel = divmod(first_null(entries), int(widths[0]))
        row, step = place_of(offsets, element)
        got = f"a null in {reader.row(row)}, step {step}, channel {channel}, column {quote(name)}"
        fix = f"fill it, or write NaN and {how_to_fill()}"
        raise reader.error(got, "elements that are not null", fix)
    return numbers_of(entries).reshape(len(widths), int(widths[0]))


def _multi_hot(reader: Reader, elements: Any, name: str, offsets: Integers) -> Values:
    """Return sets of whole numbers as ``(N, SET_SIZE)`` float32: 1 for each number of a set."""
    widths, entries = explode(elements)
    odd = _not_in_set(elements)
    if odd is not None:
        rule = f"sets of different whole numbers from 0 to {SET_SIZE - 1}"
        fix = "correct the row, or remove it"
        raise reader.entry_error(quote(elements[odd].as_py()), odd, name, rule, fix, offsets)
    block = np.zeros((len(widths), SET_SIZE), dtype=np.float32)
    block[np.repeat(np.arange(len(widths)), widths), entries.cast("int64").to_numpy()] = 1
    return block


def _split_texts(
    reader: Reader, column: Any, name: str, split: str | None
) -> tuple[Entries, Integers]:
    """Split texts into tokens, by default at white space."""
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    texts = as_texts(column)
    if split not in (None, "words"):
        tokens, counts = split_texts(words_of(reader, column, name).tolist(), split)
        return tokens, offsets_of(counts)
    try:
        lengths, elements = explode(compute.utf8_split_whitespace(texts))
        words = as_numpy(elements)
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise not_utf8(reader, texts, name, None) from error
    # Arrow makes an empty token of white space at an end.
    kept = words != ""
    return words[kept], np.concatenate([[0], np.cumsum(kept)])[offsets_of(lengths)]


def are_sets(column: Any) -> bool:
    """Return True for lists of sets of whole numbers: their sizes differ, and no set has a number
    twice.
    """
    if not is_list(column.type) or not is_list(column.type.value_type) or column.null_count:
        return False
    _, elements = explode(column)
    if not arrow_types().is_integer(elements.type.value_type) or elements.null_count:
        return False
    widths, _ = explode(elements)
    return len(widths) > 0 and bool((widths != widths[0]).any()) and _not_in_set(elements) is None


def _not_in_set(elements: Any) -> int | None:
    """Return the first element that is no set of numbers below ``SET_SIZE``, or None."""
    widths, entries = explode(elements)
    owners = np.repeat(np.arange(len(widths)), widths)
    numbers = entries.cast("int64", safe=False).fill_null(-1).to_numpy()
    wrong = (numbers < 0) | (numbers >= SET_SIZE)
    _, places = np.unique(owners * SET_SIZE + numbers, return_index=True)
    wrong |= ~np.isin(np.arange(len(numbers)), places)
    return int(owners[wrong.argmax()]) if wrong.any() else None
