"""Cache keys of steps that are valid in other processes: a hash of everything that affects the
result.

A key can contain values of Python's types; functions, by their bytecode and the closures and
globals that they read; and torch and Raglane's cells, by their versions. A step that reads anything
else has no key, and is traced in each process.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raglane.programs.graph import Unkept
from raglane.programs.step import Held

_IMPORTED = time.time()

_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range)
)
_TORCH = frozenset((torch.dtype, torch.device, torch.layout, torch.memory_format))
# Modules, and parts of torch in C and in Python, whose functions depend only on their arguments.
_PURE = frozenset("builtins math cmath itertools typing".split())
_COMPUTING = frozenset([f"torch._C.{name}" for name in ("_nn", "_linalg", "_special", "_fft")])
_FUNCTIONS = (
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.modules.",
    "torch.nn.utils.parametri",
)
_MODULES = frozenset(
    "torch torch.nn torch.functional torch.nn.functional torch.linalg torch.special torch.fft".split()
)
_BUILTINS = frozenset(
    "abs all any bool bytes complex dict divmod enumerate filter float int isinstance issubclass iter len list map max"
    " min next pow range reversed round slice sorted str sum super tuple zip Ellipsis NotImplemented __debug__".split()
)
_BUILTINS |= {
    name for name, part in vars(builtins).items() if hasattr(part, "with_traceback")
}  # exceptions
# Classes that a function may use: their instances are constants, or are visible to a trace.
_MAKEABLE: tuple[type, ...] = (int, float, str, tuple, list, dict, BaseException)
_MAKEABLE += (nn.Module, Tensor, torch.Size, torch.dtype, torch.device)
# Methods that Python calls when an instance or a class is made; a step that makes one has no key.
_MAKING = frozenset(
    "__init__ __new__ __init_subclass__ __class_getitem__ __set_name__ __post_init__".split()
)
_MOST = 2000  # functions and classes that one step may reach


def lasting_key(key: Any) -> str:
    """Return a key that is equal in another process if and only if the step is the same."""
    walk = _KeyWalk()
    try:
        root = walk.value(key)
        walk.finish()
    except RecursionError:
        raise Unkept("it reaches too many functions, one within the other") from None
    except ValueError:
        raise Unkept("it reads a variable around it that has no value") from None
    content = repr((_versions(), torch.get_default_dtype(), root, walk.found))
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@functools.cache
def _versions() -> tuple[Any, ...]:
    """Return the versions of everything that makes programs, and a hash of Raglane's code for
    cells.
    """
    root = Path(__file__).parents[1]
    files = sorted([*(root / "cells").glob("*.py"), *(root / "programs").glob("*.py")])
    if any(file.stat().st_mtime > _IMPORTED for file in files):
        raise Unkept("Raglane's own source was changed since it was imported")
    content = b"\0".join(
        content_of for file in files for content_of in (file.name.encode(), file.read_bytes())
    )
    sources = hashlib.sha256(content).hexdigest()
    return sources, torch.__version__, torch.version.git_version, np.__version__, sys.version


class _KeyWalk:
    """Visits everything that a key contains, once each, in a deterministic order."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._names: set[str] = set()
        # Classes and modules whose attributes are read, with the versioned bases of a class, which
        # may call methods that override theirs.
        self._holders: list[tuple[int, Any, tuple[type, ...]]] = []
        self._done: set[tuple[int, str]] = set()

    def value(self, value: Any) -> Any:
        """Return the part of the key of any value."""
        kind = type(value)
        if kind in _PLAIN or kind in _TORCH:
            return kind.__name__, repr(value)
        if kind in (tuple, list, torch.Size):
            return kind.__name__, tuple([self.value(item) for item in value])
        if kind is slice:  # from Python 3.14 on, a constant of functions
            return "slice", self.value((value.start, value.stop, value.step))
        if kind in (set, frozenset) and all(
            type(item) in (int, bool) for item in value
        ):  # others have no order
            return kind.__name__, tuple(sorted(map(repr, value)))
        if kind is dict:
            return "dict", tuple(
                [(self.value(name), self.value(item)) for name, item in value.items()]
            )
        return self._reference(value)

    def _reference(self, value: Any) -> Any:
        """Return the part of the key of a class, module, function or another object."""
        kind = type(value)
        if kind is types.CodeType:
            return "code"  # of a function that is visited
        if kind is Held:
            return self._around(value.part)
        if isinstance(value, type):
            return self._class(value)
        if kind is types.ModuleType:
            return self._module(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind in (staticmethod, classmethod):
            return kind.__name__, self.value(value.__func__)
        if kind is property:
            return "property", self.value((value.fget, value.fset, value.fdel))
        if kind is types.BuiltinFunctionType and _computes(value):
            return "builtin", value.__module__, value.__qualname__
        named = "tensor" if isinstance(value, Tensor) else kind.__name__
        raise Unkept(f"it reads a {named}, whose value in another process is unknown")

    def finish(self) -> None:
        """Visit the attributes of classes and modules whose names some function reads, until no new
        ones appear.
        """
        before = -1
        while before != len(self._done):
            before = len(self._done)
            for number, holder, bases in list(self._holders):
                attributes = vars(holder)
                for name in sorted(attributes if bases else self._names.intersection(attributes)):
                    value = attributes[name]
                    if (number, name) not in self._done and (
                        name in self._names or _is_called(name, value, bases)
                    ):
                        self._done.add((number, name))
                        self.found.append((number, name, self._around(value)))

    def _number(self, value: Any) -> tuple[int, bool]:
        is_new = id(value) not in self._numbers
        if is_new:
            if len(self._numbers) == _MOST:
                raise Unkept(f"it reaches more than {_MOST} functions and classes")
            self._numbers[id(value)] = len(self._numbers)
        return self._numbers[id(value)], is_new

    def _class(self, cls: type) -> Any:
        if _is_known(cls):
            return "class", cls.__module__, cls.__qualname__
        number, is_new = self._number(cls)
        if is_new:
            above = tuple([self._class(other) for other in (type(cls), *cls.__mro__[1:])])
            self.found.append((number, "class", cls.__qualname__, above))
            self._holders.append((number, cls, tuple(filter(_is_known, cls.__mro__))))
        return "class", number

    def _module(self, module: types.ModuleType) -> Any:
        root = module.__name__.partition(".")[0]
        if module.__name__ not in _MODULES | _PURE and (
            root in (*sys.stdlib_module_names, "torch", "numpy")
        ):
            raise Unkept(
                f"it reads the module {module.__name__}, which may read more than its arguments"
            )
        number, is_new = self._number(module)
        if is_new:
            self.found.append((number, "module", module.__name__))
            self._holders.append((number, module, ()))
        return "module", number

    def _around(self, value: Any) -> Any:
        """Return the part of the key of a closure's or module's variable; a class there may be
        called.
        """
        if isinstance(value, type) and not (_is_known(value) and issubclass(value, _MAKEABLE)):
            raise Unkept(f"it reads the class {value.__name__}, whose instances are not in the key")
        return self.value(value)

    def _function(self, function: types.FunctionType) -> Any:
        number, is_new = self._number(function)
        if not is_new:
            return "function", number
        home = str(function.__globals__.get("__name__"))
        if home.startswith(("torch.", "raglane.cells.")) or home == "torch":
            if not home.startswith((*_FUNCTIONS, "raglane.cells.")):
                raise Unkept(
                    f"it calls {home}.{function.__qualname__}, which may read values that are not in the key"
                )
            code: Any = home, function.__qualname__, function.__code__.co_firstlineno
        else:
            code = self._code(function.__code__, function.__globals__)
            if vars(function):
                raise Unkept(f"it reads the function {function.__name__}, which has attributes")
        # super() reads ``__class__``.
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        read = [(self.value if name == "__class__" else self._around, cell) for name, cell in cells]
        contents = tuple([of(cell.cell_contents) for of, cell in read])
        self.found.append(
            (number, code, contents, self.value((function.__defaults__, function.__kwdefaults__)))
        )
        return "function", number

    def _code(self, code: types.CodeType, space: dict[str, Any]) -> Any:
        self._names.update(code.co_names)
        read = []
        for name in sorted(_names_around(code)):
            if name in space:
                read.append((name, self._around(space[name])))
            elif hasattr(builtins, name) and name not in _BUILTINS:
                raise Unkept(f"it calls {name}, which may read values that are not in the key")
        consts = [
            self._code(constant, space)
            if isinstance(constant, types.CodeType)
            else self.value(constant)
            for constant in code.co_consts
        ]
        named = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        return code.co_code, code.co_exceptiontable, named, counts, tuple(consts), tuple(read)


def _names_around(code: types.CodeType) -> set[str]:
    """Return the names of globals and builtins that a function reads."""
    names = set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "IMPORT_NAME":
            raise Unkept(f"it imports {name} within a step")
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Unkept(f"it changes {name}, a global variable")
        if instruction.opname in ("BUILD_SET", "SET_ADD"):
            raise Unkept("it makes a set, whose order differs between processes")
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            names.add(name)
        elif name in code.co_names and name.startswith("__"):
            raise Unkept(f"it reads {name}, whose value may not be in the key")
    return names


def _is_known(cls: type) -> bool:
    """Return True for an unmodified class of torch, Python or Raglane's cells, whose version is in
    the key.
    """
    root = cls.__module__.partition(".")[0]
    is_theirs = root in ("torch", "builtins", "abc", "enum", "typing")
    is_theirs = is_theirs or cls.__module__.startswith("raglane.cells.")
    value: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        value = getattr(value, name, None)
    return is_theirs and value is cls


def _computes(value: Any) -> bool:
    """Return True if a function in C depends only on its arguments."""
    owner = value.__self__
    home = owner.__name__ if isinstance(owner, types.ModuleType) else owner
    if home in _PURE:
        return home != "builtins" or value.__name__ in _BUILTINS
    # Torch's functions of tensors have no module.
    is_of_torch = home is None and value.__qualname__ == f"_VariableFunctionsClass.{value.__name__}"
    return is_of_torch or (type(home) is str and home in _COMPUTING)


def _is_called(name: str, value: Any, bases: tuple[type, ...]) -> bool:
    """Return True if Python or torch may call an attribute of a class whose name no function
    reads.
    """
    if name in _MAKING:
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, types.FunctionType | property | staticmethod | classmethod)
    return any(hasattr(base, name) for base in bases)
