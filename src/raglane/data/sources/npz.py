"""NumPy's ``.npz``: named arrays, of which each becomes a column of a table, as in Parquet.

An array ``(sequences, steps)`` or ``(sequences, steps, channels)`` has sequences of one length, and
an array of one dimension an entry per sequence. With an array ``offsets`` (or ``lengths``),
sequences have different lengths: arrays with a row per element, ``(N,)`` or ``(N, channels)``,
become lists of these lengths. Arrays of objects are refused, because reading them can run code.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.sources.files import data_error, read_bytes
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.typed.arrays import Array
from raglane.data.typed.arrow import lists, lists_of


def table(path: Path) -> SourceTable:
    """Return the arrays of a file, with a row per sequence."""
    arrays = arrays_of(path)
    name = "offsets" if "offsets" in arrays else "lengths"
    offsets = given = arrays.pop(name, None)
    if given is not None:
        is_whole = given.ndim == 1 and given.dtype.kind in "iu"
        offsets = (
            np.append(0, given.cumsum(dtype=np.int64)) if name == "lengths" and is_whole else given
        )
        if (
            not is_whole
            or len(offsets) < 2
            or offsets[0] != 0
            or (offsets[1:] < offsets[:-1]).any()
        ):
            got = f"{name} {quote(given)}"
            rule = "a file whose offsets begin with 0 and never fall, or with lengths"
            raise data_error(
                path,
                got,
                rule,
                "write the place where each sequence starts, and the end of the last",
            )
    columns = {}
    rows = len(next(iter(arrays.values()), ())) if offsets is None else len(offsets) - 1
    for name, array in arrays.items():
        if offsets is not None and len(array) == offsets[-1]:
            columns[name] = lists(offsets, array)
        elif len(array) == rows:
            columns[name] = lists_of(array)
        else:
            total = "" if offsets is None else f" of {offsets[-1]:,} elements in all"
            got = f"an array {quote(name)} of shape {array.shape}, with {rows:,} sequences{total}"
            rule = "a file whose arrays have a row per sequence, or per element with the array offsets or lengths"
            raise data_error(
                path, got, rule, "correct the lengths, or save other arrays in another file"
            )
    return whole_table(path, require("pyarrow", "data").table(columns))


def arrays_of(path: Path) -> dict[str, Array]:
    """Return the arrays of a file by name."""
    if not (content := read_bytes(path)).startswith(
        b"PK"
    ):  # NumPy would read it as .npy, or advise to allow pickle
        fix = "write it with numpy.savez, or pass its format"
        raise data_error(path, "no zip archive", "a file of numpy.savez", fix)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            found = dict(file)
    # RuntimeError: encryption, and methods of compression that zipfile lacks.
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        got = f"no readable arrays ({' '.join(str(error).split()).rstrip('.')})"
        raise data_error(
            path, got, "a file of numpy.savez, without objects", "write it again"
        ) from error
    # Arrow has only the byte order of the machine, and no long double.
    kinds = {
        name: "d" if array.dtype.char == "g" else array.dtype.newbyteorder("=")
        for name, array in found.items()
    }
    arrays = {name: array.astype(kinds[name], copy=False) for name, array in found.items()}
    rule = "a file of arrays of numbers or texts, with a row per sequence"
    if not arrays:
        raise data_error(path, "no array", rule, "save one with numpy.savez")
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biufUS":
            got = f"an array {quote(name)} of {array.dtype} and shape {array.shape}"
            raise data_error(path, got, rule, "leave it out")
    return arrays


def array_of(path: Path) -> Array:
    """Return the array of a ``.npy`` file."""
    try:
        array: Array = np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        got = f"no readable array ({' '.join(str(error).split()).rstrip('.')})"
        rule = "a file of numpy.save, without objects"
        raise data_error(path, got, rule, "write it again") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)
