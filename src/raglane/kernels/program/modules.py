"""Users' modules in the graphs of ``torch.compile``: a graph holds a name, and the tensors of the module go in.

A name stands for one module for as long as that lives, and never for another one. It means nothing in another process,
and nothing to a copy: a copy is another module, which is compiled by itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raglane._utils.messages import message
from raglane._utils.tracing import constant_when_traced
from raglane.cells.module import ModuleCell
from raglane.errors import DispatchError
from raglane.kernels.contract import Request
from raglane.kernels.program.steps import ready, step_of
from raglane.programs.graph import Refused
from raglane.programs.weights import replaced


class Named(NamedTuple):
    """A module as a graph holds it."""

    name: str
    tensors: list[Tensor]


class _Known(NamedTuple):
    """What a name stands for; ``names`` are those of the tensors that a graph gives the module."""

    module: weakref.ref[nn.Module]
    cell: ModuleCell
    names: tuple[str, ...]


# The compiler of torch 2.11 gives no module to a function that it calls while it traces, but it does give the id.
_announced: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_known: dict[str, _Known] = {}
_numbers = itertools.count(1)


def announce(modules: Iterable[nn.Module]) -> None:
    """Have graphs find modules."""
    for module in modules:
        _announced[id(module)] = module


def named(request: Request) -> tuple[Request, str]:
    """A request of users' modules as a graph holds it; to be called while ``torch.compile`` traces."""
    cell: Any = request.cell
    facts = cell.output_size, cell.is_tuple, cell.state_sizes(0)
    found = []
    for module in request.weights:
        own = [*module.named_parameters(), *module.named_buffers()]
        # ``id`` makes the graph one for this module alone.
        names = tuple([name for name, _ in own])
        answer = _name_of(id(module), module.input_size, facts, request.values.dtype, names)
        if not answer[0]:
            return request, answer[1]
        found.append(Named(answer[0], [part for _, part in own]))
    return replace(request, weights=tuple(found)), ""


@constant_when_traced
def _name_of(
    address: int, width: int, facts: tuple[int, bool, tuple[int, ...]], dtype: torch.dtype, names: tuple[str, ...]
) -> tuple[str, str]:
    """The name of a module, and nothing; or nothing, and the reason."""
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
    for name, own in list(_known.items()):
        if own.module() is module and own.names == names and _facts(own.cell) == facts:
            return name, ""
    # The size of the output is in it: a compiler finds what it keeps on disk by the text of a graph.
    name = f"{cell.name} {next(_numbers)}, output {output}"
    _known[name] = _Known(weakref.ref(module, lambda _: _known.pop(name, None)), cell, names)
    return name, ""


def _facts(cell: ModuleCell) -> tuple[int, bool, tuple[int, ...]]:
    return cell.output_size, cell.is_tuple, cell.state_sizes(0)


def _unsuited(cell: ModuleCell, module: nn.Module, width: int, sizes: tuple[int, ...], dtype: torch.dtype) -> str:
    """Why an operator must not run a step: it takes the step again for gradients, and only what goes in has one."""
    try:
        step = step_of(cell, module, width, sizes, dtype)
        trace = ready(step).trace
    except Refused as refused:
        return refused.reason
    if not trace.prepares and hasattr(module, "prepare"):
        return "what it prepares cannot become a part of its program"
    if trace.reads_itself:
        return "it reaches a parameter by another way than its module"
    given = {id(part) for part in _tensors(module).values()}
    if any(part.requires_grad and id(part) not in given for part in step.leaves):
        return "a tensor that has a gradient is neither a parameter nor a buffer"
    return ""


def cell_of(name: str) -> ModuleCell:
    """The equations that a name stands for."""
    return _find(name).cell


def weights_of(name: str, tensors: list[Tensor], width: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The module that a name stands for, as it is now, with other parameters and buffers."""
    own = _find(name)
    module = own.module()
    there = {} if module is None else _tensors(module)
    if tuple(there) != own.names or len(tensors) != len(own.names):
        got, rule = (
            f"{name!r} with {', '.join(there)}",
            f"a cell with the tensors with which it was compiled, {', '.join(own.names)}",
        )
        raise DispatchError(message("cell", got, rule, "call torch.compiler.reset()"))
    given = {id(part): other for part, other in zip(there.values(), tensors, strict=True)}
    weights = replaced(module, lambda part: given.get(id(part), part))
    reason = _unsuited(own.cell, weights, width, sizes, dtype)
    if reason:
        got, rule = f"{name!r}, a changed cell", f"unchanged since it was compiled ({reason})"
        raise DispatchError(message("cell", got, rule, "call torch.compiler.reset()"))
    return weights


def _find(name: str) -> _Known:
    if name not in _known:
        rule = "a compiled layer that is alive, in the process that compiled it"
        raise DispatchError(message("cell", repr(name), rule, "keep the layer; in another process compile it again"))
    return _known[name]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, each once."""
    return dict([*module.named_parameters(), *module.named_buffers()])
