"""Types of Arrow columns, and the elements of lists."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from raglane._utils.messages import require
from raglane.data.typed.arrays import Array, Integers

_is_bytes = re.compile(r"(dictionary<values=)?(large_|fixed_size_)?binary(_view)?\b").match


def arrow_types() -> Any:
    """Return the module ``pyarrow.types``."""
    return require("pyarrow.types", "data")


# Rows whose conversion takes longer than to import pandas.
_MANY = 1 << 18


def as_numpy(values: Any) -> Array:
    """Return an Arrow array as one of NumPy, texts as objects.

    Arrow's ``to_numpy`` imports pandas, which takes a quarter of a second.
    """
    if values.null_count or len(values) > _MANY or "pandas" in sys.modules:
        return np.asarray(values.to_numpy(zero_copy_only=False))
    if is_text(values.type):
        texts = np.empty(len(values), dtype=object)
        texts[:] = values.to_pylist()
        return texts
    return np.from_dlpack(getattr(values, "combine_chunks", lambda: values)())


def is_list(kind: Any) -> bool:
    """Return True for a type of lists."""
    types = arrow_types()
    tests = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Return True for a type of texts, which may be a dictionary of them."""
    types = arrow_types()
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    """Return True for a type of numbers or booleans."""
    types = arrow_types()
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
    )


def is_sequence(kind: Any) -> bool:
    """Return True for a type of lists of numbers, texts, nulls, or lists of numbers or nulls."""
    if not is_list(kind):
        return False
    inner = kind.value_type
    if is_list(inner):
        return is_number(inner.value_type) or bool(arrow_types().is_null(inner.value_type))
    return is_number(inner) or is_text(inner) or bool(arrow_types().is_null(inner))


def is_label(kind: Any) -> bool:
    """Return True for a type of classes: texts, integers or booleans."""
    return is_id(kind) or bool(arrow_types().is_boolean(kind))


def is_id(kind: Any) -> bool:
    """Return True for a type of ids: texts or integers."""
    return bool(is_text(kind) or arrow_types().is_integer(kind))


def is_bytes(kind: Any) -> bool:
    """Return True for a type of bytes, which are no text."""
    return _is_bytes(str(kind)) is not None


def as_texts(column: Any) -> Any:
    """Cast texts, integers or booleans to large strings."""
    if arrow_types().is_dictionary(column.type):
        # Arrow cannot look up string views, which Polars writes.
        column = column.cast(
            require("pyarrow", "data").dictionary(column.type.index_type, "large_string")
        )
    return column.cast("large_string")


def explode(column: Any) -> tuple[Integers, Any]:
    """Return the length of each list, ``(B,)``, and the elements of all lists as a chunked
    array.
    """
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    lengths = as_numpy(compute.list_value_length(column)).astype(np.int64)
    return lengths, arrow.chunked_array(
        [chunk.flatten() for chunk in column.chunks], type=column.type.value_type
    )


def lists(offsets: Array, array: Array) -> Any:
    """Return a column of lists: the rows of an array between offsets."""
    return _lists(offsets, lists_of(array))


def lists_of(array: Array) -> Any:
    """Return an array as an Arrow column, in nested lists for each further dimension."""
    if array.ndim == 1:
        return require("pyarrow", "data").array(
            array.tolist() if array.dtype.kind in "US" else array
        )
    count, width = array.shape[:2]
    return _lists(
        np.arange(count + 1) * width, lists_of(array.reshape(count * width, *array.shape[2:]))
    )


def _lists(offsets: Array, values: Any) -> Any:
    arrow = require("pyarrow", "data")
    return arrow.LargeListArray.from_arrays(arrow.array(offsets.astype(np.int64)), values)
