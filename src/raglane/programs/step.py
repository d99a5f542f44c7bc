"""A cell's step with the weights of a call: the key of its program, and torch's way to run it.

The weights of a cell of the library are a tuple of tensors, those of a user's cell its module.
Everything in a module that its step may read affects the result: tensors become inputs of the
program, and all else is part of the key.
"""

from __future__ import annotations

import abc
import enum
import functools
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _disable_current_modes

from raglane.cells.module import ModuleCell
from raglane.cells.regularised import MarkedWeights
from raglane.cells.spec import CellSpec
from raglane.programs.graph import Refused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = frozenset(nn.Module().__dict__) - {"training"}
# Methods by which a step runs; those of torch's own classes may be replaced too.
_METHODS = ("step", "forward", "prepare", "__call__", "_call_impl", "__getattr__")
_MARKS = frozenset(("_is_param", "_is_buffer"))  # attributes of the tensors of :func:`stand_in`
_CONSTANT = frozenset((type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented)))
_CONSTANT |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_COMPARED_AS_TEXT = frozenset((float, complex, range))  # -0.0 equals 0.0, and a NaN equals nothing
_FIXED = frozenset(
    (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
)
_FIXED |= {types.GetSetDescriptorType, type(vars(namedtuple("Named", "field"))["field"])}
_NO_OWNER = (type(None), types.ModuleType)  # of a function written in C
_SEQUENCES = frozenset((list, tuple, set, frozenset, torch.Size))
_MAPPINGS = frozenset((dict, OrderedDict, types.MappingProxyType))
# Classes whose attributes do not change, and attributes of other classes that no step reads.
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class whose attributes can be changed
_OURS = ("torch", "raglane")
_BASES = (abc.ABC, abc.ABCMeta, enum.Enum, enum.EnumMeta, Generic)
_UNREAD = frozenset(
    "__dict__ __weakref__ __annotations__ __orig_bases__ __parameters__ _abc_impl".split()
)
_UNREAD |= {"__dataclass_fields__", "__dataclass_params__", "__abstractmethods__"}
NARROW = (torch.bfloat16, torch.float16)
"""Dtypes whose steps compute in float32."""
_ENDLESS = "its attributes are nested too deep, or contain themselves"
# The largest integer buffer whose numbers become part of the key.
_LARGEST = 1 << 14


class Step:
    """One step of a cell with certain weights, as a function of all tensors that it reads."""

    def __init__(
        self,
        cell: CellSpec,
        weights: Any,
        width: int,
        sizes: tuple[int, ...],
        output: int,
        dtype: torch.dtype,
    ) -> None:
        self.cell, self.weights = cell, weights
        self.width, self.sizes, self.output, self.dtype = width, sizes, output, dtype
        survey = Survey.of(weights)
        self.leaves, self.elements = survey.leaves, survey.elements
        # Everything that affects the result; and what may change during the process: the attributes
        # of classes, the contents of closures and the dtype of tensors that a step creates.
        self.facts = _cell_key(cell), survey.key, width, sizes, output, dtype
        self.key = (self.facts, torch.get_default_dtype(), *survey.classes)

    def converted(self, part: Tensor) -> Tensor:
        """Return a tensor in the dtype of the computation: narrow ones are widened."""
        return part.to(self.dtype) if part.dtype in NARROW else part

    @property
    def widths(self) -> list[int]:
        """The columns of the input, and of each tensor that has a row for each element."""
        return [self.width, *(part.shape[1] for part in self.elements)]

    def whole(self, prepares: bool) -> CellSpec:
        """Return a cell that takes this step, with or without the cell's own ``prepare``."""
        return self.cell if prepares else _Unprepared(self.cell)

    def on_host(self) -> Step:
        """Return this step with copies of its tensors on the CPU."""
        leaves = [part.detach().cpu().requires_grad_(part.requires_grad) for part in self.leaves]
        elements = [self.elements[0], *self.elements] if self.elements else []
        weights = self.with_tensors(leaves, [part.detach().cpu() for part in elements])
        return Step(self.cell, weights, self.width, self.sizes, self.output, self.dtype)

    def with_tensors(self, leaves: list[Tensor], elements: list[Tensor]) -> Any:
        """Return the weights with these tensors in place of their own."""
        # In a backward pass after torch.func.functional_call, a module has its own tensors again,
        # in the same places. They are found outside of a trace, which records what reads them.
        with default_modes(torch.is_grad_enabled()):
            own = Survey.of(self.weights).leaves
        swapped = {id(part): leaf for part, leaf in zip(own, leaves, strict=True)}
        swapped |= {id(part): elements[index + 1] for index, part in enumerate(self.elements)}
        return replaced(self.weights, lambda part: swapped[id(part)])

    def run(
        self,
        leaves: list[Tensor] | None,
        elements: list[Tensor],
        states: list[Tensor],
        offsets: Tensor,
        prepares: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...], bool]:
        """Run one step in torch: output, new states, and whether the module changed; without leaves
        on its own.
        """
        weights = self.weights if leaves is None else self.with_tensors(leaves, elements)
        before = _contents(weights)
        rows = self.cell.prepare(weights, elements[0], offsets) if prepares else elements[0]
        output, new = self.cell.step(weights, rows, tuple(states))
        return output, new, before != _contents(weights)


@contextmanager
def default_modes(grad: bool) -> Iterator[None]:
    """Run a block in torch's default modes, whatever the modes of the caller; ``grad`` enables
    gradients.
    """
    # Leaving the inference mode also makes autograd record what an operator of a compiled graph
    # computes. A mode of torch's functions is e.g. the one that computes row by row, and one of its
    # operators has tensors without numbers.
    no_modes, no_operators = torch._C.DisableTorchFunction(), _disable_current_modes()
    no_autocast = torch.autocast("cpu", enabled=False)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )  # e.g. of a checkpoint, which counts the tensors
    no_hooks = (
        torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
        if hooks
        else nullcontext()
    )
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        no_autocast,
        no_modes,
        no_operators,
        no_hooks,
    ):
        yield


class _Unprepared(CellSpec):
    """A cell whose input has already been prepared."""

    def __init__(self, inner: CellSpec) -> None:
        self.name, self.step = inner.name, inner.step  # type: ignore[method-assign]

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        return values

    def step(self, weights: Any, prepared: Tensor, state: Any, mask: Any = None) -> Any:
        raise NotImplementedError


def _contents(weights: Any) -> Any:
    """Return what a module contains, with tensors by their identity; None for a tuple."""
    weights = weights.inner if isinstance(weights, MarkedWeights) else weights
    if not isinstance(weights, nn.Module):
        return None
    survey = Survey(by_identity=True)
    key = survey.module(weights)
    survey.add_closures()
    return key, survey.classes


def _cell_key(cell: CellSpec) -> tuple[Any, ...]:
    """Return everything in a cell that affects its result, apart from its weights."""
    if isinstance(cell, ModuleCell):
        return cell.facts
    held: list[Any] = [type(cell)]
    for name, part in vars(cell).items():
        held.append(
            (
                name,
                "itself"
                if part is cell
                else _cell_key(part)
                if isinstance(part, CellSpec)
                else part,
            )
        )
    key = tuple(held)
    try:
        hash(key)
    except TypeError:
        raise Refused("its cell holds a value that cannot be compared") from None
    return key


# ---- the contents of weights ---------------------------------------------------------------------


@dataclass
class Survey:
    """The tensors in a cell's weights, and a key of all else in them."""

    key: tuple[Any, ...] = ()
    leaves: list[Tensor] = field(default_factory=list)
    elements: list[Tensor] = field(default_factory=list)
    by_identity: bool = False
    classes: list[Any] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)
    _closures: list[types.CellType] = field(default_factory=list)
    _is_in_closure: bool = False

    @classmethod
    def of(cls, weights: Any) -> Survey:
        """Survey a tuple of tensors or a module."""
        survey = cls()
        survey.key = (
            (survey._own(weights),) if isinstance(weights, nn.Module) else survey._tuple(weights)
        )
        if survey._closures:
            survey.add_closures()
        return survey

    def _own(self, module: nn.Module) -> Any:
        try:
            return self.module(module, is_called=not hasattr(module, "step"))
        except RecursionError:
            raise Refused(_ENDLESS) from None

    def _tuple(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        key: list[Any] = [type(weights)]
        for part in weights:
            if isinstance(part, tuple):
                key.append(self._tuple(part))
            elif isinstance(part, nn.Module):
                key.append(self._own(part))
            elif isinstance(weights, MarkedWeights) and part is not None:
                self.elements.append(part)
                key.append(("marks", part.shape[1]))
            else:
                key.append(None if part is None else self.tensor(part))
        return tuple(key)

    def tensor(self, part: Tensor) -> tuple[Any, ...]:
        """Return the key of a tensor, which becomes a leaf unless only a closure contains it."""
        index = self._seen.get(id(part))
        if index is not None:
            return ("leaf", index)
        if self.by_identity or self._is_in_closure:
            self._seen[id(part)] = len(self._seen)
            return Held(part), tuple(part.shape), part.dtype, self._attributes(part)
        kind = type(part)
        if kind is not Tensor and kind is not nn.Parameter and kind is not nn.Buffer:
            raise Refused(f"it has a {kind.__name__} among its tensors")
        if part.device.type not in ("cpu", "cuda") or part.layout is not torch.strided:
            raise Refused(f"it has a tensor of {part.layout} on {part.device}")
        index = self._seen[id(part)] = len(self.leaves)
        self.leaves.append(part)
        content = None
        if not part.dtype.is_floating_point:
            if part.numel() > _LARGEST or part.dtype.is_complex or not part.is_cpu:
                raise Refused(f"it has {part.numel()} numbers of {part.dtype} on {part.device}")
            content = part.numpy().tobytes()
        # With strides, because a step may read memory in its order, e.g. by a view.
        is_parameter = kind is nn.Parameter or isinstance(part, nn.Parameter)
        memory = tuple(part.shape), part.stride(), part.dtype, content
        return ("leaf", index, is_parameter, *memory, self._attributes(part) if vars(part) else ())

    def _attributes(self, part: Tensor) -> tuple[Any, ...]:
        """Return the key of the attributes that were set on a tensor."""
        attributes = [(name, item) for name, item in vars(part).items() if name not in _MARKS]
        return tuple([(name, self.value(item)) for name, item in attributes])

    def value(self, part: Any) -> Any:
        """Return the key of anything in a module: two keys are equal if and only if nothing in it
        has changed.
        """
        kind = type(part)
        if kind in _CONSTANT:
            return kind, part
        if kind in _COMPARED_AS_TEXT:
            return kind, repr(part)
        if isinstance(part, Tensor):
            return self.tensor(part)
        if isinstance(part, nn.Module):
            return self.module(part)
        if kind in _FIXED or (
            kind is types.BuiltinFunctionType and isinstance(part.__self__, _NO_OWNER)
        ):
            return part
        if (
            isinstance(part, np.ndarray | np.generic)
            and kind.__module__ == "numpy"
            and part.dtype.kind in "biufc"
        ):
            return kind, part.shape, part.strides, part.dtype.str, part.tobytes()
        if kind in _SEQUENCES:
            return kind, tuple([self.value(item) for item in part])
        if kind in _MAPPINGS:
            return kind, tuple(
                [(self.value(name), self.value(item)) for name, item in part.items()]
            )
        if isinstance(part, type):
            self._class(part)
            return Held(part)
        place = self._seen.get(id(part))
        if place is not None:
            return "again", place
        self._seen[id(part)] = len(self._seen)
        return self._object(part)

    def _object(self, part: Any) -> Any:
        """Return the key of a function or another callable, or of a plain object."""
        kind = type(part)
        if kind is types.FunctionType:
            own = part.__defaults__, part.__kwdefaults__, vars(part)
            self._closures += part.__closure__ or ()
            return part, part.__code__, tuple([self.value(item) for item in own])
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
        if isinstance(part, tuple) and not hasattr(part, "__dict__"):  # a named tuple
            self._class(kind)
            return Held(kind), tuple([self.value(item) for item in part])
        raise Refused(f"it holds a {kind.__name__}, which may change where no program can see it")

    def add_closures(self) -> None:
        """Add the contents of the closures of all functions.

        They come last: a tensor or module in a closure is a leaf only if the module contains it too.
        """
        self._is_in_closure = True
        try:
            for cell in self._closures:  # which grows while functions in closures are visited
                self.classes.append(self._cell(cell))
        except RecursionError:
            raise Refused(_ENDLESS) from None

    def _cell(self, cell: types.CellType) -> Any:
        """Return the key of a closure's variable; a Python module there is read as a global is."""
        try:
            part = cell.cell_contents
        except ValueError:
            return None
        return Held(part) if isinstance(part, types.ModuleType) else self.value(part)

    def module(self, part: nn.Module, is_called: bool = True) -> Any:
        """Return the key of a module."""
        place = self._seen.get(id(part))
        if place is not None:
            return ("module", place)
        self._seen[id(part)] = len(self._seen)
        own = vars(part)
        if isinstance(part, torch.jit.ScriptModule):
            raise Refused("it has a scripted module")
        has_hooks = _has_any_global_hook() or any(own.get(name) for name in _HOOKS)
        if is_called and not self.by_identity and has_hooks:
            raise Refused(f"a {type(part).__name__} inside of it has hooks")
        held = [(name, self.value(item)) for name, item in own.items() if name not in _OWN]
        tensors = [
            (name, self.value(item))
            for kind in ("_parameters", "_buffers")
            for name, item in own[kind].items()
        ]
        inner = [(name, self.value(item)) for name, item in own["_modules"].items()]
        cls = type(part)
        self._class(cls)
        return (
            cls,
            tuple([getattr(cls, name, None) for name in _METHODS]),
            tuple(held),
            tuple(tensors),
            tuple(inner),
        )

    def _class(self, cls: type) -> None:
        """Add the attributes of a class, its bases and its metaclass, except for those of torch and
        Python.
        """
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = len(self._seen)
        self.classes.append((cls, cls.__mro__))
        for base in (*cls.__mro__[1:], type(cls)):
            self._class(base)
        if (
            cls.__flags__ & _MADE_BY_PYTHON
            and cls.__module__.partition(".")[0] not in _OURS
            and cls not in _BASES
        ):
            held = [(name, item) for name, item in vars(cls).items() if name not in _UNREAD]
            self.classes += [(name, self.value(item)) for name, item in held]


class Held:
    """An object by its identity, kept alive by the key."""

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
    """Return True if instances have only a dictionary; slots in addition to one are found in the
    class.
    """
    same = (
        kind.__basicsize__ == _Plain.__basicsize__ and kind.__dictoffset__ == _Plain.__dictoffset__
    )
    return same and not kind.__itemsize__


# ---- weights with other tensors ------------------------------------------------------------------


def stand_in(made: Tensor, original: Tensor) -> Tensor:
    """Mark a tensor as an instance of the class of the parameter or buffer that it replaces, and
    copy the attributes that were set on that.
    """
    if made is not original:
        vars(made).update(vars(original))
        for kind, name in ((nn.Parameter, "_is_param"), (nn.Buffer, "_is_buffer")):
            if isinstance(original, kind) and not isinstance(made, kind):
                setattr(made, name, True)
    return made


def replaced(
    part: Any, swap: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None
) -> Any:
    """Return weights with other tensors; a module becomes a new one, which shares all else with the
    original.
    """
    copies = {} if copies is None else copies
    if isinstance(part, Tensor):
        return stand_in(swap(part), part)
    if id(part) in copies:
        return copies[id(part)]
    if isinstance(part, nn.Module):
        made = copies[id(part)] = type(part).__new__(type(part))
        object.__setattr__(made, "__dict__", {})
        for name, item in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(made)[name] = {
                    key: replaced(value, swap, copies) for key, value in item.items()
                }
            else:
                vars(made)[name] = item if name in _OWN else replaced(item, swap, copies)
        return made
    if isinstance(part, tuple):
        items = [replaced(item, swap, copies) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if type(part) is list:
        return [replaced(item, swap, copies) for item in part]
    if type(part) is dict:
        return {name: replaced(item, swap, copies) for name, item in part.items()}
    return part
