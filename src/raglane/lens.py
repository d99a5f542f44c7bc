"""Immutable updates of nested values: a path to the parts to change, a function, and a new value out.

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
from typing import Any, Generic, TypeVar

from torch import Tensor

from raglane._utils.messages import message, nearest
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.ragged import Ragged

__all__ = ["Path", "modify"]

T = TypeVar("T")


class _Mark(Enum):
    """Marks that are equal to no key of a dict."""

    EACH = "each"
    NOWHERE = "nowhere"


def modify(value: T) -> Path[T]:
    """Begin a path into ``value``; :meth:`Path.apply` ends it with a function and gives the changed value.

    ==========================  ====================================================================================
    step                        where it leads
    ==========================  ====================================================================================
    ``.name``, ``["name"]``     the field of a dataclass or named tuple, the value of that key of a dict, and of a
                                :class:`~raglane.Ragged` its ``values``
    ``[key]``                   the value of any other key of a dict
    ``[index]``                 the item of a list or tuple, the sequence of a Ragged; negative ones count from the end
    ``.each``                   every item of a list, tuple or named tuple, every value of a dict, every sequence of a
                                Ragged (their lengths may change); nowhere from None; any other value, such as the
                                dataclass that might have been None, itself
    ==========================  ====================================================================================

    Nothing is changed in place. What the path does not touch is shared with the original, and where the function
    returns the very object that it was given, so is all around it: where that is so everywhere, the result is
    ``value`` itself.

    Containers keep their type. A dict, a list or a subclass of either is copied by :func:`copy.copy`; a tuple is made
    by its class from the items; a Ragged is put together anew, and gradients flow through. A dataclass, frozen or not,
    is made by :func:`dataclasses.replace`: its ``__init__`` and ``__post_init__`` run, so that fields declared with
    ``init=False`` are worked out anew, and a path cannot lead to them.

    Args:
        value: a nested structure of the above.

    Raises:
        ArgumentError: by ``apply``: a name, key or index that does not exist, or a field with ``init=False``. The
            message names the part of the path, what is there and what that has.
        ArgumentTypeError: by ``apply``: a path that goes on through something else, for instance a string; or a
            function that cannot be called.
        ShapeError: by ``apply``: what became of the sequences or the values of a Ragged does not fit together.

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
    """A path into a value, which :func:`modify` begins. Every step gives a new path, so that one can be kept.

    A field, or a key of a dict, that is called ``each`` or ``apply``, or that begins with two underscores, is reached
    in brackets: ``["each"]``.

    Example:
        >>> modify({"a b": (1, 2)})["a b"][-1]
        modify(<dict>)['a b'][-1]
    """

    __slots__ = ("__root", "__steps")

    def __init__(self, root: T, steps: tuple[Any, ...]) -> None:
        self.__root = root
        self.__steps = steps

    def __getattr__(self, name: str) -> Path[T]:
        # Python itself asks for names of this kind, for instance to copy a path.
        if name.startswith("__"):
            raise AttributeError(f"{self!r} does not read {name!r} as a step; write [{name!r}] where it is one")
        return Path(self.__root, (*self.__steps, name))

    def __getitem__(self, key: Any) -> Path[T]:
        return Path(self.__root, (*self.__steps, key))

    # Python would make a loop over a path of __getitem__, and it would never end.
    __iter__ = None

    @property
    def each(self) -> Path[T]:
        """The path to every part; see :func:`modify`."""
        return Path(self.__root, (*self.__steps, _Mark.EACH))

    def apply(self, function: Callable[[Any], Any]) -> T:
        """The value with what the path leads to replaced by what ``function`` makes of it.

        Args:
            function: is called once for each part, in order, and returns what is to stand in its place; for a
                sequence of a Ragged, a tensor.

        Raises:
            ArgumentError: a part of the path that does not exist.
            ArgumentTypeError: a path through something that has no parts, or ``function`` cannot be called.
            ShapeError: what became of a Ragged does not fit together.

        Example:
            >>> modify([1, 2, 3])[-1].apply(lambda number: number + 1)
            [1, 2, 4]
        """
        if not callable(function):
            raise ArgumentTypeError(
                message("function", type(function).__name__, "a function of one value", "pass e.g. str.upper")
            )
        result: T = _Update(self.__root, self.__steps, function).of(self.__root, ())
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (self.__root, self.__steps)

    def __repr__(self) -> str:
        return _written(self.__root, self.__steps)


# -- walking a path ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """A path from ``root``, and the function at its end."""

    root: Any
    steps: tuple[Any, ...]
    function: Callable[[Any], Any]

    def of(self, value: Any, where: tuple[Any, ...], depth: int = 0) -> Any:
        """The new value in place of ``value``, to which the first ``depth`` steps led by way of the keys ``where``."""
        if depth == len(self.steps):
            return self.function(value)
        step, opened = self.steps[depth], _open(value)
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
            part = opened.get(key)
            new = self.of(part, (*where, key), depth + 1)
            if new is not part:
                changed[key] = new
        return opened.replaced(changed) if changed else value

    def _find(self, value: Any, opened: _Opened | None, where: tuple[Any, ...], depth: int) -> tuple[_Opened, Any]:
        """The value that a step leads through, and its key there; or an error that lists the keys."""
        step, path = self.steps[depth], _written(self.root, self.steps[: depth + 1])
        got = f"{type(value).__name__} at {''.join(map(_step, where)) or 'the start'}"
        if opened is None:
            rule = "a step into a dataclass, a named tuple, a dict, a list, a tuple or a Ragged"
            fix = "write .each before it where there may be None" if value is None else "end the path before it"
            raise ArgumentTypeError(message(path, got, rule, fix))
        key = opened.find(step)
        if key is _Mark.NOWHERE:
            names = [name for name in opened.names if isinstance(name, str)]
            close = nearest(step, names) if isinstance(step, str) else None
            others = "choose one of them" if opened.keys is None else "choose one, or write .each for all of them"
            raise ArgumentError(message(path, got, opened.rule(), f"write {_step(close)}" if close else others))
        return opened, key


def _step(step: Any) -> str:
    """A step as one writes it."""
    if step is _Mark.EACH:
        return ".each"
    is_name = isinstance(step, str) and step.isidentifier() and not keyword.iskeyword(step)
    return f".{step}" if is_name and step not in ("each", "apply") and not step.startswith("__") else f"[{step!r}]"


def _written(root: Any, steps: tuple[Any, ...]) -> str:
    return f"modify(<{type(root).__name__}>)" + "".join(map(_step, steps))


# -- what a path leads through -----------------------------------------------------------------------------------------
# Each has a ``value``, the ``names`` and ``keys`` of its parts, and finds, gets and replaces parts by their keys.


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
        return f"one of the fields {_few(self.names)}" + (f" (not {_few(derived)}: init=False)" if derived else "")


class _Entries:
    """A dict or another mapping."""

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value: Any = value
        self.names = self.keys = list(value)

    def find(self, step: Any) -> Any:
        try:
            # Not by reading it, which would put a missing key into a defaultdict.
            return step if step in self.value else _Mark.NOWHERE
        except TypeError:  # what cannot be hashed is not a key
            return _Mark.NOWHERE

    def get(self, key: Any) -> Any:
        return self.value[key]

    def replaced(self, changed: dict[Any, Any]) -> Any:
        if not isinstance(self.value, MutableMapping):
            return type(self.value)({**self.value, **changed})
        new = copy.copy(self.value)
        for key, part in changed.items():
            new[key] = part
        return new

    def rule(self) -> str:
        return f"one of the keys {_few(self.names)}" if self.names else "one of 0 keys"


class _Items:
    """A list or a tuple; ``noun`` says what its parts are."""

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
        items = [changed.get(index, part) for index, part in enumerate(self.value)]
        if isinstance(self.value, list):
            new = copy.copy(self.value)
            new[:] = items
            return new
        # Not through __new__, which a named tuple may have of its own.
        make = type(self.value)._make if self.names else type(self.value)
        return make(items)

    def rule(self) -> str:
        count = len(self.keys)
        return (
            f"one of {count} {self.noun}"
            + (f", from {-count} to {count - 1}" if count else "")
            + (f", or one of the names {_few(self.names)}" if self.names else "")
        )


class _Sequences(_Items):
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
        for key, part in changed.items():
            if not isinstance(part, Tensor):
                got = f"a result of type {type(part).__name__} for {_step(key)} of a Ragged"
                rule = "a function that returns a tensor for a sequence or for the values"
                raise ArgumentTypeError(message("function", got, rule, "return torch.as_tensor(...)"))
        if "values" in changed:
            return self.value.map(lambda _: changed["values"])
        return type(self.value)([changed.get(index, self.get(index)) for index in self.keys])


_Opened = _Fields | _Entries | _Items


def _open(value: Any) -> _Opened | None:
    """A value whose parts a path can lead to; None where it has no parts."""
    if isinstance(value, Ragged):
        return _Sequences(value)
    if isinstance(value, Mapping):
        return _Entries(value)
    if isinstance(value, list | tuple):
        return _Items(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Fields(value)
    return None


def _few(names: Sequence[Any]) -> str:
    """Names, and that there are more where they are many."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(map(repr, names[:12])) + more
