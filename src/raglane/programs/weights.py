"""The tensors that a cell's weights hold, and the same weights with other tensors in their place.

A cell of the library has a tuple of tensors, a user's has a module. All of a module that its step may read decides what
the step computes: tensors are lifted out, and everything else is part of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raglane.cells.module import ModuleCell
from raglane.cells.regularised import RegularisedWeights
from raglane.cells.spec import CellSpec
from raglane.programs.graph import Refused

__all__ = ["Survey", "cell_key", "replaced", "stand_in", "survey"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_METHODS = ("step", "forward", "prepare")
# Plain values that a class may hold for its steps.
_VALUES = (bool, int, float, str, list, tuple, dict, np.ndarray)
# Numbers of a buffer that are not of floating point and become a part of the key.
_LARGEST = 1 << 14


@dataclass
class Survey:
    """What is in a cell's weights.

    Attributes:
        key: all but the numbers of floating point: two weights of one key take the same steps.
        leaves: the tensors, each once.
        elements: those that hold a row for each element of the batch.
        by_identity: whether the key says which tensors there are, rather than of which kind; nothing is a leaf then.
        classes: what stands in the classes of modules, which may be changed while the process lives.
    """

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

    def value(self, part: Any, depth: int = 0) -> Any:
        """The key of anything that a module holds."""
        if part is None or isinstance(part, bool | int | float | str | bytes | torch.dtype | torch.device | type):
            return (type(part), repr(part) if isinstance(part, float) else part)
        if isinstance(part, Tensor):
            return self.tensor(part)
        if isinstance(part, nn.Module):
            return self.module(part)
        if isinstance(part, np.ndarray):
            return ("array", part.shape, str(part.dtype), part.tobytes())
        if depth > 6:
            raise Refused(f"it holds a {type(part).__name__} that is nested too deep to watch")
        if isinstance(part, dict):
            return (type(part), tuple((repr(name), self.value(item, depth + 1)) for name, item in part.items()))
        if isinstance(part, list | tuple | set | frozenset):
            return (type(part), tuple(self.value(item, depth + 1) for item in part))
        if callable(part) and not hasattr(part, "__dict__"):
            return part  # such as torch.tanh
        if callable(part) and not vars(part):
            return part  # a function
        if hasattr(part, "__dict__"):
            return (type(part), self.value(vars(part), depth + 1))
        raise Refused(f"it holds a {type(part).__name__}, of which a program cannot know whether it changes")

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
        self.classes += self._class(cls)
        code = tuple(getattr(cls, name, None) for name in _METHODS)
        return (cls, code, tuple(held), tuple(tensors), tuple(inner))

    def _class(self, cls: type) -> list[Any]:
        """What stands in a class and those that it is made of: its functions, and values that a step may read."""
        if cls.__module__.startswith("torch."):
            return []
        found: list[Any] = []
        for base in cls.__mro__:
            if base is nn.Module or base.__module__.startswith("torch."):
                found.append(base)
                break
            for name, item in vars(base).items():
                if isinstance(item, _VALUES) and not name.startswith("__"):
                    found.append((name, self.value(item)))
                elif isinstance(item, Hashable) and (callable(item) or isinstance(item, property | staticmethod)):
                    found.append((name, item))
        return found


def survey(weights: Any) -> Survey:
    """What is in a cell's weights.

    Raises:
        Refused: something that no program can follow.

    Example:
        >>> from raglane.cells import Weights
        >>> len(survey(Weights(torch.zeros(4, 3), torch.zeros(4, 4))).leaves)
        2
    """
    found = Survey()
    if isinstance(weights, nn.Module):
        found.key = (found.module(weights, is_called=not hasattr(weights, "step")),)
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


def replaced(weights: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """The same weights with other tensors; a module is another one, which shares the rest with the first.

    Args:
        weights: a tuple of tensors, or a module.
        swap: what takes the place of a tensor.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> replaced(layer, lambda part: part.double()).weight.dtype, layer.weight.dtype
        (torch.float64, torch.float32)
    """
    return _replaced(weights, swap, {})


def stand_in(made: Tensor, original: Tensor) -> Tensor:
    """A tensor in the place of another one, which a step then takes for a parameter or a buffer, too."""
    if made is not original:
        for kind, name in ((nn.Parameter, "_is_param"), (nn.Buffer, "_is_buffer")):
            if isinstance(original, kind) and not isinstance(made, kind):
                setattr(made, name, True)
    return made


def _replaced(part: Any, swap: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    if isinstance(part, Tensor):
        return stand_in(swap(part), part)
    if id(part) in known:
        return known[id(part)]
    if isinstance(part, nn.Module):
        made = known[id(part)] = type(part).__new__(type(part))
        object.__setattr__(made, "__dict__", {})
        for name, item in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(made)[name] = {key: _replaced(value, swap, known) for key, value in item.items()}
            else:
                vars(made)[name] = item if name in _OWN else _replaced(item, swap, known)
        return made
    if isinstance(part, tuple):
        items = [_replaced(item, swap, known) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if type(part) is list:
        return [_replaced(item, swap, known) for item in part]
    if type(part) is dict:
        return {name: _replaced(item, swap, known) for name, item in part.items()}
    return part


def cell_key(cell: CellSpec) -> tuple[Any, ...]:
    """All that decides what a cell computes, apart from its weights.

    Raises:
        Refused: it holds what cannot be compared.

    Example:
        >>> from raglane.cells import CELLS
        >>> cell_key(CELLS["gru"]) == cell_key(CELLS["gru_reset_before"])
        False
    """
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
