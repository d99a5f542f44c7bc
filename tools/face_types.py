"""Write ``raglane/ragged/typed.pyi``, the methods of a Ragged as type checkers see them.

    python tools/face_types.py

To checkers a Ragged is a Tensor, so that it is an argument of any function of torch. The file has
the methods that return a batch in place of a tensor: their signatures are those of torch's stubs,
their names those of the table of functions.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from raglane.ragged.face import table

STUB = Path(__file__).parents[1] / "src/raglane/ragged/typed.pyi"

_HEAD = '''\
"""The base of a Ragged to type checkers. Written by tools/face_types.py, from torch's stubs."""

# mypy: disable-error-code="override, overload-overlap"

from builtins import bool as _bool, complex as _complex, float as _float, int as _int
from collections.abc import Sequence
from typing import Any, Literal, Self, overload

import torch
from torch import Generator, SymInt, Tensor, dtype as _dtype, memory_format
from torch.types import Number, _size

class Face(Tensor):
    def norm(self, p: Any = "fro", dim: Any = None, keepdim: _bool = False, *, dtype: _dtype | None = None) -> Any: ...
    def __neg__(self) -> Self: ...
    def __abs__(self) -> Self: ...
    def __invert__(self) -> Self: ...
    def __matmul__(self, other: Any) -> Self: ...
    def __rmatmul__(self, other: Any) -> Self: ...
'''
# Functions along a dimension whose result always has steps.
_KEEPS_STEPS = frozenset(
    """softmax log_softmax cumsum cumprod logcumsumexp argsort diff flip roll""".split()
)
# As for a batch with features; its -1 are the steps of one without.
_FEATURES = "Literal[-3, -2, -1, 2, 3, 4]"


def stub() -> str:
    """Return the text of the file."""
    typed = ast.parse((Path(torch.__file__).parent / "_C/__init__.pyi").read_text())
    base = next(
        part for part in typed.body if isinstance(part, ast.ClassDef) and part.name == "TensorBase"
    )
    methods: dict[str, list[ast.FunctionDef]] = {}
    for part in base.body:
        if isinstance(part, ast.FunctionDef):
            methods.setdefault(part.name, []).append(part)
    lines = [_HEAD]
    for name in [*table.methods(), *table.OPERATORS]:
        if f"def {name}(" not in _HEAD and name in methods:
            lines += _method(name, methods[name])
    return "".join(lines)


def _method(name: str, methods: list[ast.FunctionDef]) -> list[str]:
    """Return the lines of a method; none if torch's are right."""
    row = table.ROWS.get(name)
    kind = "each element" if row is None else row.kind
    signatures = []
    for method in methods:
        result = ast.unparse(method.returns) if method.returns else "Any"
        if kind in ("each element", "features") or name in _KEEPS_STEPS:
            result = result.replace("Tensor", "Self")
        elif kind == "join":
            result = result.replace("Tensor", "Any" if name == "unbind" else "Self")
        arguments = ast.unparse(method.args)
        if kind == "reduction" and "dim: _int" in arguments and result == "Tensor":
            has_empty = row is not None and "empty" in row.flags.split()
            keyword = (
                ", empty: _float | None=None"
                if "*," in arguments
                else ", *, empty: _float | None=None"
            )
            arguments += keyword * has_empty
            first, _, rest = arguments.partition("dim: ")
            others = rest.partition(",")
            of_features = (f"{first}dim: {_FEATURES}{others[1]}{others[2]}", "Self")
            if of_features not in signatures:
                signatures.append(of_features)
        signatures.append((arguments, result))
    if all(
        result == ast.unparse(method.returns or ast.Constant(None))
        for (_, result), method in zip(signatures, methods, strict=False)
    ):
        return []
    several = "    @overload\n" * (len(signatures) > 1)
    return [
        f"{several}    def {name}({arguments}) -> {result}: ...\n"
        for arguments, result in signatures
    ]


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
