"""Immutable updates of nested values, by a path to the parts that a function changes.

>>> from raglane.ragged import Ragged
>>> batch = {"inputs": Ragged([[1, 2, 3], [4]]), "labels": [0, 1]}
>>> modify(batch).inputs.each.apply(lambda sequence: sequence[-2:])["inputs"].values.tolist()
[2, 3, 4]
"""

from __future__ import annotations

import copy
import dataclasses
import keyword
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from raglane._utils.messages import nearest
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.ragged import Ragged

__all__ = ["modify"]

T = TypeVar("T")


class _Mark(Enum):
    """Values that differ from every key of a dict."""

    EACH = "each"
    NOWHERE = "nowhere"


def modify(value: T) -> Path[T]:
    """Begin a path into a nested value; :meth:`Path.apply` ends it with a function and returns the
    changed value.

    ==========================  ====================================================================================
    step                        leads to
    ==========================  ====================================================================================
    ``.name``, ``["name"]``     the field of a dataclass or named tuple, the value of that key of a dict, or the
                                ``values`` of a :class:`~raglane.Ragged`
    ``[key]``                   the value of any other key of a dict
    ``[index]``                 an item of a list or tuple, or a sequence of a Ragged; negative indices are allowed
    ``.each``                   all items of a list, tuple or named tuple, all values of a dict, or all sequences of a
                                Ragged (their lengths may change); nothing for None; any other value itself, such as
                                an optional dataclass
    ==========================  ====================================================================================

    Nothing is changed in place. The result shares everything outside of the path with the original.
    If the function returns its argument everywhere, the result is ``value`` itself.

    Containers keep their type. Dicts and lists are copied by :func:`copy.copy`, and tuples are
    built by their class from the items. A Ragged is built from its sequences, and gradients flow
    through it. A dataclass, frozen or not, is built by :func:`dataclasses.replace`: its
    ``__init__`` and ``__post_init__`` run, so fields with ``init=False`` are computed again, and
    paths cannot lead to them.

    Args:
        value: a nested structure of these types.

    Returns:
        A path without steps.

    Raises:
        ArgumentError: by ``apply``, if a name, key or index does not exist, or a field has
            ``init=False``. The message has the part of the path, the value there, and its keys.
        ArgumentTypeError: by ``apply``, if the path continues in another type, e.g. a string, or
            the function cannot be called.
        ShapeError: by ``apply``, if new sequences or values of a Ragged do not fit together.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Street:
        ...     name: str
        >>> @dataclass(frozen=True)
        ... class Address:
        ...     street: Street | None
        >>> @dataclass(frozen=True)
        ... class Person:
        ...     addresses: list[Address]
        >>> person = Person([Address(Street("Mill Lane")), Address(None)])
        >>> modify(person).addresses.each.street.each.name.apply(str.upper)
        Person(addresses=[Address(street=Street(name='MILL LANE')), Address(street=None)])
        >>> modify(person).addresses.each.stret.each.name.apply(str.upper)
        Traceback (most recent call last):
        ...
        raglane.errors.ArgumentError: modify(<Person>).addresses.each.stret must be one of the fields 'street', \
got Address at .addresses[0]. Write .street.
    """
    return Path(value, ())


class Path(Generic[T]):
    """A path into a value, which :func:`modify` begins. Each step returns a new path.

    Write fields and keys named ``each`` or ``apply``, or that begin with two underscores, in
    brackets: ``["each"]``.

    Example:
        >>> modify({"a b": (1, 2)})["a b"][-1]
        modify(<dict>)['a b'][-1]
    """

    __slots__ = ("__root", "__steps")

    def __init__(self, root: T, steps: tuple[Any, ...]) -> None:
        self.__root = root
        self.__steps = steps

    def __getattr__(self, name: str) -> Path[T]:
        # Python reads such names, e.g. to copy a path.
        if name.startswith("__"):
            raise AttributeError(f"{self!r} does not read {name!r} as a step; write [{name!r}]")
        return Path(self.__root, (*self.__steps, name))

    def __getitem__(self, key: Any) -> Path[T]:
        return Path(self.__root, (*self.__steps, key))

    # Otherwise Python would iterate by __getitem__, without end.
    __iter__ = None

    @property
    def each(self) -> Path[T]:
        """The path to all parts; see :func:`modify`."""
        return Path(self.__root, (*self.__steps, _Mark.EACH))

    def apply(self, function: Callable[[Any], Any]) -> T:
        """Return the value, with the parts at the end of the path replaced by results of a
        function.

        Args:
            function: called once for each part, in order; returns the new part, a tensor for a
                sequence of a Ragged.

        Returns:
            The changed value, of the same type.

        Raises:
            ArgumentError: a part of the path does not exist.
            ArgumentTypeError: the path leads through a value without parts, or ``function`` cannot
                be called.
            ShapeError: new sequences or values of a Ragged do not fit together.

        Example:
            >>> modify([1, 2, 3])[-1].apply(lambda number: number + 1)
            [1, 2, 4]
        """
        if not callable(function):
            raise ArgumentTypeError(
                "function", type(function).__name__, "a function of one value", "pass str.upper"
            )
        return _Update(self.__root, self.__steps, function).of(self.__root, ())

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (self.__root, self.__steps)

    def __repr__(self) -> str:
        return _written(self.__root, self.__steps)


# -- walking a path
# --------------------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """A path from ``root`` and the function at its end."""

    root: Any
    steps: tuple[Any, ...]
    function: Callable[[Any], Any]

    def of(self, value: Any, where: tuple[Any, ...], depth: int = 0) -> Any:
        """Return the new value of ``value``, which is at the keys ``where`` after the first
        ``depth`` steps.
        """
        if depth == len(self.steps):
            return self.function(value)
        step = self.steps[depth]
        opened = _open(value)
        if step is not _Mark.EACH:
            opened, key = self._find(value, opened, where, depth)
            keys: Sequence[Any] = (key,)
        elif value is None:
            return None
        elif opened is None or opened.keys is None:
            return self.of(value, where, depth + 1)
        else:
            keys = opened.keys
        changed = {}
        for key in keys:
            old = opened.get(key)
            new = self.of(old, (*where, key), depth + 1)
            if new is not old:
                changed[key] = new
        return opened.replaced(changed) if changed else value

    def _find(
        self, value: Any, opened: _Opened | None, where: tuple[Any, ...], depth: int
    ) -> tuple[_Opened, Any]:
        """Return the opened value with the key of a step; raises an error that lists the keys."""
        step = self.steps[depth]
        path = _written(self.root, self.steps[: depth + 1])
        got = f"{type(value).__name__} at {''.join(map(_step, where)) or 'the start'}"
        if opened is None:
            rule = (
                "a path through dataclasses, named tuples, dicts, lists, tuples and Ragged batches"
            )
            fix = "end the path before it"
            if value is None:
                fix = "write .each before it if it may be None"
            raise ArgumentTypeError(path, got, rule, fix)
        key = opened.find(step)
        if key is _Mark.NOWHERE:
            names = [name for name in opened.names if isinstance(name, str)]
            close = nearest(step, names) if isinstance(step, str) else None
            fix = "choose one, or write .each for all of them"
            if close:
                fix = f"write {_step(close)}"
            elif opened.keys is None:
                fix = "choose one of them"
            raise ArgumentError(path, got, opened.rule(), fix)
        return opened, key


def _step(step: Any) -> str:
    """Return a step as text."""
    if step is _Mark.EACH:
        return ".each"
    is_name = isinstance(step, str) and step.isidentifier() and not keyword.iskeyword(step)
    if is_name and step not in ("each", "apply") and not step.startswith("__"):
        return f".{step}"
    return f"[{step!r}]"


def _written(root: Any, steps: tuple[Any, ...]) -> str:
    return f"modify(<{type(root).__name__}>)" + "".join(map(_step, steps))


# -- containers
# --------------------------------------------------------------------------------------------------
# Each has a ``value``, the ``names`` and ``keys`` of its parts, and finds, gets and replaces parts
# by their keys.


class _Fields:
    """A dataclass."""

    keys = None

    def __init__(self, value: Any) -> None:
        self.value = value
        self.names = [field.name for field in dataclasses.fields(value) if field.init]

    def find(self, step: Any) -> Any:
        return step if isinstance(step, str) and step in self.names else _Mark.NOWHERE

    def get(self, key: Any) -> Any:
        return getattr(self.value, key)

    def replaced(self, changed: dict[Any, Any]) -> Any:
        return dataclasses.replace(self.value, **changed)

    def rule(self) -> str:
        derived = [field.name for field in dataclasses.fields(self.value) if not field.init]
        rule = f"one of the fields {_few(self.names)}"
        return f"{rule}, not {_few(derived)} with init=False" if derived else rule


class _Entries:
    """A dict or another mapping."""

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value: Any = value
        self.names = self.keys = list(value)

    def find(self, step: Any) -> Any:
        try:
            # Not by reading it, which would add a missing key to a defaultdict.
            return step if step in self.value else _Mark.NOWHERE
        except TypeError:  # not hashable
            return _Mark.NOWHERE

    def get(self, key: Any) -> Any:
        return self.value[key]

    def replaced(self, changed: dict[Any, Any]) -> Any:
        if not isinstance(self.value, MutableMapping):
            return type(self.value)({**self.value, **changed})
        new = copy.copy(self.value)
        for key, new_value in changed.items():
            new[key] = new_value
        return new

    def rule(self) -> str:
        if not self.names:
            return "a path into a mapping with keys"
        return f"one of the keys {_few(self.names)}"


class _ListEntries:
    """A list or a tuple, whose parts are named by ``noun``."""

    noun = "items"

    def __init__(self, value: Any, names: Sequence[str] = ()) -> None:
        self.value = value
        self.names = names or getattr(value, "_fields", ())
        self.keys = range(len(value))

    def find(self, step: Any) -> Any:
        if isinstance(step, str):
            return self.names.index(step) if step in self.names else _Mark.NOWHERE
        try:
            return self.keys[operator.index(step)]
        except (TypeError, IndexError):
            return _Mark.NOWHERE

    def get(self, key: Any) -> Any:
        return self.value[key]

    def replaced(self, changed: dict[Any, Any]) -> Any:
        items = [changed.get(index, item) for index, item in enumerate(self.value)]
        if isinstance(self.value, list):
            new = copy.copy(self.value)
            new[:] = items
            return new
        # Not by __new__, which a named tuple may override.
        make = type(self.value)._make if self.names else type(self.value)
        return make(items)

    def rule(self) -> str:
        count = len(self.keys)
        rule = f"a path into a sequence with {self.noun}"
        if count:
            rule = f"an index of its {count} {self.noun}, from {-count} to {count - 1}"
        return f"{rule}, or one of the names {_few(self.names)}" if self.names else rule


class _RaggedEntries(_ListEntries):
    """A ragged batch: its sequences by index, and its flat values by name."""

    noun = "sequences"

    def __init__(self, value: Ragged) -> None:
        super().__init__(value, ("values",))
        self.sequences: list[Tensor] = []

    def find(self, step: Any) -> Any:
        return step if isinstance(step, str) and step == "values" else super().find(step)

    def get(self, key: Any) -> Any:
        if key == "values":
            return self.value.values
        self.sequences = self.sequences or self.value.to_list()
        return self.sequences[key]

    def replaced(self, changed: dict[Any, Any]) -> Any:
        for key, result in changed.items():
            if not isinstance(result, Tensor):
                got = f"a result of type {type(result).__name__} for {_step(key)} of a Ragged"
                rule = "a tensor for a sequence or the values"
                raise ArgumentTypeError("function", got, rule, "return torch.as_tensor(...)")
        if "values" in changed:
            return self.value.map(lambda _: changed["values"])
        return type(self.value)([changed.get(index, self.get(index)) for index in self.keys])


_Opened = _Fields | _Entries | _ListEntries


def _open(value: Any) -> _Opened | None:
    """Return a container, or None for a value without parts."""
    if isinstance(value, Ragged):
        return _RaggedEntries(value)
    if isinstance(value, Mapping):
        return _Entries(value)
    if isinstance(value, list | tuple):
        return _ListEntries(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Fields(value)
    return None


def _few(names: Sequence[Any]) -> str:
    """Return up to 12 names, and the number of others."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(map(repr, names[:12])) + more
