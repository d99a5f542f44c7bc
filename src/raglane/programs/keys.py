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
    walk = _Walk()
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
    place = Path(__file__).parents[1]
    files = sorted([*(place / "cells").glob("*.py"), *(place / "programs").glob("*.py")])
    if any(file.stat().st_mtime > _IMPORTED for file in files):
        raise Unkept("Raglane's own source was changed since it was imported")
    content = b"\0".join(part for file in files for part in (file.name.encode(), file.read_bytes()))
    sources = hashlib.sha256(content).hexdigest()
    return sources, torch.__version__, torch.version.git_version, np.__version__, sys.version


class _Walk:
    """Visits everything that a key contains, once each, in a deterministic order."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._names: set[str] = set()
        # Classes and modules whose attributes are read, with the versioned bases of a class, which
        # may call methods that override theirs.
        self._holders: list[tuple[int, Any, tuple[type, ...]]] = []
        self._done: set[tuple[int, str]] = set()

    def value(self, part: Any) -> Any:
        """Return the part of the key of any value."""
        kind = type(part)
        if kind in _PLAIN or kind in _TORCH:
            return kind.__name__, repr(part)
        if kind in (tuple, list, torch.Size):
            return kind.__name__, tuple([self.value(item) for item in part])
        if kind is slice:  # from Python 3.14 on, a constant of functions
            return "slice", self.value((part.start, part.stop, part.step))
        if kind in (set, frozenset) and all(
            type(item) in (int, bool) for item in part
        ):  # others have no order
            return kind.__name__, tuple(sorted(map(repr, part)))
        if kind is dict:
            return "dict", tuple(
                [(self.value(name), self.value(item)) for name, item in part.items()]
            )
        if kind is types.CodeType:
            return "code"  # of a function that is visited
        if kind is Held:
            return self._around(part.part)
        if isinstance(part, type):
            return self._class(part)
        if kind is types.ModuleType:
            return self._module(part)
        if kind is types.FunctionType:
            return self._function(part)
        if kind in (staticmethod, classmethod):
            return kind.__name__, self.value(part.__func__)
        if kind is property:
            return "property", self.value((part.fget, part.fset, part.fdel))
        if kind is types.BuiltinFunctionType and _computes(part):
            return "builtin", part.__module__, part.__qualname__
        named = "tensor" if isinstance(part, Tensor) else kind.__name__
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
                    part = attributes[name]
                    if (number, name) not in self._done and (
                        name in self._names or _is_called(name, part, bases)
                    ):
                        self._done.add((number, name))
                        self.found.append((number, name, self._around(part)))

    def _number(self, part: Any) -> tuple[int, bool]:
        known = self._numbers.get(id(part))
        if known is not None:
            return known, False
        if len(self._numbers) == _MOST:
            raise Unkept(f"it reaches more than {_MOST} functions and classes")
        self._numbers[id(part)] = number = len(self._numbers)
        return number, True

    def _class(self, part: type) -> Any:
        if _is_known(part):
            return "class", part.__module__, part.__qualname__
        number, is_new = self._number(part)
        if is_new:
            above = tuple([self._class(other) for other in (type(part), *part.__mro__[1:])])
            self.found.append((number, "class", part.__qualname__, above))
            self._holders.append((number, part, tuple(filter(_is_known, part.__mro__))))
        return "class", number

    def _module(self, part: types.ModuleType) -> Any:
        root = part.__name__.partition(".")[0]
        if part.__name__ not in _MODULES | _PURE and (
            root in (*sys.stdlib_module_names, "torch", "numpy")
        ):
            raise Unkept(
                f"it reads the module {part.__name__}, which may read more than its arguments"
            )
        number, is_new = self._number(part)
        if is_new:
            self.found.append((number, "module", part.__name__))
            self._holders.append((number, part, ()))
        return "module", number

    def _around(self, part: Any) -> Any:
        """Return the part of the key of a closure's or module's variable; a class there may be
        called.
        """
        if isinstance(part, type) and not (_is_known(part) and issubclass(part, _MAKEABLE)):
            raise Unkept(f"it reads the class {part.__name__}, whose instances are not in the key")
        return self.value(part)

    def _function(self, part: types.FunctionType) -> Any:
        number, is_new = self._number(part)
        if not is_new:
            return "function", number
        home = str(part.__globals__.get("__name__"))
        if home.startswith(("torch.", "raglane.cells.")) or home == "torch":
            if not home.startswith((*_FUNCTIONS, "raglane.cells.")):
                raise Unkept(
                    f"it calls {home}.{part.__qualname__}, which may read values that are not in the key"
                )
            code: Any = home, part.__qualname__, part.__code__.co_firstlineno
        else:
            code = self._code(part.__code__, part.__globals__)
            if vars(part):
                raise Unkept(f"it reads the function {part.__name__}, which has attributes")
        # super() reads ``__class__``.
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
        read = [(self.value if name == "__class__" else self._around, cell) for name, cell in cells]
        held = tuple([of(cell.cell_contents) for of, cell in read])
        self.found.append(
            (number, code, held, self.value((part.__defaults__, part.__kwdefaults__)))
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
            self._code(part, space) if isinstance(part, types.CodeType) else self.value(part)
            for part in code.co_consts
        ]
        named = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        return code.co_code, code.co_exceptiontable, named, counts, tuple(consts), tuple(read)


def _names_around(code: types.CodeType) -> set[str]:
    """Return the names of globals and builtins that a function reads."""
    found = set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "IMPORT_NAME":
            raise Unkept(f"it imports {name} within a step")
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Unkept(f"it changes {name}, a global variable")
        if instruction.opname in ("BUILD_SET", "SET_ADD"):
            raise Unkept("it makes a set, whose order differs between processes")
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            found.add(name)
        elif name in code.co_names and name.startswith("__"):
            raise Unkept(f"it reads {name}, whose value may not be in the key")
    return found


def _is_known(part: type) -> bool:
    """Return True for an unmodified class of torch, Python or Raglane's cells, whose version is in
    the key.
    """
    root = part.__module__.partition(".")[0]
    is_theirs = root in (
        "torch",
        "builtins",
        "abc",
        "enum",
        "typing",
    ) or part.__module__.startswith("raglane.cells.")
    found: Any = sys.modules.get(part.__module__)
    for name in part.__qualname__.split("."):
        found = getattr(found, name, None)
    return is_theirs and found is part


def _computes(part: Any) -> bool:
    """Return True if a function in C depends only on its arguments."""
    owner = part.__self__
    home = owner.__name__ if isinstance(owner, types.ModuleType) else owner
    if home in _PURE:
        return home != "builtins" or part.__name__ in _BUILTINS
    # Torch's functions of tensors have no module.
    is_of_torch = home is None and part.__qualname__ == f"_VariableFunctionsClass.{part.__name__}"
    return is_of_torch or (type(home) is str and home in _COMPUTING)


def _is_called(name: str, part: Any, bases: tuple[type, ...]) -> bool:
    """Return True if Python or torch may call an attribute of a class whose name no function
    reads.
    """
    if name in _MAKING:
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(part, types.FunctionType | property | staticmethod | classmethod)
    return any(hasattr(base, name) for base in bases)
