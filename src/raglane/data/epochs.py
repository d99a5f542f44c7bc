"""Epochs of batches in an order that is drawn anew each time, and that can be taken up again in the middle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from raglane._utils.checks import check_kind
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError

Item = TypeVar("Item")


class Epochs(Generic[Item]):
    """What goes through data epoch after epoch: the place where it stands, and how to come back there.

    The items of an epoch follow from the arguments and the epoch's number alone. Each time that an epoch was iterated
    to its end, the next iteration is the next epoch; :meth:`set_epoch` chooses another (Lightning calls it).
    """

    # What a state says of a place.
    _numbers: tuple[str, ...] = ("epoch", "done")

    def __init__(self) -> None:
        self.epoch = 0
        # How many items of this epoch were handed out, and where the next iteration begins.
        self._done = 0
        self._start = 0
        # Whether the epoch was iterated to its end, so that the next iteration begins another.
        self._ended = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of items in an epoch."""

    @abstractmethod
    def _items(self, start: int) -> Iterator[Item]:
        """The items of the epoch, from the one numbered ``start``."""

    @abstractmethod
    def _identity(self) -> dict[str, int]:
        """What must be the same for a state to mean the same items."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, from 0; a new epoch begins at its first batch."""
        check_least("epoch", epoch, 0)
        self._ended = False
        if epoch != self.epoch:
            self.epoch = epoch
            self._done = self._start = 0

    def __iter__(self) -> Iterator[Item]:
        """What the epoch holds: all that remains, right after :meth:`load_state_dict`, else all."""
        if self._ended:
            self.set_epoch(self.epoch + 1)
        self._done, self._start = self._start, 0
        for item in self._items(self._done):
            self._done += 1
            yield item
        self._ended = True

    def state_dict(self, done: int | None = None) -> dict[str, int]:
        """Where the epoch stands: numbers only.

        Args:
            done: how many batches of this epoch were used. None takes the number that were handed out, which with
                DataLoader workers is larger: they fetch ahead.

        Raises:
            ArgumentTypeError: ``done`` is not an int.
            ArgumentError: ``done`` is below 0 or above the number of batches.
        """
        done = self._done if done is None else done
        check_least("done", done, 0)
        return {"epoch": self.epoch, "done": done, **self._place(done), **self._identity()}

    def _place(self, done: int) -> dict[str, int]:
        """What beside ``done`` says where that is; raises an ArgumentError where the epoch has fewer items."""
        self._check_done("done", done)
        return {}

    def _take_up(self, state: Mapping[str, int]) -> None:
        """Check that a state's place exists, and make what it saves; nothing else may change yet."""
        self._check_done("state['done']", state["done"])

    def _check_done(self, name: str, done: int) -> None:
        if done > len(self):
            rule = f"from 0 to the number of batches, {len(self)}"
            raise ArgumentError(message(name, quote(done), rule, "pass a number of batches of this epoch"))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Stand where :meth:`state_dict` was called: the next iteration gives exactly what remains.

        Raises:
            ArgumentTypeError: the state is not a mapping to ints.
            ArgumentError: the state is of other sequences or arguments.
        """
        kind = type(self).__name__
        check_kind("state", state, Mapping, f"the state of this {kind}", "pass the result of state_dict()")
        for name, mine in {**dict.fromkeys(self._numbers), **self._identity()}.items():
            if name not in state or (mine is not None and state[name] != mine):
                got = f"{name} = {quote(state.get(name))}"
                rule = f"the state of this {kind}" if mine is None else f"the state of a {kind} with {name} = {mine}"
                raise ArgumentError(message("state", got, rule, f"create the {kind} with the same arguments"))
        for name in self._numbers:
            check_least(f"state[{name!r}]", state[name], 0)
        self._take_up(state)
        self.epoch = state["epoch"]
        self._ended = False
        self._done = self._start = state["done"]


def check_least(name: str, value: int, least: int, most: int = 2**63 - 1) -> None:
    """Check a whole number that a caller gives."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(message(name, quote(value), "an int", f"pass {least} or more"))
    if value < least:
        raise ArgumentError(message(name, quote(value), f"at least {least}", f"pass {least} or more"))
    if value > most:
        raise ArgumentError(message(name, quote(value), f"at most {most}", "pass a smaller one"))
