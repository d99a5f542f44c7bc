"""Operators of torch in Python, which users and graphs can call with any tensors.

Imported only where an operator is registered, because that is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.tracing import records_operators
from raglane.errors import ShapeError


def operator(
    name: str, shapes: Callable[..., Any], schema: str | None = None
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that registers a function as an operator, which reads no memory beyond its
    tensors.

    ``shapes`` returns results without numbers; see ``torch.library.register_fake``.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        full_schema = schema or torch.library.infer_schema(function, mutates_args=())
        names = [argument.name for argument in torch._C.parse_schema(f"_{full_schema}").arguments]

        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            for argument, value in zip(names, args, strict=True):
                for tensor in _tensors(value):
                    check_dense(argument, tensor)
                    check_storage(argument, tensor)
            return function(*args)

        definition = torch.library.custom_op(name, checked, mutates_args=(), schema=full_schema)
        definition.register_fake(without_memory(shapes))
        return definition

    return register


def without_memory(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of shapes that raises where its results would have memory.

    Torch calls it if any tensor is on meta; if others are not, the results would be numbers that
    were never computed.
    """

    @functools.wraps(shapes)
    def checked(*args: Any) -> Any:
        results = shapes(*args)
        is_real = not records_operators() and any(
            not tensor.is_meta for tensor in _tensors(results)
        )
        if is_real:
            rule = "all on meta, or none"
            raise ShapeError("tensors", "some on meta", rule, "move them with .to()")
        return results

    return checked


def _tensors(value: Any) -> Iterable[Tensor]:
    """Return the tensors of an argument or result: itself, or those of a list."""
    tensors = value if isinstance(value, list | tuple) else (value,)
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
