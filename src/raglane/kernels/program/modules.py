"""Cells in the graphs of ``torch.compile`` and ``torch.export``.

A graph contains a user's module by a name, and its tensors as inputs. A name belongs to one module
during its lifetime, and to no other; it is not valid in another process. A copy of a module is
another module, and is compiled separately.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raglane._utils.tracing import constant_when_traced
from raglane.cells.module import ModuleCell
from raglane.errors import DispatchError
from raglane.kernels.contract import Request
from raglane.kernels.program.backend import ready, step_of
from raglane.programs.graph import Refused
from raglane.programs.step import replaced


class Named(NamedTuple):
    """A module in a graph."""

    name: str
    tensors: list[Tensor]


class _Registered(NamedTuple):
    """A module with a name; ``names`` are those of the tensors that a graph passes for it."""

    module: weakref.ref[nn.Module]
    cell: ModuleCell
    names: tuple[str, ...]


# The compiler of torch 2.11 passes no modules to a function that it calls while it traces, only
# their ids.
_announced: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_registered: dict[str, _Registered] = {}
_numbers = itertools.count(1)


def announce(modules: Iterable[nn.Module]) -> None:
    """Make modules available to graphs."""
    for module in modules:
        _announced[id(module)] = module


def named(request: Request) -> tuple[Request, str]:
    """Replace a request's modules by names while ``torch.compile`` traces; or return why not."""
    cell: Any = request.cell
    facts = cell.facts[1:]
    weights = []
    for module in request.weights:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        names = tuple([name for name, _ in tensors])
        # ``id`` restricts the graph to this module.
        name, reason = _name_of(id(module), module.input_size, facts, request.values.dtype, names)
        if reason:
            return request, reason
        weights.append(Named(name, [tensor for _, tensor in tensors]))
    return replace(request, weights=tuple(weights)), ""


@constant_when_traced
def _name_of(
    address: int,
    width: int,
    facts: tuple[int, bool, tuple[int, ...]],
    dtype: torch.dtype,
    names: tuple[str, ...],
) -> tuple[str, str]:
    """Return the name of a module and an empty reason, or an empty name and the reason."""
    module = _announced.get(address)
    if module is None:
        return "", "it is none of the modules that its layer was built with"
    output, is_tuple, sizes = facts
    cell = ModuleCell(module, output_size=output, state_sizes=sizes, is_tuple=is_tuple)
    reason = _unsuited(cell, module, width, sizes, dtype)
    if not reason and names != tuple(_tensors(module)):
        reason = "its parameters are not its own"
    if reason:
        return "", reason
    for name, entry in list(_registered.items()):
        if entry.module() is module and entry.names == names and entry.cell.facts[1:] == facts:
            return name, ""
    # With the size of the output, because a compiler's cache on disk has the text of a graph as its
    # key.
    name = f"{cell.name} {next(_numbers)}, output {output}"
    _registered[name] = _Registered(
        weakref.ref(module, lambda _: _registered.pop(name, None)), cell, names
    )
    return name, ""


def _unsuited(
    cell: ModuleCell, module: nn.Module, width: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> str:
    """Return why an operator, whose inputs alone have gradients, must not run a step."""
    try:
        step = step_of(cell, module, width, sizes, dtype)
        trace = ready(step).trace
    except Refused as refused:
        return refused.reason
    if not trace.prepares and hasattr(module, "prepare"):
        return "its prepare cannot become a part of its program"
    if trace.reads_itself:
        return "it reaches a parameter by another way than its module"
    inputs = {id(tensor) for tensor in _tensors(module).values()}
    if any(leaf.requires_grad and id(leaf) not in inputs for leaf in step.leaves):
        return "a tensor that has a gradient is neither a parameter nor a buffer"
    return ""


def cell_of(name: str) -> ModuleCell:
    """Return the cell of a named module."""
    return _find(name).cell


def weights_of(
    name: str, tensors: list[Tensor], width: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """Return a named module in its present state, with other parameters and buffers."""
    entry = _find(name)
    module = entry.module()
    present = {} if module is None else _tensors(module)
    fix = "call torch.compiler.reset()"
    if tuple(present) != entry.names or len(tensors) != len(entry.names):
        rule = f"a module with the tensors that it was compiled with, {', '.join(entry.names)}"
        raise DispatchError("cell", f"{name!r} with {', '.join(present)}", rule, fix)
    swapped = {id(tensor): other for tensor, other in zip(present.values(), tensors, strict=True)}
    weights = replaced(module, lambda tensor: swapped.get(id(tensor), tensor))
    reason = _unsuited(entry.cell, weights, width, sizes, dtype)
    if reason:
        rule = f"a module that a graph can contain, but {reason}"
        raise DispatchError("cell", f"{name!r}, changed since it was compiled", rule, fix)
    return weights


def _find(name: str) -> _Registered:
    if name not in _registered:
        rule = "a layer that is alive, in the process that compiled it"
        fix = "keep it, or compile it in this process"
        raise DispatchError("cell", repr(name), rule, fix)
    return _registered[name]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, each once."""
    return dict([*module.named_parameters(), *module.named_buffers()])
