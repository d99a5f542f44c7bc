"""Keys that hold in another process: all that decides what a step computes, as text.

In a process the key of a step names classes and functions by themselves. Here they are read: the instructions that
Python made of their source, what these read of closures and of the module around them, and so on. So a key is that of
the code that runs, not of a file that may have been changed since. Torch and Raglane's own rooms go by their versions.

What cannot be read with certainty has no such key: an object that a function finds around it, an import within a
step, ``getattr`` and its like, whose names may be computed, a module of Python's that knows the time or the
environment.
"""

from __future__ import annotations

import abc
import builtins
import dis
import enum
import functools
import hashlib
import operator
import sys
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raglane.programs.graph import Unkept

__all__ = ["lasting_key"]

_FORMAT = 1
_IMPORTED = time.time()

# Packages that go by their versions, and modules of Python's whose functions give the same for the same arguments.
_VERSIONED = ("torch", "raglane.cells", "raglane.programs")
_PURE = (
    "abc cmath collections contextlib dataclasses enum functools itertools math numbers operator _operator types typing"
)
_KNOWN = frozenset((*_PURE.split(), "builtins"))
_BUILTINS = frozenset(
    "abs all any bool bytes classmethod complex dict divmod enumerate filter float frozenset int isinstance issubclass"
    " iter len list map max min next object pow property range reversed round set slice sorted staticmethod str sum"
    " super tuple type zip Ellipsis NotImplemented __debug__".split()
)
# What reads attributes that the code around it need not name.
_GETTERS = (operator.attrgetter, operator.methodcaller)
_GETTING = ("__dict__", "__getattr__", "__getattribute__")
# Of a class: what making an instance runs, what turning one into text does, and what no step reads.
_MAKING = frozenset(("__init__", "__new__", "__init_subclass__", "__post_init__"))
_SHOWING = frozenset(("__repr__", "__str__", "__format__"))
_UNREAD = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType)
# Py_TPFLAGS_HEAPTYPE: whose attributes can be changed.
_MADE_BY_PYTHON = 1 << 9
# Reached by one step; more is somebody's whole program.
_MOST = 2000


def lasting_key(key: Any) -> str:
    """A key that is the same in another process where, and only where, the same step is taken.

    Args:
        key: the key in this process: nested tuples of plain values, types and functions.

    Raises:
        Unkept: something in it is not known with certainty.

    Example:
        >>> lasting_key(("a", 1)) == lasting_key(("a", 1)) != lasting_key(("a", 2))
        True
    """
    walk = _Walk()
    try:
        root = walk.value(key)
        walk.finish()
    except RecursionError:
        raise Unkept("it reaches too many functions, one within the other") from None
    content = repr((_versions(), torch.get_default_dtype(), root, walk.found))
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@functools.cache
def _versions() -> tuple[Any, ...]:
    """What makes programs, and the code of Raglane's cells."""
    digest = hashlib.sha256()
    place = Path(__file__).parents[1]
    for file in sorted([*(place / "cells").glob("*.py"), *(place / "programs").glob("*.py")]):
        if file.stat().st_mtime > _IMPORTED:
            raise Unkept("Raglane's own source was changed since it was imported")
        content = file.read_bytes()
        digest.update(f"{file.parent.name} {file.name} {len(content)}\n".encode())
        digest.update(content)
    torch_version = torch.__version__, torch.version.git_version
    # The package itself is above this one.
    own = sys.modules["raglane"].__version__
    return _FORMAT, own, digest.hexdigest(), *torch_version, np.__version__, sys.version


class _Holder(NamedTuple):
    """A class or a module, of which some attributes are read."""

    number: int
    of: Any
    names: Any  # the dictionary of its attributes
    bases: tuple[type, ...]  # of a class, those that go by a version, and may call what overrides theirs


class _Walk:
    """Reads everything that a key reaches, once each, in an order that hangs on what is read alone."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no other object gets the same id
        self._names: set[str] = set()
        self._holders: list[_Holder] = []
        self._done: set[tuple[int, str]] = set()
        self._made: set[int] = set()  # ids of classes of which a step may make instances
        self._makes_any, self._shows = False, False

    def value(self, part: Any) -> Any:
        """The text of anything."""
        if isinstance(part, _PLAIN):
            if type(part) not in _PLAIN:
                raise Unkept(f"it reads a {type(part).__name__}, of which it is not known what it does")
            return type(part).__name__, repr(part)
        if isinstance(part, _TORCH):
            return "torch", repr(part)
        if isinstance(part, tuple | list) and type(part) in (tuple, list, torch.Size):
            # A module that holds a class has it beside the class of that.
            holds_class = len(part) == 2 and isinstance(part[0], type) and issubclass(part[0], type)
            return type(part).__name__, tuple([(self._around if holds_class else self.value)(item) for item in part])
        if type(part) in (set, frozenset):
            return type(part).__name__, tuple(sorted(repr(self.value(item)) for item in part))
        if type(part) is dict:
            return "dict", tuple([(self.value(name), self.value(item)) for name, item in part.items()])
        if isinstance(part, enum.Enum):
            return "enum", self.value(type(part)), part.name, self.value(part.value)
        if isinstance(part, type):
            return self._class(part)
        if isinstance(part, types.ModuleType):
            return self._module(part)
        return self._callable(part)

    def finish(self) -> None:
        """Read the attributes of classes and modules that some function may mean, until nothing is new."""
        before = -1
        while before != len(self._done):
            before = len(self._done)
            for holder in list(self._holders):
                is_module = isinstance(holder.of, types.ModuleType)
                for name in sorted(self._names.intersection(holder.names) if is_module else holder.names):
                    if (holder.number, name) not in self._done and self._is_read(holder, name):
                        self._done.add((holder.number, name))
                        self.found.append((holder.number, name, self._attribute(holder, name)))

    # Classes and modules.

    def _number(self, part: Any) -> tuple[int, bool]:
        """The number of an object, and whether it is new."""
        known = self._numbers.get(id(part))
        if known is not None:
            return known, False
        if len(self._numbers) == _MOST:
            raise Unkept(f"it reaches more than {_MOST} functions and classes")
        self._numbers[id(part)] = number = len(self._numbers)
        self._alive.append(part)
        return number, True

    def _class(self, part: type) -> Any:
        if part in _GETTERS:
            raise Unkept(f"it calls {part.__name__}, which may read what no key knows")
        is_written_in_c = not part.__flags__ & _MADE_BY_PYTHON
        if _is_known(part.__module__) and (is_written_in_c or _resolves(part)):
            return "class", part.__module__, part.__qualname__
        number, is_new = self._number(part)
        if is_new:
            bases = part.__mro__[1:]
            meta = () if type(part) in (type, abc.ABCMeta) else self.value(type(part))
            self.found.append((number, "class", part.__qualname__, meta, tuple([self.value(base) for base in bases])))
            known = tuple([base for base in bases if _is_known(base.__module__)])
            self._holders.append(_Holder(number, part, vars(part), known))
        return "class", number

    def _module(self, part: types.ModuleType) -> Any:
        root = part.__name__.partition(".")[0]
        if not _is_known(part.__name__) and (root in sys.stdlib_module_names or root == "numpy"):
            raise Unkept(f"it reads the module {part.__name__}, which may know more than its arguments")
        number, is_new = self._number(part)
        if is_new:
            self.found.append((number, "module", part.__name__))
            self._holders.append(_Holder(number, part, vars(part), ()))
        return "module", number

    def _is_read(self, holder: _Holder, name: str) -> bool:
        if name in self._names:
            return True
        if name in _MAKING:
            return id(holder.of) in self._made or self._makes_any or "__class__" in self._names
        if name in _SHOWING:
            return self._shows
        if name in _UNREAD:
            return False
        if name.startswith("__") and name.endswith("__"):
            item = holder.names[name]  # what Python itself calls
            return callable(item) or isinstance(item, property | staticmethod | classmethod)
        return any(hasattr(base, name) for base in holder.bases)

    def _attribute(self, holder: _Holder, name: str) -> Any:
        item = holder.names[name]
        if isinstance(item, staticmethod | classmethod):
            return type(item).__name__, self.value(item.__func__)
        if isinstance(item, property):
            return "property", self.value((item.fget, item.fset, item.fdel))
        if isinstance(item, _DESCRIPTORS):
            return type(item).__name__, name
        if isinstance(holder.of, types.ModuleType) and _is_known(holder.of.__name__):
            is_code = isinstance(item, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType)
            return self._around(item) if is_code else (type(item).__name__, name)
        return self._around(item)

    # Functions.

    def _callable(self, part: Any) -> Any:
        if isinstance(part, types.FunctionType):
            return self._function(part)
        if isinstance(part, types.BuiltinFunctionType) and _is_known(_home(part)):
            return "builtin", _home(part), part.__qualname__
        if type(part) is functools.partial:
            return "partial", self.value((part.func, part.args, part.keywords))
        if isinstance(part, types.MethodDescriptorType) and _is_known(part.__objclass__.__module__):
            return "method", part.__objclass__.__qualname__, part.__name__
        kind = "tensor" if isinstance(part, Tensor) else type(part).__name__
        raise Unkept(f"it reads a {kind} that it finds around it, not in its module")

    def _function(self, part: types.FunctionType) -> Any:
        number, is_new = self._number(part)
        if not is_new:
            return "function", number
        home = str(part.__globals__.get("__name__"))
        if _is_known(home):
            code: Any = home, part.__qualname__, part.__code__.co_firstlineno
        else:
            code = self._code(part.__code__, part.__globals__)
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
        held = tuple([self._cell(name, cell) for name, cell in cells])
        defaults = self.value((part.__defaults__, part.__kwdefaults__))
        self.found.append((number, code, held, defaults))
        return "function", number

    def _cell(self, name: str, cell: types.CellType) -> Any:
        try:
            part = cell.cell_contents
        except ValueError:
            return "empty"
        # What ``super()`` reads is no class that somebody makes an instance of.
        return self.value(part) if name == "__class__" else self._around(part)

    def _around(self, part: Any) -> Any:
        """What a function finds around it: a class there may be called."""
        if isinstance(part, type):
            self._made.update(map(id, part.__mro__))
        return self.value(part)

    def _code(self, code: types.CodeType, space: dict[str, Any]) -> Any:
        """The instructions of a function, with what its names stand for."""
        self._names.update(code.co_names)
        for name in _GETTING:
            if name in code.co_names:
                raise Unkept(f"it reads {name}, which may give what no key knows")
        read = []
        names = _names_around(code)
        self._makes_any |= "type" in names
        self._shows |= "str" in names or any(part.opname.startswith("FORMAT") for part in dis.get_instructions(code))
        for name in sorted(names):
            if name in space:
                read.append((name, self._around(space[name])))
            elif hasattr(builtins, name) and name not in _BUILTINS and not _is_exception(getattr(builtins, name)):
                raise Unkept(f"it calls {name}, which may read what no key knows")
        consts = [
            self._code(part, space) if isinstance(part, types.CodeType) else self.value(part) for part in code.co_consts
        ]
        named = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        return code.co_code, code.co_exceptiontable, named, counts, tuple(consts), tuple(read)


def _names_around(code: types.CodeType) -> set[str]:
    """The names that a function reads from the module around it, or from Python."""
    found = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            raise Unkept(f"it imports {instruction.argval} within a step")
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Unkept(f"it changes {instruction.argval}, which lies outside of its module")
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            found.add(instruction.argval)
    return found


def _is_known(module: str | None) -> bool:
    """Whether a module's code goes by its version."""
    if module is None:
        return False
    return module in _KNOWN or any(module == name or module.startswith(f"{name}.") for name in _VERSIONED)


def _resolves(part: type) -> bool:
    """Whether a class is the one that its module has under its name."""
    found: Any = sys.modules.get(part.__module__)
    for name in part.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is part


def _home(part: types.BuiltinFunctionType) -> str | None:
    """The module of a function that is not written in Python."""
    owner = part.__self__
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return owner.__module__ if isinstance(owner, type) else part.__module__


def _is_exception(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseException)
