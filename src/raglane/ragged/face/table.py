"""The table of the torch functions that accept a Ragged, by kind.

A Ragged means what a tensor ``(B, *, F...)`` would mean in which only real elements exist: dim 0
are the sequences, dim 1 the steps, the rest features, and without ``dim`` a function reads all real
values. Losses mean what they mean for the flat rows. ``Ragged.__torch_function__``, the methods of
Ragged, the page docs/operations.md and the tests read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raglane.ragged.face import along, elements, indexing, joins, losses, reductions
from raglane.ragged.face.entry import Entry, Row
from raglane.ragged.face.refusals import refusal

ROWS: dict[str, Row] = (
    elements.ROWS | reductions.ROWS | along.ROWS | joins.ROWS | indexing.ROWS | losses.ROWS
)
_HOMES = (torch.nn.functional, torch, Tensor, torch.special, torch._C._nn)


_DTYPES = {
    name: getattr(torch, dtype)
    for name, dtype in (
        ("float", "float32"),
        ("double", "float64"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("long", "int64"),
        ("int", "int32"),
        ("short", "int16"),
        ("char", "int8"),
        ("byte", "uint8"),
        ("bool", "bool"),
    )
}


def _table() -> dict[Callable[..., Any], Entry]:
    """Return the entry of each torch function, in all modules of torch that contain it."""
    table: dict[Callable[..., Any], Entry] = {}
    for name, row in ROWS.items():
        # Outside of torch.nn.functional, losses have other parameters.
        homes = _HOMES[:1] if row.kind == "loss" else _HOMES
        homes = (torch.linalg,) if name == "vector_norm" else homes
        for home in homes:
            function = getattr(home, name, None)
            if callable(function):
                table[function] = row.entry(name, function)
    return table


TABLE = _table()


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with a Ragged among its arguments."""
    entry = TABLE.get(function)
    if entry is None:
        raise refusal(getattr(function, "__name__", str(function)))
    return entry.run(entry, args, kwargs)


def methods() -> dict[str, Callable[..., Any]]:
    """Return the methods of torch.Tensor in the table."""
    names = [name for name in ROWS if not name.startswith("__")]
    found = {name: TABLE.get(getattr(Tensor, name, None)) for name in names}
    of_table = {name: _method(entry) for name, entry in found.items() if entry is not None}
    return of_table | {name: _converter(name, dtype) for name, dtype in _DTYPES.items()}


def _converter(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the method of a dtype, such as ``float``."""

    def method(self: Any) -> Any:
        return self.to(dtype)

    method.__name__ = name
    method.__doc__ = f"Return the batch with values of {dtype}."
    return method


def _method(entry: Entry) -> Callable[..., Any]:
    run: Any = entry.run
    if entry.has("empty"):

        def method(self: Any, *args: Any, empty: float | None = None, **kwargs: Any) -> Any:
            return run(entry, (self, *args), kwargs, empty)

    else:

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(entry, (self, *args), kwargs)

    method.__name__ = entry.name
    method.__doc__ = f"See :meth:`torch.Tensor.{entry.name}`; dim 1 are the steps."
    return method
