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
from raglane.ragged.face.entry import FunctionRow, ModuleEntry
from raglane.ragged.face.refusals import refusal

ROWS: dict[str, FunctionRow] = (
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


def _table() -> dict[Callable[..., Any], ModuleEntry]:
    """Return the entry of each torch function, in all modules of torch that contain it."""
    table: dict[Callable[..., Any], ModuleEntry] = {}
    for name, row in ROWS.items():
        # Outside of torch.nn.functional, losses have other parameters.
        homes = _HOMES[:1] if row.kind == "loss" else _HOMES
        module, _, function_name = name.rpartition(".")
        homes = (getattr(torch, module),) if module else homes
        for home in homes:
            function = getattr(home, function_name, None)
            if callable(function):
                table[function] = ModuleEntry(name, row, function)
    return table


TABLE = _table()
OPERATORS = {
    name: TABLE[getattr(Tensor, name)]
    for name in ROWS
    if name[:2] == "__" and hasattr(Tensor, name)
}


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with a Ragged among its arguments."""
    name = ""
    if torch.compiler.is_compiling():
        # Not by the function: torch.compile builds those of operators anew.
        name = getattr(function, "__name__", "")
    entry = OPERATORS[name] if name in OPERATORS else TABLE.get(function)
    if entry is None:
        raise refusal(getattr(function, "__name__", str(function)))
    return entry.run(entry, args, kwargs)


def _of_methods() -> dict[str, ModuleEntry]:
    """Return the entries of the methods of torch.Tensor."""
    names = [name for name in ROWS if not name.startswith("__")]
    functions = {name: getattr(Tensor, name) for name in names if hasattr(Tensor, name)}
    return {name: TABLE[function] for name, function in functions.items() if function in TABLE}


METHODS = _of_methods()


def methods() -> dict[str, Callable[..., Any]]:
    """Return the methods of torch.Tensor in the table, and those of dtypes."""
    of_table = {name: _method(name) for name in METHODS}
    return of_table | {name: _converter(name) for name in _DTYPES}


def _converter(name: str) -> Callable[..., Any]:
    """Return the method of a dtype, such as ``float``."""

    def method(self: Any) -> Any:
        return self.to(_DTYPES[name])

    method.__name__ = name
    method.__doc__ = f"Return the batch with values of {_DTYPES[name]}."
    return method


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The table is read in the call, because torch.compile does not trace closures of entries.
        entry = METHODS[name]
        return entry.run(entry, (self, *args), kwargs)

    def with_empty(self: Any, *args: Any, empty: float | None = None, **kwargs: Any) -> Any:
        entry: Any = METHODS[name]
        return entry.run(entry, (self, *args), kwargs, empty)

    chosen = with_empty if METHODS[name].has("empty") else method
    chosen.__name__ = name
    # Tracebacks, and the messages of streams, which read them, name the method.
    chosen.__code__ = chosen.__code__.replace(co_name=name, co_qualname=f"Ragged.{name}")
    chosen.__doc__ = f"See :meth:`torch.Tensor.{name}`; dim 1 are the steps."
    return chosen
