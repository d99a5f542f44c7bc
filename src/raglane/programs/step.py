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
        self.cell = cell
        self.weights = weights
        self.width = width
        self.sizes = sizes
        self.output = output
        self.dtype = dtype
        survey = Survey.of(weights)
        self.leaves = survey.leaves
        self.elements = survey.elements
        # Everything that affects the result; and what may change during the process: the attributes
        # of classes, the contents of closures and the dtype of tensors that a step creates.
        self.facts = _cell_key(cell), survey.key, width, sizes, output, dtype
        self.key = (self.facts, torch.get_default_dtype(), *survey.classes)

    def converted(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype of the computation: narrow ones are widened."""
        return tensor.to(self.dtype) if tensor.dtype in NARROW else tensor

    @property
    def widths(self) -> list[int]:
        """The columns of the input, and of each tensor that has a row for each element."""
        return [self.width, *(tensor.shape[1] for tensor in self.elements)]

    def whole(self, prepares: bool) -> CellSpec:
        """Return a cell that takes this step, with or without the cell's own ``prepare``."""
        return self.cell if prepares else _Unprepared(self.cell)

    def on_host(self) -> Step:
        """Return this step with copies of its tensors on the CPU."""
        leaves = [
            tensor.detach().cpu().requires_grad_(tensor.requires_grad) for tensor in self.leaves
        ]
        elements = [self.elements[0], *self.elements] if self.elements else []
        weights = self.with_tensors(leaves, [tensor.detach().cpu() for tensor in elements])
        return Step(self.cell, weights, self.width, self.sizes, self.output, self.dtype)

    def with_tensors(self, leaves: list[Tensor], elements: list[Tensor]) -> Any:
        """Return the weights with these tensors in place of their own."""
        # In a backward pass after torch.func.functional_call, a module has its own tensors again,
        # in the same places. They are found outside of a trace, which records what reads them.
        with default_modes(torch.is_grad_enabled()):
            own_leaves = Survey.of(self.weights).leaves
        swapped = {id(tensor): leaf for tensor, leaf in zip(own_leaves, leaves, strict=True)}
        swapped |= {id(tensor): elements[index + 1] for index, tensor in enumerate(self.elements)}
        return replaced(self.weights, lambda tensor: swapped[id(tensor)])

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


def _is_fixed(value: Any) -> bool:
    """Return True for objects that never change, such as dtypes and functions in C."""
    if type(value) is types.BuiltinFunctionType:
        return isinstance(value.__self__, _NO_OWNER)
    return type(value) in _FIXED


def _is_array_of_numbers(value: Any) -> bool:
    """Return True for NumPy's arrays and scalars of numbers, except those of subclasses."""
    is_array = isinstance(value, np.ndarray | np.generic) and type(value).__module__ == "numpy"
    return is_array and value.dtype.kind in "biufc"


@contextmanager
def default_modes(grad: bool) -> Iterator[None]:
    """Run a block in torch's default modes, whatever the modes of the caller; ``grad`` enables
    gradients.
    """
    # Leaving the inference mode also makes autograd record what an operator of a compiled graph
    # computes. A mode of torch's functions is e.g. the one that computes row by row, and one of its
    # operators has tensors without numbers.
    no_modes = torch._C.DisableTorchFunction()
    no_operators = _disable_current_modes()
    no_autocast = torch.autocast("cpu", enabled=False)
    # Hooks are e.g. those of a checkpoint, which counts the tensors.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
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
        self.name = inner.name
        self.step = inner.step  # type: ignore[method-assign]

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
    key: tuple[Any, ...] = (type(cell),)
    for name, value in vars(cell).items():
        if value is cell:
            key += ((name, "itself"),)
        elif isinstance(value, CellSpec):
            key += ((name, _cell_key(value)),)
        else:
            key += ((name, value),)
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
        for item in weights:
            if isinstance(item, tuple):
                key.append(self._tuple(item))
            elif isinstance(item, nn.Module):
                key.append(self._own(item))
            elif isinstance(weights, MarkedWeights) and item is not None:
                self.elements.append(item)
                key.append(("marks", item.shape[1]))
            else:
                key.append(None if item is None else self.tensor(item))
        return tuple(key)

    def tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the key of a tensor, which becomes a leaf unless only a closure contains it."""
        index = self._seen.get(id(tensor))
        if index is not None:
            return ("leaf", index)
        if self.by_identity or self._is_in_closure:
            self._seen[id(tensor)] = len(self._seen)
            return Held(tensor), tuple(tensor.shape), tensor.dtype, self._attributes(tensor)
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter and kind is not nn.Buffer:
            raise Refused(f"it has a {kind.__name__} among its tensors")
        if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
            raise Refused(f"it has a tensor of {tensor.layout} on {tensor.device}")
        index = self._seen[id(tensor)] = len(self.leaves)
        self.leaves.append(tensor)
        content = None
        if not tensor.dtype.is_floating_point:
            if tensor.numel() > _LARGEST or tensor.dtype.is_complex or not tensor.is_cpu:
                raise Refused(
                    f"it has {tensor.numel()} numbers of {tensor.dtype} on {tensor.device}"
                )
            content = tensor.numpy().tobytes()
        # With strides, because a step may read memory in its order, e.g. by a view.
        is_parameter = kind is nn.Parameter or isinstance(tensor, nn.Parameter)
        memory = tuple(tensor.shape), tensor.stride(), tensor.dtype, content
        return (
            "leaf",
            index,
            is_parameter,
            *memory,
            self._attributes(tensor) if vars(tensor) else (),
        )

    def _attributes(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the key of the attributes that were set on a tensor."""
        attributes = [(name, item) for name, item in vars(tensor).items() if name not in _MARKS]
        return tuple([(name, self.value(item)) for name, item in attributes])

    def value(self, value: Any) -> Any:
        """Return the key of anything in a module: two keys are equal if and only if nothing in it
        has changed.
        """
        kind = type(value)
        if kind in _CONSTANT:
            return kind, value
        if kind in _COMPARED_AS_TEXT:
            return kind, repr(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if _is_fixed(value):
            return value
        if _is_array_of_numbers(value):
            return kind, value.shape, value.strides, value.dtype.str, value.tobytes()
        if kind in _SEQUENCES:
            return kind, tuple([self.value(item) for item in value])
        if kind in _MAPPINGS:
            return kind, tuple(
                [(self.value(name), self.value(item)) for name, item in value.items()]
            )
        if isinstance(value, type):
            self._class(value)
            return Held(value)
        number = self._seen.get(id(value))
        if number is not None:
            return "again", number
        self._seen[id(value)] = len(self._seen)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Return the key of a function or another callable, or of a plain object."""
        kind = type(value)
        if kind is types.FunctionType:
            attributes = value.__defaults__, value.__kwdefaults__, vars(value)
            self._closures += value.__closure__ or ()
            return value, value.__code__, tuple([self.value(item) for item in attributes])
        if kind is types.MethodType:
            return kind, self.value(value.__func__), self.value(value.__self__)
        if kind is types.BuiltinFunctionType:
            return kind, value.__name__, self.value(value.__self__)
        if kind is functools.partial:
            return kind, self.value((value.func, value.args, value.keywords, vars(value)))
        if kind is property:
            return kind, self.value((value.fget, value.fset, value.fdel))
        if kind in (staticmethod, classmethod):
            return kind, self.value(value.__func__)
        if kind is types.SimpleNamespace or isinstance(value, enum.Enum) or _is_plain(kind):
            self._class(kind)
            return Held(kind), self.value(vars(value))
        if isinstance(value, tuple) and not hasattr(value, "__dict__"):  # a named tuple
            self._class(kind)
            return Held(kind), tuple([self.value(item) for item in value])
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
            content = cell.cell_contents
        except ValueError:
            return None
        return Held(content) if isinstance(content, types.ModuleType) else self.value(content)

    def module(self, module: nn.Module, is_called: bool = True) -> Any:
        """Return the key of a module."""
        number = self._seen.get(id(module))
        if number is not None:
            return ("module", number)
        self._seen[id(module)] = len(self._seen)
        attributes = vars(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise Refused("it has a scripted module")
        has_hooks = _has_any_global_hook() or any(attributes.get(name) for name in _HOOKS)
        if is_called and not self.by_identity and has_hooks:
            raise Refused(f"a {type(module).__name__} inside of it has hooks")
        items = [(name, self.value(item)) for name, item in attributes.items() if name not in _OWN]
        tensors = [
            (name, self.value(item))
            for kind in ("_parameters", "_buffers")
            for name, item in attributes[kind].items()
        ]
        inner = [(name, self.value(item)) for name, item in attributes["_modules"].items()]
        cls = type(module)
        self._class(cls)
        return (
            cls,
            tuple([getattr(cls, name, None) for name in _METHODS]),
            tuple(items),
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
            items = [(name, item) for name, item in vars(cls).items() if name not in _UNREAD]
            self.classes += [(name, self.value(item)) for name, item in items]


class Held:
    """An object by its identity, kept alive by the key."""

    __slots__ = ("part",)

    def __init__(self, value: Any) -> None:
        self.part = value

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


def stand_in(tensor: Tensor, original: Tensor) -> Tensor:
    """Mark a tensor as an instance of the class of the parameter or buffer that it replaces, and
    copy the attributes that were set on that.
    """
    if tensor is not original:
        vars(tensor).update(vars(original))
        for kind, name in ((nn.Parameter, "_is_param"), (nn.Buffer, "_is_buffer")):
            if isinstance(original, kind) and not isinstance(tensor, kind):
                setattr(tensor, name, True)
    return tensor


def replaced(
    original: Any, swap: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None
) -> Any:
    """Return weights with other tensors; a module becomes a new one, which shares all else with the
    original.
    """
    copies = {} if copies is None else copies
    if isinstance(original, Tensor):
        return stand_in(swap(original), original)
    if id(original) in copies:
        return copies[id(original)]
    if isinstance(original, nn.Module):
        copied = copies[id(original)] = type(original).__new__(type(original))
        object.__setattr__(copied, "__dict__", {})
        for name, item in vars(original).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(copied)[name] = {
                    key: replaced(value, swap, copies) for key, value in item.items()
                }
            else:
                vars(copied)[name] = item if name in _OWN else replaced(item, swap, copies)
        return copied
    if isinstance(original, tuple):
        items = [replaced(item, swap, copies) for item in original]
        return type(original)(*items) if hasattr(original, "_fields") else tuple(items)
    if type(original) is list:
        return [replaced(item, swap, copies) for item in original]
    if type(original) is dict:
        return {name: replaced(item, swap, copies) for name, item in original.items()}
    return original
