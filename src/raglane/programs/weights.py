"""The tensors that a cell's weights hold, and the same weights with other tensors in their place.

A cell of the library has a tuple of tensors, a user's has a module. All of a module that its step may read decides what
the step computes: tensors are lifted out, and everything else is part of a key.
"""

from __future__ import annotations

import abc
import enum
import functools
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from raglane.cells.module import ModuleCell
from raglane.cells.regularised import RegularisedWeights
from raglane.cells.spec import CellSpec
from raglane.programs.graph import Refused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_METHODS = ("step", "forward", "prepare")
# Values that never change, and those of them that are compared as they are written.
_CONSTANT = frozenset((type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented)))
_CONSTANT |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_WRITTEN = frozenset((float, complex, range))
_FIXED = frozenset((types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType))
_FIXED |= {types.GetSetDescriptorType, type(vars(namedtuple("Named", "field"))["field"])}
_NO_OWNER = (type(None), types.ModuleType)  # of a function written in C
_HOLDERS = frozenset((list, tuple, set, frozenset, torch.Size))
_MAPPINGS = frozenset((dict, OrderedDict, types.MappingProxyType))
# Classes in which nobody changes anything, and what no step reads in others.
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be changed
_OURS = ("torch", "raglane")
_BASES = (abc.ABC, abc.ABCMeta, enum.Enum, enum.EnumMeta, Generic)
_UNREAD = frozenset("__dict__ __weakref__ __annotations__ __orig_bases__ __parameters__ _abc_impl".split())
_UNREAD |= {"__dataclass_fields__", "__dataclass_params__", "__abstractmethods__"}
# Numbers of a buffer that are not of floating point and become a part of the key.
_LARGEST = 1 << 14


@dataclass
class Survey:
    """What is in a cell's weights."""

    key: tuple[Any, ...] = ()
    leaves: list[Tensor] = field(default_factory=list)
    elements: list[Tensor] = field(default_factory=list)
    by_identity: bool = False
    classes: list[Any] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)

    def tensor(self, part: Tensor) -> tuple[Any, ...]:
        """The key of a tensor, which becomes a leaf."""
        if self.by_identity:
            return ("tensor", id(part))
        index = self._seen.get(id(part))
        if index is not None:
            return ("leaf", index)
        kind = type(part)
        if kind is not Tensor and kind is not nn.Parameter and kind is not nn.Buffer:
            raise Refused(f"it has a {kind.__name__} among its tensors")
        if not part.is_cpu or part.layout is not torch.strided:
            raise Refused(f"it has a tensor of {part.layout} on {part.device}")
        index = self._seen[id(part)] = len(self.leaves)
        self.leaves.append(part)
        content = None
        if not part.dtype.is_floating_point:
            if part.numel() > _LARGEST or part.dtype.is_complex:
                raise Refused(f"it has {part.numel()} numbers of {part.dtype}")
            content = part.numpy().tobytes()
        # A step may read memory as it lies, such as by a view.
        return ("leaf", index, isinstance(part, nn.Parameter), tuple(part.shape), part.stride(), part.dtype, content)

    def value(self, part: Any) -> Any:
        """The key of anything that a module holds: equal where, and only where, nothing in it has changed."""
        kind = type(part)
        if kind in _CONSTANT:
            return kind, part
        if kind in _WRITTEN:
            return kind, repr(part)  # -0.0 is equal to 0.0, and a NaN to nothing
        if isinstance(part, Tensor):
            return self.tensor(part)
        if isinstance(part, nn.Module):
            return self.module(part)
        if kind in _FIXED or (kind is types.BuiltinFunctionType and isinstance(part.__self__, _NO_OWNER)):
            return part
        if isinstance(part, np.ndarray | np.generic) and kind.__module__ == "numpy" and part.dtype.kind in "biufc":
            return kind, part.shape, part.strides, part.dtype.str, part.tobytes()
        if kind in _HOLDERS:
            return kind, tuple([self.value(item) for item in part])
        if kind in _MAPPINGS:
            return kind, tuple([(self.value(name), self.value(item)) for name, item in part.items()])
        if isinstance(part, type):
            self._class(part)
            return Held(part)
        place = self._seen.get(id(part))
        if place is not None:
            return "again", place
        self._seen[id(part)] = len(self._seen)
        return self._object(part)

    def _object(self, part: Any) -> Any:
        """The key of a function, or of what else is called, and of plain objects."""
        kind = type(part)
        if kind is types.FunctionType:
            own = part.__defaults__, part.__kwdefaults__, vars(part)
            cells = tuple([self._cell(cell) for cell in part.__closure__ or ()])
            return part, part.__code__, tuple([self.value(item) for item in own]), cells
        if kind is types.MethodType:
            return kind, self.value(part.__func__), self.value(part.__self__)
        if kind is types.BuiltinFunctionType:
            return kind, part.__name__, self.value(part.__self__)
        if kind is functools.partial:
            return kind, self.value((part.func, part.args, part.keywords, vars(part)))
        if kind is property:
            return kind, self.value((part.fget, part.fset, part.fdel))
        if kind in (staticmethod, classmethod):
            return kind, self.value(part.__func__)
        if kind is types.SimpleNamespace or isinstance(part, enum.Enum) or _is_plain(kind):
            self._class(kind)
            return Held(kind), self.value(vars(part))
        if isinstance(part, tuple) and not hasattr(part, "__dict__"):  # a named one
            self._class(kind)
            return Held(kind), tuple([self.value(item) for item in part])
        raise Refused(f"it holds a {kind.__name__}, which may change where no program can see it")

    def _cell(self, cell: types.CellType) -> Any:
        """The key of what a closure holds; within an object there, as within a global, no change is seen."""
        try:
            part = cell.cell_contents
        except ValueError:
            return None
        return self.value(part) if type(part) in (*_CONSTANT, *_WRITTEN, types.FunctionType) else Held(part)

    def module(self, part: nn.Module, is_called: bool = True) -> Any:
        """The key of a module."""
        place = self._seen.get(id(part))
        if place is not None:
            return ("module", place)
        self._seen[id(part)] = len(self._seen)
        own = vars(part)
        if isinstance(part, torch.jit.ScriptModule):
            raise Refused("it has a scripted module")
        if is_called and not self.by_identity and any(own.get(name) for name in _HOOKS):
            raise Refused(f"a {type(part).__name__} inside of it has hooks")
        held = [(name, self.value(item)) for name, item in own.items() if name not in _OWN]
        tensors = [(name, self.value(item)) for kind in ("_parameters", "_buffers") for name, item in own[kind].items()]
        inner = [(name, self.value(item)) for name, item in own["_modules"].items()]
        cls = type(part)
        self._class(cls)
        code = tuple(getattr(cls, name, None) for name in _METHODS)
        return (cls, code, tuple(held), tuple(tensors), tuple(inner))

    def _class(self, cls: type) -> None:
        """What stands in a class and in those that it is made of, without torch's and Python's."""
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = len(self._seen)
        self.classes.append((cls, cls.__mro__))
        for base in (*cls.__mro__[1:], type(cls)):
            self._class(base)
        if cls.__flags__ & _MADE_BY_PYTHON and cls.__module__.partition(".")[0] not in _OURS and cls not in _BASES:
            held = [(name, item) for name, item in vars(cls).items() if name not in _UNREAD]
            self.classes += [(name, self.value(item)) for name, item in held]


class Held:
    """An object by its identity, which lives as long as the key."""

    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part

    def __hash__(self) -> int:
        return id(self.part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.part is self.part


class _Plain:
    pass


def _is_plain(kind: type) -> bool:
    """Whether instances have nothing but a dictionary; a slot beside it is found in the class."""
    same = kind.__basicsize__ == _Plain.__basicsize__ and kind.__dictoffset__ == _Plain.__dictoffset__
    return same and not kind.__itemsize__


def survey(weights: Any) -> Survey:
    """What is in a cell's weights."""
    found = Survey()
    if isinstance(weights, nn.Module):
        try:
            found.key = (found.module(weights, is_called=not hasattr(weights, "step")),)
        except RecursionError:
            raise Refused("what it holds is nested too deep, or within itself") from None
    else:
        found.key = _tuple_key(found, weights)
    return found


def _tuple_key(found: Survey, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    key: list[Any] = [type(weights)]
    for part in weights:
        if isinstance(part, tuple):
            key.append(_tuple_key(found, part))
        elif isinstance(weights, RegularisedWeights) and part is not None:
            found.elements.append(part)
            key.append(("held", part.shape[1]))
        else:
            key.append(None if part is None else found.tensor(part))
    return tuple(key)


def stand_in(made: Tensor, original: Tensor) -> Tensor:
    """A tensor in the place of another one, which a step then takes for a parameter or a buffer, too."""
    if made is not original:
        for kind, name in ((nn.Parameter, "_is_param"), (nn.Buffer, "_is_buffer")):
            if isinstance(original, kind) and not isinstance(made, kind):
                setattr(made, name, True)
    return made


def replaced(part: Any, swap: Callable[[Tensor], Tensor], known: dict[int, Any] | None = None) -> Any:
    """The same weights with other tensors; a module is another one, which shares the rest with the first."""
    known = {} if known is None else known
    if isinstance(part, Tensor):
        return stand_in(swap(part), part)
    if id(part) in known:
        return known[id(part)]
    if isinstance(part, nn.Module):
        made = known[id(part)] = type(part).__new__(type(part))
        object.__setattr__(made, "__dict__", {})
        for name, item in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(made)[name] = {key: replaced(value, swap, known) for key, value in item.items()}
            else:
                vars(made)[name] = item if name in _OWN else replaced(item, swap, known)
        return made
    if isinstance(part, tuple):
        items = [replaced(item, swap, known) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if type(part) is list:
        return [replaced(item, swap, known) for item in part]
    if type(part) is dict:
        return {name: replaced(item, swap, known) for name, item in part.items()}
    return part


def cell_key(cell: CellSpec) -> tuple[Any, ...]:
    """All that decides what a cell computes, apart from its weights."""
    if isinstance(cell, ModuleCell):
        return (ModuleCell, cell.output_size, cell.is_tuple, cell.state_sizes(0))
    held: list[Any] = [type(cell)]
    for name, part in vars(cell).items():
        held.append((name, "itself" if part is cell else cell_key(part) if isinstance(part, CellSpec) else part))
    key = tuple(held)
    try:
        hash(key)
    except TypeError:
        raise Refused("its cell holds what cannot be compared") from None
    return key
