"""The sequences of an Arrow column: lists of numbers, of lists of numbers, of strings, or texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.arrow import (
    Reader,
    arrow_types,
    explode,
    is_list,
    is_sequence,
    is_text,
    not_utf8,
    numbers_of,
    words_of,
)
from raglane.data.formats.base import columns_argument, takes_tokens
from raglane.data.missing import how_to_fill
from raglane.data.records import Columns, offsets_of, place_of
from raglane.data.splitting import split_texts
from raglane.errors import count_of, quote, require

__all__ = ["is_whole", "sequences_of"]


def is_whole(kind: Any) -> bool:
    """Whether a type holds whole numbers, which can be tokens."""
    return bool(arrow_types().is_integer(kind))


def sequences_of(
    reader: Reader, column: Any, name: str, columns: Columns
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The flat values of a sequence column, and their offsets."""
    reader.refuse_nulls(column, name, "sequence")
    if is_text(column.type):
        return _split_texts(reader, column, name, columns.split)
    if not is_sequence(column.type):
        rule = "lists of numbers, lists of lists of numbers, lists of strings, or texts"
        raise reader.error(
            f"{column.type} in column {quote(name)}", rule, f"name another with {columns_argument('sequence')}"
        )
    lengths, elements = explode(column)
    offsets = offsets_of(lengths)
    reader.refuse_inner_nulls(elements, offsets, name)
    if is_text(elements.type):
        return words_of(reader, elements, name, offsets), offsets
    if is_whole(elements.type) and takes_tokens(columns, name)[0]:
        return elements.cast("large_string").to_numpy().astype(object), offsets
    if not is_list(elements.type):
        return numbers_of(elements)[:, None], offsets
    widths, entries = explode(elements)
    if len(widths) == 0:
        # Sequences of length 0 alone: how many channels they have does not show, and a model need not be told.
        return np.zeros((0, 0), dtype=np.float32), offsets
    if (widths != widths[0]).any():
        odd = int((widths != widths[0]).argmax())
        row, step = place_of(offsets, odd)
        got = f"{count_of(widths[odd], 'channel')} in {reader.row(row)}, step {step}, column {quote(name)}"
        got += f", after {count_of(widths[0], 'channel')}"
        raise reader.error(got, "all steps have the same channels", "correct the row, or remove it")
    if widths[0] == 0:
        row, step = place_of(offsets, 0)
        got = f"no channel in {reader.row(row)}, step {step}, column {quote(name)}"
        raise reader.error(got, "a step has at least one channel", "write the empty sequence as an empty list")
    if entries.null_count:
        # The place of an entry is that of its step.
        first = int(entries.is_null().to_numpy().argmax())
        row, step = place_of(offsets, first // int(widths[0]))
        got = f"a null in {reader.row(row)}, step {step}, channel {first % int(widths[0])}, column {quote(name)}"
        fix = f"fill it, or write NaN and {how_to_fill()}"
        raise reader.error(got, "the elements of a sequence are not null", fix)
    return numbers_of(entries).reshape(len(widths), int(widths[0])), offsets


def _split_texts(
    reader: Reader, column: Any, name: str, split: str | None
) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.int64]]:
    """Cut texts into tokens, by default at white space: there a text of white space alone has none."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    texts = compute.cast(column, "large_string")
    if split not in (None, "words"):
        cut, counts = split_texts(words_of(reader, column, name).tolist(), split)
        return cut, offsets_of(counts)
    try:
        lengths, tokens = explode(compute.utf8_split_whitespace(texts))
        words = tokens.to_numpy().astype(object)
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise not_utf8(reader, texts, name, None) from error
    # White space at an end leaves an empty token there.
    kept = words != ""
    before = np.concatenate([[0], np.cumsum(kept)])
    return words[kept], before[offsets_of(lengths)]
